"""The waiting requests of a pool: the tenant with the smallest counter is next, the queue policy orders inside it."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from heapq import merge
from itertools import islice
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

from weft_scheduler.core.policy.queue.sorted_queue import FIRST, Key, SortedQueue
from weft_scheduler.core.policy.queue.token_counters import TokenCounters


class QueueEntry(NamedTuple):
    """A request as it waits: fixed while it does."""

    lane: str = ""  # the numerics class that it may have to wait for; "": none
    tokens: int = 0  # tokens that its pages have to hold: prompt, emitted, reservation
    work: int = 0  # tokens that are to be computed for it yet, those of its prompt too; the median of what is expected
    expected_work: float = 0.0  # what it is expected to cost yet, in output tokens, where the order asks for that


class QueuedRequest(Protocol):
    """A request as a queue knows it. All of this is fixed while the request waits."""

    @property
    def id(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def order(self) -> tuple[float, int]:
        """Age: the smaller waits longer, whatever the order of a policy. The first part is the arrival, in seconds."""
        ...

    @property
    def waiting(self) -> QueueEntry: ...


R = TypeVar("R", bound=QueuedRequest)


class MostFree(Protocol):
    """The placement of requests, as a queue knows it."""

    def free_tokens(self) -> int:
        """Return the maximum of the runners' free tokens."""
        ...


class QueuePolicy(ABC):
    """An order of waiting requests, by a key that stays fixed in the queue. One object serves all tenants of a pool."""

    by_age: ClassVar[bool] = False  # the order is that of age
    ages: ClassVar[bool] = False  # the order itself bounds who passes whom: only passes out of that order count

    @abstractmethod
    def key(self, request: QueuedRequest, backlog_s: float) -> Key:
        """Return a request's place in the policy's order: the smaller is offered first; no two have the same.

        `backlog_s`: for how long its tenant's waiting requests keep the tenant's share of the pool busy.
        """

    def first(self, placement: MostFree) -> Key:
        """Return the order's start for a pass: keys up to it cannot be placed, by the maximum that is free."""
        del placement
        return FIRST

    def delay_s(self, request: QueuedRequest, key: Key) -> float:
        """Return the policy's delay of a request with this key, in seconds."""
        del request, key
        return 0.0


class TenantQueue(Generic[R]):
    """The waiting requests of one tenant. `keys`: the keys of all waiting requests, by id.

    Requests that wait for a numerics class have a lane of their own, and a window of their own: else, once as many of
    them wait as the window has, no request behind them would be offered.
    """

    def __init__(self, policy: QueuePolicy, keys: Mapping[str, Key]) -> None:
        self._policy, self._keys = policy, keys
        self._lanes: dict[str, SortedQueue[R]] = {}
        self._by_age: SortedQueue[R] | None = None if policy.by_age else SortedQueue()
        self._size = 0
        self.work = 0  # tokens
        self._latest = (-float("inf"), 0.0)  # of those that left in order: arrival with the policy's delay, the lag

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[R]:
        """Yield the requests in the policy's order."""
        if len(self._lanes) == 1:
            return iter(next(iter(self._lanes.values())))
        return merge(*self._lanes.values(), key=lambda request: self._keys[request.id])

    def add(self, request: R) -> None:
        self._lanes.setdefault(request.waiting.lane, SortedQueue()).add(self._keys[request.id], request)
        self._size += 1
        self.work += request.waiting.work
        if self._by_age is not None:
            self._by_age.add(request.order, request)

    def remove(self, request: R, key: Key) -> None:
        lane = self._lanes[request.waiting.lane]
        lane.remove(key)
        self._size -= 1
        self.work -= request.waiting.work
        if not len(lane):
            del self._lanes[request.waiting.lane]
        if self._by_age is not None:
            self._by_age.remove(request.order)

    def by_age(self) -> Iterator[R]:
        """Yield the requests by age; none may come or go meanwhile."""
        return iter(self if self._by_age is None else self._by_age)

    def candidates(self, window: int, placement: MostFree) -> Iterator[R]:
        """Yield requests to offer, in the policy's order: each is removed or stays before the next is taken.

        Of each lane the iteration ends where `window` offered requests have stayed.
        """
        passed, stayed = dict[str, Key](), Counter[str]()
        while True:
            first, matches = self._policy.first(placement), list[tuple[Key, R, str]]()
            for name, lane in self._lanes.items():
                entry = lane.successor(max(first, passed.get(name, FIRST))) if stayed[name] < window else None
                if entry is not None:
                    matches.append((*entry, name))
            if not matches:
                return
            key, request, name = min(matches, key=lambda entry: entry[0])
            passed[name] = key
            yield request
            stayed[name] += request.id in self._keys

    def lag_s(self, due: float, now: float) -> float:
        """Return the delay of a tenant's turn behind the order of its requests, in seconds: the time since `due` for a
        request in order.

        A request that leaves later than those behind it keeps its distance to them.
        """
        latest, lag = self._latest
        if due >= latest:
            lag = max(0.0, now - due)
            self._latest = due, lag
        return lag


class WaitingQueue(Generic[R]):
    """All waiting requests of a pool. `counters`: of its tenants."""

    def __init__(self, policy: QueuePolicy, counters: TokenCounters) -> None:
        self.policy, self.counters = policy, counters
        self._keys: dict[str, Key] = {}
        self._tenants: dict[str, TenantQueue[R]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[R]:
        """Yield every waiting request, tenant by tenant, in the policy's order."""
        for tenant in self.tenants():
            yield from self._tenants[tenant]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._keys

    def tenants(self) -> Iterator[str]:
        """Yield waiting tenants, the next tenant first."""
        key = FIRST
        while (entry := self.counters.successor(key)) is not None:
            key, tenant = entry
            yield tenant

    def of_tenant(self, tenant: str) -> TenantQueue[R]:
        """Return a tenant's queue. Raises KeyError if none of its requests waits."""
        return self._tenants[tenant]

    def key_of(self, request: R) -> Key:
        """Return the key that a request waits by. Raises KeyError if it does not wait."""
        return self._keys[request.id]

    def push(self, request: R, work_per_s: float = 0.0) -> None:
        """Let a request wait. `work_per_s`: tokens that the pool computes in a second; 0: not known."""
        tenant = request.tenant
        self._keys[request.id] = self.policy.key(request, self.backlog_s(tenant, work_per_s))
        if tenant not in self._tenants:
            self._tenants[tenant] = TenantQueue(self.policy, self._keys)
            self.counters.enter(tenant)
        self._tenants[tenant].add(request)

    def backlog_s(self, tenant: str, work_per_s: float) -> float:
        """Return for how long what waits of a tenant keeps its share of the pool busy; infinite: not known."""
        if tenant not in self._tenants or not self.policy.ages:
            return 0.0
        share = self.counters.weight(tenant) / self.counters.waiting_weight
        return self._tenants[tenant].work / (work_per_s * share) if work_per_s else math.inf

    def remove(self, request: R) -> None:
        """Let a request wait no longer. Raises KeyError if it does not wait."""
        tenant = request.tenant
        self._tenants[tenant].remove(request, self._keys.pop(request.id))
        if not len(self._tenants[tenant]):
            del self._tenants[tenant]
            self.counters.leave(tenant)

    def oldest(self, tenant: str, limit: int) -> Iterator[R]:
        """Yield at most `limit` of a tenant's requests, by age; none may come or go meanwhile."""
        return islice(self._tenants[tenant].by_age(), limit) if tenant in self._tenants else iter(())

    def share(self, window: int) -> int:
        """Return the number of requests that may stay in the pass for one tenant, of `window` in total."""
        return max(1, window // max(1, len(self._tenants)))

    def candidates(self, tenant: str, window: int, placement: MostFree) -> Iterator[R]:
        """Yield a tenant's requests to offer, as `TenantQueue.candidates`."""
        return self._tenants[tenant].candidates(window, placement) if tenant in self._tenants else iter(())

    def delay_s(self, request: R, now: float, *, alone: bool) -> float:
        """Return what a request's arrival is delayed by, in seconds: a runner computes prompts in order of the sum.

        The policy's delay; unless its tenant is alone in the pool also what the tenant's turn is behind, so that the
        order of prompts of different tenants is that of their turns: else the old requests of a flood came first.
        """
        policy_s = self.policy.delay_s(request, self.key_of(request))
        if alone:
            return policy_s
        return policy_s + self._tenants[request.tenant].lag_s(request.order[0] + policy_s, now)
