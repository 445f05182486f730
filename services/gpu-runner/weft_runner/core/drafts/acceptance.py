"""How likely drafted tokens are to be the ones that are sampled: learnt from the drafts before. Pure.

Two things are known of a guess: how long the text before it has matched, guesses before it included, and how many of
the places that matched go on with it. Each pair of classes of the two has its own share of accepted guesses, which
starts from a prior worth `PRIOR_GUESSES` and forgets (`MAX_GUESSES`), so that it follows an adapter whose answers
change. A class in which nothing is drafted any more drifts back to its prior and is tried again.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

PRIORS = (  # by share of places that agree (at most half, more, the only one, all of several), by length
    (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.4),
    (0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.7),
    (0.3, 0.45, 0.6, 0.7, 0.8, 0.85, 0.9),
    (0.5, 0.65, 0.8, 0.9, 0.93, 0.95, 0.95),
)
LENGTHS = len(PRIORS[0])  # classes: 1, 2-3, 4-7, ..., 64 and more
LENGTH_CLASSES = [min(max(matched, 1).bit_length() - 1, LENGTHS - 1) for matched in range(128)]
PRIOR_GUESSES = 4.0
MAX_GUESSES = 128.0  # a class remembers about as many
FORGET = 0.98  # of what a class knows, each time a guess of it was not worth a try
MIN_GAIN = 0.05  # expected tokens: a guess of less, and those behind it, pay nowhere


class Draft(NamedTuple):
    """Tokens that may follow: of `places[i]` that match so far, `agree[i]` go on with `tokens[i]`.

    `matched`: tokens before the first one that match, at most 64.
    """

    matched: int
    tokens: Sequence[int]
    agree: Sequence[int]
    places: Sequence[int]


class Acceptance:
    """Accepted and tried guesses by class, the prior's included. One owner: an adapter's text."""

    __slots__ = ("_accepted", "_shares", "_tried")

    def __init__(self) -> None:
        self._shares = [*chain.from_iterable(PRIORS)]  # accepted / tried
        self._tried = [PRIOR_GUESSES] * len(self._shares)
        self._accepted = [PRIOR_GUESSES * prior for prior in self._shares]

    def gains(self, draft: Draft) -> list[float]:
        """Return the expected tokens of a draft's guesses: the probability that each one, and all before, are right.

        Guesses of less than MIN_GAIN, and those behind them, are left out.
        """
        matched, shares, gain = draft.matched, self._shares, 1.0
        gains: list[float] = []
        for agree, places in zip(draft.agree, draft.places, strict=True):
            gain *= shares[_class_of(matched, agree, places)]
            if gain < MIN_GAIN:
                break
            gains.append(gain)
            matched += 1
        return gains

    def learn(self, draft: Draft, at: int, *, accepted: bool) -> None:
        """Count guess `at` of a draft, which was checked: all before it were right."""
        one = _class_of(draft.matched + at, draft.agree[at], draft.places[at])
        if self._tried[one] >= MAX_GUESSES:
            self._accepted[one] *= 1.0 - 1.0 / MAX_GUESSES
            self._tried[one] *= 1.0 - 1.0 / MAX_GUESSES
        self._accepted[one] += accepted
        self._tried[one] += 1.0
        self._shares[one] = self._accepted[one] / self._tried[one]

    def pass_over(self, draft: Draft) -> None:
        """Count a draft whose first guess was not worth a try."""
        one = _class_of(draft.matched, draft.agree[0], draft.places[0])
        prior = PRIORS[one // LENGTHS][one % LENGTHS]
        self._accepted[one] += (1.0 - FORGET) * (PRIOR_GUESSES * prior - self._accepted[one])
        self._tried[one] += (1.0 - FORGET) * (PRIOR_GUESSES - self._tried[one])
        self._shares[one] = self._accepted[one] / self._tried[one]


def _class_of(matched: int, agree: int, places: int) -> int:
    if agree == places:
        return ((3 if places > 1 else 2) * LENGTHS) + LENGTH_CLASSES[matched]
    return (LENGTHS if 2 * agree > places else 0) + LENGTH_CLASSES[matched]
