"""What an adapter adds to the shared model: its median residual, shrunk by n / (n + k).

An offset per adapter explains as much of the length as a good prompt model does, and needs no gradient step; the median
because residuals of log length have long tails, the shrinkage because a cold adapter knows little of itself.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from statistics import median

WINDOW = 64  # latest residuals of an adapter: a drift has passed through after as many outcomes
SHRINK_K = 8.0
MAX_ADAPTERS = 10_000


class Offsets:
    """Residuals of log length by adapter. Bounded: the adapter heard of longest ago is forgotten first."""

    def __init__(self, max_adapters: int = MAX_ADAPTERS) -> None:
        self._residuals: OrderedDict[str, deque[float]] = OrderedDict()
        self._offset: dict[str, float] = {}
        self._max_adapters = max_adapters

    def __len__(self) -> int:
        return len(self._residuals)

    def of(self, adapter: str) -> float:
        """The offset of an adapter in log tokens; 0 for one never seen."""
        return self._offset.get(adapter, 0.0)

    def learn(self, adapter: str, residual: float) -> None:
        """One more residual (log length minus the shared model's answer)."""
        window = self._window(adapter)
        window.append(residual)
        self._offset[adapter] = shrunk_median(window)

    def items(self) -> Iterable[tuple[str, list[float]]]:
        """Adapter and residuals, oldest first: what has to be saved."""
        return ((adapter, list(window)) for adapter, window in self._residuals.items())

    def restore(self, adapter: str, residuals: Iterable[float]) -> None:
        """Put back what `items` gave."""
        window = self._window(adapter)
        window.extend(residuals)
        self._offset[adapter] = shrunk_median(window)

    def _window(self, adapter: str) -> deque[float]:
        window = self._residuals.setdefault(adapter, deque(maxlen=WINDOW))
        self._residuals.move_to_end(adapter)
        if len(self._residuals) > self._max_adapters:
            forgotten, _ = self._residuals.popitem(last=False)
            self._offset.pop(forgotten, None)
        return window


def shrunk_median(residuals: Iterable[float], k: float = SHRINK_K) -> float:
    """median * n / (n + k); 0 for none."""
    values = list(residuals)
    return median(values) * len(values) / (len(values) + k) if values else 0.0
