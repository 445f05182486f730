"""Log probabilities as OpenAI's clients read them, for chats and for completions."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from weft_gateway.core.events import TokenLogprobOut

LEAST = -9999.0  # what OpenAI says for "very unlikely": JSON has no infinity


class TokenNames(Protocol):
    """What a token is. `name_of` is None for one that stands for its bytes."""

    def bytes_of(self, token: int) -> bytes: ...
    def name_of(self, token: int) -> str | None: ...


def chat_logprobs(told: Sequence[TokenLogprobOut], alternatives: int, words: TokenNames) -> dict[str, Any]:
    """`choices[].logprobs` of a chat: an entry a token, with its likeliest alternatives."""
    return {"content": [_entry(one, alternatives, words) for one in told], "refusal": None}


def completion_logprobs(told: Sequence[TokenLogprobOut], alternatives: int, words: TokenNames) -> dict[str, Any]:
    """`choices[].logprobs` of a completion. Offsets count characters of the answer, the first one at 0.

    Each of `top_logprobs` holds the chosen token too, so up to one more than was asked for.
    """
    return {
        "tokens": [_spelled(one.token, words) for one in told],
        "token_logprobs": [_finite(one.logprob.logprob) for one in told],
        "top_logprobs": [_by_name(one, alternatives, words) for one in told],
        "text_offset": [one.start for one in told],
    }


def _entry(told: TokenLogprobOut, alternatives: int, words: TokenNames) -> dict[str, Any]:
    top = told.logprob.top[:alternatives]
    others = [_token(token, logprob, words) for token, logprob in top]
    return _token(told.token, told.logprob.logprob, words) | {"top_logprobs": others}


def _token(token: int, logprob: float, words: TokenNames) -> dict[str, Any]:
    """A token that is not text by itself has the bytes it stands for written out; a special one has none."""
    name = words.name_of(token)
    if name is not None:
        return {"token": name, "logprob": _finite(logprob), "bytes": None}
    own = words.bytes_of(token)
    return {"token": own.decode("utf-8", "backslashreplace"), "logprob": _finite(logprob), "bytes": list(own)}


def _by_name(told: TokenLogprobOut, alternatives: int, words: TokenNames) -> dict[str, float]:
    return _first_of_each(
        (_spelled(token, words), _finite(logprob))
        for token, logprob in (*told.logprob.top[:alternatives], (told.token, told.logprob.logprob))
    )


def _first_of_each(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Two tokens may be spelled the same: the likelier one stands."""
    found: dict[str, float] = {}
    for name, logprob in pairs:
        found.setdefault(name, logprob)
    return found


def _spelled(token: int, words: TokenNames) -> str:
    """Completions have no list of bytes: a part of a character is `bytes:\\xe2\\x80`."""
    name = words.name_of(token)
    if name is not None:
        return name
    own = words.bytes_of(token)
    try:
        return own.decode()
    except UnicodeDecodeError:
        return "bytes:" + own.decode("utf-8", "backslashreplace")


def _finite(logprob: float) -> float:
    return min(0.0, max(LEAST, logprob))
