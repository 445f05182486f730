"""Whose work is next: tenants take turns by what theirs has cost, so that a burst waits behind itself. Pure.

Start-time fair queueing (Goyal et al., 1996), with costs that are known once the work is done: of the tenants that wait
the one whose work has cost least is next. One that comes is lifted to what the last to begin had cost: nobody saves for
later. A tenant begins only while more places are free than it has (dynamic thresholds, Choudhury and Hahne, 1998):
alone it has half of them, and who comes next finds one free. Work that has begun is not stopped.
"""

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

    def enter(self, tenant: str, work: W) -> bool:
        """Return whether a tenant's work begins now. Else it waits until `leave` returns it, or `cancel` drops it."""
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = _Tenant(tenant, self._start)
        if found.places < self._free:
            self._begin(found)
            return True
        found.waiting[work] = None
        return False

    def waiting(self, tenant: str) -> int:
        """How much work of a tenant waits."""
        found = self._tenants.get(tenant)
        return len(found.waiting) if found else 0

    def cancel(self, tenant: str, work: W) -> None:
        """Let work wait no longer. Harmless where it does not wait."""
        if (found := self._tenants.get(tenant)) is not None:
            found.waiting.pop(work, None)
            self._forget()

    def leave(self, tenant: str, cost: float) -> list[tuple[str, W]]:
        """Take back the place of work that has ended, and return whose work begins now, with its tenant."""
        found = self._tenants[tenant]
        found.places -= 1
        found.cost += max(LEAST, cost)
        self._free += 1
        begun = list[tuple[str, W]]()
        while able := [one for one in self._tenants.values() if one.places < self._free and one.waiting]:
            one = min(able, key=_cost)
            begun.append((one.name, work := next(iter(one.waiting))))
            del one.waiting[work]
            self._begin(one)
        if not found.places and not found.waiting:
            self._forget()
        return begun

    @property
    def remembered(self) -> int:
        """How many tenants there are."""
        return len(self._tenants)

    def check(self) -> None:
        """Raises AssertionError."""
        tenants = self._tenants.values()
        assert 0 <= self._free == self._places - sum(one.places for one in tenants), "places"
        assert all(one.places >= self._free for one in tenants if one.waiting), "nobody waits who may begin"
        assert any(one.places for one in tenants) or not tenants, "nothing is remembered of who was there"

    def _begin(self, one: _Tenant[W]) -> None:
        self._free -= 1
        one.places += 1
        self._start = max(self._start, one.cost)

    def _forget(self) -> None:
        """Forget the idle ones that others have come as far as; and all once nobody is there."""
        busy = self._free < self._places
        for one in list(self._tenants.values()):
            if not one.places and not one.waiting and not (busy and one.cost > self._start):
                del self._tenants[one.name]


_cost = attrgetter("cost")
