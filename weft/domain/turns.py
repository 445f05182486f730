"""Turns between tenants by the cost of their work, so that a burst waits behind itself. Pure.

Start-time fair queueing (Goyal et al., 1996), with costs that are known once the work is done: of the tenants that wait
the tenant whose work has cost least is next. A newcomer is lifted to what the last to begin had cost: nobody saves for
later. A tenant begins only while more places are free than it has (dynamic thresholds, Choudhury and Hahne, 1998):
alone it has half of them, and a newcomer finds a free place. Work that has begun is not stopped.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

LEAST = 1e-6  # what work costs at the least: who is served has to fall behind
W = TypeVar("W", bound=Hashable)


@dataclass(eq=False, slots=True)
class _Tenant(Generic[W]):
    name: str
    cost: float  # of its work that has ended, and what it was lifted by
    places: int = 0  # that it has
    waiting: dict[W, None] = field(default_factory=dict[W, None])


class TenantTurns(Generic[W]):
    """The work of all tenants at one bottleneck, `places` pieces at once. One owner.

    An event takes time by the tenants that are there: 10 us for a hundred.
    """

    def __init__(self, places: int) -> None:
        self._places = self._free = places
        self._tenants: dict[str, _Tenant[W]] = {}
        self._start = 0.0  # what the last tenant to begin had cost; it never falls

    def enter(self, name: str, work: W) -> bool:
        """Return whether a tenant's work begins now. Else it waits until `leave` returns it, or `cancel` drops it."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name, self._start)
        if tenant.places < self._free:
            self._begin(tenant)
            return True
        tenant.waiting[work] = None
        return False

    def waiting(self, name: str) -> int:
        """How much work of a tenant waits."""
        tenant = self._tenants.get(name)
        return len(tenant.waiting) if tenant else 0

    def cancel(self, name: str, work: W) -> None:
        """Let work wait no longer. Harmless for work that does not wait."""
        if (tenant := self._tenants.get(name)) is not None:
            tenant.waiting.pop(work, None)
            self._forget()

    def leave(self, name: str, cost: float) -> list[tuple[str, W]]:
        """Take back the place of work that has ended, and return whose work begins now, with its tenant."""
        tenant = self._tenants[name]
        tenant.places -= 1
        tenant.cost += max(LEAST, cost)
        self._free += 1
        begun = list[tuple[str, W]]()
        while able := [each for each in self._tenants.values() if each.places < self._free and each.waiting]:
            first = min(able, key=_cost)
            begun.append((first.name, work := next(iter(first.waiting))))
            del first.waiting[work]
            self._begin(first)
        if not tenant.places and not tenant.waiting:
            self._forget()
        return begun

    @property
    def remembered(self) -> int:
        """How many tenants there are."""
        return len(self._tenants)

    def check(self) -> None:
        """Raises AssertionError."""
        tenants = self._tenants.values()
        assert 0 <= self._free == self._places - sum(tenant.places for tenant in tenants), "places"
        assert all(tenant.places >= self._free for tenant in tenants if tenant.waiting), "nobody waits who may begin"
        assert any(tenant.places for tenant in tenants) or not tenants, "nothing is remembered of who was there"

    def _begin(self, tenant: _Tenant[W]) -> None:
        self._free -= 1
        tenant.places += 1
        self._start = max(self._start, tenant.cost)

    def _forget(self) -> None:
        """Forget idle tenants that others have caught up with, and all tenants once none is present."""
        busy = self._free < self._places
        for tenant in list(self._tenants.values()):
            if not tenant.places and not tenant.waiting and not (busy and tenant.cost > self._start):
                del self._tenants[tenant.name]


_cost = attrgetter("cost")


class TenantSlots:
    """Slots that nobody waits for. A tenant takes a slot only while more slots are free than it has. One owner."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._used = Counter[str]()

    def take(self, tenant: str) -> bool:
        """Return whether the tenant has one more slot now; `give` gives it back."""
        if self._used[tenant] >= self._free:
            return False
        self._used[tenant] += 1
        self._free -= 1
        return True

    def give(self, tenant: str) -> None:
        """Give back a slot that `take` gave."""
        self._free += 1
        self._used[tenant] -= 1
        if not self._used[tenant]:
            del self._used[tenant]
