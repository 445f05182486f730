"""How an answer looks: JSON bodies, and SSE chunks from templates built once a request.

A chunk costs one `orjson.dumps` of its text; everything around it is constant bytes.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from weft_gateway.core.events import FinishReason

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_REASONS = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_HOLE = "\u0000text\u0000"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. What comes after a stop string does not count."""

    prompt_tokens: int
    completion_tokens: int

    def to_json(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


class Shape(Protocol):
    """One request's way to say things. `first` opens a stream and may be empty."""

    def first(self) -> bytes: ...
    def chunk(self, text: str) -> bytes: ...
    def last(self, reason: FinishReason) -> bytes: ...
    def usage(self, usage: Usage) -> bytes: ...
    def whole(self, text: str, reason: FinishReason, usage: Usage) -> bytes: ...


class _Templates:
    """Envelope and chunk template of one stream."""

    def __init__(self, envelope: dict[str, Any], hole: dict[str, Any], *, include_usage: bool) -> None:
        self._envelope = envelope
        self._nothing: dict[str, Any] = {"usage": None} if include_usage else {}
        before, after = self.event([hole]).split(orjson.dumps(_HOLE))
        self._before, self._after = before, after

    def chunk(self, text: str) -> bytes:
        return self._before + orjson.dumps(text) + self._after

    def event(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        said = {"usage": usage.to_json()} if usage else self._nothing
        return b"data: " + orjson.dumps({**self._envelope, "choices": choices, **said}) + b"\n\n"


class ChatShape:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, request_id: str, model: str, created: int, *, include_usage: bool = False) -> None:
        self._whole = {"id": f"chatcmpl-{request_id}", "object": "chat.completion", "created": created, "model": model}
        chunk = {**self._whole, "object": "chat.completion.chunk"}
        self._templates = _Templates(chunk, _delta({"content": _HOLE}), include_usage=include_usage)
        self.chunk = self._templates.chunk

    def first(self) -> bytes:
        return self._templates.event([_delta({"role": "assistant", "content": ""})])

    def last(self, reason: FinishReason) -> bytes:
        return self._templates.event([_delta({}, _REASONS[reason])])

    def usage(self, usage: Usage) -> bytes:
        return self._templates.event([], usage)

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> bytes:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _REASONS[reason]}
        return orjson.dumps({**self._whole, "choices": [choice], "usage": usage.to_json()})


class CompletionShape:
    """`text_completion`, whole or in chunks."""

    def __init__(self, request_id: str, model: str, created: int, *, include_usage: bool = False) -> None:
        self._whole = {"id": f"cmpl-{request_id}", "object": "text_completion", "created": created, "model": model}
        self._templates = _Templates(self._whole, _text(_HOLE), include_usage=include_usage)
        self.chunk = self._templates.chunk

    def first(self) -> bytes:
        return b""

    def last(self, reason: FinishReason) -> bytes:
        return self._templates.event([_text("", _REASONS[reason])])

    def usage(self, usage: Usage) -> bytes:
        return self._templates.event([], usage)

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> bytes:
        return orjson.dumps({**self._whole, "choices": [_text(text, _REASONS[reason])], "usage": usage.to_json()})


def error_event(body: bytes) -> bytes:
    """An error after the first byte; the stream closes after it, without [DONE]."""
    return b"data: " + body + b"\n\n"


def _delta(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


def _text(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
