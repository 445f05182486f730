"""Adapters that a forecast names come to disk one at a time, and only while no sequence waits for an adapter.

No readiness, status or error follows from them. One that fails is forgotten, and a sequence that
came for it meanwhile has it fetched once more, as if nothing had been; one that no sequence has used is the first to
leave.
"""

from collections import Counter
from collections.abc import Iterable

from weft_runner.core.adapter import Adapter

MOST_FORECAST = 64  # named and not fetched; what comes beyond is dropped


class ForecastPrefetch:
    """What is named, what is on its way, and what came of it. `adapters`, `n_bytes`: by outcome, since start."""

    OUTCOMES = ("fetched", "used", "dropped", "failed")  # dropped: left the disk unused

    def __init__(self) -> None:
        self.fetching: Adapter | None = None
        self.adapters, self.n_bytes = Counter[str](), Counter[str]()
        self._queue: dict[str, None] = {}  # the most probable first

    @property
    def left(self) -> int:
        """Named, and not on disk yet."""
        return len(self._queue) + (self.fetching is not None)

    def name(self, digests: Iterable[str]) -> None:
        for digest in digests:
            if len(self._queue) < MOST_FORECAST:
                self._queue[digest] = None

    def next(self) -> str | None:
        """The digest to fetch now, if any."""
        if self.fetching is not None or not self._queue:
            return None
        digest = next(iter(self._queue))
        del self._queue[digest]
        return digest

    def clear(self) -> None:
        """The disk has no place for more."""
        self._queue.clear()

    def begin(self, adapter: Adapter) -> None:
        adapter.prefetched, self.fetching = True, adapter

    def end(self, adapter: Adapter) -> bool:
        """A fetch has ended. Whether it was one of a forecast."""
        ours = self.fetching is adapter
        if ours:
            self.fetching = None
        return ours

    def count(self, adapter: Adapter, outcome: str) -> None:
        self.adapters[outcome] += 1
        self.n_bytes[outcome] += adapter.n_bytes

    def settle(self, adapter: Adapter, outcome: str) -> None:
        """What became of an adapter that had been brought unasked; nothing where it was not, or is known already."""
        if adapter.prefetched:
            adapter.prefetched = False
            self.count(adapter, outcome)


def check_forecast(forecast: ForecastPrefetch) -> None:
    """What is on its way is in transfer; what is named is bounded."""
    assert forecast.left <= MOST_FORECAST + 1, forecast.left
    assert forecast.fetching is None or forecast.fetching.in_transfer, forecast.fetching
