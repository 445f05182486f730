"""`POST /v1/chat/completions`, and `/batch` below it: many chats in one request, as vLLM has it."""

import json
from typing import Any

from pydantic import PrivateAttr

from weft.chat_template import Chat
from weft_gateway.errors import ParameterError
from weft_gateway.forms.template_forms import TemplateForms
from weft_gateway.forms.tool_formats import ToolFormat, instructions, render_calls
from weft_gateway.openai.call import MAX_PROMPT_CHARS, Call, ModelEndpoint, Prompt
from weft_gateway.openai.response_format import ChatEncoder
from weft_gateway.openai.schema import ChatPrompt, ChatRequest, checked, naming, object_of, parse
from weft_gateway.shell.request_ids import MAX_PROMPTS
from weft_gateway.shell.tokenizer import ModelTokenizer

_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


def chat_of(params: ChatPrompt, template: TemplateForms, parser: str) -> Chat:
    """Make the input of the model's chat template. A template without tools gets them in a system message.

    `parser`: of calls, that the pool names. Raises ParameterError.
    """
    messages, tools = [message.of_template() for message in params.messages], params.callable_tools
    variables, call_marks = _variables(params, template), frozenset[str]()
    if not template.shows_calls and any("tool_calls" in message for message in messages):
        written = template.tool_format(parser)
        messages, call_marks = [_with_calls(written, message) for message in messages], written.spellings
    if template.tools_variable and tools:
        variables[template.tools_variable] = tools
    elif tools:
        messages, tools = _with_tools(messages, template, template.tool_format(parser), tools), []
    return Chat(
        messages,
        add_generation_prompt=params.add_generation_prompt and not params.continue_final_message,
        continue_final_message=params.continue_final_message,
        tools=tools,
        documents=params.documents,
        variables=variables,
        add_special_tokens=params.add_special_tokens,
        call_marks=call_marks,
    )


def _variables(params: ChatPrompt, template: TemplateForms) -> dict[str, Any]:
    """Collect the caller's variables. What is empty, or false, happens anyway where the model does not reason; degrees
    of effort are a hint. Raises ParameterError for a variable that the template does not read: it would change nothing.
    """

    def is_read(name: str) -> bool:
        return name in template.variables

    switch = "thinking" if is_read("thinking") and not is_read("enable_thinking") else "enable_thinking"
    switches: dict[str, tuple[str, Any]] = {switch: ("enable_thinking", params.enable_thinking)}
    effort = params.reasoning_effort
    is_effort_read = effort is not None and is_read("reasoning_effort")
    if is_effort_read:
        switches["reasoning_effort"] = "reasoning_effort", effort
    ends_thinking = effort == "none" and not is_effort_read
    if effort and params.enable_thinking is None and (is_read(switch) or ends_thinking):
        switches[switch] = "reasoning_effort", effort != "none"
    switches |= {
        name: (f"chat_template_kwargs.{name[:64]}", value) for name, value in params.chat_template_kwargs.items()
    }
    for name, (param, value) in switches.items():
        if name in _GIVEN and value != getattr(params, name):
            raise ParameterError(
                f"{param}: it is a parameter of the request, beside chat_template_kwargs.", param=param
            )
        idle = value is None or name in _GIVEN or not (value or template.reasoning)
        if not idle and not is_read(name):
            raise _not_read(param)
    if params.documents and not is_read("documents"):
        raise _not_read("documents")
    return {name: value for name, (_, value) in switches.items() if value is not None}


def _not_read(param: str) -> ParameterError:
    text = f"{param}: this model's chat template has no such variable: it would change nothing. Leave it out."
    return ParameterError(text, param=param, code="unsupported_parameter")


def _with_calls(written: ToolFormat, message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    content = "\n".join(filter(None, [message.get("content"), render_calls(written, calls)]))
    return {**message, "content": content}


def _with_tools(
    messages: list[dict[str, Any]], template: TemplateForms, written: ToolFormat, tools: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Show tools in the system message: in its field for them, or in words."""
    has_system = messages[0]["role"] in ("system", "developer")
    first, rest = (messages[0], messages[1:]) if has_system else ({"role": "system", "content": ""}, messages)
    if template.tools_field:
        listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        return [{**first, template.tools_field: listed}, *rest]
    text = f"{first.get('content', '')}\n\n{instructions(written, tools)}".removeprefix("\n\n" * (not has_system))
    return [{**first, "content": text}, *rest]


def prompt_of(params: ChatPrompt, call: Call, echo: str = "") -> Prompt:
    """Render nothing yet: a chat is read and encoded at its tenant's turn. Encoding raises also ParameterError."""
    text = "\n".join(message.content for message in params.messages)[-MAX_PROMPT_CHARS:]

    def encode(tokenizer: ModelTokenizer, context_tokens: int) -> list[int]:
        chat = chat_of(params, call.tokenizer.forms, call.pool.tool_call_parser)
        return tokenizer.encode_chat(chat, context_tokens)

    return Prompt(text, encode, echo, rendered=True)


def echoed(params: ChatRequest) -> str:
    """Return the text before the answer: the message that the answer continues, never the caller's question (vLLM)."""
    last = params.messages[-1]
    return last.content if params.echo and (params.continue_final_message or last.role == "assistant") else ""


class ChatEndpoint(ModelEndpoint[ChatRequest]):
    """A chat: through the model's chat template."""

    name = "chat_completions"
    path = "/v1/chat/completions"
    encoder = ChatEncoder

    def parse(self, body: bytes) -> ChatRequest:
        return parse(ChatRequest, body)

    def prompts(self, params: ChatRequest, call: Call) -> list[Prompt]:
        return [prompt_of(params, call, echoed(params))]


class BatchedChats(ChatRequest):
    """The first chat, and all of them: they share every parameter but their messages."""

    _chats: list[ChatRequest] = PrivateAttr(default_factory=list[ChatRequest])

    @property
    def chats(self) -> list[ChatRequest]:
        return self._chats

    @property
    def prompts(self) -> int:
        return len(self._chats)

    @classmethod
    def of_value(cls, value: dict[str, Any]) -> "BatchedChats":
        """Check `value`, a chat whose messages are lists of messages. Raises ParameterError."""
        chats = value.get("messages")
        if not isinstance(chats, list) or not 0 < len(chats) <= MAX_PROMPTS:
            text = f"messages: must be a list of 1 to {MAX_PROMPTS} chats, each of which is a list of messages."
            raise ParameterError(text, param="messages")
        checked_chats: list[ChatRequest] = []
        for index, messages in enumerate(chats):
            with naming({"messages": f"messages[{index}]"}):
                checked_chats.append(checked(ChatRequest, value | {"messages": messages}))
        request = checked(cls, value | {"messages": chats[0]})
        if request.stream:
            raise ParameterError("stream: the answers to many chats are written whole; leave it out.", param="stream")
        request.note_ignored(frozenset().union(*(chat.ignored for chat in checked_chats)))
        request._chats = checked_chats
        return request


class BatchedChatsEndpoint(ChatEndpoint):
    """Many chats: a choice for each."""

    name = "batched_chats"
    path = f"{ChatEndpoint.path}/batch"

    def parse(self, body: bytes) -> BatchedChats:
        return BatchedChats.of_value(object_of(body))

    def prompts(self, params: ChatRequest, call: Call) -> list[Prompt]:
        assert isinstance(params, BatchedChats)
        return [prompt_of(chat, call, echoed(chat)) for chat in params.chats]


CHAT, CHATS = ChatEndpoint(), BatchedChatsEndpoint()
