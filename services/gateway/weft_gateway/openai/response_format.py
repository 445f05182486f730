"""The shape of an answer: JSON bodies, and SSE chunks from templates built once a request.

A chunk costs one `orjson.dumps` of its text; everything around it is constant bytes. Only one with log probabilities,
token ids or the tokens used so far is made whole.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import orjson

from weft.domain.request import FinishReason
from weft_gateway.core.events import Emit, End, TokenLogprobOut
from weft_gateway.forms.answer_reader import AnswerReader, message_of
from weft_gateway.openai.call import AnswerEncoder, Call, Prompt
from weft_gateway.openai.logprobs import (
    TokenIdNames,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    joined_logprobs,
    prompt_logprobs,
)
from weft_gateway.openai.schema import Common
from weft_gateway.openai.spans import REASONS
from weft_gateway.openai.usage import CallUsage

DONE = b"data: [DONE]\n\n"
FINGERPRINT_CHARS = 16
PING = b": ping\n\n"
_HOLE = "\u0000text\u0000"
LogprobsEncoder = Callable[[Sequence[TokenLogprobOut], int, TokenNames], dict[str, Any]]


def _fingerprint(digest: str) -> str:
    """Return `system_fingerprint`, the same for the same weights; the answer's header has the whole digest."""
    algorithm, _, hexadecimal = digest.partition(":")
    return f"{algorithm}:{hexadecimal[:FINGERPRINT_CHARS]}" if hexadecimal else digest


class ResponseEncoder(AnswerEncoder):
    """Writes the answers to one call. A chunk is constant bytes around a text, but for those with more than text."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    encode_logprobs: ClassVar[LogprobsEncoder]

    def __init__(self, params: Common, call: Call) -> None:
        plain = all(prompt.form.is_plain for prompt in call.prompts)
        self._params, self._prompts, self._counts_usage = params, call.prompts, params.usage_in_chunks
        self._no_usage: dict[str, Any] = {"usage": None} if params.include_usage else {}
        has_more = params.return_token_ids or params.return_weight_versions or self._counts_usage
        self._plain = params.alternatives is None and not has_more
        self._weights: dict[str, str] | None = None
        if params.return_weight_versions:
            self._weights = {"version": call.digest, "base_version": call.pool.base_digest}
        self._names = TokenIdNames(call.tokenizer) if params.return_tokens_as_token_ids else call.tokenizer
        self._choices = params.n * len(call.prompts)
        request_id = call.ids.request_id
        forms = [] if plain else [self._prompt_of(index).form for index in range(self._choices)]
        self._readers = [AnswerReader(form, f"{request_id}/{index}") for index, form in enumerate(forms)]
        self._fingerprint = _fingerprint(call.digest)
        self._head = {
            "id": f"{self.id_prefix}-{request_id}",
            "object": self.kind,
            "created": call.arrived_unix_ms // 1000,
            "model": params.model,
            "system_fingerprint": self._fingerprint,
        }
        self._chunk_head = {**self._head, "object": self.chunk_kind}
        self._answer_tokens = [0] * self._choices
        hole = orjson.dumps(_HOLE)
        self._around = [self._event([self._delta(index, _HOLE)]).split(hole) for index in range(self._choices)]

    @property
    def span_attributes(self) -> Mapping[str, str | None]:
        return {"openai.response.system_fingerprint": self._fingerprint}

    def chunk(self, index: int, emit: Emit) -> bytes:
        if self._plain:
            prefix, suffix = self._around[index]
            return prefix + orjson.dumps(emit.text) + suffix
        self._answer_tokens[index] = emit.answer_tokens
        choice = self._delta(index, emit.text, self._logprobs(emit))
        if self._params.return_token_ids:
            choice["token_ids"] = list(emit.tokens)
        return self._event([choice], self._usage_so_far())

    def finish_chunk(self, index: int, end: End) -> bytes:
        choice = self._delta(index, "", None, REASONS[end.reason]) | self._at_end(index, end)
        return self._event([choice], self._usage_so_far())

    def last_chunk(self, usage: CallUsage) -> bytes:
        """Close a stream: usage, if the client asked for it, and [DONE]."""
        return (self._event([], usage.of_choices()) if self._params.include_usage else b"") + DONE

    def body(self, choices: Sequence[tuple[Emit, End]], usage: CallUsage) -> bytes:
        choices_out = self._choices_out(choices)
        return orjson.dumps({**self._head, "choices": choices_out, "usage": self._with_reasoning(usage).of_choices()})

    @property
    def reasoning_tokens(self) -> int:
        return sum(reader.reasoning_tokens for reader in self._readers)

    def _choices_out(self, choices: Sequence[tuple[Emit, End]]) -> list[dict[str, Any]]:
        return [self._whole_choice(i, emit, end.reason) | self._at_end(i, end) for i, (emit, end) in enumerate(choices)]

    def _whole_choice(self, index: int, emit: Emit, reason: FinishReason) -> dict[str, Any]:
        self._answer_tokens[index] = emit.answer_tokens
        choice = self._choice(index, emit.text, self._logprobs(emit), REASONS[reason])
        if self._params.prompt_logprobs is not None:
            tokens, alternatives = self._prompt_of(index).tokens, self._params.prompt_logprobs
            choice["prompt_logprobs"] = prompt_logprobs(tokens, emit.prompt_logprobs, alternatives, self._names)
        if self._params.return_token_ids:
            choice["token_ids"] = list(emit.tokens)
        return choice

    def _prompt_of(self, index: int) -> Prompt:
        return self._prompts[index // self._params.n]

    def _at_end(self, index: int, end: End) -> dict[str, Any]:
        """Name the end of a choice and, if requested, the weights that sampled its tokens (vLLM)."""
        about: dict[str, Any] = {} if end.stop is None else {"stop_reason": end.stop}
        if self._weights is not None:
            about["weight_versions"] = [{**self._weights, "start": 0, "end": self._answer_tokens[index]}]
        return about

    def _usage_so_far(self) -> dict[str, Any] | None:
        if not self._counts_usage:
            return None
        prompt_tokens = sum(len(prompt.tokens) for prompt in self._prompts)
        usage = CallUsage(prompt_tokens, sum(self._answer_tokens), self.cached_tokens, self.reasoning_tokens)
        return usage.of_choices()

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None, **members: Any) -> bytes:
        about = {"usage": usage} if usage else self._no_usage
        return b"data: " + orjson.dumps({**self._chunk_head, "choices": choices, **about, **members}) + b"\n\n"

    def _logprobs(self, emit: Emit) -> dict[str, Any] | None:
        if self._params.alternatives is None:
            return None
        return type(self).encode_logprobs(emit.logprobs, self._params.alternatives, self._names)

    def _choice(self, index: int, text: str, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        """Write a choice of a body."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _delta(self, index: int, text: str, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        """Write a choice of a chunk."""
        return self._choice(index, text, logprobs, reason)


class CompletionEncoder(ResponseEncoder):
    """`text_completion`, whole or in chunks."""

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    encode_logprobs = staticmethod(completion_logprobs)

    def first_chunk(self) -> bytes:
        """Write the first chunk: echoed prompts, and requested token ids of prompts."""
        chunk = b""
        for index in range(self._choices):
            prompt = self._prompt_of(index)
            choice = self._delta(index, prompt.echo)
            if self._params.return_token_ids:
                choice |= {"prompt_token_ids": list(prompt.tokens), "token_ids": []}
            if prompt.echo or self._params.return_token_ids:
                chunk += self._event([choice], self._usage_so_far())
        return chunk

    def _whole_choice(self, index: int, emit: Emit, reason: FinishReason) -> dict[str, Any]:
        choice, prompt = super()._whole_choice(index, emit, reason), self._prompt_of(index)
        if prompt.echo:
            choice["text"] = prompt.echo + emit.text
            if (alternatives := self._params.alternatives) is not None:
                echoed = echoed_logprobs(prompt.tokens, emit.prompt_logprobs, alternatives, self._names)
                choice["logprobs"] = joined_logprobs(echoed, choice["logprobs"], len(prompt.echo))
        if self._params.return_token_ids:
            choice["prompt_token_ids"] = list(prompt.tokens)
        return choice


class ChatEncoder(ResponseEncoder):
    """`chat.completion` and `chat.completion.chunk`."""

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    encode_logprobs = staticmethod(chat_logprobs)

    def chunk(self, index: int, emit: Emit) -> bytes:
        """Write a chunk for each part of an answer with more than text; the first has what comes beside the text."""
        if not self._readers:
            return super().chunk(index, emit)
        self._answer_tokens[index] = emit.answer_tokens
        deltas = self._readers[index].push(emit.text, emit.token_starts)
        logprobs, tokens = self._logprobs(emit), list(emit.tokens) if self._params.return_token_ids else None
        if not deltas and (logprobs is not None or tokens):
            deltas = [{}]
        return b"".join(
            self._part(index, delta, logprobs if first else None, tokens if first else None)
            for first, delta in zip([True] + [False] * len(deltas), deltas, strict=False)
        )

    def finish_chunk(self, index: int, end: End) -> bytes:
        if not self._readers:
            return super().finish_chunk(index, end)
        deltas = self._readers[index].flush(cut=end.reason is FinishReason.LENGTH)
        left = b"".join(self._part(index, delta) for delta in deltas)
        choice = self._delta(index, "", None, self._reason(index, end.reason)) | self._at_end(index, end)
        return left + self._event([choice], self._usage_so_far())

    def _part(self, index: int, delta: dict[str, Any], logprobs: Any = None, tokens: list[int] | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if tokens is not None:
            choice["token_ids"] = tokens
        return self._event([choice], self._usage_so_far())

    def _reason(self, index: int, reason: FinishReason) -> str:
        """Say why a choice ended: for calls to be made, unless it was cut or the request itself named the call."""
        calls = self._readers and self._readers[index].ends_with_calls and reason is not FinishReason.LENGTH
        return "tool_calls" if calls else REASONS[reason]

    def _whole_choice(self, index: int, emit: Emit, reason: FinishReason) -> dict[str, Any]:
        choice = super()._whole_choice(index, emit, reason)
        if self._readers:
            reader = self._readers[index]
            deltas = reader.push(emit.text, emit.token_starts)
            choice["message"] = message_of([*deltas, *reader.flush(cut=reason is FinishReason.LENGTH)])
            choice["finish_reason"] = self._reason(index, reason)
        if echo := self._prompt_of(index).echo:
            choice["message"]["content"] = echo + (choice["message"]["content"] or "")
        return choice

    def first_chunk(self) -> bytes:
        texts = [self._prompt_of(index).echo for index in range(self._choices)]
        roles = [{"role": "assistant", "content": text} for text in texts]
        deltas = [{"index": i, "delta": role, "logprobs": None, "finish_reason": None} for i, role in enumerate(roles)]
        tokens = {"prompt_token_ids": list(self._prompts[0].tokens)} if self._params.return_token_ids else {}
        return b"".join(self._event([delta], self._usage_so_far(), **tokens) for delta in deltas)

    def body(self, choices: Sequence[tuple[Emit, End]], usage: CallUsage) -> bytes:
        choices_out = self._choices_out(choices)
        members = {"prompt_token_ids": list(self._prompts[0].tokens)} if self._params.return_token_ids else {}
        if self._params.prompt_logprobs is not None:  # they are the prompt's, as in vLLM
            of_prompt = [choice.pop("prompt_logprobs") for choice in choices_out]
            members["prompt_logprobs"] = of_prompt[0]
        return orjson.dumps(
            {**self._head, "choices": choices_out, "usage": self._with_reasoning(usage).of_choices(), **members}
        )

    def _choice(self, index: int, text: str, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _delta(self, index: int, text: str, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        delta = {"content": text} if reason is None else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
