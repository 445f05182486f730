"""What an adapter adds to the shared model: its median residual, shrunk by n / (n + k).

An offset per adapter explains as much of the length as a good prompt model does, and needs no gradient step; the median
because residuals of log length have long tails, the shrinkage because a cold adapter knows little of itself.
"""

from collections import deque
from collections.abc import Iterable
from statistics import median

from weft.domain.lru import LruDict

WINDOW = 64  # latest residuals of an adapter: a drift has passed through after as many outcomes
SHRINK_K = 8.0
MAX_ADAPTERS = 10_000


class _Window:
    """The latest residuals of an adapter and their shrunk median."""

    __slots__ = ("offset", "residuals")

    def __init__(self) -> None:
        self.residuals: deque[float] = deque(maxlen=WINDOW)
        self.offset = 0.0

    def extend(self, residuals: Iterable[float]) -> None:
        self.residuals.extend(residuals)
        self.offset = shrunk_median(self.residuals)


class Offsets:
    """Residuals of log length by adapter. Bounded: the adapter without outcomes for the longest time is dropped."""

    def __init__(self, max_adapters: int = MAX_ADAPTERS) -> None:
        self._windows: LruDict[str, _Window] = LruDict(max_adapters)

    def __len__(self) -> int:
        return len(self._windows)

    def of(self, adapter: str) -> float:
        """The offset of an adapter in log tokens; 0 for one never seen."""
        window = self._windows.get(adapter)
        return window.offset if window else 0.0

    def learn(self, adapter: str, residual: float) -> None:
        """One more residual (log length minus the shared model's answer)."""
        self.restore(adapter, (residual,))

    def items(self) -> Iterable[tuple[str, list[float]]]:
        """Adapter and residuals, oldest first: the part of the checkpoint."""
        return ((adapter, list(window.residuals)) for adapter, window in self._windows.items())

    def restore(self, adapter: str, residuals: Iterable[float]) -> None:
        """Append residuals, such as `items` returned."""
        self._windows.touch(adapter, _Window).extend(residuals)


def shrunk_median(residuals: Iterable[float], k: float = SHRINK_K) -> float:
    """median * n / (n + k); 0 for none."""
    values = list(residuals)
    return median(values) * len(values) / (len(values) + k) if values else 0.0
