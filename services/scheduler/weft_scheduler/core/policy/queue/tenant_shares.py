"""The tenants of a pool: what each runs, and who leaves the last places to others."""

from collections import Counter

from weft_scheduler.core.policy.autoscaling.autoscaler import PoolCapacity
from weft_scheduler.core.policy.queue.token_counters import TokenCounters

HEADROOM = 8  # one of so many places is left for tenants that run less than their share


class TenantShares:
    """The tenants that have interactive requests, and what they run. `counters`: of those that wait."""

    def __init__(self, counters: TokenCounters, capacity: PoolCapacity) -> None:
        self._counters, self._capacity = counters, capacity
        self.tenants: Counter[str] = Counter()  # of their requests
        self.weight = 0  # of those tenants
        self.running: Counter[str] = Counter()  # requests on runners, by tenant
        self.running_requests = 0

    def follow(self, counters: TokenCounters) -> None:
        """Use other counters, with weights of their own."""
        self._counters = counters
        self.weight = sum(map(counters.weight, self.tenants))

    def add(self, tenant: str) -> None:
        """Count a request that has come."""
        self.tenants[tenant] += 1
        if self.tenants[tenant] == 1:
            self.weight += self._counters.weight(tenant)

    def remove(self, tenant: str) -> None:
        """Count a request no more."""
        self.tenants[tenant] -= 1
        if not self.tenants[tenant]:
            del self.tenants[tenant]
            self.weight -= self._counters.weight(tenant)

    def count_running(self, tenant: str, by: int) -> None:
        """Count a request that is on a runner (1), or was (-1)."""
        self.running_requests += by
        self.running[tenant] += by
        if not self.running[tenant]:
            del self.running[tenant]

    def is_alone(self) -> bool:
        """True where no two tenants have requests."""
        return len(self.tenants) == 1

    def is_beyond(self, tenant: str) -> bool:
        """True for a tenant that runs more sequences than its share, by weight, among the tenants that are there."""
        allowed = self._capacity.sum.sequences * self._counters.weight(tenant)
        return self.running[tenant] * self.weight > allowed

    def must_yield(self, tenant: str) -> bool:
        """True for a tenant that runs more than its share, and leaves the last places to others that are there.

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
