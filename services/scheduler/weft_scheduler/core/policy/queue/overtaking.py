"""One pass over a queue, and how often a waiting request may be overtaken in it; `README.md` has the rules."""

from collections import Counter
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Protocol, TypeVar

from weft_scheduler.core.policy.placement.runner_index import RunnerShape
from weft_scheduler.core.policy.queue.sorted_queue import Key
from weft_scheduler.core.policy.queue.waiting_queue import QueuedRequest, R, WaitingQueue

R_in = TypeVar("R_in", bound=QueuedRequest, contravariant=True)


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

    def free_tokens(self) -> int:
        """The most tokens that a placeable runner has free."""
        ...

    def changed_for(self, request: R_in) -> bool:
        """Whether a request that was blocked in the last pass may fit now."""
        ...


class Overtaking:
    """How often each waiting request was overtaken by younger ones; never above the pass's bound.

    A request that was blocked in the last pass is offered again only where something changed for it: behind a long
    queue an event costs 1 us for each blocked request, and not a search.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._blocked: set[str] = set()  # ids that the last passes found blocked
        self._reach: dict[str, Key] = {}  # lane whose window is full -> the last key that was offered
        self._closed: set[RunnerShape] = set()  # by the last pass; where there are some, the next pass offers all

    def schedule(self, queue: WaitingQueue[R], context: PlacementContext[R], bound: int, window: int) -> None:
        """Offer those that were overtaken `bound` times the oldest first, then the candidates."""
        if self._closed:
            self._blocked.clear()
        tried, closed = set[str](), set[RunnerShape]()
        self._closed, self._reach = closed, {}

        def offer(request: R) -> bool:
            """Admit it if possible, and count whom it overtakes."""
            if request.id in tried or (request.id in self._blocked and not context.changed_for(request)):
                return False
            tried.add(request.id)
            key = queue.key_of(request)
            admitted = context.admit(request, closed)
            if admitted is None:
                self._blocked.add(request.id)
                return False
            self.forget(request.id)
            for older in queue.oldest(window):
                if older.order > request.order:
                    break
                if older.id not in queue or (queue.ages and queue.key_of(older) > key):
                    continue  # it has left, or its order lets that one pass, which ageing bounds
                if context.waits_for(older, admitted):
                    self.counts[older.id] += 1
                    drain_for(older)
            return True

        def drain_for(request: R) -> None:
            """One that was overtaken too often runs now, or its runners take nothing new until it does."""
            if self.counts[request.id] >= bound and not offer(request):
                closed.update(context.placeable_shapes(request))

        if not context.has_capacity(closed):
            return
        if bound == 0 or self.counts:
            for request in queue.oldest(window):
                drain_for(request)
        stayed, reach = Counter[str](), dict[str, Key]()
        for request in queue.candidates(window, context.free_tokens):
            lane = request.awaited_class
            if not offer(request):
                stayed[lane] += 1
                if stayed[lane] == window:
                    reach[lane] = queue.key_of(request)
            if not context.has_capacity(closed):
                return
        self._reach = reach

    def out_of_reach(self, queue: WaitingQueue[R], request: R) -> bool:
        """Whether a request that has just been queued is behind all that a pass would offer."""
        last = self._reach.get(request.awaited_class)
        return last is not None and queue.key_of(request) > last

    def forget(self, request_id: str) -> None:
        """It waits no longer."""
        self.counts.pop(request_id, None)
        self._blocked.discard(request_id)
        self._reach.clear()
