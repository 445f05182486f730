"""First come, first served; `README.md` in this folder has the rules of overtaking."""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Generic, NamedTuple, Protocol, TypeVar

from weft_scheduler.core.policy.placement.runner_index import RunnerShape
from weft_scheduler.core.policy.queue.sorted_queue import SortedQueue


class QueuedRequest(Protocol):
    """What a queue policy has to know of a request."""

    @property
    def id(self) -> str: ...

    @property
    def order(self) -> tuple[float, int]:
        """Its age: the smaller waits longer, whatever the order of a policy."""
        ...

    @property
    def awaited_class(self) -> str:
        """The numerics class that it may have to wait for; fixed while it waits. "": none."""
        ...


R = TypeVar("R", bound=QueuedRequest)
R_in = TypeVar("R_in", bound=QueuedRequest, contravariant=True)


class QueuePolicy(Protocol[R]):
    """The order in which waiting requests are offered to the placement; one for each pool, which it owns."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[R]:
        """Every waiting request, in the policy's order."""
        ...

    def push(self, request: R) -> None: ...

    def remove(self, request: R) -> None:
        """Raises KeyError where it does not wait."""
        ...

    def candidates(self, window: int) -> Iterator[R]:
        """Requests to offer, one after the other: each is removed or stays before the next is taken.

        The iteration ends where `window` offered requests have stayed.
        """
        ...


class Fcfs(Generic[R]):
    """By age. Requests that wait for a numerics class have a lane of their own, and a window of their own.

    Otherwise, once as many of them wait as the window has, no request behind them would be offered.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, SortedQueue[R]] = {}

    def __len__(self) -> int:
        return sum(len(lane) for lane in self._lanes.values())

    def __iter__(self) -> Iterator[R]:
        if len(self._lanes) == 1:
            yield from next(iter(self._lanes.values()))
        else:
            yield from sorted((r for lane in self._lanes.values() for r in lane), key=lambda r: r.order)

    def push(self, request: R) -> None:
        self._lanes.setdefault(request.awaited_class, SortedQueue()).add(request)

    def remove(self, request: R) -> None:
        lane = self._lanes[request.awaited_class]
        lane.remove(request)
        if not len(lane):
            del self._lanes[request.awaited_class]

    def candidates(self, window: int) -> Iterator[R]:
        stayed: Counter[str] = Counter()  # by lane: the offered ones that stay are its first ones
        while True:
            oldest: R | None = None
            for name, lane in self._lanes.items():
                request = lane.at(stayed[name]) if stayed[name] < window else None
                if request is not None and (oldest is None or request.order < oldest.order):
                    oldest = request
            if oldest is None:
                return
            yield oldest
            lane = self._lanes.get(oldest.awaited_class)
            if lane is not None and lane.at(stayed[oldest.awaited_class]) is oldest:
                stayed[oldest.awaited_class] += 1


class Admitted(NamedTuple):
    """The runner that a request was admitted on, as queue policies see it."""

    shape: RunnerShape
    uuid: str


class PlacementContext(Protocol[R_in]):
    """A pool's runners, as queue policies see them."""

    def admit(self, request: R_in, closed: AbstractSet[RunnerShape]) -> Admitted | None:
        """Admit it (it leaves the queue) on a runner of no closed shape; None where no runner can take it."""
        ...

    def waits_for(self, request: R_in, admitted: Admitted) -> bool:
        """Whether it could ever run on that runner and does not avoid it."""
        ...

    def placeable_shapes(self, request: R_in) -> AbstractSet[RunnerShape]:
        """The shapes that could ever run it and have a placeable runner that it does not avoid."""
        ...

    def has_capacity(self, closed: AbstractSet[RunnerShape]) -> bool:
        """Whether a runner of a shape that is not closed could take anything at all."""
        ...

    def changed_for(self, request: R_in) -> bool:
        """Whether a request that was blocked in the last pass may fit now."""
        ...


class Overtaking:
    """How often each waiting request was overtaken, whatever the order of the policy; never above `bound`.

    A request that was blocked in the last pass is offered again only where something changed for it: behind a long
    queue an event costs 1 us for each blocked request, and not a search.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._blocked: set[str] = set()  # ids that the last passes found blocked
        self._reach: dict[str, tuple[float, int]] = {}  # lane whose window is full -> the last one it offered
        self._closed: set[RunnerShape] = set()  # by the last pass; where there are some, the next pass offers all

    def schedule(self, queue: QueuePolicy[R], context: PlacementContext[R], bound: int, window: int) -> None:
        """Offer the queue's candidates to the placement, and close the runners of those overtaken too often."""
        blocked: list[R] = []
        if self._closed:
            self._blocked.clear()
        known, closed = self._blocked, set[RunnerShape]()
        self._closed, self._reach = closed, {}
        if not context.has_capacity(closed):
            return
        for request in queue.candidates(window):
            same = request.id in known and not context.changed_for(request)
            admitted = None if same else context.admit(request, closed)
            if admitted is None:
                blocked.append(request)
                self._blocked.add(request.id)
                if self.counts[request.id] >= bound:
                    closed |= context.placeable_shapes(request)
            else:
                self.forget(request.id)
                for older in blocked:
                    if older.order < request.order and context.waits_for(older, admitted):
                        self.counts[older.id] += 1
                        if self.counts[older.id] >= bound:
                            closed |= context.placeable_shapes(older)
            if not context.has_capacity(closed):
                return
        stayed = Counter([request.awaited_class for request in blocked])
        self._reach = {r.awaited_class: r.order for r in blocked if stayed[r.awaited_class] >= window}

    def out_of_reach(self, request: QueuedRequest) -> bool:
        """Whether a request that has just been queued is behind all that a pass would offer."""
        last = self._reach.get(request.awaited_class)
        return last is not None and request.order > last

    def forget(self, request_id: str) -> None:
        """It waits no longer."""
        self.counts.pop(request_id, None)
        self._blocked.discard(request_id)
        self._reach.clear()
