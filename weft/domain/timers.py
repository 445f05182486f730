"""Named deadlines, at most one for each key, the earliest in O(log n): what a machine's `next_deadline` reads."""

import heapq
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=tuple[Any, ...])


class TimerQueue(Generic[K]):
    """A heap with lazy deletion: an entry counts only while it is the deadline of its key.

    Keys are tuples of texts. Equal deadlines come up in the keys' order, whatever the hash seed.
    """

    def __init__(self) -> None:
        self._deadlines: dict[K, float] = {}
        self._heap: list[tuple[float, K]] = []

    def __contains__(self, key: K) -> bool:
        return key in self._deadlines

    def get(self, key: K) -> float | None:
        return self._deadlines.get(key)

    def set(self, key: K, deadline: float) -> None:
        """Set a deadline, or change it."""
        if self._deadlines.get(key) == deadline:
            return
        self._deadlines[key] = deadline
        heapq.heappush(self._heap, (deadline, key))
        if len(self._heap) > 64 + 4 * len(self._deadlines):  # void entries are the majority
            self._heap = [(deadline, key) for key, deadline in self._deadlines.items()]
            heapq.heapify(self._heap)

    def set_earlier(self, key: K, deadline: float) -> None:
        """Set a deadline unless an earlier one is set."""
        if self._deadlines.get(key, deadline) >= deadline:
            self.set(key, deadline)

    def clear(self, key: K) -> None:
        self._deadlines.pop(key, None)

    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap and self._deadlines.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> K | None:
        """Remove the earliest deadline if it is at or before `now`."""
        deadline = self.next()
        if deadline is None or deadline > now:
            return None
        key = heapq.heappop(self._heap)[1]
        del self._deadlines[key]
        return key
