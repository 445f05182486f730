"""The queue of objects to plan, and the budget of writes for each. Pure.

An object's writes may come in a burst, then at a steady pace. A second installation, a webhook or a script may keep
undoing the controller's writes. Without the budget, the controller would repeat them as fast as the API server answers.
Normal operation stays far below these numbers.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterable

from weft_operator.core.resources import Ref


class WorkQueue:
    """A queue of objects to plan: each at most once at a time, at once or at a time. Several consumers.

    An object from `get()` is in work until `done()`. If it is added again meanwhile, `get()` returns it once more after
    that.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._marked: dict[Ref, None] = {}
        self._working: set[Ref] = set()
        self._later: dict[Ref, None] = {}
        self._timed: list[tuple[float, int, Ref]] = []
        self._due_at: dict[Ref, float] = {}
        self._count = itertools.count()
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()  # one idle consumer waits for the next object, the rest wait for their turn

    def __len__(self) -> int:
        """The number of objects waiting for a plan now."""
        return len(self._marked) + len(self._later)

    def add(self, refs: Iterable[Ref]) -> None:
        """Add objects; an already queued object stays queued once."""
        for ref in refs:
            (self._later if ref in self._working else self._marked)[ref] = None
        self._wake.set()

    def add_at(self, ref: Ref, due_at: float) -> None:
        """Add an object at a time. For several times of an object the last call counts."""
        self._due_at[ref] = due_at
        heapq.heappush(self._timed, (due_at, next(self._count), ref))
        self._wake.set()

    async def get(self) -> Ref:
        """Wait for the next queued object without a worker."""
        async with self._turn:
            self._due()
            while not self._marked:
                await self._pause()
                self._due()
            ref = next(iter(self._marked))
            del self._marked[ref]
            self._working.add(ref)
            return ref

    def done(self, ref: Ref) -> None:
        """End the work on an object."""
        self._working.discard(ref)
        if ref in self._later:
            del self._later[ref]
            self.add([ref])

    async def _pause(self) -> None:
        self._wake.clear()
        pause_s = max(self._timed[0][0] - self._clock(), 0.001) if self._timed else None
        try:
            async with asyncio.timeout(pause_s):
                await self._wake.wait()
        except TimeoutError:
            return

    def _due(self) -> None:
        """Add everything that is due."""
        now = self._clock()
        while self._timed and self._timed[0][0] <= now:
            due_at, _, ref = heapq.heappop(self._timed)
            if self._due_at.get(ref) == due_at:
                del self._due_at[ref]
                self.add([ref])


BURST = 100  # writes: many adapters and runners of a pool come up at once
PER_S = 1.0


class TokenBucket:
    """A budget of writes for each object, with a single owner; `now` is in seconds."""

    def __init__(self) -> None:
        self._spent: dict[Ref, tuple[float, float]] = {}  # writes not yet forgiven, and as of when

    def take(self, ref: Ref, now: float) -> None:
        """Count a write about an object."""
        self._spent[ref] = (self._level(ref, now) + 1.0, now)

    def pause_s(self, ref: Ref, now: float) -> float:
        """Return the seconds to wait before reconciling an object; 0: reconcile now."""
        return max(0.0, self._level(ref, now) - BURST + 1.0) / PER_S

    def forget(self, ref: Ref) -> None:
        """Forget the spent budget of a deleted object."""
        self._spent.pop(ref, None)

    def _level(self, ref: Ref, now: float) -> float:
        level, at = self._spent.get(ref, (0.0, now))
        return max(0.0, level - max(0.0, now - at) * PER_S)
