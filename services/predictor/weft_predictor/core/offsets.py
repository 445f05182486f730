"""Offsets of adapters from the shared model: an adapter's median residual, shrunk by n / (n + k).

An offset per adapter explains as much of the length as a good prompt model does, and needs no gradient step. It is a
median because residuals of log length have long tails. It is shrunk because a cold adapter has little evidence. A
tenant's window of an adapter (or of the base, which tenants share) is shrunk towards the adapter's offset at the
window's beginning.
"""

from collections import deque
from collections.abc import Iterable
from statistics import median

from weft.domain.lru import LruDict

WINDOW = 64  # latest residuals of an adapter: a drift has passed through after the same number of outcomes
SHRINK_K = 8.0
MAX_OFFSET_ADAPTERS = 10_000
Group = tuple[str, str]  # tenant and adapter; the tenant "": all tenants, or keys are off
HISTORY = 8  # past offsets, each of eight changes: together a full window


class _Window:
    """The latest residuals of a group and their median. `history`: every eighth offset of the past."""

    __slots__ = ("changes", "forgotten", "history", "offset", "prior", "residuals")

    def __init__(self, prior: float = 0.0, residuals: Iterable[float] = ()) -> None:
        self.residuals: deque[float] = deque(residuals, maxlen=WINDOW)
        self.history: deque[tuple[int, float]] = deque(maxlen=HISTORY)  # (changed at, the offset until then)
        self.changes, self.prior = 0, prior
        self.offset = shrunk_median(self.residuals, prior)
        self.forgotten = -1  # the end of the last offset dropped from `history`

    def append(self, residual: float, now: int) -> None:
        if self.changes % HISTORY == 0:
            if len(self.history) == HISTORY:
                self.forgotten = self.history[0][0]
            self.history.append((now, self.offset))
        self.residuals.append(residual)
        self.changes, self.offset = self.changes + 1, shrunk_median(self.residuals, self.prior)


class Offsets:
    """The residuals of log length by group. Bounded: the group without outcomes for the longest time is dropped."""

    def __init__(self, max_adapters: int = MAX_OFFSET_ADAPTERS) -> None:
        self._windows: LruDict[Group, _Window] = LruDict(max_adapters)

    def __len__(self) -> int:
        return len(self._windows)

    def of_group(self, group: Group) -> float:
        """Return the offset of a tenant's adapter in log tokens, else the adapter's; 0 for an unknown adapter."""
        window = self._windows.get(group) or self._windows.get(("", group[1]))
        return window.offset if window else 0.0

    def at_version(self, group: Group, version: int) -> float | None:
        """Return about the adapter's offset after `version` outcomes of the model; None: the offset is forgotten."""
        window = self._windows.get(group)
        if window is None or version > window.forgotten:
            past = (offset for changed_at, offset in window.history if changed_at >= version) if window else ()
            return next(iter(past), self.of_group(group))
        return None

    def learn(self, group: Group, residual: float, now: int = 0) -> None:
        """Learn a residual (log length minus the ridge's answer). `now`: outcomes learned before."""
        self._windows.touch(group, lambda: _Window(self.of_group(group))).append(residual, now)

    def items(self) -> Iterable[tuple[Group, list[float]]]:
        """Return groups and residuals, oldest first: with `prior` the part of the checkpoint."""
        return ((group, list(window.residuals)) for group, window in self._windows.items())

    def prior(self, group: Group) -> float:
        """Return the prior offset of a group with a window; the group is shrunk towards it."""
        return self._windows[group].prior

    def restore(self, group: Group, residuals: Iterable[float], prior: float) -> None:
        """Restore a group from the output of `items` and `prior`."""
        self._windows[group] = _Window(prior, residuals)


def shrunk_median(residuals: Iterable[float], prior: float = 0.0) -> float:
    """(median * n + prior * k) / (n + k)."""
    values = list(residuals)
    return (median(values) * len(values) + prior * SHRINK_K) / (len(values) + SHRINK_K) if values else prior
