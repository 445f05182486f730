"""Whose work is next: nobody starves, order inside a tenant is kept, a newcomer waits for little of each other one."""

from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.turns import TenantSlots, TenantTurns

TENANTS = "abcde"
PLACES = st.integers(1, 8)
EVENTS = st.lists(st.tuples(st.sampled_from(["enter", "enter", "leave", "cancel"]), st.integers(0, 1000)), max_size=200)


@dataclass
class Bench:
    """Work that runs and waits, beside what the turns know of it."""

    turns: TenantTurns[int]
    running: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    waiting: dict[str, deque[int]] = field(default_factory=dict[str, deque[int]])
    done: Counter[str] = field(default_factory=Counter[str])  # cost by tenant
    entered: int = 0

    def enter(self, tenant: str) -> None:
        self.entered += 1
        if self.turns.enter(tenant, self.entered):
            self.running.append((tenant, self.entered))
        else:
            self.waiting.setdefault(tenant, deque()).append(self.entered)
        self.turns.check()

    def leave(self, place: int, cost: int) -> list[str]:
        """End the work at a place. Returns whose begins."""
        tenant, _ = self.running.pop(place)
        self.done[tenant] += cost
        begun = self.turns.leave(tenant, cost)
        for whose, work in begun:
            assert work == self.waiting[whose].popleft(), "the order inside a tenant is kept"
        self.running += begun
        self.turns.check()
        return [whose for whose, _ in begun]

    def cancel(self, number: int) -> None:
        if waiting := [(tenant, work) for tenant, works in self.waiting.items() for work in works]:
            tenant, work = waiting[number % len(waiting)]
            self.waiting[tenant].remove(work)
            self.turns.cancel(tenant, work)
            self.turns.check()


@given(PLACES, EVENTS)
def test_nothing_is_lost_and_order_is_kept_whatever_comes_and_goes(places: int, events: list[tuple[str, int]]) -> None:
    bench = Bench(TenantTurns(places))
    for kind, number in events:
        if kind == "enter":
            bench.enter(TENANTS[number % len(TENANTS)])
        elif kind == "cancel":
            bench.cancel(number)
        elif bench.running:
            bench.leave(number % len(bench.running), 1 + number % 7)
        assert len(bench.running) <= places
    while bench.running:
        bench.leave(0, 1)
    assert not any(bench.waiting.values()), "all of it has begun"
    assert not bench.turns.remembered, "of who is idle nothing is kept"


@given(PLACES, st.dictionaries(st.sampled_from(TENANTS), st.integers(1, 20), min_size=2), st.integers(0, 80))
def test_tenants_that_wait_all_the_time_get_the_same(places: int, costs: dict[str, int], until: int) -> None:
    """However cheap the work of one is, and dear that of another: each piece takes as long as it costs."""
    bench, ends = Bench(TenantTurns(places)), list[tuple[int, str, int]]()
    for tenant in list(costs) * 400:
        bench.enter(tenant)
    now = 0
    while now < until:
        known = {work for _, _, work in ends}
        ends += [(now + costs[tenant], tenant, work) for tenant, work in bench.running if work not in known]
        ends.sort()
        now, tenant, work = ends.pop(0)
        bench.leave(bench.running.index((tenant, work)), costs[tenant])
    left = Counter[str]()
    for end, tenant, _ in ends:
        left[tenant] += costs[tenant] - max(0, end - now)
    got = [bench.done[tenant] + left[tenant] for tenant in costs]
    assert max(got) - min(got) <= (places + 1) * max(costs.values())


@given(PLACES, st.integers(1, 20), st.integers(1, 4), st.integers(0, 30))
def test_a_newcomer_waits_for_one_piece_of_each_other_tenant(places: int, cost: int, others: int, before: int) -> None:
    bench = Bench(TenantTurns(places))
    for number in range(50 * others):
        bench.enter(TENANTS[number % others])
    for _ in range(before):
        bench.leave(0, cost)
    bench.enter("newcomer")
    begun = list[str]()
    while ("newcomer" not in {tenant for tenant, _ in bench.running}) and bench.running:
        begun += bench.leave(0, cost)
    ahead = Counter(begun)
    del ahead["newcomer"]
    assert all(count <= 1 for count in ahead.values()), ahead


@given(PLACES, st.integers(1, 20))
def test_who_comes_late_has_saved_nothing(places: int, cost: int) -> None:
    bench = Bench(TenantTurns(places))
    for _ in range(200):
        bench.enter("early")
    for _ in range(100):
        bench.leave(0, cost)
    for _ in range(100):
        bench.enter("late")
    before = bench.done["early"]
    for _ in range(20 + places):
        bench.leave(0, cost)
    assert bench.done["early"] - before >= 10 * cost


@pytest.mark.parametrize("places", [1, 2, 4])
def test_tenants_that_come_and_go_do_not_starve_one_that_waits(places: int) -> None:
    """Each of the others is idle for a moment after each piece: what it has cost is not forgiven meanwhile."""
    bench = Bench(TenantTurns(places))
    for _ in range(20):
        bench.enter("crowded")
    for tenant in TENANTS:
        bench.enter(tenant)
    for _ in range(100):
        tenant = bench.running[0][0]
        bench.leave(0, 1)
        if tenant in TENANTS:
            bench.enter(tenant)
    assert bench.done["crowded"] >= 100 // (len(TENANTS) + 1) - places


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.sampled_from(TENANTS)), max_size=100))
def test_a_tenant_takes_a_slot_only_while_more_are_free_than_it_has(slots: int, events: list[tuple[bool, str]]) -> None:
    shared, taken = TenantSlots(slots), Counter[str]()
    for take, tenant in events:
        if take:
            assert shared.take(tenant) == (taken[tenant] < slots - taken.total())
            taken[tenant] += taken[tenant] < slots - taken.total()
        elif taken[tenant]:
            shared.give(tenant)
            taken[tenant] -= 1
        assert taken.total() <= slots
        assert taken[tenant] <= (slots + 1) // 2


def test_one_tenant_has_half_of_the_places_and_the_next_one_begins_at_once() -> None:
    bench = Bench(TenantTurns(4))
    for _ in range(10):
        bench.enter("flood")
    assert [tenant for tenant, _ in bench.running] == ["flood", "flood"]
    for _ in range(3):
        assert bench.leave(0, 1) == ["flood"]
    bench.enter("other")
    assert [tenant for tenant, _ in bench.running] == ["flood", "flood", "other"]
