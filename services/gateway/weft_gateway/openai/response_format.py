"""The shape of an answer: JSON bodies, and SSE chunks from templates built once a request.

A chunk costs one `orjson.dumps` of its text; everything around it is constant bytes. Only one with log probabilities is
made whole.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import orjson

from weft.domain.request import FinishReason
from weft_gateway.core.events import Emit, TokenLogprobOut
from weft_gateway.openai.logprobs import TokenNames, chat_logprobs, completion_logprobs
from weft_gateway.openai.schema import Common

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_REASONS = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_HOLE = "\u0000text\u0000"
LogprobsEncoder = Callable[[Sequence[TokenLogprobOut], int, TokenNames], dict[str, Any]]


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Tokens of a request: its prompt once, all its answers. What comes after a stop string does not count."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


class ResponseEncoder:
    """One request's encoder; `index` is that of a choice.

    A chunk is constant bytes around a text, but for those with log probabilities.
    """

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    encode_logprobs: ClassVar[LogprobsEncoder]

    def __init__(self, params: Common, names: TokenNames, request_id: str, created_unix_s: int) -> None:
        self._n, self._alternatives, self._names = params.n, params.alternatives, names
        self._head, self._chunk_head = (
            {"id": f"{self.id_prefix}-{request_id}", "object": kind, "created": created_unix_s, "model": params.model}
            for kind in (self.kind, self.chunk_kind)
        )
        self._no_usage: dict[str, Any] = {"usage": None} if params.include_usage else {}
        hole = orjson.dumps(_HOLE)
        self._around = [self._event([self._delta(index, _HOLE)]).split(hole) for index in range(params.n)]

    def role_chunk(self) -> bytes:
        """What opens a stream."""
        return b""

    def chunk(self, index: int, emit: Emit) -> bytes:
        logprobs = self._logprobs(emit)
        if logprobs is not None:
            return self._event([self._delta(index, emit.text, logprobs)])
        before, after = self._around[index]
        return before + orjson.dumps(emit.text) + after

    def finish_chunk(self, index: int, reason: FinishReason) -> bytes:
        return self._event([self._delta(index, "", None, _REASONS[reason])])

    def usage(self, usage: dict[str, int]) -> bytes:
        return self._event([], usage)

    def body(self, choices: Sequence[tuple[Emit, FinishReason]], usage: dict[str, int]) -> bytes:
        whole = [
            self._choice(index, emit.text, self._logprobs(emit), _REASONS[reason])
            for index, (emit, reason) in enumerate(choices)
        ]
        return orjson.dumps({**self._head, "choices": whole, "usage": usage})

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        more = {"usage": usage} if usage else self._no_usage
        return b"data: " + orjson.dumps({**self._chunk_head, "choices": choices, **more}) + b"\n\n"

    def _logprobs(self, emit: Emit) -> dict[str, Any] | None:
        if self._alternatives is None:
            return None
        return type(self).encode_logprobs(emit.logprobs, self._alternatives, self._names)

    def _choice(self, index: int, text: str, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        """A choice of a body."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _delta(self, index: int, text: str, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        """A choice of a chunk."""
        return self._choice(index, text, logprobs, reason)


class CompletionEncoder(ResponseEncoder):
    """`text_completion`, whole or in chunks."""

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    encode_logprobs = staticmethod(completion_logprobs)


class ChatEncoder(ResponseEncoder):
    """`chat.completion` and `chat.completion.chunk`."""

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    encode_logprobs = staticmethod(chat_logprobs)

    def role_chunk(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        deltas = [{"index": i, "delta": role, "logprobs": None, "finish_reason": None} for i in range(self._n)]
        return b"".join(self._event([delta]) for delta in deltas)

    def _choice(self, index: int, text: str, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _delta(self, index: int, text: str, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        delta = {"content": text} if reason is None else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def error_event(body: bytes) -> bytes:
    """An error after the first byte; the stream closes after it, without [DONE]."""
    return b"data: " + body + b"\n\n"
