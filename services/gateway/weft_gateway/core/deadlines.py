"""Named deadlines: one for each key, the earliest first; equal ones in the order in which they were set."""

import heapq
from enum import Enum, auto

from weft.domain.machine import Peer


class Timer(Enum):
    """The kinds of deadlines."""

    ARRIVAL = auto()  # a request before its submission
    HOLD = auto()  # an answer without a runner
    SESSION = auto()  # connecting, or idle
    DRAIN = auto()


Key = tuple[Timer, str | Peer]


class Deadlines:
    """A heap whose replaced entries stay until they come up, or until they are most of it."""

    def __init__(self) -> None:
        self._at: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._count = 0  # of entries so far: no two keys are ever compared

    def __len__(self) -> int:
        return len(self._at)

    def get(self, key: Key) -> float | None:
        entry = self._at.get(key)
        return entry[0] if entry else None

    def set(self, key: Key, at: float | None) -> None:
        """Replace the key's deadline; None removes it."""
        if at is None:
            self._at.pop(key, None)
            return
        self._count += 1
        self._at[key] = at, self._count
        heapq.heappush(self._heap, (at, self._count, key))
        if len(self._heap) > 2 * len(self._at) + 64:
            self._heap = [(at, count, key) for key, (at, count) in self._at.items()]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap:
            at, count, key = self._heap[0]
            if self._at.get(key) == (at, count):
                return at
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now: float) -> Key | None:
        """Remove and return the key of the earliest deadline that has come."""
        at = self.next()
        if at is None or at > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._at[key]
        return key
