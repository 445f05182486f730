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
from weft_gateway.openai.call import AnswerEncoder, Call
from weft_gateway.openai.chat import ChatEndpoint
from weft_gateway.openai.fields import MAX_INT32, Stops, Whole
from weft_gateway.openai.http_requests import caller_of, json_body, json_response
from weft_gateway.openai.schema import MAX_MESSAGES, ChatRequest, Common, Strict, checked, naming, object_of
from weft_gateway.openai.tokenize import chat_length, tokenizer_of
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.auth import Action
from weft_gateway.tolerance import check_names

PATH = "/v1/messages"
PASSED_ON = ("model", "stream", "temperature", "top_p", "top_k")
OWN_NAMES = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "enable_thinking": "thinking"}
_BLOCK_FIELDS = (  # cache_control changes no answer; the others in its line come back with an answer
    "type", "text", "id", "name", "input", "tool_use_id", "content", "is_error", "thinking", "data",
    "cache_control", "citations", "signature", "caller",
)  # fmt: skip
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REASONS = {FinishReason.EOS: "end_turn", FinishReason.STOP: "stop_sequence", FinishReason.LENGTH: "max_tokens"}
_BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class CountRequest(Strict):
    """`POST /v1/messages/count_tokens`."""

    model: str = Field(min_length=1, max_length=512)
    messages: list[Any] = Field(min_length=1, max_length=MAX_MESSAGES, description="of user and assistant, in turn")
    system: str | list[Any] = Field("", description="a system message before them")
    tools: list[Any] = Field(default_factory=list[Any], description="functions that the model may call")
    tool_choice: dict[str, Any] = Field(default_factory=dict[str, Any], description="auto, any, none, or a tool's name")
    thinking: dict[str, Any] = Field(default_factory=dict[str, Any], description="accepted while it is disabled")

    def check_together(self) -> None:
        if self.thinking not in ({}, {"type": "disabled"}):
            text = "thinking: a model reasons as its chat template has it; leave it out."
            raise ParameterError(text, param="thinking", code="unsupported_value")

    def chat(self) -> dict[str, Any]:
        """Make the parameters of a chat. Raises ParameterError."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {
            "model": self.model,
            "messages": [*system, *_messages(self.messages)],
            "tools": [_tool(tool, index) for index, tool in enumerate(self.tools)],
            "tool_choice": _tool_choice(self.tool_choice),
            "enable_thinking": False if self.thinking else None,
            "parallel_tool_calls": not self.tool_choice.get("disable_parallel_tool_use", False),
        }


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: Whole = Field(ge=1, le=MAX_INT32)
    stream: bool = Field(False, description="server-sent events by name, a delta per step")
    stop_sequences: Stops = Field((), description="texts that end the answer; they are not part of it")
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Whole = Field(0, ge=0, le=MAX_INT32)
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any], description="user_id; logged hashed")

    def chat(self) -> dict[str, Any]:
        passed = {name: getattr(self, name) for name in PASSED_ON if name in self.model_fields_set}
        user = self.metadata.get("user_id")
        return {
            **super().chat(),
            **passed,
            "max_completion_tokens": self.max_tokens,
            "stop": list(self.stop_sequences),
            "user": user if isinstance(user, str) else None,
        }


class MessagesChat(ChatRequest):
    """The chat that a request of `POST /v1/messages` asks for."""

    prompt_name: ClassVar[str] = "messages"
    asked_as = OWN_NAMES


def _messages(given: list[Any]) -> list[dict[str, Any]]:
    """Make chat messages; results of tools are messages of their own, before their text. Raises ParameterError."""
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(given):
        match message:
            case {"role": "user" | "assistant" as role, "content": str(text)}:
                messages.append({"role": role, "content": text})
            case {"role": "user" | "assistant" as role, "content": [*blocks]}:
                messages += _of_blocks(role, blocks, f"messages[{index}].content")
            case _:
                text = f"messages[{index}]: must be of user or assistant, with content: a text or a list of blocks."
                raise ParameterError(text, param=f"messages[{index}]")
    return messages


def _of_blocks(role: str, blocks: list[Any], where: str) -> list[dict[str, Any]]:
    texts, calls, results = list[str](), list[Any](), list[dict[str, Any]]()
    for index, block in enumerate(blocks):
        if isinstance(block, dict):
            check_names(f"{where}[{index}]", block, _BLOCK_FIELDS)  # pyright: ignore[reportUnknownArgumentType]
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(arguments)}:
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": call_id, "type": "function", "function": function})
            case {"type": "tool_result", "tool_use_id": str(call_id), **others}:
                results.append({"role": "tool", "tool_call_id": call_id, "content": others.get("content")})
            case {"type": "thinking" | "redacted_thinking"}:
                pass  # models do not get their earlier reasoning
            case _:
                text = f"{where}[{index}]: must be of type text, tool_use, tool_result or thinking."
                raise ParameterError(text, param=f"{where}[{index}]")
    own: dict[str, Any] = {"role": role, "content": "".join(texts)} | ({"tool_calls": calls} if calls else {})
    return [*results, own] if texts or calls or not results else results


def _tool(tool: Any, index: int) -> dict[str, Any]:
    match tool:
        case {"name": str(name), "input_schema": dict(schema), **others} if others.get("type") in (None, "custom"):
            check_names(f"tools[{index}]", others, ("type", "description", "strict", "cache_control"))
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


def _chat(params: CountRequest) -> MessagesChat:
    """Raises ParameterError."""
    with naming(OWN_NAMES):
        return checked(MessagesChat, params.chat())


class MessagesEncoder(AnswerEncoder):
    """Makes blocks of one answer's deltas (thinking, text, tool_use), one open at a time."""

    def __init__(self, params: Common, call: Call) -> None:
        self._model, self._id = params.model, f"msg_{call.ids.request_id}"
        self._reader = AnswerReader(call.prompts[0].form, f"{call.ids.request_id}/0")
        self._prompt_tokens = sum(len(prompt.tokens) for prompt in call.prompts)
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False  # the last block
        self._stop_reason: str | None = None
        self._stop: str | None = None  # the stop sequence that ended it

    def first_chunk(self) -> bytes:
        return _event("message_start", message=self._message({"input_tokens": self._prompt_tokens, "output_tokens": 0}))

    def chunk(self, index: int, emit: Emit) -> bytes:  # noqa: ARG002 (there is one)
        return b"".join(self._take(delta) for delta in self._reader.push(emit.text))

    def finish_chunk(self, index: int, end: End) -> bytes:  # noqa: ARG002
        cut = end.reason is FinishReason.LENGTH
        left = b"".join(self._take(delta) for delta in self._reader.flush(cut=cut))
        calls = any(block["type"] == "tool_use" for block in self._blocks)
        self._stop_reason = "tool_use" if calls and not cut else _REASONS[end.reason]
        if isinstance(end.stop, str) and self._stop_reason != "tool_use":
            self._stop_reason, self._stop = "stop_sequence", end.stop
        return left + self._close()

    def last_chunk(self, usage: dict[str, int]) -> bytes:
        ended = {"stop_reason": self._stop_reason, "stop_sequence": self._stop}
        delta = _event("message_delta", delta=ended, usage=_usage(usage))
        return delta + _event("message_stop")

    def error_body(self, error: ApiError) -> bytes:
        return error.anthropic_body()

    def error_chunk(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.anthropic_body() + b"\n\n"

    def body(self, choices: Sequence[tuple[Emit, End]], usage: dict[str, int]) -> bytes:
        ((emit, end),) = choices
        self.chunk(0, emit)
        self.finish_chunk(0, end)
        for block in self._blocks:
            if block["type"] == "tool_use":
                block["input"] = _arguments(block["input"])
        return orjson.dumps(self._message(_usage(usage)))

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
        known = self._is_open and self._blocks[-1]["type"] == kind
        opened = b"" if known else self._open(dict(_BLOCKS[kind]))
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

    def _message(self, usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._blocks,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop,
            "usage": usage,
        }


def _event(kind: str, /, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


def _usage(usage: dict[str, int]) -> dict[str, int]:
    return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}


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
        return _chat(checked(MessagesRequest, object_of(body)))


MESSAGES = MessagesEndpoint()


async def count_tokens(state: AppState, request: Request) -> Response:
    """Count the tokens of a chat in Anthropic's form."""
    caller = await caller_of(state, request, Action.INFER)
    body = await json_body(state, request, caller.tenant)
    params = await state.turns.parse(caller.tenant, lambda body: _chat(checked(CountRequest, object_of(body))), body)
    pool, tokenizer = await tokenizer_of(state, caller, params.model)
    count = partial(chat_length, params, pool, tokenizer)
    tokens = await state.turns.encode(caller.tenant, count, request.is_disconnected)
    return json_response({"input_tokens": tokens})
