"""Output lengths as they were: what stands in for a prediction."""

import math
from collections import deque

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
        if censored and tokens <= self.of_adapter(pool, adapter):
            return
        for key in ((pool, adapter), (pool, None)):
            self._lengths.touch(key, lambda: deque(maxlen=MEMORY)).append(tokens)

    def of_adapter(self, pool: str, adapter: str) -> int:
        """Return the estimate for the next answer of the adapter."""
        return self._length_of((pool, adapter)) or self.of_pool(pool)

    def of_pool(self, pool: str) -> int:
        """Return the estimate for the next answer of any adapter of the pool."""
        return self._length_of((pool, None)) or self._default_tokens

    def _length_of(self, key: tuple[str, str | None]) -> int:
        """Return the quantile of a key's lengths; 0: too few answers for that rank."""
        lengths = self._lengths.get(key, ())
        rank = math.ceil(self._quantile * (len(lengths) + 1))
        return sorted(lengths)[rank - 1] if rank <= len(lengths) else 0
