"""Virtual token counters: whose turn it is (VTC: Sheng et al., OSDI 2024, algorithm 2).

A counter is the service that a tenant has received, divided by its weight. The waiting tenant with the smallest one is
served next. One that begins to wait is lifted to the smallest of those that wait, less a burst: an idle one has no
other credit. (VTC has no burst. Without one, requests that come together take turns with those of a flood, although
their tenant has used little of its share.) So the service of two tenants that both wait all the time differs by a
bounded amount.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import count

from weft.domain.lru import LruDict
from weft_scheduler.core.policy.autoscaling.autoscaler import PoolCapacity
from weft_scheduler.core.policy.queue.sorted_queue import FIRST, Key, SortedQueue

BURST_TOKENS = 2_000  # some eight answers
HEADROOM = 8  # parts of the places: one is left for tenants that run less than their share
MAX_IDLE = 100_000  # tenants remembered that do not wait: one that is forgotten is lifted as a new one


class TokenCounters:
    """The counters of one pool, in output tokens. `weights`: by tenant, by default 1."""

    def __init__(self, weights: Mapping[str, int], burst_tokens: float = BURST_TOKENS) -> None:
        self._weights, self._burst_tokens = weights, burst_tokens
        self._waiting: SortedQueue[str] = SortedQueue()  # (counter, turn) -> tenant
        self._keys: dict[str, Key] = {}
        self._idle = LruDict[str, float](MAX_IDLE)
        self._last = 0.0  # the counter of the tenant that left an empty queue behind
        self._turns = count()
        self.waiting_weight = 0

    def __len__(self) -> int:
        """Return the number of waiting tenants."""
        return len(self._keys)

    def weight(self, tenant: str) -> int:
        return self._weights.get(tenant, 1)

    def counter(self, tenant: str) -> float:
        """Return a tenant's service by weight, and its lift."""
        return self._keys[tenant][0] if tenant in self._keys else self._idle.get(tenant, 0.0)

    def key_of(self, tenant: str) -> Key:
        """Return the place of a tenant that waits. Raises KeyError if it does not."""
        return self._keys[tenant]

    def successor(self, key: Key) -> tuple[Key, str] | None:
        """Return the next greater key and its waiting tenant; None: there is none."""
        return self._waiting.successor(key)

    def is_next(self, tenant: str) -> bool:
        """Return whether the tenant waits and has the smallest counter."""
        first = self._waiting.successor(FIRST)
        return first is not None and first[1] == tenant

    @property
    def spread(self) -> float:
        """Difference between the largest and the smallest counter of waiting tenants."""
        first, last = self._waiting.successor(FIRST), self._waiting.last()
        return last[0][0] - first[0][0] if first is not None and last is not None else 0.0

    def enter(self, tenant: str) -> None:
        """Let a tenant begin to wait."""
        first = self._waiting.successor(FIRST)
        minimum = (first[0][0] if first is not None else self._last) - self._burst_tokens / self.weight(tenant)
        self._put(tenant, (max(self._idle.pop(tenant, 0.0), minimum), next(self._turns)))
        self.waiting_weight += self.weight(tenant)

    def leave(self, tenant: str) -> None:
        """Let a tenant wait no longer: none of its requests does."""
        key = self._keys.pop(tenant)
        self._waiting.remove(key)
        self._idle[tenant] = key[0]
        self.waiting_weight -= self.weight(tenant)
        if not self._keys:
            self._last = key[0]

    def charge(self, tenant: str, tokens: float) -> None:
        """Charge a tenant for service of `tokens`; negative: it was charged for more than it received."""
        service = tokens / self.weight(tenant)
        key = self._keys.get(tenant)
        if key is None:
            self._idle[tenant] = self._idle.get(tenant, 0.0) + service
            return
        self._waiting.remove(key)
        self._put(tenant, (key[0] + service, key[1]))

    def _put(self, tenant: str, key: Key) -> None:
        self._keys[tenant] = key
        self._waiting.add(key, tenant)


class TenantShares:
    """Tenants with interactive requests, and their running requests. `counters`: of waiting tenants."""

    def __init__(self, counters: TokenCounters, capacity: PoolCapacity) -> None:
        self._counters, self._capacity = counters, capacity
        self.tenants: Counter[str] = Counter()  # requests of each tenant
        self.weight = 0  # sum over `tenants`
        self.running: dict[str, dict[str, None]] = {}  # tenant -> ids of its requests that run, the latest last
        self.running_requests = 0
        self.parked: set[str] = set()  # ids of requests that are on runners, and wait there for other tenants
        self._by_excess: SortedQueue[str] = SortedQueue()  # (running but one / weight, turn) -> tenant that runs some
        self._keys: dict[str, Key] = {}
        self._unranked: set[str] = set()  # tenants whose keys are not up to date
        self._turns = count()

    def follow(self, counters: TokenCounters) -> None:
        """Replace the counters, with their weights."""
        self._counters = counters
        self.weight = sum(map(counters.weight, self.tenants))
        self._unranked.update(self.running)

    def add(self, tenant: str) -> None:
        """Count an arrived request of the tenant."""
        self.tenants[tenant] += 1
        if self.tenants[tenant] == 1:
            self.weight += self._counters.weight(tenant)

    def remove(self, tenant: str) -> None:
        """Count a request no more."""
        self.tenants[tenant] -= 1
        if not self.tenants[tenant]:
            del self.tenants[tenant]
            self.weight -= self._counters.weight(tenant)

    def run(self, tenant: str, request_id: str) -> None:
        """Count a request running on a runner, not parked."""
        self.running_requests += 1
        self.running.setdefault(tenant, {})[request_id] = None
        self._unranked.add(tenant)

    def stop(self, tenant: str, request_id: str) -> None:
        """Count a request that is on no runner any more. Raises KeyError if it was on none."""
        if request_id in self.parked:
            self.parked.remove(request_id)
            return
        self.running_requests -= 1
        del self.running[tenant][request_id]
        if not self.running[tenant]:
            del self.running[tenant]
        self._unranked.add(tenant)

    def park(self, tenant: str, request_id: str, *, parked: bool) -> None:
        """Count a request on a runner as parked or running. Repeated counts change nothing."""
        if parked and request_id not in self.parked:
            self.stop(tenant, request_id)
            self.parked.add(request_id)
        elif not parked and request_id in self.parked:
            self.parked.remove(request_id)
            self.run(tenant, request_id)

    def is_alone(self) -> bool:
        """Return whether no two tenants have requests."""
        return len(self.tenants) == 1

    def is_beyond(self, tenant: str) -> bool:
        """Return whether a tenant runs more sequences than its share, by weight, among present tenants."""
        return self._runs(tenant) * self.weight > self._allowed(tenant)

    def is_within(self, tenant: str) -> bool:
        """Return whether a present tenant stays within its share with one more sequence."""
        return (self._runs(tenant) + 1) * self.weight <= self._allowed(tenant)

    def farthest_beyond(self) -> str | None:
        """Return the tenant farthest above its share, by weight; None if one fewer would be below its share."""
        if len(self.tenants) < 2:
            return None
        for tenant in self._unranked:
            if (key := self._keys.pop(tenant, None)) is not None:
                self._by_excess.remove(key)
            if running := self.running.get(tenant):
                key = self._keys[tenant] = (len(running) - 1) / self._counters.weight(tenant), next(self._turns)
                self._by_excess.add(key, tenant)
        self._unranked.clear()
        last = self._by_excess.last()
        return last[1] if last is not None and self.excess(last[1]) > 0 else None

    def excess(self, tenant: str) -> int:
        """Return how many sequences fewer a tenant can run, and still runs its share."""
        return self._runs(tenant) + -self._allowed(tenant) // max(1, self.weight)

    def _runs(self, tenant: str) -> int:
        return len(self.running.get(tenant, ()))

    def _allowed(self, tenant: str) -> int:
        """Return the share of a tenant, times the weight of all: the sequences that the pool runs well, by weight."""
        return self._capacity.sum.sequences * self._counters.weight(tenant)

    def must_yield(self, tenant: str) -> bool:
        """Return whether the tenant runs more than its share, and so leaves the last places to present tenants.

        Where another waits, too, that is so unless its own turn is next. Else a flood would fill every place, and each
        request of another tenant would wait for one.
        """
        counters, capacity = self._counters, self._capacity
        if len(self.tenants) < 2 or (len(counters) > 1 and counters.is_next(tenant)):
            return False
        sequences, tokens = capacity.sum.sequences, capacity.sum.kv_tokens
        if sequences - self.running_requests > sequences // HEADROOM and tokens - capacity.interactive_tokens > (
            tokens // HEADROOM
        ):
            return False
        return self.is_beyond(tenant)
