"""The shape of `POST /v1/messages`: an answer as blocks, whole or as events by name."""

from collections.abc import Sequence
from typing import Any

import orjson

from weft.domain.request import FinishReason
from weft_gateway.core.events import Emit, End
from weft_gateway.errors import ApiError
from weft_gateway.forms.answer_reader import AnswerReader
from weft_gateway.openai.call import AnswerEncoder, Call
from weft_gateway.openai.schema import Common

_REASONS = {FinishReason.EOS: "end_turn", FinishReason.STOP: "stop_sequence", FinishReason.LENGTH: "max_tokens"}
_BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


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


def _arguments(text: str) -> dict[str, Any]:
    """Read the arguments of a call; a part of JSON has no form here: those of a call that was cut are lost."""
    try:
        value: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {"value": value}
