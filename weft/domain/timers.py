"""Named deadlines, at most one for each key, the earliest in O(log n): what a machine's `next_deadline` reads."""

import heapq
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=tuple[Any, ...])


class TimerQueue(Generic[K]):
    """A heap with lazy deletion: an entry counts only while it is the deadline of its key.

    Keys are tuples of texts. Equal deadlines come up in the keys' order, whatever the hash seed.
    """

    def __init__(self) -> None:
        self._when: dict[K, float] = {}
        self._heap: list[tuple[float, K]] = []

    def __contains__(self, key: K) -> bool:
        return key in self._when

    def get(self, key: K) -> float | None:
        return self._when.get(key)

    def set(self, key: K, when: float) -> None:
        """Set a deadline, or change it."""
        if self._when.get(key) == when:
            return
        self._when[key] = when
        heapq.heappush(self._heap, (when, key))
        if len(self._heap) > 64 + 4 * len(self._when):  # void entries are the majority
            self._heap = [(when, key) for key, when in self._when.items()]
            heapq.heapify(self._heap)

    def set_earlier(self, key: K, when: float) -> None:
        """Set a deadline unless an earlier one is set."""
        if self._when.get(key, when) >= when:
            self.set(key, when)

    def clear(self, key: K) -> None:
        self._when.pop(key, None)

    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap and self._when.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> K | None:
        """Remove the earliest deadline if it is at or before `now`."""
        when = self.next()
        if when is None or when > now:
            return None
        key = heapq.heappop(self._heap)[1]
        del self._when[key]
        return key
