"""One pass over a queue, and how often a waiting request may be overtaken in it; `README.md` has the rules."""

from collections import Counter
from collections.abc import Set as AbstractSet
from typing import Generic, NamedTuple, Protocol, TypeVar

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

    def holds_back(self, tenant: str) -> bool:
        """Whether a tenant leaves what is free to others for now."""
        ...

    def changed_for(self, request: R_in) -> bool:
        """Whether a request that was blocked in the last pass may fit now."""
        ...


class Overtaking(Generic[R]):
    """How often each waiting request was overtaken; never above the pass's bound.

    Younger requests of the same tenant overtake it, and those of a tenant whose turn comes later: not those of a tenant
    that is before its own. A request that was blocked in the last pass is offered again only where something changed
    for it: behind a long queue an event costs 1 us for each blocked request, and not a search.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._starved: dict[str, R] = {}  # by id: those that were overtaken `bound` times
        self._blocked: set[str] = set()  # ids that the last passes found blocked
        self._reach: dict[tuple[str, str], Key] = {}  # tenant and lane whose window is full -> the last key offered
        self._frontier: Key | None = None  # the last pass reached no tenant behind it
        self._skipped: set[str] = set()  # tenants that were held back: what changed meanwhile is not known
        self._closed: set[RunnerShape] = set()  # by the last pass; where there are some, the next pass offers all

    def copy(self) -> "Overtaking[R]":
        """With the same counts; every request is offered again."""
        same = Overtaking[R]()
        same.counts = self.counts.copy()
        same._starved = self._starved.copy()
        return same

    def schedule(self, queue: WaitingQueue[R], context: PlacementContext[R], bound: int, window: int) -> None:
        """Offer each tenant's requests in its turn, first those that were overtaken `bound` times, by age.

        Again where requests were admitted and shapes closed: by now the turn may be another tenant's, for whom the
        request that closed them has to wait.
        """
        while True:
            waiting = len(queue)
            self._offer_all(queue, context, bound, window)
            if not self._closed or not queue.fair or len(queue) == waiting:
                return

    def _offer_all(self, queue: WaitingQueue[R], context: PlacementContext[R], bound: int, window: int) -> None:
        if self._closed:
            self._blocked.clear()
        tried, closed, stayed = set[str](), set[RunnerShape](), dict[str, R]()
        self._closed, self._reach, self._frontier = closed, {}, None
        again = set[str]()  # tenants that were held back before this pass
        counted, reach = Counter[tuple[str, str]](), dict[tuple[str, str], Key]()

        def offer(request: R) -> bool:
            """Admit it if possible, and count whom it overtakes."""
            tenant = queue.tenant_of(request)
            known = request.id in self._blocked and tenant not in again
            if request.id in tried or (known and not context.changed_for(request)):
                return False
            tried.add(request.id)
            key = queue.key_of(request)
            admitted = context.admit(request, closed)
            if admitted is None:
                self._blocked.add(request.id)
                return False
            self.forget(request.id)
            for older in queue.oldest(tenant, window):
                if older.order > request.order:
                    break
                if queue.policy.ages and older.id in queue and queue.key_of(older) > key:
                    continue  # its order lets that one pass, which ageing bounds
                overtaken(older, admitted)
            for other in stayed.values() if queue.fair else ():
                if queue.tenant_of(other) != tenant:
                    overtaken(other, admitted)
            return True

        def overtaken(request: R, by: Admitted) -> None:
            if request.id in queue and context.waits_for(request, by):
                self.counts[request.id] += 1
                if self.counts[request.id] >= bound:
                    self._starved[request.id] = request
                    drain_for(request)

        def drain_for(request: R) -> None:
            """One that was overtaken too often runs now, or its runners take nothing new until it does."""
            if not offer(request):
                closed.update(context.placeable_shapes(request))

        def skipped(tenant: str) -> bool:
            if context.holds_back(tenant):
                self._skipped.add(tenant)
                return True
            if tenant in self._skipped:
                self._skipped.remove(tenant)
                again.add(tenant)
            return False

        def starved(tenant: str) -> list[R]:
            if bound == 0:
                return queue.oldest(tenant, window)
            mine = [request for request in self._starved.values() if queue.tenant_of(request) == tenant]
            return sorted(mine, key=lambda request: request.order)

        share = queue.share(window)
        if not context.has_capacity(closed):
            return
        for request in queue.turns(window, context.free_tokens, starved, skipped):
            if bound == 0 or request.id in self._starved:
                drain_for(request)
            else:
                offer(request)
            if request.id in queue:
                stayed[request.id] = request
                lane = queue.tenant_of(request), request.awaited_class
                counted[lane] += 1
                if counted[lane] == share:
                    reach[lane] = queue.key_of(request)
            if not context.has_capacity(closed):
                return
        self._frontier = queue.frontier
        if bound and not self._starved:  # those are offered out of their order
            self._reach = reach

    def out_of_reach(self, queue: WaitingQueue[R], request: R) -> bool:
        """Whether a request that has just been queued is behind all that a pass would offer."""
        tenant = queue.tenant_of(request)
        last = self._reach.get((tenant, request.awaited_class))
        if last is not None and queue.key_of(request) > last:
            return True
        return self._frontier is not None and queue.counters.key_of(tenant) > self._frontier

    def forget(self, request_id: str) -> None:
        """It waits no longer."""
        self.counts.pop(request_id, None)
        self._starved.pop(request_id, None)
        self._blocked.discard(request_id)
        self._reach.clear()
        self._frontier = None
