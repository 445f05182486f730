"""The predicted length of an answer as a distribution.

Between its quantiles the logarithm of a length is linear in the normal score: a log-normal, in pieces. So heavy tails
are counted (Zheng et al., arXiv 2604.00499, rank by an expectation that the tail enters), and every integral is closed.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import NormalDist

NORMAL = NormalDist()
MIN_SLOPE = 0.05  # slope of log length by normal score: quantiles that coincide are no certainty
RARE = 1e-6  # a probability below which a prediction says nothing


class LengthDistribution:
    """Tokens of an answer. `quantiles`: (level, tokens) by level, above 0 and below 1; two of them at least."""

    def __init__(self, quantiles: Sequence[tuple[float, float]]) -> None:
        points = [(NORMAL.inv_cdf(level), math.log(max(1.0, tokens))) for level, tokens in quantiles]
        self._pieces: list[tuple[float, float, float]] = []  # up to this score: log length = offset + slope * score
        log_tokens = points[0][1]
        for (score, _), (upper, log_upper) in pairwise(points):
            slope = max(MIN_SLOPE, (log_upper - log_tokens) / (upper - score))
            self._pieces.append((upper, log_tokens - slope * score, slope))
            log_tokens += slope * (upper - score)
        _, offset, slope = self._pieces[-1]
        self._pieces[-1] = math.inf, offset, slope

    def survival(self, tokens: float) -> float:
        """Return the probability of more than `tokens` tokens."""
        return NORMAL.cdf(-self._score(tokens))

    def expected_remaining(self, emitted: int, limit: int) -> float:
        """Return the tokens to come of an answer that has `emitted` of them and is cut at `limit`; at least 1."""
        longer = self.survival(emitted)
        if longer < RARE:  # a heavy tail is expected to go on for as long again
            return float(max(1, min(emitted, limit - emitted)))
        low, high = self._score(emitted), self._score(limit)
        total = limit * NORMAL.cdf(-high) + sum(self._lengths_between(low, high))
        return max(1.0, min(total / longer - emitted, float(limit - emitted)))

    def _lengths_between(self, low: float, high: float) -> Iterator[float]:
        """Yield the integral of the length over the scores of each piece."""
        for upper, offset, slope in self._pieces:
            if low < min(upper, high):
                weight = NORMAL.cdf(min(upper, high) - slope) - NORMAL.cdf(low - slope)
                yield math.exp(offset + slope * slope / 2) * weight
                low = upper

    def _score(self, tokens: float) -> float:
        if tokens < 1:
            return -math.inf
        log_tokens = math.log(tokens)
        for upper, offset, slope in self._pieces:
            if (score := (log_tokens - offset) / slope) <= upper:
                return score
        raise AssertionError("the last piece has no end")
