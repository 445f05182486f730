"""What the model chose for a row. Pure values, from the executor to the wire."""

from typing import NamedTuple


class TokenLogprob(NamedTuple):
    """Natural logarithms of the probabilities that the model gave at one position: log softmax of its raw logits.

    `top`: the most likely tokens with theirs, the likeliest first, the lower id first among equals.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Choice(NamedTuple):
    """A token, and its log probability where the request asked for it."""

    token: int
    logprob: TokenLogprob | None = None
