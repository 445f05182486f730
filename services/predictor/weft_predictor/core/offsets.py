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
HISTORY = 8  # offsets of the past, each of eight changes: together of a whole window


class _Window:
    """The latest residuals of an adapter and their shrunk median. `history`: every eighth offset of the past."""

    __slots__ = ("changes", "forgotten", "history", "offset", "residuals")

    def __init__(self) -> None:
        self.residuals: deque[float] = deque(maxlen=WINDOW)
        self.history: deque[tuple[int, float]] = deque(maxlen=HISTORY)  # (changed at, the offset until then)
        self.changes, self.offset = 0, 0.0
        self.forgotten = -1  # the end of what `history` has dropped

    def extend(self, residuals: Iterable[float], now: int) -> None:
        if self.changes % HISTORY == 0:
            if len(self.history) == HISTORY:
                self.forgotten = self.history[0][0]
            self.history.append((now, self.offset))
        self.residuals.extend(residuals)
        self.changes, self.offset = self.changes + 1, shrunk_median(self.residuals)


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

    def before(self, adapter: str, then: int) -> float | None:
        """About the offset of an adapter when the model had learned `then` outcomes; None: it is forgotten."""
        window = self._windows.get(adapter)
        if window is None or then > window.forgotten:
            past = (offset for changed_at, offset in window.history if changed_at >= then) if window else ()
            return next(iter(past), self.of(adapter))
        return None

    def learn(self, adapter: str, residual: float, now: int = 0) -> None:
        """One more residual (log length minus the shared model's answer). `now`: outcomes learned before."""
        self._windows.touch(adapter, _Window).extend((residual,), now)

    def items(self) -> Iterable[tuple[str, list[float]]]:
        """Adapter and residuals, oldest first: the part of the checkpoint."""
        return ((adapter, list(window.residuals)) for adapter, window in self._windows.items())

    def restore(self, adapter: str, residuals: Iterable[float]) -> None:
        """Put back what `items` returned."""
        window = self._windows.touch(adapter, _Window)
        window.residuals.extend(residuals)
        window.offset = shrunk_median(window.residuals)


def shrunk_median(residuals: Iterable[float], k: float = SHRINK_K) -> float:
    """median * n / (n + k); 0 for none."""
    values = list(residuals)
    return median(values) * len(values) / (len(values) + k) if values else 0.0
