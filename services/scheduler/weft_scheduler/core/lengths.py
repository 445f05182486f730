"""How long answers were: the scheduler's own running quantile per adapter, for when nobody predicts.

The last 64 lengths per (pool, adapter) and per pool. The q-quantile is the order statistic of split conformal
prediction, rank ceil(q * (n + 1)): it covers the next answer with probability q where lengths are exchangeable. An
adapter with too few answers for that rank borrows its pool's; a pool with too few takes the default.
"""

import math
from collections import OrderedDict, deque

MEMORY = 64


class Lengths:
    """Bounded: `adapters` keys, the least recently observed one goes first."""

    def __init__(self, quantile: float, default_tokens: int, adapters: int) -> None:
        self._quantile, self._default_tokens, self._adapters = quantile, default_tokens, adapters
        self._seen: OrderedDict[tuple[str, str | None], deque[int]] = OrderedDict()

    def observe(self, pool: str, digest: str, tokens: int, censored: bool) -> None:
        """Learn from an outcome. A censored length only says "at least": it counts where it is above the estimate."""
        if censored and tokens <= self.quantile_tokens(pool, digest):
            return
        for key in ((pool, digest), (pool, None)):
            self._seen.setdefault(key, deque(maxlen=MEMORY)).append(tokens)
            self._seen.move_to_end(key)
        while len(self._seen) > self._adapters:
            self._seen.popitem(last=False)

    def quantile_tokens(self, pool: str, digest: str) -> int:
        """The estimate for the next answer of that adapter."""
        for key in ((pool, digest), (pool, None)):
            lengths = self._seen.get(key, ())
            rank = math.ceil(self._quantile * (len(lengths) + 1))
            if rank <= len(lengths):
                return sorted(lengths)[rank - 1]
        return self._default_tokens
