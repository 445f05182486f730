"""One pass over a queue, and how often a waiting request may be overtaken in it; `README.md` has the rules."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple

from weft_scheduler.core.policy.placement.policy import PlacementPolicy
from weft_scheduler.core.policy.placement.runner_index import RunnerShape
from weft_scheduler.core.policy.queue.sorted_queue import FIRST, Key
from weft_scheduler.core.policy.queue.token_counters import TenantShares
from weft_scheduler.core.policy.queue.waiting_queue import R, WaitingQueue


class Offer(NamedTuple, Generic[R]):
    """The next request in turn, with the policy's key."""

    request: R
    tried: bool  # offered before in this pass, in vain
    blocked: bool  # found so by the last passes: it fits only where something has changed for it
    drains: bool  # overtaken `bound` times: where it could run, nothing new is placed until it is


class Overtaking(Generic[R]):
    """Counts of how often each waiting request was overtaken; never above the pass's bound.

    Younger requests of the same tenant overtake it, and those of a tenant whose turn comes later: not those of a tenant
    that is before its own. A request that was blocked in the last pass is offered again only where something changed
    for it: behind a long queue an event costs 1 us for each blocked request, and not a search.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.starved: dict[str, R] = {}  # by id: requests that were overtaken `bound` times
        self.blocked: set[str] = set()  # ids that the last passes found blocked
        self.reach: dict[tuple[str, str], Key] = {}  # tenant and lane whose window is full -> the last key offered
        self.frontier: Key | None = None  # the last pass reached no tenant behind it
        self.skipped: set[str] = set()  # tenants that were held back: what changed meanwhile is not known
        self.closed: set[RunnerShape] = set()  # of the last pass; where there are any, the next pass offers all

    def copy(self) -> "Overtaking[R]":
        """Return the same counts; every request is offered again."""
        copy = Overtaking[R]()
        copy.counts = self.counts.copy()
        copy.starved = self.starved.copy()
        return copy

    def out_of_reach(self, queue: WaitingQueue[R], request: R) -> bool:
        """Return whether a newly queued request comes after all requests offered by a pass."""
        tenant = request.tenant
        last = self.reach.get((tenant, request.waiting.lane))
        if last is not None and queue.key_of(request) > last:
            return True
        return self.frontier is not None and queue.counters.key_of(tenant) > self.frontier

    def forget(self, request_id: str) -> None:
        """Forget a request that left the queue."""
        self.counts.pop(request_id, None)
        self.starved.pop(request_id, None)
        self.blocked.discard(request_id)
        self.reach.clear()
        self.frontier = None


class QueuePass(Generic[R]):
    """One pass over a queue. It yields the next request to place, and expects its result before the next request.

    `kept`: what one pass leaves for the next. `placement`: where requests are placed. `shares`: tenants that may have
    to leave the last places to others; None: nobody has to.
    """

    def __init__(
        self,
        retained: Overtaking[R],
        queue: WaitingQueue[R],
        placement: PlacementPolicy,
        bound: int,
        window: int,
        shares: TenantShares | None = None,
    ) -> None:
        self._retained, self._queue, self._placement, self._shares = retained, queue, placement, shares
        self._bound, self._window = bound, window
        self.closed: set[RunnerShape] = set()  # shapes of which no runner takes anything new in this pass

    def offers(self) -> Iterator[Offer[R]]:
        """Yield each tenant's requests in its turn, first requests overtaken `bound` times, by age.

        Begin again where the pass placed requests after which another pass may place more.
        """
        queue, retained = self._queue, self._retained
        while True:
            if retained.closed:
                retained.blocked.clear()
            self.closed = retained.closed = set()
            retained.reach, retained.frontier = {}, None
            if not self._may_place():
                return
            waiting = len(queue)
            self._begin()
            for request in self._turns():
                self._next.append(request)
                while self._next:
                    offered = self._next.popleft()
                    if offered.id not in queue:
                        continue
                    self._key = queue.key_of(offered)
                    drains = self._bound == 0 or offered.id in retained.starved
                    blocked = offered.id in retained.blocked and offered.tenant not in self._again
                    yield Offer(offered, offered.id in self._tried, blocked, drains)
                if request.id in queue:
                    self._stays(request)
                if not self._may_place():
                    break
            else:
                if self._bound and not retained.starved:  # starved ones are offered out of their order
                    retained.reach = self._reach
            if len(queue) in (0, waiting) or not self._is_outdated:
                return

    def tried(self, request: R, *, placed: bool) -> None:
        """Take the answer to an offer: the request was placed, or no runner can take it now."""
        self._tried.add(request.id)
        if placed:
            self._retained.forget(request.id)
        else:
            self._retained.blocked.add(request.id)

    def passed_by(self, request: R, *, into_gap: bool = False) -> Iterator[R]:
        """Yield the requests overtaken by a placed request: older requests of its tenant, and of tenants with an
        earlier turn.

        One that others made room for, `into_gap` them, takes nothing that requests of other tenants could have.
        """
        queue, tenant = self._queue, request.tenant
        for older in queue.oldest(tenant, self._window):
            if older.order > request.order:
                break
            if queue.policy.ages and older.id in queue and queue.key_of(older) > self._key:
                continue  # its order lets that one pass, which ageing bounds
            if older.id in queue:
                yield older
        if not into_gap:
            yield from (other for other in self._stayed.values() if other.tenant != tenant and other.id in queue)

    def count(self, overtaken: Iterable[R]) -> None:
        """Count `overtaken` requests. A request overtaken too often is offered next."""
        starved: list[R] = []
        for request in overtaken:
            self._retained.counts[request.id] += 1
            if self._retained.counts[request.id] >= self._bound:
                self._retained.starved[request.id] = request
                starved.append(request)
        self._next.extendleft(reversed(starved))

    def close(self, shapes: Iterable[RunnerShape]) -> None:
        """Close runners of these shapes for new requests."""
        self.closed.update(shapes)

    # ------------------------------------------------------------ the pass

    def _may_place(self) -> bool:
        """Return whether a runner takes something, or sequences of a tenant beyond its share may make room."""
        return self._placement.has_capacity(self.closed) or self._may_park()

    def _may_park(self) -> bool:
        return self._shares is not None and self._shares.farthest_beyond() is not None

    def _begin(self) -> None:
        self._key: Key = FIRST  # key of the latest offer
        self._next: deque[R] = deque()  # to be offered before anybody else
        self._tried: set[str] = set()  # ids
        self._stayed: dict[str, R] = {}  # by id: offered, and still in the queue
        self._again: set[str] = set()  # tenants that were held back before this pass
        self._share = self._queue.share(self._window)
        self._counted: dict[tuple[str, str], int] = {}  # tenant and lane -> requests that stayed
        self._reach: dict[tuple[str, str], Key] = {}

    def _turns(self) -> Iterator[R]:
        """Yield the next request of the open tenant with the smallest counter.

        Of each tenant first those that were overtaken too often, then its own in the policy's order. At most `window`
        tenants have none left before the pass ends.
        """
        counters, cursor, ended = self._queue.counters, FIRST, 0
        begun: dict[str, Iterator[R]] = {}
        while (entry := counters.successor(cursor)) is not None and ended < self._window:
            key, tenant = entry
            if tenant not in begun:
                begun[tenant] = self._of_tenant(tenant)
            request = None if self._is_held_back(tenant) else next(begun[tenant], None)
            if request is None:
                cursor, ended = key, ended + 1
            else:
                yield request
        self._retained.frontier = cursor if entry is not None else None

    def _of_tenant(self, tenant: str) -> Iterator[R]:
        queue = self._queue
        if self._bound == 0:
            first = [*queue.oldest(tenant, self._window)]
        else:
            starved = [request for request in self._retained.starved.values() if request.tenant == tenant]
            first = sorted(starved, key=lambda request: request.order)
        for request in first:
            if request.id in queue:
                yield request
        yield from queue.candidates(tenant, self._share, self._placement)

    def _is_held_back(self, tenant: str) -> bool:
        """Return whether a tenant leaves free capacity to the rest. Its requests are offered again afterwards."""
        if self._shares is not None and self._shares.must_yield(tenant):
            self._retained.skipped.add(tenant)
            return True
        if tenant in self._retained.skipped:
            self._retained.skipped.remove(tenant)
            self._again.add(tenant)
        return False

    def _stays(self, request: R) -> None:
        """Keep an offered request in the queue. The last request of a full window bounds the offers of its lane."""
        self._stayed[request.id] = request
        lane = request.tenant, request.waiting.lane
        counted = self._counted[lane] = self._counted.get(lane, 0) + 1
        if counted == self._share:
            self._reach[lane] = self._queue.key_of(request)

    @property
    def _is_outdated(self) -> bool:
        """Return whether a placement changes the remaining offers.

        Where shapes are closed the turn may be another tenant's by now, for whom the request that closed them has to
        wait. Where a tenant waits no more the window is shared by fewer. Who was placed may be beyond its share now.
        """
        is_full = self._queue.share(self._window) > self._share
        return bool(self.closed or (self._reach and is_full) or self._may_park())
