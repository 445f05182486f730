"""Requests that wait, first come, first served, among those whose adapter may run."""

import heapq
from collections import deque
from dataclasses import dataclass, field

from weft_bench.engine_request import EngineRequest


@dataclass
class AdapterFifo:
    """Requests by adapter, with the order of all of them. The base and resident adapters need no slot.

    `without_slot`: those of adapters that are not resident.
    """

    without_slot: int = 0
    _by_adapter: dict[int | None, deque[tuple[int, EngineRequest]]] = field(default_factory=dict)
    _heads: list[tuple[int, int | None]] = field(default_factory=list)  # of every adapter; stale ones among them
    _open: list[tuple[int, int | None]] = field(default_factory=list)  # of those that need no slot
    _resident: set[int | None] = field(default_factory=lambda: {None})
    _count: int = 0
    _last: int = 0
    _first: int = 0

    def __len__(self) -> int:
        return self._count

    def append(self, request: EngineRequest) -> None:
        """Add a request behind all others."""
        queue = self._by_adapter.setdefault(request.adapter, deque())
        self._last += 1
        queue.append((self._last, request))
        self._counted(request.adapter, 1)
        if len(queue) == 1:
            self._announce(request.adapter)

    def put_first(self, request: EngineRequest) -> None:
        """Put a request that had begun before all others."""
        self._first -= 1
        self._by_adapter.setdefault(request.adapter, deque()).appendleft((self._first, request))
        self._counted(request.adapter, 1)
        self._announce(request.adapter)

    def head(self, any_adapter: bool) -> EngineRequest | None:
        """Return the first of all, or of those that need no slot."""
        heap = self._heads if any_adapter else self._open
        while heap:
            order, adapter = heap[0]
            queue = self._by_adapter.get(adapter)
            if queue and queue[0][0] == order and (any_adapter or adapter in self._resident):
                return queue[0][1]
            heapq.heappop(heap)
        return None

    def remove(self, request: EngineRequest) -> None:
        """Take out what `head` returned."""
        queue = self._by_adapter[request.adapter]
        _, first = queue.popleft()
        assert first is request
        self._counted(request.adapter, -1)
        if queue:
            self._announce(request.adapter)

    def resident(self, adapter: int | None) -> None:
        """Note that this adapter has a slot now."""
        if adapter not in self._resident:
            self._resident.add(adapter)
            self.without_slot -= len(self._by_adapter.get(adapter, ()))
            self._announce(adapter)

    def gone(self, adapter: int | None) -> None:
        """Note that this adapter has no slot any more."""
        if adapter is not None and adapter in self._resident:
            self._resident.discard(adapter)
            self.without_slot += len(self._by_adapter.get(adapter, ()))

    def _counted(self, adapter: int | None, more: int) -> None:
        self._count += more
        if adapter not in self._resident:
            self.without_slot += more

    def _announce(self, adapter: int | None) -> None:
        queue = self._by_adapter.get(adapter)
        if not queue:
            return
        entry = (queue[0][0], adapter)
        heapq.heappush(self._heads, entry)
        if adapter in self._resident:
            heapq.heappush(self._open, entry)
