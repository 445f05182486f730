"""`POST /v1/chat/completions`."""

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft_gateway.openai.answer_parts import AnswerForm
from weft_gateway.openai.http_requests import completion
from weft_gateway.openai.reasoning import BEGIN, reasons
from weft_gateway.openai.response_format import ChatEncoder
from weft_gateway.openai.schema import ChatPrompt, ChatRequest, parse
from weft_gateway.openai.tool_calls import ToolFormat, instructions, renders_tools, written_calls
from weft_gateway.openai.validation import ModelEndpoint, ParsedRequest, Prompt
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.chat_template import Chat
from weft_gateway.shell.tokenizer import ModelTokenizer


def chat_of(params: ChatPrompt, template: str, form: ToolFormat) -> Chat:
    """What the model's chat template gets. One that shows no tools gets them in a system message, calls in `form`."""
    messages, tools = [message.of_template() for message in params.messages], params.callable_tools
    if not renders_tools(template):
        messages = _with_instructions([_with_written_calls(form, message) for message in messages], form, tools)
        tools = []
    return Chat(
        messages,
        add_generation_prompt=params.add_generation_prompt and not params.continue_final_message,
        continue_final_message=params.continue_final_message,
        tools=tools,
        documents=params.documents,
        variables={"reasoning_effort": params.reasoning_effort} | params.chat_template_kwargs
        if params.reasoning_effort
        else params.chat_template_kwargs,
        add_special_tokens=params.add_special_tokens,
    )


def _with_written_calls(form: ToolFormat, message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    content = "\n".join(filter(None, [message["content"], written_calls(form, calls)]))
    return {**message, "content": content}


def _with_instructions(
    messages: list[dict[str, Any]], form: ToolFormat, tools: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    if not tools:
        return messages
    text, (first, *others) = instructions(form, tools), messages
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *others]
    return [{"role": "system", "content": text}, first, *others]


def prompts_of(parsed: ParsedRequest[ChatRequest]) -> list[Prompt]:
    """The chat as the model's template renders it."""
    return [prompt_of(parsed.params, parsed.tokenizer, parsed.tools, echoed(parsed.params))]


def prompt_of(params: ChatPrompt, tokenizer: ModelTokenizer, form: ToolFormat, echo: str = "") -> Prompt:
    """A chat, to be encoded within the context."""
    chat = chat_of(params, tokenizer.template, form)
    text = "\n".join(message.content for message in params.messages)
    return Prompt(text, lambda tokenizer, context_tokens: tokenizer.encode_chat(chat, context_tokens), echo)


def echoed(params: ChatRequest) -> str:
    """What stands before the answer: the message that it goes on with, never the caller's question (vLLM)."""
    last = params.messages[-1]
    return last.content if params.echo and (params.continue_final_message or last.role == "assistant") else ""


def form_of(parsed: ParsedRequest[ChatRequest], prompt_end: str) -> AnswerForm:
    """By the call, the model's form of calls and what its template says of reasoning."""
    template, params = parsed.tokenizer.template, parsed.params
    return AnswerForm(
        tools=parsed.tools if params.callable_tools else None,
        reasons=reasons(template),
        in_reasoning=prompt_end.rstrip().endswith(BEGIN),
        calls_are_asked=isinstance(params.tool_choice, dict),
        calls_alone=bool(params.required_tools),
    )


CHAT = ModelEndpoint("/v1/chat/completions", partial(parse, ChatRequest), prompts_of, ChatEncoder, form_of=form_of)


async def chat_completions(state: AppState, request: Request) -> Response:
    """A chat: through the model's chat template."""
    return await completion(CHAT, state, request)
