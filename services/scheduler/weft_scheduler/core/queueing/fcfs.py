"""First come, first served, with a bounded exception for what fits where the first does not.

Who may pass whom, exactly. Requests of a pool stand in order of age (time waited before a restart or a move included).
One look goes through them from the oldest:

1. A request that a runner can take now is admitted there (the placement policy says where).
2. One that no runner can take *blocks*, and stays. A later one may be admitted past it; that is a *pass* for every
   blocked request before it that could ever run on that runner: the shape takes the request's rank and context, and
   the request does not keep off the runner of its own accord (who stands aside is not passed).
3. A request that has been passed `bound` times closes its runners: in this look and all later ones nothing behind it is
   admitted on any runner of a shape that takes it, until it is admitted itself. So nobody is passed more than `bound`
   times, and the closed runners drain until it fits. A shape whose only free runners it keeps off stays open: closing
   it would not make room for it, and one request would stall a whole pool.
4. At most `window` requests may be blocked before a look ends: further back nobody passes. It bounds a look's cost.

An older request that comes back to the queue (moved, preempted) stands before younger ones: that is order, not a pass.
"""

from collections.abc import Set as AbstractSet
from typing import Protocol, TypeVar

from weft_scheduler.core.queueing.queue import Queue
from weft_scheduler.core.shelves import Place, Shape


class Waiting(Protocol):
    """What the policy has to know of a request."""

    passes: int

    @property
    def order(self) -> tuple[float, int]: ...


W = TypeVar("W", bound=Waiting)
W_in = TypeVar("W_in", bound=Waiting, contravariant=True)


class Floor(Protocol[W_in]):
    """Where requests go; the policy's view of placement."""

    def admit(self, request: W_in, closed: AbstractSet[Shape]) -> Place | None:
        """Admit it (it leaves the queue) on a runner of no closed shape: that runner, None if none can."""
        ...

    def waits_for(self, request: W_in, place: Place) -> bool:
        """Whether it could ever run on that runner and does not keep off it."""
        ...

    def shapes_for(self, request: W_in) -> AbstractSet[Shape]:
        """The shapes that could ever run it and have a free runner that it does not keep off."""
        ...

    def has_room(self, closed: AbstractSet[Shape]) -> bool:
        """Whether any runner of another shape could take anything at all."""
        ...


class Policy(Protocol):
    """One look at a queue: admits what may be admitted now."""

    def look(self, queue: Queue[W], floor: Floor[W], bound: int, window: int) -> None: ...


class Fcfs:
    """See the module's text."""

    def look(self, queue: Queue[W], floor: Floor[W], bound: int, window: int) -> None:
        blocked: list[W] = []
        closed: set[Shape] = set()
        while len(blocked) < window and floor.has_room(closed):
            request = queue.at(len(blocked))  # all before it are blocked: they stay where they are
            if request is None:
                return
            place = floor.admit(request, closed)
            if place is None:
                blocked.append(request)
                if request.passes >= bound:
                    closed |= floor.shapes_for(request)
            else:
                closed |= _pass(blocked, place, floor, bound)


def _pass(blocked: list[W], place: Place, floor: Floor[W], bound: int) -> set[Shape]:
    """Count the pass for those it happened to; the shapes that close by it."""
    closed: set[Shape] = set()
    for request in blocked:
        if floor.waits_for(request, place):
            request.passes += 1
            if request.passes >= bound:
                closed |= floor.shapes_for(request)
    return closed
