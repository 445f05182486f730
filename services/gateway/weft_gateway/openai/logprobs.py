"""Log probabilities as OpenAI's clients read them, for chats and for completions."""

from collections.abc import Sequence
from typing import Any, Protocol

from weft_gateway.core.events import TokenLogprobOut

LEAST = -9999.0  # OpenAI's value for "very unlikely": JSON has no infinity


class TokenNames(Protocol):
    """Spells tokens. `name_of` is None for one that stands for its bytes."""

    def bytes_of(self, token: int) -> bytes: ...
    def name_of(self, token: int) -> str | None: ...


def chat_logprobs(tokens: Sequence[TokenLogprobOut], alternatives: int, names: TokenNames) -> dict[str, Any]:
    """`choices[].logprobs` of a chat: an entry a token, with its likeliest alternatives."""
    return {"content": [_entry(one, alternatives, names) for one in tokens], "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprobOut], alternatives: int, names: TokenNames) -> dict[str, Any]:
    """`choices[].logprobs` of a completion. Offsets count characters of the answer, the first one at 0.

    Each of `top_logprobs` holds the sampled token too, so up to one more than was asked for.
    """
    return {
        "tokens": [_spelled(one.token, names) for one in tokens],
        "token_logprobs": [_finite(one.logprob.logprob) for one in tokens],
        "top_logprobs": [_by_name(one, alternatives, names) for one in tokens],
        "text_offset": [one.start for one in tokens],
    }


def _entry(out: TokenLogprobOut, alternatives: int, names: TokenNames) -> dict[str, Any]:
    top = out.logprob.top[:alternatives]
    others = [_token(token, logprob, names) for token, logprob in top]
    return _token(out.token, out.logprob.logprob, names) | {"top_logprobs": others}


def _token(token: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    """A token that is not text by itself has the bytes it stands for written out; a special one has none."""
    name = names.name_of(token)
    if name is not None:
        return {"token": name, "logprob": _finite(logprob), "bytes": None}
    own = names.bytes_of(token)
    return {"token": own.decode("utf-8", "backslashreplace"), "logprob": _finite(logprob), "bytes": list(own)}


def _by_name(out: TokenLogprobOut, alternatives: int, names: TokenNames) -> dict[str, float]:
    """Two tokens may be spelled the same: the likelier one stands."""
    found: dict[str, float] = {}
    for token, logprob in (*out.logprob.top[:alternatives], (out.token, out.logprob.logprob)):
        found.setdefault(_spelled(token, names), _finite(logprob))
    return found


def _spelled(token: int, names: TokenNames) -> str:
    """Completions have no list of bytes: a part of a character is `bytes:\\xe2\\x80`."""
    name = names.name_of(token)
    if name is not None:
        return name
    own = names.bytes_of(token)
    try:
        return own.decode()
    except UnicodeDecodeError:
        return "bytes:" + own.decode("utf-8", "backslashreplace")


def _finite(logprob: float) -> float:
    return min(0.0, max(LEAST, logprob))
