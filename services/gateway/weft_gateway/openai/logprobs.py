"""Log probabilities as OpenAI's clients read them, for chats and for completions."""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any, Protocol

from weft.domain.request import TokenLogprob
from weft_gateway.core.events import TokenLogprobOut

LEAST = -9999.0  # OpenAI's value for "very unlikely": JSON has no infinity


class TokenNames(Protocol):
    """Spells tokens. `name_of` is None for a token that stands for its bytes."""

    def bytes_of(self, token: int) -> bytes: ...
    def name_of(self, token: int) -> str | None: ...


class TokenIdNames:
    """Spells every token as its id: vLLM's `return_tokens_as_token_ids`."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def bytes_of(self, token: int) -> bytes:
        return self._names.bytes_of(token)

    def name_of(self, token: int) -> str | None:
        return f"token_id:{token}"


def chat_logprobs(tokens: Sequence[TokenLogprobOut], alternatives: int, names: TokenNames) -> dict[str, Any]:
    """Write `choices[].logprobs` of a chat: an entry a token, with its likeliest alternatives."""
    return {"content": [_entry(token, alternatives, names) for token in tokens], "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprobOut], alternatives: int, names: TokenNames) -> dict[str, Any]:
    """Write `choices[].logprobs` of a completion. Offsets count characters of the answer, the first one at 0.

    Each of `top_logprobs` holds the sampled token too, so up to one more than was asked for.
    """
    return {
        "tokens": [_spelled(token.token, names) for token in tokens],
        "token_logprobs": [_finite(token.logprob.logprob) for token in tokens],
        "top_logprobs": [_by_name(token, alternatives, names) for token in tokens],
        "text_offset": [token.start for token in tokens],
    }


def echoed_logprobs(
    tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None], alternatives: int, names: TokenNames
) -> dict[str, Any]:
    """Write `choices[].logprobs` of a prompt before its answer. The first token has no probability."""
    spelled, offsets, chars, decoder = list[str](), list[int](), 0, getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        spelled.append(_spelled(token, names))
        offsets.append(chars)
        chars += len(decoder.decode(names.bytes_of(token)))
    outs = [logprob and TokenLogprobOut(token, logprob, 0) for token, logprob in zip(tokens, logprobs, strict=True)]
    return {
        "tokens": spelled,
        "token_logprobs": [out and _finite(out.logprob.logprob) for out in outs],
        "top_logprobs": [out and _by_name(out, alternatives, names) for out in outs],
        "text_offset": offsets,
    }


def joined_logprobs(prompt: dict[str, Any], answer: dict[str, Any], chars: int) -> dict[str, Any]:
    """Join the log probabilities of a prompt of `chars` characters and of the answer behind it."""
    shifted = answer | {"text_offset": [chars + offset for offset in answer["text_offset"]]}
    return {name: values + shifted[name] for name, values in prompt.items()}


def prompt_logprobs(
    tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None], alternatives: int, names: TokenNames
) -> list[dict[str, Any] | None]:
    """Write vLLM's `prompt_logprobs`: by token id, the prompt's token first. An unknown rank is null."""
    entries: list[dict[str, Any] | None] = []
    for token, logprob in zip(tokens, logprobs, strict=True):
        if logprob is None:
            entries.append(None)
            continue
        ranks = {token: rank for rank, (token, _) in enumerate(logprob.top[:alternatives], 1)}
        values = {token: logprob.logprob} | dict(logprob.top[:alternatives])
        entries.append(
            {
                str(t): {"logprob": _finite(value), "rank": ranks.get(t), "decoded_token": _spelled(t, names)}
                for t, value in values.items()
            }
        )
    return entries


def _entry(out: TokenLogprobOut, alternatives: int, names: TokenNames) -> dict[str, Any]:
    top = out.logprob.top[:alternatives]
    alternatives_out = [_token(token, logprob, names) for token, logprob in top]
    return _token(out.token, out.logprob.logprob, names) | {"top_logprobs": alternatives_out}


def _token(token: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    """Write a token. A token without a text has its bytes written out, and a special token has none."""
    name = names.name_of(token)
    if name is not None:
        return {"token": name, "logprob": _finite(logprob), "bytes": None}
    spelled = names.bytes_of(token)
    return {"token": spelled.decode("utf-8", "backslashreplace"), "logprob": _finite(logprob), "bytes": list(spelled)}


def _by_name(out: TokenLogprobOut, alternatives: int, names: TokenNames) -> dict[str, float]:
    """Write logarithms by spelling. Of equally spelled tokens the likelier token counts."""
    by_name: dict[str, float] = {}
    for token, logprob in (*out.logprob.top[:alternatives], (out.token, out.logprob.logprob)):
        by_name.setdefault(_spelled(token, names), _finite(logprob))
    return by_name


def _spelled(token: int, names: TokenNames) -> str:
    """Spell a token; completions have no list of bytes: a part of a character is `bytes:\\xe2\\x80`."""
    name = names.name_of(token)
    if name is not None:
        return name
    spelled = names.bytes_of(token)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + spelled.decode("utf-8", "backslashreplace")


def _finite(logprob: float) -> float:
    return min(0.0, max(LEAST, logprob))
