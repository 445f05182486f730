"""The event queue. What happens first among simultaneous events is written here and nowhere else.

Events are ordered by (time, rank, number): the earliest first; at one time by `Rank`, the smaller first; of one rank
in the order in which they were scheduled. So a fault strikes before the messages of its moment, a message that arrives
exactly at a deadline counts as in time, and a client's request meets a system that has finished everything before it.
"""

import gc
import random
from collections.abc import Callable
from enum import IntEnum
from hashlib import blake2b
from heapq import heappop, heappush
from typing import Any

GARBAGE = 200_000  # objects between two searches for cycles, of which there are few: a tenth of a run at Python's 700


class Rank(IntEnum):
    """The order of simultaneous events, by their kind."""

    FAULT = 0
    DELIVERY = 1  # a message, a connection or the end of one
    WORK = 2  # a core, the model or a disk has finished something
    DEADLINE = 3
    ARRIVAL = 4  # a client does something
    LAW = 5  # a check that looks at the state between two times


class Clock:
    """Virtual time in seconds, with the due events."""

    def __init__(self, start: float = 1000.0) -> None:
        self.now = start
        self.events = 0  # that have happened
        self._number = 0
        self._stopped = False
        self._queue: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time: float, rank: int, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action(*arguments)` at `time`, or now if that is over. Nothing is cancelled."""
        self._number += 1
        heappush(self._queue, (max(time, self.now), rank, self._number, action, arguments))

    def call_after(self, seconds: float, rank: int, action: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, rank, action, *arguments)

    def stop(self) -> None:
        """End `run` after the present event."""
        self._stopped = True

    def run(self, end_s: float = float("inf")) -> None:
        """Let everything due up to `end_s` happen, or until `stop`, or until nothing is left."""
        queue, events = self._queue, 0
        self._stopped = False
        thresholds = gc.get_threshold()
        gc.set_threshold(GARBAGE, *thresholds[1:])
        try:
            while queue and queue[0][0] <= end_s:
                self.now, _, _, action, arguments = heappop(queue)
                events += 1
                action(*arguments)
                if self._stopped:
                    break
        finally:
            gc.set_threshold(*thresholds)
        self.events += events
        if self._stopped:
            return
        if end_s != float("inf"):
            self.now = max(self.now, end_s)


def random_of(seed: int, *names: object) -> random.Random:
    """Return a separate random stream for each name, so that additional draws of a part change no other part.

    The derivation is a hash of the text: `hash()` of a string differs from process to process.
    """
    text = "/".join(map(str, (seed, *names)))
    return random.Random(int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big"))
