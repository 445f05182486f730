"""`POST /v1/messages`: Anthropic's form of a chat, as far as it maps to one: texts, tools, reasoning, streamed.

A request becomes one of chats (`MessagesChat`), so everything behind it is the same; an answer becomes blocks, whole or
as events by name.
"""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import orjson
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from weft.domain.request import FinishReason
from weft_gateway.core.events import Emit, End
from weft_gateway.errors import ApiError, ParameterError
from weft_gateway.forms.answer_reader import AnswerReader
from weft_gateway.hints import HintScope
from weft_gateway.openai.call import AnswerEncoder, Call
from weft_gateway.openai.chat import ChatEndpoint
from weft_gateway.openai.fields import MAX_FLOAT32, MAX_INT32, Stops, Whole
from weft_gateway.openai.http_requests import caller_of, json_body, json_response
from weft_gateway.openai.schema import MAX_MESSAGES, ChatRequest, Common, Strict, checked, naming, object_of, text_of
from weft_gateway.openai.tokenize import chat_length, tokenizer_of
from weft_gateway.openai.tool_changes import settle_tools
from weft_gateway.openai.usage import CallUsage
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.auth import Action
from weft_gateway.tolerance import check_names, unknown_of

PATH = "/v1/messages"
PASSED_ON = ("model", "stream", "temperature", "top_p", "top_k", "cache_salt")
OWN_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "enable_thinking": "thinking",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "parameters": "input_schema",
}
DEFAULT_EFFORT = "high"  # Anthropic's, where a model thinks
_BLOCK_FIELDS = (  # those in the last line come back with an answer
    "type", "text", "id", "name", "input", "tool_use_id", "content", "is_error", "thinking", "data",
    "citations", "signature", "caller",
)  # fmt: skip
_FILES = ("image", "document", "container_upload")
_STRING = (str, "a string")
_NEEDED: dict[str, dict[str, tuple[type, str]]] = {  # by type of block
    "text": {"text": _STRING},
    "thinking": {"thinking": _STRING},
    "tool_use": {"id": _STRING, "name": _STRING, "input": (dict, "an object")},
    "tool_result": {"tool_use_id": _STRING},
}
THINKING = ("disabled", "enabled", "adaptive")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REASONS = {FinishReason.EOS: "end_turn", FinishReason.STOP: "stop_sequence", FinishReason.LENGTH: "max_tokens"}
_BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class CountRequest(Strict):
    """`POST /v1/messages/count_tokens`."""

    api: ClassVar[HintScope | None] = HintScope.MESSAGES

    model: str = Field(min_length=1, max_length=512)
    messages: list[Any] = Field(min_length=1, max_length=MAX_MESSAGES, description="of user, assistant and system")
    system: str | list[Any] = Field("", description="a system message before them")
    tools: list[Any] = Field(default_factory=list[Any], description="functions that the model may call")
    tool_choice: dict[str, Any] = Field(default_factory=dict[str, Any], description="auto, any, none, or a tool's name")
    thinking: dict[str, Any] = Field(default_factory=dict[str, Any], description="disabled, enabled or adaptive")
    output_config: dict[str, Any] = Field(default_factory=dict[str, Any], description="effort, and the answer's format")
    chat_template_kwargs: Any = Field(None, description="as in chats")
    output_format: dict[str, Any] | None = Field(None, description="the older name of output_config.format")

    def check_together(self) -> None:
        check_names("thinking", self.thinking, ("type",))
        if self.thinking and self.thinking.get("type") not in THINKING:
            text = f"thinking.type: expected {', '.join(THINKING)}, got {str(self.thinking.get('type'))[:64]!r}."
            raise ParameterError(text, param="thinking.type", code="unsupported_value")
        check_names("output_config", self.output_config, ("effort", "format"))

    def chat(self) -> dict[str, Any]:
        """Make the parameters of a chat. Raises ParameterError."""
        system = [{"role": "system", "content": text_of(self.system, "system")}] if self.system else []
        thinking, effort = self.thinking.get("type"), self.output_config.get("effort")
        return {
            "model": self.model,
            "messages": [*system, *_messages(self.messages)],
            "tools": [_tool(tool, index) for index, tool in enumerate(self.tools)],
            "tool_choice": _tool_choice(self.tool_choice),
            "enable_thinking": False if thinking == "disabled" else None,
            "reasoning_effort": effort or (DEFAULT_EFFORT if thinking in ("enabled", "adaptive") else None),
            "response_format": _response_format(self.output_config.get("format") or self.output_format),
            "chat_template_kwargs": self.chat_template_kwargs,
            "parallel_tool_calls": not self.tool_choice.get("disable_parallel_tool_use", False),
        }


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: Whole = Field(ge=1, le=MAX_INT32)
    stream: bool = Field(False, description="server-sent events by name, a delta per step")
    stop_sequences: Stops = Field((), description="texts that end the answer; they are not part of it")
    temperature: float = Field(1.0, ge=0, le=MAX_FLOAT32)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Whole = Field(0, ge=0, le=MAX_INT32)
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any], description="user_id; logged hashed")
    cache_salt: Any = Field(None, description="as in chats")

    def check_together(self) -> None:
        super().check_together()
        if unknown_of(self.metadata, ("user_id",)):
            self.note_ignored(frozenset(("metadata",)))

    def chat(self) -> dict[str, Any]:
        passed = {name: getattr(self, name) for name in PASSED_ON if name in self.model_fields_set}
        return {
            **super().chat(),
            **passed,
            "max_completion_tokens": self.max_tokens,
            "stop": list(self.stop_sequences),
            "user": self.metadata.get("user_id"),
        }


class MessagesChat(ChatRequest):
    """The chat of a request of `POST /v1/messages`."""

    prompt_name: ClassVar[str] = "messages"
    api: ClassVar[HintScope | None] = HintScope.ANY  # the hints are taken out of the request
    asked_as = OWN_NAMES


def _messages(entries: list[Any]) -> list[dict[str, Any]]:
    """Make chat messages; results of tools are messages of their own, before their text. Raises ParameterError."""
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(entries):
        match message:
            case {"role": "user" | "assistant" | "system" as role, "content": str(text)}:
                messages.append({"role": role, "content": text})
            case {"role": "user" | "assistant" | "system" as role, "content": [*blocks]}:
                messages += _of_blocks(role, blocks, f"messages[{index}].content")
            case _:
                text = f"messages[{index}]: must be of user, assistant or system, with content: a text or blocks."
                raise ParameterError(text, param=f"messages[{index}]")
    return messages


def _of_blocks(role: str, blocks: list[Any], path: str) -> list[dict[str, Any]]:
    texts, thoughts, calls, results = list[str](), list[str](), list[Any](), list[dict[str, Any]]()
    for index, block in enumerate(blocks):
        if isinstance(block, dict) and block.get("type") not in _FILES:
            check_names(f"{path}[{index}]", block, _BLOCK_FIELDS)  # pyright: ignore[reportUnknownArgumentType]
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)} if role == "assistant":
                thoughts.append(text)
            case {"type": "redacted_thinking"} if role == "assistant":
                pass  # encrypted by another server: no model here can read it
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(arguments)}:
                function = {"name": name, "arguments": _written(arguments, f"{path}[{index}].input")}
                calls.append({"id": call_id, "type": "function", "function": function})
            case {"type": "tool_result", "tool_use_id": str(call_id), **others}:
                text = text_of(others.get("content"), f"{path}[{index}].content")
                results.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case _:
                raise _block_fault(role, block, f"{path}[{index}]")
    # As in a chat, an answer without a text has no content.
    message: dict[str, Any] = {"role": role, "content": texts if texts or not (thoughts or calls) else None}
    message |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    message |= {"tool_calls": calls} if calls else {}
    return [*results, message] if texts or thoughts or calls or not (results or role == "system") else results


def _block_fault(role: str, block: Any, path: str) -> ParameterError:
    """Name the missing field of a block, or its unknown type."""
    kind = block.get("type") if isinstance(block, dict) else None  # pyright: ignore[reportUnknownMemberType]
    needed = _NEEDED.get(kind, {}) if isinstance(kind, str) and (role == "assistant" or kind != "thinking") else {}
    for field, (python_type, form) in needed.items():
        if not isinstance(block.get(field), python_type):
            return ParameterError(f"{path}.{field}: must be {form}.", param=f"{path}.{field}")
    text = f"{path}: must be of type text, tool_use, tool_result or thinking"
    return ParameterError(f"{text}{'; images and files are not served' if kind in _FILES else ''}.", param=path)


def _written(arguments: dict[str, Any], path: str) -> str:
    """Write the arguments of a call as chats have them. Raises ParameterError."""
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except RecursionError as error:
        raise ParameterError(f"{path}: is too deeply nested.", param=path) from error


def _tool(tool: Any, index: int) -> dict[str, Any]:
    match tool:
        case {"name": str(name), "input_schema": dict(schema), **others} if others.get("type") in (None, "custom"):
            check_names(f"tools[{index}]", others, ("type", "description", "strict"))
            about = {key: others[key] for key in ("description", "strict") if others.get(key)}
            return {"type": "function", "function": {"name": name, **about, "parameters": schema}}
        case _:
            text = f'tools[{index}]: must be {{"name": "...", "description": "...", "input_schema": {{...}}}}.'
            raise ParameterError(text, param=f"tools[{index}]")


def _tool_choice(choice: dict[str, Any]) -> Any:
    check_names("tool_choice", choice, ("type", "name", "disable_parallel_tool_use"))
    match choice:
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": str(kind)} if kind in _CHOICES:
            return _CHOICES[kind]
        case _ if not choice:
            return None
        case _:
            raise ParameterError("tool_choice: must be of type auto, any, none or tool.", param="tool_choice")


def _response_format(form: Any) -> Any:
    match form:
        case {"type": "json_schema", **schema}:
            return {"type": "json_schema", "json_schema": {"name": "answer", **schema}}
        case None:
            return None
        case _:
            text = 'output_config.format: must be {"type": "json_schema", "schema": {...}}.'
            raise ParameterError(text, param="output_config.format")


def _chat(params: CountRequest) -> MessagesChat:
    """Raises ParameterError."""
    with naming(OWN_NAMES):
        chat = checked(MessagesChat, params.chat())
    chat.note_ignored(params.ignored)
    return chat


class MessagesEncoder(AnswerEncoder):
    """Makes blocks of an answer's deltas (thinking, text, tool_use), with at most one open block."""

    def __init__(self, params: Common, call: Call) -> None:
        self._model, self._id = params.model, f"msg_{call.ids.request_id}"
        self._reader = AnswerReader(call.prompts[0].form, f"{call.ids.request_id}/0")
        self._prompt_tokens = sum(len(prompt.tokens) for prompt in call.prompts)
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False  # the last block
        self._stop_reason: str | None = None
        self._stop: str | None = None  # the stop sequence that ended it

    def first_chunk(self) -> bytes:
        return _event("message_start", message=self._message(CallUsage(self._prompt_tokens, 0, self.cached_tokens)))

    def chunk(self, index: int, emit: Emit) -> bytes:  # noqa: ARG002 (there is one)
        return b"".join(self._take(delta) for delta in self._reader.push(emit.text, emit.token_starts))

    def finish_chunk(self, index: int, end: End) -> bytes:  # noqa: ARG002
        cut = end.reason is FinishReason.LENGTH
        left = b"".join(self._take(delta) for delta in self._reader.flush(cut=cut))
        calls = any(block["type"] == "tool_use" for block in self._blocks)
        self._stop_reason = "tool_use" if calls and not cut else _REASONS[end.reason]
        if isinstance(end.stop, str) and self._stop_reason != "tool_use":
            self._stop_reason, self._stop = "stop_sequence", end.stop
        return left + self._close()

    def last_chunk(self, usage: CallUsage) -> bytes:
        ended = {"stop_reason": self._stop_reason, "stop_sequence": self._stop}
        delta = _event("message_delta", delta=ended, usage=usage.of_message())
        return delta + _event("message_stop")

    def error_body(self, error: ApiError) -> bytes:
        return error.anthropic_body()

    def error_chunk(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.anthropic_body() + b"\n\n"

    def body(self, choices: Sequence[tuple[Emit, End]], usage: CallUsage) -> bytes:
        ((emit, end),) = choices
        self.chunk(0, emit)
        self.finish_chunk(0, end)
        for block in self._blocks:
            if block["type"] == "tool_use":
                block["input"] = _arguments(block["input"])
        return orjson.dumps(self._message(self._with_reasoning(usage)))

    @property
    def reasoning_tokens(self) -> int:
        return self._reader.reasoning_tokens

    # ---------------------------------------------------------------- blocks

    def _take(self, delta: dict[str, Any]) -> bytes:
        """Add a delta of a chat."""
        match delta:
            case {"reasoning_content": str(text)}:
                return self._add("thinking", text)
            case {"content": str(text)}:
                return self._add("text", text)
            case {"tool_calls": [{"id": call_id, "function": {"name": name}}]}:
                block = {"type": "tool_use", "id": call_id, "name": name}
                opened = self._open({**block, "input": {}})
                self._blocks[-1]["input"] = ""
                return opened
            case {"tool_calls": [{"function": {"arguments": str(text)}}]}:
                self._blocks[-1]["input"] += text
                return self._delta({"type": "input_json_delta", "partial_json": text})
            case _:
                raise AssertionError(delta)

    def _add(self, kind: str, text: str) -> bytes:
        continues = self._is_open and self._blocks[-1]["type"] == kind
        opened = b"" if continues else self._open(dict(_BLOCKS[kind]))
        self._blocks[-1][kind] += text
        return opened + self._delta({"type": f"{kind}_delta", kind: text})

    def _open(self, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._blocks.append(block)
        self._is_open = True
        return closed + _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _close(self) -> bytes:
        was_open, self._is_open = self._is_open, False
        return _event("content_block_stop", index=len(self._blocks) - 1) if was_open else b""

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _message(self, usage: CallUsage) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._blocks,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop,
            "usage": usage.of_message(),
        }


def _event(kind: str, /, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


def _arguments(text: str) -> Any:
    """Return the arguments of a call as they are written, however deep; those of a call that was cut are lost."""
    try:
        value: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    written = orjson.Fragment(text)
    return written if isinstance(value, dict) else {"value": written}


class MessagesEndpoint(ChatEndpoint):
    """A chat in Anthropic's form."""

    name = "create_message"
    path = PATH
    encoder = MessagesEncoder

    def parse(self, body: bytes) -> MessagesChat:
        return _chat(checked(MessagesRequest, settle_tools(object_of(body))))


MESSAGES = MessagesEndpoint()


async def count_tokens(state: AppState, request: Request) -> Response:
    """Count the tokens of a chat in Anthropic's form."""
    caller = await caller_of(state, request, Action.INFER)
    body = await json_body(state, request, caller.tenant)
    params = await state.turns.parse(
        caller.tenant, lambda body: _chat(checked(CountRequest, settle_tools(object_of(body)))), body
    )
    pool, tokenizer = await tokenizer_of(state, caller, params.model)
    count = partial(chat_length, params, pool, tokenizer)
    tokens = await state.turns.encode(caller.tenant, count, request.is_disconnected)
    return json_response({"input_tokens": tokens}, params.ignored)
