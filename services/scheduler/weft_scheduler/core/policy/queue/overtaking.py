"""One pass over a queue, and how often a waiting request may be overtaken in it; `README.md` has the rules."""

from collections import Counter
from collections.abc import Set as AbstractSet
from typing import Generic, NamedTuple, Protocol, TypeVar

from weft_scheduler.core.policy.placement.runner_index import RunnerShape
from weft_scheduler.core.policy.queue.sorted_queue import Key
from weft_scheduler.core.policy.queue.waiting_queue import QueuedRequest, R, WaitingQueue

R_in = TypeVar("R_in", bound=QueuedRequest, contravariant=True)


class Admitted(NamedTuple):
    """The runners that a request was admitted on, as queue policies see them: shape and uuid of each."""

    runners: tuple[tuple[RunnerShape, str], ...]


class PlacementContext(Protocol[R_in]):
    """A pool's runners, as queue policies see them."""

    def admit(self, request: R_in, closed: AbstractSet[RunnerShape]) -> Admitted | None:
        """Admit it (it leaves the queue) on a runner of no closed shape; None where no runner can take it."""
        ...

    def waits_for(self, request: R_in, admitted: Admitted) -> bool:
        """Whether it could ever run on one of those runners and does not avoid it."""
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
        self.starved: dict[str, R] = {}  # by id: those that were overtaken `bound` times
        self.blocked: set[str] = set()  # ids that the last passes found blocked
        self.reach: dict[tuple[str, str], Key] = {}  # tenant and lane whose window is full -> the last key offered
        self.frontier: Key | None = None  # the last pass reached no tenant behind it
        self.skipped: set[str] = set()  # tenants that were held back: what changed meanwhile is not known
        self.closed: set[RunnerShape] = set()  # by the last pass; where there are some, the next pass offers all

    def copy(self) -> "Overtaking[R]":
        """With the same counts; every request is offered again."""
        same = Overtaking[R]()
        same.counts = self.counts.copy()
        same.starved = self.starved.copy()
        return same

    def schedule(self, queue: WaitingQueue[R], context: PlacementContext[R], bound: int, window: int) -> None:
        """Offer each tenant's requests in its turn, first those that were overtaken `bound` times, by age.

        Again where the pass admitted requests after which another one may admit more.
        """
        while True:
            waiting, one = len(queue), _Pass(self, queue, context, bound, window)
            one.run()
            if len(queue) == waiting or not one.outdated:
                return

    def out_of_reach(self, queue: WaitingQueue[R], request: R) -> bool:
        """Whether a request that has just been queued is behind all that a pass would offer."""
        tenant = request.tenant
        last = self.reach.get((tenant, request.awaited_class))
        if last is not None and queue.key_of(request) > last:
            return True
        return self.frontier is not None and queue.counters.key_of(tenant) > self.frontier

    def forget(self, request_id: str) -> None:
        """It waits no longer."""
        self.counts.pop(request_id, None)
        self.starved.pop(request_id, None)
        self.blocked.discard(request_id)
        self.reach.clear()
        self.frontier = None


class _Pass(Generic[R]):
    """One pass over a queue. `kept`: what one pass leaves for the next."""

    def __init__(
        self, kept: Overtaking[R], queue: WaitingQueue[R], context: PlacementContext[R], bound: int, window: int
    ) -> None:
        self._kept, self._queue, self._context, self._bound, self._window = kept, queue, context, bound, window
        if kept.closed:
            kept.blocked.clear()
        self._closed = kept.closed = set[RunnerShape]()
        kept.reach, kept.frontier = {}, None
        self._tried = set[str]()  # ids
        self._stayed = dict[str, R]()  # by id: offered, and still in the queue
        self._again = set[str]()  # tenants that were held back before this pass
        self._share = queue.share(window)
        self._counted = Counter[tuple[str, str]]()  # tenant and lane -> those that stayed
        self._reach = dict[tuple[str, str], Key]()

    def run(self) -> None:
        queue, context = self._queue, self._context
        if not context.has_capacity(self._closed):
            return
        for request in queue.turns(self._window, context.free_tokens, self._first, self._skips):
            if self._bound == 0 or request.id in self._kept.starved:
                self._drain_for(request)
            else:
                self._offer(request)
            if request.id in queue:
                self._stays(request)
            if not context.has_capacity(self._closed):
                return
        self._kept.frontier = queue.frontier
        if self._bound and not self._kept.starved:  # those are offered out of their order
            self._kept.reach = self._reach

    @property
    def outdated(self) -> bool:
        """Whether what was admitted changes what is offered.

        Where shapes are closed the turn may be another tenant's by now, for whom the request that closed them has to
        wait. Where a tenant waits no more the window is shared by fewer.
        """
        more = self._queue.share(self._window) > self._share
        return bool(self._closed or (self._reach and more))

    def _first(self, tenant: str) -> list[R]:
        """Those of a tenant that are offered before the others: overtaken `bound` times, by age."""
        if self._bound == 0:
            return self._queue.oldest(tenant, self._window)
        starved = self._kept.starved.values()
        return sorted((r for r in starved if r.tenant == tenant), key=lambda r: r.order)

    def _skips(self, tenant: str) -> bool:
        """Whether a tenant is held back now; one that was, and is no more, is offered from its beginning."""
        if self._context.holds_back(tenant):
            self._kept.skipped.add(tenant)
            return True
        if tenant in self._kept.skipped:
            self._kept.skipped.remove(tenant)
            self._again.add(tenant)
        return False

    def _drain_for(self, request: R) -> None:
        """One that was overtaken too often runs now, or its runners take nothing new until it does."""
        if not self._offer(request):
            self._closed.update(self._context.placeable_shapes(request))

    def _offer(self, request: R) -> bool:
        """Admit it if possible, and count whom it overtakes."""
        if not self._may_fit(request):
            return False
        self._tried.add(request.id)
        key = self._queue.key_of(request)
        admitted = self._context.admit(request, self._closed)
        if admitted is None:
            self._kept.blocked.add(request.id)
            return False
        self._kept.forget(request.id)
        self._overtakes(request, key, admitted)
        return True

    def _may_fit(self, request: R) -> bool:
        """Whether it was not tried yet, and was not blocked before, or something changed for it."""
        if request.id in self._tried:
            return False
        known = request.id in self._kept.blocked and request.tenant not in self._again
        return not known or self._context.changed_for(request)

    def _overtakes(self, request: R, key: Key, admitted: Admitted) -> None:
        """Count an admitted request's passes: of older ones of its tenant, and of tenants whose turn came before."""
        queue, tenant = self._queue, request.tenant
        for older in queue.oldest(tenant, self._window):
            if older.order > request.order:
                break
            if queue.policy.ages and older.id in queue and queue.key_of(older) > key:
                continue  # its order lets that one pass, which ageing bounds
            self._count(older, admitted)
        for other in self._stayed.values():
            if other.tenant != tenant:
                self._count(other, admitted)

    def _count(self, overtaken: R, by: Admitted) -> None:
        counts = self._kept.counts
        if overtaken.id in self._queue and self._context.waits_for(overtaken, by):
            counts[overtaken.id] += 1
            if counts[overtaken.id] >= self._bound:
                self._kept.starved[overtaken.id] = overtaken
                self._drain_for(overtaken)

    def _stays(self, request: R) -> None:
        """It was offered and waits on: the last one of a full window is how far its lane is offered."""
        self._stayed[request.id] = request
        lane = request.tenant, request.awaited_class
        self._counted[lane] += 1
        if self._counted[lane] == self._share:
            self._reach[lane] = self._queue.key_of(request)
