"""`POST /v1/chat/completions`."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft.chat_template import Chat
from weft_gateway.errors import ParameterError
from weft_gateway.openai.answer_parts import AnswerForm
from weft_gateway.openai.http_requests import completion
from weft_gateway.openai.marks import mark_tokens
from weft_gateway.openai.reasoning import marks_of, reasons
from weft_gateway.openai.response_format import ChatEncoder
from weft_gateway.openai.schema import ChatPrompt, ChatRequest, parse
from weft_gateway.openai.tool_calls import ToolFormat, instructions, renders_tools, written_calls
from weft_gateway.openai.validation import ModelEndpoint, ParsedRequest, Prompt
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.tokenizer import ModelTokenizer

_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


def chat_of(params: ChatPrompt, template: str, form: ToolFormat) -> Chat:
    """What the model's chat template gets. One that shows no tools gets them in a system message, calls in `form`.

    Raises ParameterError.
    """
    messages, tools = [message.of_template() for message in params.messages], params.callable_tools
    if not renders_tools(template):
        if "tool_calls" not in template:
            messages = [_with_written_calls(form, message) for message in messages]
        messages, tools = _with_instructions(messages, form, tools), []
    return Chat(
        messages,
        add_generation_prompt=params.add_generation_prompt and not params.continue_final_message,
        continue_final_message=params.continue_final_message,
        tools=tools,
        documents=params.documents,
        variables=_variables(params, template),
        add_special_tokens=params.add_special_tokens,
    )


def _variables(params: ChatPrompt, template: str) -> dict[str, Any]:
    """The caller's own. Raises ParameterError for one that the template does not read: it would change nothing.

    What is empty, or false, is what happens anyway where the model does not reason. Degrees of effort are a hint.
    """

    def is_read(name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", template) is not None

    asked: dict[str, tuple[str, Any]] = {"enable_thinking": ("enable_thinking", params.enable_thinking)}
    effort, is_effort_read = params.reasoning_effort, is_read("reasoning_effort")
    if effort and is_effort_read:
        asked["reasoning_effort"] = "reasoning_effort", effort
    ends_thinking = effort == "none" and not is_effort_read
    if effort and params.enable_thinking is None and (is_read("enable_thinking") or ends_thinking):
        asked["enable_thinking"] = "reasoning_effort", effort != "none"
    asked |= {name: (f"chat_template_kwargs.{name[:64]}", value) for name, value in params.chat_template_kwargs.items()}
    for name, (param, value) in asked.items():
        if name in _GIVEN and value != getattr(params, name):
            raise ParameterError(
                f"{param}: it is a parameter of the request, beside chat_template_kwargs.", param=param
            )
        idle = value is None or name in _GIVEN or not (value or reasons(template))
        if not idle and not is_read(name):
            raise _not_read(param)
    if params.documents and not is_read("documents"):
        raise _not_read("documents")
    return {name: value for name, (_, value) in asked.items() if value is not None}


def _not_read(param: str) -> ParameterError:
    text = f"{param}: this model's chat template has no such variable: it would change nothing. Leave it out."
    return ParameterError(text, param=param, code="unsupported_parameter")


def _with_written_calls(form: ToolFormat, message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    content = "\n".join(filter(None, [message.get("content"), written_calls(form, calls)]))
    return {**message, "content": content}


def _with_instructions(
    messages: list[dict[str, Any]], form: ToolFormat, tools: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    if not tools:
        return messages
    text, (first, *others) = instructions(form, tools), messages
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first.get('content', '')}\n\n{text}"}, *others]
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


def form_of(parsed: ParsedRequest[ChatRequest], prompt_end: Sequence[int]) -> AnswerForm:
    """What an answer may hold, by the request, the form of calls, and what template and prompt say of reasoning."""
    params, tokenizer = parsed.params, parsed.tokenizer
    last = params.messages[-1].content if params.continue_final_message else ""
    end, tokens = tokenizer.spelled(prompt_end).rstrip(), mark_tokens(tokenizer.added)
    marks = marks_of(tokenizer.template, end, tokens)
    in_reasoning = marks is not None and (end.endswith(marks.begin) or last.rfind(marks.begin) > last.rfind(marks.end))
    reasoned = marks is not None and not in_reasoning and (end.endswith(marks.end) or params.continue_final_message)
    return AnswerForm(
        tools=parsed.tools if params.callable_tools else None,
        reasons=marks,
        in_reasoning=in_reasoning,
        reasoned=reasoned,
        shows_reasoning=params.include_reasoning,
        spells_marks=not params.skip_special_tokens,
        marks=tokens,
        calls_are_asked=isinstance(params.tool_choice, dict),
        calls_alone=bool(params.required_tools),
        one_call=not params.parallel_tool_calls,
    )


CHAT = ModelEndpoint("/v1/chat/completions", partial(parse, ChatRequest), prompts_of, ChatEncoder, form_of=form_of)


async def chat_completions(state: AppState, request: Request) -> Response:
    """A chat: through the model's chat template."""
    return await completion(CHAT, state, request)
