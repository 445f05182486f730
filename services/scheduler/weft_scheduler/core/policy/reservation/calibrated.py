"""How many output tokens a request reserves; `README.md` in this folder has the reasons."""

import math
from collections import deque
from typing import Protocol

from weft.domain.lru import LruDict

MEMORY = 64  # answers remembered for each adapter, and for each pool


class OutputLengthStats:
    """A running quantile of output lengths for each adapter and pool, for when there is no prediction.

    The q-quantile of the last lengths is the order statistic of split conformal prediction, rank ceil(q * (n + 1)): it
    covers the next answer with probability q where lengths are exchangeable. An adapter with too few answers for that
    rank takes its pool's; a pool with too few takes the default. Bounded: the least recently observed one is forgotten.
    """

    def __init__(self, quantile: float, default_tokens: int, max_keys: int) -> None:
        self._quantile, self._default_tokens = quantile, default_tokens
        self._lengths: LruDict[tuple[str, str | None], deque[int]] = LruDict(max_keys)

    def __len__(self) -> int:
        return len(self._lengths)

    def observe(self, pool: str, adapter: str, tokens: int, censored: bool) -> None:
        """Learn from an outcome. A censored length is a lower bound: it counts where it is above the estimate."""
        if censored and tokens <= self.quantile_tokens(pool, adapter):
            return
        for key in ((pool, adapter), (pool, None)):
            self._lengths.touch(key, lambda: deque(maxlen=MEMORY)).append(tokens)

    def quantile_tokens(self, pool: str, adapter: str) -> int:
        """The estimate for the next answer of that adapter."""
        for key in ((pool, adapter), (pool, None)):
            lengths = self._lengths.get(key, ())
            rank = math.ceil(self._quantile * (len(lengths) + 1))
            if rank <= len(lengths):
                return sorted(lengths)[rank - 1]
        return self._default_tokens


class ReservationPolicy(Protocol):
    """The first reservation of a request. One for all pools; it owns what it learns."""

    def initial_tokens(self, pool: str, adapter: str, p90_tokens: int, max_tokens: int) -> int:
        """1 to `max_tokens` output tokens. `p90_tokens` 0: no prediction."""
        ...

    def observe(self, pool: str, adapter: str, tokens: int, censored: bool) -> None:
        """An answer had that many tokens; `censored`: at least."""
        ...


class Calibrated:
    """The predictor's calibrated p90, capped by `max_tokens`; without a prediction the adapter's own running p90."""

    def __init__(self, stats: OutputLengthStats) -> None:
        self._stats = stats

    def initial_tokens(self, pool: str, adapter: str, p90_tokens: int, max_tokens: int) -> int:
        expected = p90_tokens if p90_tokens > 0 else self._stats.quantile_tokens(pool, adapter)
        return max(1, min(expected, max_tokens))

    def observe(self, pool: str, adapter: str, tokens: int, censored: bool) -> None:
        self._stats.observe(pool, adapter, tokens, censored)


def double_past(reserved_until: int, emitted_tokens: int) -> int:
    """The position that a reservation reaches after as many doublings as it takes to pass what was emitted."""
    reserved_until = max(1, reserved_until)
    while reserved_until <= emitted_tokens:
        reserved_until *= 2
    return reserved_until


def remaining_tokens(reserved_until: int, emitted_tokens: int, max_tokens: int) -> int:
    """Output tokens to reserve beyond what was emitted: at least 1, never beyond `max_tokens`."""
    return max(1, min(double_past(reserved_until, emitted_tokens), max_tokens) - emitted_tokens)
