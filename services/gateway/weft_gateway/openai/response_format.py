"""How an answer looks: JSON bodies, and SSE chunks from templates built once a request.

A chunk costs one `orjson.dumps` of its text; everything around it is constant bytes. Only one with log probabilities is
made whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from weft_gateway.core.events import Emit, FinishReason, TokenLogprobOut
from weft_gateway.openai.logprobs import TokenNames, chat_logprobs, completion_logprobs

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_REASONS = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_HOLE = "\u0000text\u0000"
Form = Callable[[Sequence[TokenLogprobOut], int, TokenNames], dict[str, Any]]


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
    """What every chunk of one answer says, and how its choices look."""

    request_id: str
    model: str
    created: int
    n: int = 1
    include_usage: bool = False
    alternatives: int | None = None  # told beside each token; None: no log probabilities
    words: TokenNames = field(kw_only=True)  # spells tokens


class ResponseEncoder(Protocol):
    """One request's way to say things. `first` opens a stream and may be empty; `index` is that of a choice."""

    def first(self) -> bytes: ...
    def chunk(self, index: int, said: Emit) -> bytes: ...
    def last(self, index: int, reason: FinishReason) -> bytes: ...
    def usage(self, usage: Usage) -> bytes: ...
    def whole(self, choices: Sequence[tuple[Emit, FinishReason]], usage: Usage) -> bytes: ...


class _Chunks:
    """The chunks of one stream: constant bytes around a text, but for those with log probabilities."""

    def __init__(
        self, head: dict[str, Any], about: ResponseMeta, choice: Callable[[int, str, Any], dict[str, Any]]
    ) -> None:
        self._head, self._choice = head, choice
        self._nothing: dict[str, Any] = {"usage": None} if about.include_usage else {}
        hole = orjson.dumps(_HOLE)
        self._around = [self.event([choice(index, _HOLE, None)]).split(hole) for index in range(about.n)]

    def chunk(self, index: int, text: str, logprobs: dict[str, Any] | None) -> bytes:
        if logprobs is not None:
            return self.event([self._choice(index, text, logprobs)])
        before, after = self._around[index]
        return before + orjson.dumps(text) + after

    def event(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        said = {"usage": usage.to_json()} if usage else self._nothing
        return b"data: " + orjson.dumps({**self._head, "choices": choices, **said}) + b"\n\n"


class ChatEncoder:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, about: ResponseMeta) -> None:
        self._about = about
        self._head = _head(f"chatcmpl-{about.request_id}", "chat.completion", about)
        chunk = {**self._head, "object": "chat.completion.chunk"}
        self._chunks = _Chunks(chunk, about, lambda index, text, told: _delta(index, {"content": text}, told))

    def first(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunks.event([_delta(index, role)]) for index in range(self._about.n))

    def chunk(self, index: int, said: Emit) -> bytes:
        return self._chunks.chunk(index, said.text, self._logprobs(said))

    def last(self, index: int, reason: FinishReason) -> bytes:
        return self._chunks.event([_delta(index, {}, None, _REASONS[reason])])

    def usage(self, usage: Usage) -> bytes:
        return self._chunks.event([], usage)

    def whole(self, choices: Sequence[tuple[Emit, FinishReason]], usage: Usage) -> bytes:
        said = [self._message(index, *choice) for index, choice in enumerate(choices)]
        return orjson.dumps({**self._head, "choices": said, "usage": usage.to_json()})

    def _message(self, index: int, said: Emit, reason: FinishReason) -> dict[str, Any]:
        message = {"role": "assistant", "content": said.text, "refusal": None}
        logprobs = self._logprobs(said)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": _REASONS[reason]}

    def _logprobs(self, said: Emit) -> dict[str, Any] | None:
        return _logprobs(chat_logprobs, said, self._about)


class CompletionEncoder:
    """`text_completion`, whole or in chunks."""

    def __init__(self, about: ResponseMeta) -> None:
        self._about = about
        self._head = _head(f"cmpl-{about.request_id}", "text_completion", about)
        self._chunks = _Chunks(self._head, about, _text)

    def first(self) -> bytes:
        return b""

    def chunk(self, index: int, said: Emit) -> bytes:
        return self._chunks.chunk(index, said.text, self._logprobs(said))

    def last(self, index: int, reason: FinishReason) -> bytes:
        return self._chunks.event([_text(index, "", None, _REASONS[reason])])

    def usage(self, usage: Usage) -> bytes:
        return self._chunks.event([], usage)

    def whole(self, choices: Sequence[tuple[Emit, FinishReason]], usage: Usage) -> bytes:
        texts = [
            _text(index, said.text, self._logprobs(said), _REASONS[reason])
            for index, (said, reason) in enumerate(choices)
        ]
        return orjson.dumps({**self._head, "choices": texts, "usage": usage.to_json()})

    def _logprobs(self, said: Emit) -> dict[str, Any] | None:
        return _logprobs(completion_logprobs, said, self._about)


def error_event(body: bytes) -> bytes:
    """An error after the first byte; the stream closes after it, without [DONE]."""
    return b"data: " + body + b"\n\n"


def _head(id_: str, kind: str, about: ResponseMeta) -> dict[str, Any]:
    return {"id": id_, "object": kind, "created": about.created, "model": about.model}


def _delta(index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _text(index: int, text: str, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(form: Form, said: Emit, about: ResponseMeta) -> dict[str, Any] | None:
    if about.alternatives is None:
        return None
    return form(said.told, about.alternatives, about.words)
