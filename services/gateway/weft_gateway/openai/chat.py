"""`POST /v1/chat/completions`."""

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft_gateway.openai.answer_parts import AnswerForm
from weft_gateway.openai.http_requests import completion
from weft_gateway.openai.reasoning import BEGIN, END
from weft_gateway.openai.response_format import ChatEncoder
from weft_gateway.openai.schema import ChatPrompt, ChatRequest, parse
from weft_gateway.openai.tool_calls import HERMES, format_of, instructions, renders_tools, written_calls
from weft_gateway.openai.validation import ModelEndpoint, ParsedRequest, Prompt
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.chat_template import Chat


def chat_of(params: ChatPrompt, template: str) -> Chat:
    """What the model's chat template gets. One that shows no tools gets them in a system message."""
    messages, tools = [message.of_template() for message in params.messages], params.callable_tools
    if not renders_tools(template):
        messages = _with_instructions([_with_written_calls(message) for message in messages], tools)
        tools = []
    return Chat(
        messages,
        add_generation_prompt=params.add_generation_prompt and not params.continue_final_message,
        continue_final_message=params.continue_final_message,
        tools=tools,
        documents=params.documents,
        variables=params.chat_template_kwargs,
    )


def _with_written_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    content = "\n".join(filter(None, [message["content"], written_calls(HERMES, calls)]))
    return {**message, "content": content}


def _with_instructions(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not tools:
        return messages
    text, (first, *others) = instructions(tools), messages
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *others]
    return [{"role": "system", "content": text}, first, *others]


def prompts_of(parsed: ParsedRequest[ChatRequest]) -> list[Prompt]:
    """The chat as the model's template renders it."""
    chat = chat_of(parsed.params, parsed.tokenizer.template)
    text = "\n".join(message.content for message in parsed.params.messages)
    return [Prompt(text, lambda tokenizer, context_tokens: tokenizer.encode_chat(chat, context_tokens))]


def form_of(parsed: ParsedRequest[ChatRequest], prompt_end: str) -> AnswerForm:
    """By the call and by what the template says of calls and of reasoning."""
    template, params = parsed.tokenizer.template, parsed.params
    return AnswerForm(
        tools=format_of(template) if params.callable_tools else None,
        reasons=BEGIN in template and END in template,
        in_reasoning=prompt_end.rstrip().endswith(BEGIN),
        calls_are_asked=isinstance(params.tool_choice, dict),
    )


CHAT = ModelEndpoint("/v1/chat/completions", partial(parse, ChatRequest), prompts_of, ChatEncoder, form_of=form_of)


async def chat_completions(state: AppState, request: Request) -> Response:
    """A chat: through the model's chat template."""
    return await completion(CHAT, state, request)
