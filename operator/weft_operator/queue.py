"""Which objects have to be planned, and when."""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterable

from weft_operator.resources import Ref


class Queue:
    """Objects to plan: each at most once at a time, at once or at a time. One consumer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._marked: dict[Ref, None] = {}
        self._timed: list[tuple[float, int, Ref]] = []
        self._when: dict[Ref, float] = {}
        self._count = itertools.count()
        self._wake = asyncio.Event()

    def add(self, refs: Iterable[Ref]) -> None:
        """Mark objects; marking twice is marking once."""
        self._marked |= dict.fromkeys(refs)
        self._wake.set()

    def add_at(self, ref: Ref, when: float) -> None:
        """Mark an object at a time; of several times for one object the last one said counts."""
        self._when[ref] = when
        heapq.heappush(self._timed, (when, next(self._count), ref))
        self._wake.set()

    async def get(self) -> Ref:
        """The next marked object."""
        while True:
            self._due()
            if self._marked:
                ref = next(iter(self._marked))
                del self._marked[ref]
                return ref
            self._wake.clear()
            pause_s = max(self._timed[0][0] - self._clock(), 0.001) if self._timed else None
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _due(self) -> None:
        now = self._clock()
        while self._timed and self._timed[0][0] <= now:
            when, _, ref = heapq.heappop(self._timed)
            if self._when.get(ref) == when:
                del self._when[ref]
                self._marked[ref] = None
