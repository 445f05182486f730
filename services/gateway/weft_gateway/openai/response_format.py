"""The shape of an answer: JSON bodies, and SSE chunks from templates built once a request.

A chunk costs one `orjson.dumps` of its text; everything around it is constant bytes. Only one with log probabilities is
made whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from weft.domain.request import FinishReason
from weft_gateway.core.events import Emit, TokenLogprobOut
from weft_gateway.openai.logprobs import TokenNames, chat_logprobs, completion_logprobs

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_REASONS = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_HOLE = "\u0000text\u0000"
LogprobsEncoder = Callable[[Sequence[TokenLogprobOut], int, TokenNames], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request: its prompt once, all its answers. What comes after a stop string does not count."""

    prompt_tokens: int
    completion_tokens: int

    def to_json(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


@dataclass(frozen=True, slots=True)
class ResponseMeta:
    """What every chunk of one answer holds, and the shape of its choices."""

    request_id: str
    model: str
    created: int
    n: int = 1
    include_usage: bool = False
    alternatives: int | None = None  # reported beside each token; None: no log probabilities
    names: TokenNames = field(kw_only=True)


class ResponseEncoder(Protocol):
    """One request's encoder. `role_chunk` opens a stream and may be empty; `index` is that of a choice."""

    def role_chunk(self) -> bytes: ...
    def chunk(self, index: int, emit: Emit) -> bytes: ...
    def finish_chunk(self, index: int, reason: FinishReason) -> bytes: ...
    def usage(self, usage: Usage) -> bytes: ...
    def body(self, choices: Sequence[tuple[Emit, FinishReason]], usage: Usage) -> bytes: ...


class _Chunks:
    """The chunks of one stream: constant bytes around a text, but for those with log probabilities."""

    def __init__(
        self, head: dict[str, Any], meta: ResponseMeta, choice: Callable[[int, str, Any], dict[str, Any]]
    ) -> None:
        self._head, self._choice = head, choice
        self._no_usage: dict[str, Any] = {"usage": None} if meta.include_usage else {}
        hole = orjson.dumps(_HOLE)
        self._around = [self.event([choice(index, _HOLE, None)]).split(hole) for index in range(meta.n)]

    def chunk(self, index: int, text: str, logprobs: dict[str, Any] | None) -> bytes:
        if logprobs is not None:
            return self.event([self._choice(index, text, logprobs)])
        before, after = self._around[index]
        return before + orjson.dumps(text) + after

    def event(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        more = {"usage": usage.to_json()} if usage else self._no_usage
        return b"data: " + orjson.dumps({**self._head, "choices": choices, **more}) + b"\n\n"


class ChatEncoder:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, meta: ResponseMeta) -> None:
        self._meta = meta
        self._head = _head(f"chatcmpl-{meta.request_id}", "chat.completion", meta)
        chunk = {**self._head, "object": "chat.completion.chunk"}
        self._chunks = _Chunks(chunk, meta, lambda index, text, logprobs: _delta(index, {"content": text}, logprobs))

    def role_chunk(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunks.event([_delta(index, role)]) for index in range(self._meta.n))

    def chunk(self, index: int, emit: Emit) -> bytes:
        return self._chunks.chunk(index, emit.text, self._logprobs(emit))

    def finish_chunk(self, index: int, reason: FinishReason) -> bytes:
        return self._chunks.event([_delta(index, {}, None, _REASONS[reason])])

    def usage(self, usage: Usage) -> bytes:
        return self._chunks.event([], usage)

    def body(self, choices: Sequence[tuple[Emit, FinishReason]], usage: Usage) -> bytes:
        messages = [self._message(index, *choice) for index, choice in enumerate(choices)]
        return orjson.dumps({**self._head, "choices": messages, "usage": usage.to_json()})

    def _message(self, index: int, emit: Emit, reason: FinishReason) -> dict[str, Any]:
        message = {"role": "assistant", "content": emit.text, "refusal": None}
        logprobs = self._logprobs(emit)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": _REASONS[reason]}

    def _logprobs(self, emit: Emit) -> dict[str, Any] | None:
        return _logprobs(chat_logprobs, emit, self._meta)


class CompletionEncoder:
    """`text_completion`, whole or in chunks."""

    def __init__(self, meta: ResponseMeta) -> None:
        self._meta = meta
        self._head = _head(f"cmpl-{meta.request_id}", "text_completion", meta)
        self._chunks = _Chunks(self._head, meta, _text)

    def role_chunk(self) -> bytes:
        return b""

    def chunk(self, index: int, emit: Emit) -> bytes:
        return self._chunks.chunk(index, emit.text, self._logprobs(emit))

    def finish_chunk(self, index: int, reason: FinishReason) -> bytes:
        return self._chunks.event([_text(index, "", None, _REASONS[reason])])

    def usage(self, usage: Usage) -> bytes:
        return self._chunks.event([], usage)

    def body(self, choices: Sequence[tuple[Emit, FinishReason]], usage: Usage) -> bytes:
        texts = [
            _text(index, emit.text, self._logprobs(emit), _REASONS[reason])
            for index, (emit, reason) in enumerate(choices)
        ]
        return orjson.dumps({**self._head, "choices": texts, "usage": usage.to_json()})

    def _logprobs(self, emit: Emit) -> dict[str, Any] | None:
        return _logprobs(completion_logprobs, emit, self._meta)


def error_event(body: bytes) -> bytes:
    """An error after the first byte; the stream closes after it, without [DONE]."""
    return b"data: " + body + b"\n\n"


def _head(id_: str, kind: str, meta: ResponseMeta) -> dict[str, Any]:
    return {"id": id_, "object": kind, "created": meta.created, "model": meta.model}


def _delta(index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _text(index: int, text: str, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(encode: LogprobsEncoder, emit: Emit, meta: ResponseMeta) -> dict[str, Any] | None:
    if meta.alternatives is None:
        return None
    return encode(emit.logprobs, meta.alternatives, meta.names)
