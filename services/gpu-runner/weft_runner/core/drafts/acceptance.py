"""How likely drafted tokens are to be the ones that are sampled: learnt from the drafts before. Pure.

Two things are known of a guess: how long the text before it has matched, guesses before it included, and how many of
the places that matched go on with it. Each pair of classes of the two has its own share of accepted guesses, which
starts from a prior worth `PRIOR_GUESSES` and forgets (`MAX_GUESSES`), so that it follows an adapter whose answers
change. A class in which nothing is drafted any more drifts back to its prior and is tried again.
"""

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

PRIORS = (  # by share of places that agree (at most half, more, the only one, all of several), by length
    (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.4),
    (0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.7),
    (0.3, 0.45, 0.6, 0.7, 0.8, 0.85, 0.9),
    (0.5, 0.65, 0.8, 0.9, 0.93, 0.95, 0.95),
)
ALL_PRIORS = (*chain.from_iterable(PRIORS),)  # of a class of guesses: share by share, 1, 2-3, 4-7, ..., 64 and more
SUREST = len(ALL_PRIORS) - 1  # the class
CHANGED = 2 * len(PRIORS[0]) + 1  # of a caller's draft: the guess behind a token that differed, or the first one
PRIOR_GUESSES = 4.0
MAX_GUESSES = 128.0  # a class remembers about as many
FORGET = 0.98  # of what a class knows, each time a guess of it was not worth a try
MIN_GAIN = 0.05  # expected tokens: a guess of less, and those behind it, pay nowhere


class Draft(NamedTuple):
    """Tokens that may follow, the class of each, and its expected tokens: the chance that it and all before are right.

    A draft ends before a guess of less than MIN_GAIN. Where that is the first one its class is there alone.
    """

    tokens: Sequence[int]
    classes: Sequence[int]
    gains: Sequence[float]


def weigh(tokens: Sequence[int], classes: Sequence[int], shares: Sequence[float]) -> Draft:
    """Make a draft of guesses, each of its class."""
    gains = [1.0]
    for token_class in classes:
        if (gain := gains[-1] * shares[token_class]) < MIN_GAIN:
            break
        gains.append(gain)
    return Draft(tokens[: len(gains) - 1], classes, gains[1:])


def weigh_alike(tokens: Sequence[int], token: int, shares: Sequence[float]) -> Draft:
    """Make a draft with guesses of a single class."""
    return weigh(tokens, (token,) * len(tokens), shares)


class Acceptance:
    """Accepted and tried guesses by class, the prior's included. One owner: an adapter's text.

    `shares`: accepted of tried, for the search to read.
    """

    __slots__ = ("_accepted", "_tried", "shares")

    def __init__(self) -> None:
        self.shares = array("d", ALL_PRIORS)
        self._tried = [PRIOR_GUESSES] * len(self.shares)
        self._accepted = [PRIOR_GUESSES * prior for prior in self.shares]

    def learn(self, draft: Draft, n_right: int, *, checked: bool) -> None:
        """Count the first `n_right` guesses of a draft as right, and the next guess as wrong if it was checked."""
        for at in range(n_right + checked):
            token_class = draft.classes[at]
            if self._tried[token_class] >= MAX_GUESSES:
                self._accepted[token_class] *= 1.0 - 1.0 / MAX_GUESSES
                self._tried[token_class] *= 1.0 - 1.0 / MAX_GUESSES
            self._accepted[token_class] += at < n_right
            self._tried[token_class] += 1.0
            self.shares[token_class] = self._accepted[token_class] / self._tried[token_class]

    def pass_over(self, draft: Draft) -> None:
        """Count a draft whose first guess was not worth a try."""
        token_class = draft.classes[0]
        self._accepted[token_class] += (1.0 - FORGET) * (
            PRIOR_GUESSES * ALL_PRIORS[token_class] - self._accepted[token_class]
        )
        self._tried[token_class] += (1.0 - FORGET) * (PRIOR_GUESSES - self._tried[token_class])
        self.shares[token_class] = self._accepted[token_class] / self._tried[token_class]
