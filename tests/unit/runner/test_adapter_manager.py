"""Who is where and who gets the next slot, under any sequence of commands; nobody starves."""

import itertools
import random
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harness.desired import desired, take_effects, whole
from weft.domain.adapter import AdapterState, DesiredAdapter, DesiredChange, Tier
from weft.domain.request import EndReason
from weft_runner.core import Fetch, Fetched, Unload
from weft_runner.core.adapters.adapter import HostCopy, LoadState
from weft_runner.core.adapters.known import MAX_ON_DEMAND
from weft_runner.core.adapters.manager import AdapterManager, check_adapters
from weft_runner.core.events import DropHost, FetchFailed, Load, Loaded, LoadFailed, Retain
from weft_runner.core.page_table import PageTable, check_page_table

DIGESTS = st.sampled_from([f"a{i}" for i in range(7)])
DESIRED = st.builds(  # sizes that are not known, true, too small, larger than all there is
    desired,
    DIGESTS,
    n_bytes=st.sampled_from([0, 50, 20, 500]),
    pinned=st.booleans(),
    tier=st.sampled_from([Tier.REMOTE, Tier.DISK, Tier.HOST]),
)


class Harness:
    """A manager with the adapter pool that executes its actions: what is in a slot, on its way, in host memory."""

    HOST_BYTES = 50  # of a copy
    SIZES: ClassVar = {
        f"a{i}": n for i, n in enumerate((1, 10, 25, 40, 60, 75, 95))
    }  # on the device, whatever is announced

    def __init__(self, **settings: Any) -> None:
        self.book = AdapterManager(**settings)
        self.device: dict[int, str] = {}
        self.loading: list[Load] = []
        self.fetching: list[Fetch] = []
        self.from_host: set[int] = set()  # slots that are loaded from a copy that was there
        self.host: set[str] = set()
        self.disk: set[str] = set()
        self.joined: list[tuple[str, int]] = []
        self.waiting: list[tuple[str, int]] = []
        self.numbers = itertools.count()
        self.served: set[int] = set()

    def enter(self, digest: str) -> int:
        number = next(self.numbers)
        if self.book.infeasible_reason(digest):  # the request pool refuses it
            return number
        if self.book.acquire(digest):
            self.joined.append((digest, number))
            self.served.add(number)
        else:
            self.waiting.append((digest, number))
        self.settle()
        return number

    def leave(self, index: int) -> None:
        digest, _ = self.joined.pop(index)
        self.book.release(digest, joined=True)
        self.settle()

    def cancel(self, index: int) -> None:
        digest, _ = self.waiting.pop(index)
        self.book.release(digest, joined=False)
        self.settle()

    def load(self, index: int = 0, *, fails: bool = False, permanent: bool = False) -> None:
        order = self.loading.pop(index)
        if order.slot not in self.from_host and order.to_host:
            self.host.add(order.digest)  # it may have been read before it failed
        self.from_host.discard(order.slot)
        host_bytes = self.HOST_BYTES if order.digest in self.host else None
        if fails:
            lost = self.book.on_event(LoadFailed(order.digest, EndReason.LOAD_FAILED, "broken", permanent))
            assert lost == (EndReason.LOAD_FAILED, "broken")
            self.give_up(order.digest)
        else:
            self.device[order.slot] = order.digest
            size = self.SIZES.get(order.digest, 100)
            assert self.book.on_event(Loaded(order.digest, 4, size, host_bytes, 1.0)) is None
        self.settle()

    def give_up(self, digest: str) -> None:
        for item in [w for w in self.waiting if w[0] == digest]:
            self.waiting.remove(item)
            self.book.release(digest, joined=False)

    def fetch(self, index: int = 0, *, fails: bool = False, permanent: bool = False) -> None:
        order = self.fetching.pop(index)
        size = self.SIZES.get(order.digest, 100) if order.measure else None
        if fails:
            failed = FetchFailed(order.digest, EndReason.LOAD_FAILED, "out of reach", permanent)
            if self.book.on_event(failed) is not None:
                self.give_up(order.digest)
            self.settle()
            return
        self.disk.add(order.digest)
        if order.to_host:
            self.host.add(order.digest)
        host_bytes = self.HOST_BYTES if order.to_host else None
        if self.book.on_event(Fetched(order.digest, size, host_bytes)) is not None:
            assert self.SIZES[order.digest] == 95, "only what is larger than the device"
            self.give_up(order.digest)
        self.settle()

    def bring(self, digest: str = "") -> None:
        """Let everything that is on its way arrive."""
        while self.fetching or self.loading:
            self.fetch() if self.fetching else self.load()

    def settle(self) -> None:
        for action in take_effects(self.book):
            match action:
                case Load():
                    assert action.slot not in self.device, "a slot is emptied before it is given away"
                    assert action.digest in self.disk, "a slot and pages are for what is on disk"
                    self.loading.append(action)
                    self.from_host |= {action.slot} if action.digest in self.host else set()
                case Unload(slot):
                    used = {digest for digest, _ in self.joined}
                    assert self.device.pop(slot) not in used, "an adapter in use was evicted"
                case DropHost(digest):
                    self.host.discard(digest)
                case Fetch():
                    assert action.digest not in {f.digest for f in self.fetching}, "fetched twice at a time"
                    self.fetching.append(action)
                case Retain(digests):
                    assert {digest for digest, _ in (*self.joined, *self.waiting)} <= digests
                    self.disk &= digests
        for digest in self.book.queue.take_ready():
            mine = [w for w in self.waiting if w[0] == digest]
            self.waiting = [w for w in self.waiting if w[0] != digest]
            self.joined.extend(mine)
            self.served.update(number for _, number in mine)
        check_adapters(self.book)
        check_page_table(self.book.slots.pages, [page for a in self.book.adapters.values() for page in a.pages])
        extra = self.host ^ set(self.book.host.adapters)
        assert extra <= {order.digest for order in self.loading} & self.host, "the books say what is in host memory"
        for order in self.loading:
            assert len(order.pages) == self.book.slots.pages_needed(self.book.adapters[order.digest])
        assert set(self.device.values()) == {a.digest for a in self.book.slots.by_slot.values() if a.resident}
        assert {d for d, _ in self.joined} <= set(self.device.values())
        for digest, adapter in self.book.adapters.items():
            assert adapter.running == sum(d == digest for d, _ in self.joined)
            assert adapter.waiting == sum(d == digest for d, _ in self.waiting)


class ManagerMachine(RuleBasedStateMachine):
    """Sequences come, go and are cancelled; loads end well or badly; the desired list changes."""

    def __init__(self) -> None:
        super().__init__()
        self.h = Harness(slots=3, starvation=2, host_bytes=120)

    @rule(digest=DIGESTS)
    def enter(self, digest: str) -> None:
        self.h.enter(digest)

    @precondition(lambda self: self.h.joined)
    @rule(pick=st.randoms(use_true_random=False))
    def leave(self, pick: random.Random) -> None:
        self.h.leave(pick.randrange(len(self.h.joined)))

    @precondition(lambda self: self.h.waiting)
    @rule(pick=st.randoms(use_true_random=False))
    def cancel(self, pick: random.Random) -> None:
        self.h.cancel(pick.randrange(len(self.h.waiting)))

    @precondition(lambda self: self.h.loading)
    @rule(fails=st.booleans(), permanent=st.booleans())
    def load(self, fails: bool, permanent: bool) -> None:
        self.h.load(fails=fails, permanent=permanent)

    @precondition(lambda self: self.h.fetching)
    @rule(pick=st.randoms(use_true_random=False), fails=st.booleans(), permanent=st.booleans())
    def fetch(self, pick: random.Random, fails: bool, permanent: bool) -> None:
        self.h.fetch(pick.randrange(len(self.h.fetching)), fails=fails, permanent=permanent)

    @rule()
    def retry(self) -> None:
        self.h.book.retry()
        self.h.settle()

    @rule(
        wanted=st.lists(DESIRED, max_size=6, unique_by=lambda d: d.digest), removed=st.sets(DIGESTS), full=st.booleans()
    )
    def desire(self, wanted: list[DesiredAdapter], removed: set[str], full: bool) -> None:
        before = {digest for digest, adapter in self.h.book.adapters.items() if adapter.desired}
        self.h.book.apply(DesiredChange(1, full, tuple(wanted), tuple(sorted(removed))))
        self.h.settle()
        named = {d.digest for d in wanted}
        now = {digest for digest, adapter in self.h.book.adapters.items() if adapter.desired}
        assert now == named if full else now == (before - removed) | named
        coming = {order.digest for order in (*self.h.loading, *self.h.fetching)}
        live = {d for d, _ in (*self.h.joined, *self.h.waiting)} | coming
        assert not (removed - named - live) & set(self.h.book.adapters), "removed, and in no use: forgotten"

    @invariant()
    def what_is_not_missing_is_held_at_its_tier_or_says_why_not(self) -> None:
        book = self.h.book
        waited_for = {*book.prefetcher.missing()}
        for adapter in book.adapters.values():
            if (
                (adapter.tier or Tier.REMOTE) > Tier.REMOTE
                and adapter.digest not in waited_for
                and not adapter.permanent_failure
            ):
                least = Tier.DISK if adapter.degraded_reason else adapter.tier
                assert adapter.copy is HostCopy.HELD or least is Tier.DISK
                assert adapter.nearest_tier >= least

    @invariant()
    def a_free_slot_is_never_left_while_somebody_waits_for_one(self) -> None:
        if len(self.h.book.slots.by_slot) < 3:
            assert all(adapter.in_transfer for adapter in self.h.book.queue.adapters.values())

    def teardown(self) -> None:
        """Whatever happened: once loads succeed and sequences end, everybody who waits is served."""
        for _ in range(1000):
            if self.h.loading:
                self.h.load()
            elif self.h.fetching:
                self.h.fetch()
            elif self.h.joined:
                self.h.leave(0)
            elif self.h.waiting:
                assert self.h.book.queue.force_evict_pinned(), "pinned adapters are evicted where nothing else can run"
                self.h.settle()
            else:
                break
        assert not self.h.waiting
        assert not self.h.loading
        self.h.book.retry()
        self.h.settle()
        self.h.bring()
        assert not self.h.book.prefetcher.missing(), "nothing waits for a tier for ever"


ManagerMachine.TestCase.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=40)
test_slots_and_references_balance_under_any_commands = ManagerMachine.TestCase


class PagedMachine(ManagerMachine):
    """The same where adapters hold pages, and sequences take and give back some of them as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageTable(12, 1)
        self.h = Harness(slots=3, starvation=2, host_bytes=120, keep_copies=False, pages=self.pages, page_bytes=10)

    @rule(n_pages=st.integers(1, 12))
    def sequences_take(self, n_pages: int) -> None:
        free = self.h.book.free_pages()
        if not self.pages.holders() and self.h.book.slots.evict_for(n_pages):
            assert self.pages.reserve("kv", n_pages) is not None, "room was made"
            assert n_pages <= free + self.h.book.queue.pages
        self.h.settle()

    @precondition(lambda self: self.pages.holders())
    @rule()
    def sequences_give_back(self) -> None:
        self.pages.release("kv")
        self.h.book.reconcile()
        self.h.settle()

    @invariant()
    def a_free_slot_is_never_left_while_somebody_waits_for_one(self) -> None:
        book = self.h.book
        ready = [a for a in book.queue.adapters.values() if not a.in_transfer]
        if ready and len(book.slots.by_slot) < 3:
            need = book.slots.pages_needed(ready[0])
            assert need > self.pages.free_pages + book.slots.evictable_pages(), "it waits for pages, then"

    @invariant()
    def pinned_ones_leave_pages_for_sequences(self) -> None:
        slots = self.h.book.slots
        assert sum(slots.pages_needed(a) for a in self.h.book.adapters.values() if a.protected) <= slots.max_pages

    def teardown(self) -> None:
        if self.pages.holders():
            self.sequences_give_back()
        super().teardown()


PagedMachine.TestCase.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=40)
test_pages_of_adapters_balance_and_everybody_who_waits_is_served_in_the_end = PagedMachine.TestCase


def test_who_is_being_copied_to_host_memory_keeps_nobody_behind_it_waiting():
    pages = PageTable(12, 1)
    h = Harness(slots=3, starvation=2, host_bytes=120, keep_copies=False, pages=pages, page_bytes=10)
    assert pages.reserve("kv", 7) is not None
    h.enter("a4")
    h.fetch()
    h.enter("a0")
    h.fetch()
    assert not h.loading, "a4 needs 6 of 5 free pages, a0 is behind it"
    h.book.apply(DesiredChange(1, False, (desired("a4", tier=Tier.HOST),), ()))
    h.settle()
    assert [load.digest for load in h.loading] == ["a0"]


def test_a_cold_adapter_is_not_starved_by_adapters_that_never_fall_idle():
    h = Harness(slots=2, starvation=5)
    for digest in ("hot1", "hot2"):
        h.enter(digest)
        h.bring()
    cold = h.enter("cold")
    for turn in range(40):  # each hot adapter always has a sequence: a newcomer arrives before the last one leaves
        h.enter(f"hot{turn % 2 + 1}")
        h.leave(0)
        h.bring()
        if cold in h.served:
            break
    assert cold in h.served
    assert turn <= 16, "five passes close a slot, and its last sequences then finish"


def test_newcomers_of_a_closed_adapter_join_again_when_the_waiting_one_goes_away():
    h = Harness(slots=1, starvation=1)
    h.enter("hot")
    h.bring()
    h.enter("cold")
    h.fetch()
    assert h.enter("hot") in h.served, "it may be overtaken once"
    late = h.enter("hot")
    assert late not in h.served
    h.cancel([d for d, _ in h.waiting].index("cold"))
    assert late in h.served


def test_of_those_that_were_closed_the_one_with_the_most_sequences_opens_first():
    h = Harness(slots=2, starvation=1)
    for digest in ("calm", "busy", "busy"):
        h.enter(digest)
    h.bring()
    for digest, busy in (("cold0", LoadState.RESIDENT), ("cold1", LoadState.DRAINING)):
        h.enter(digest)
        h.fetch()
        h.enter("busy")
        assert h.book.adapters["calm"].state is LoadState.DRAINING, "with fewer sequences than the other"
        assert h.book.adapters["busy"].state is busy
    h.cancel([digest for digest, _ in h.waiting].index("cold1"))
    assert h.book.adapters["busy"].state is LoadState.RESIDENT
    assert h.book.adapters["calm"].state is LoadState.DRAINING, "it is empty sooner"


def test_the_least_valuable_unused_adapter_goes_first():
    book = AdapterManager(2, starvation=9)
    use(book, "dear", load_cost=10.0)
    use(book, "cheap")
    take_effects(book)
    use(book, "new")
    assert {a.digest for a in book.slots.by_slot.values()} == {"dear", "new"}
    assert Unload(1) in take_effects(book)
    for turn in range(12):  # the clock rises with what is evicted: nothing stays for ever
        use(book, f"next{turn}")
    assert "dear" not in {a.digest for a in book.slots.by_slot.values()}


def test_pinned_adapters_load_unasked_stay_and_leave_one_slot_for_the_others():
    h = Harness(slots=3, starvation=2)
    h.book.apply(whole(*(desired(f"p{i}", pinned=True) for i in range(4))))
    h.settle()
    assert [order.digest for order in h.fetching] == ["p0", "p1"]
    assert h.book.catalog.missing_pinned() == ["p0", "p1"]
    h.bring()
    assert not h.book.catalog.missing_pinned()
    for turn in range(5):
        number = h.enter(f"other{turn}")
        h.bring()
        assert number in h.served
        h.leave(0)
    assert {"p0", "p1"} <= set(h.device.values())
    h.book.apply(whole(*(desired(digest, pinned=True) for digest in ("p3", "p1", "p0"))))
    assert h.book.catalog.missing_pinned() == ["p3"], "the order of the new list decides"


def test_a_digest_that_is_removed_leaves_every_tier_after_its_last_sequence():
    h = Harness(slots=2)
    h.book.apply(whole(desired("b")))
    h.settle()
    h.enter("a")
    h.bring()
    h.book.apply(DesiredChange(2, full=False, removed=("a",)))
    h.settle()
    assert h.book.adapters["a"].nearest_tier is Tier.DEVICE, "a running stream finishes on it"
    h.leave(0)
    assert set(h.book.adapters) == {"b"}
    assert not h.device
    assert not h.host
    assert not h.disk


def test_what_a_sequence_named_stays_on_disk_without_being_desired(monkeypatch):
    monkeypatch.setattr("weft_runner.core.adapters.known.MAX_ON_DEMAND", 16)
    h = Harness(slots=2, keep_copies=False)
    h.book.apply(whole())
    h.settle()
    for i in range(40):
        assert i == 0 or "again" in h.disk
        for digest in ("again", f"d{i}"):
            h.enter(digest)
            h.bring()
            h.leave(0)
        h.book.apply(DesiredChange(2 + i, full=i % 2 == 0))
        h.settle()
        assert h.book.adapters[f"d{i}"].state is LoadState.RESIDENT
        assert len(h.disk) <= 16, "the least recently used are forgotten beyond a bound"
    assert {f"d{i}" for i in range(30, 40)} <= h.disk


def test_beyond_the_bound_a_part_is_forgotten_at_once_and_nothing_before_the_list_is_known():
    book = AdapterManager(1)
    book.catalog.find_on_disk(f"d{n}" for n in range(MAX_ON_DEMAND + 1))
    book.reconcile()
    assert len(book.adapters) == MAX_ON_DEMAND + 1
    book.apply(whole(removed=["d9"]))
    assert [digest in book.adapters for digest in ("d0", "d9")] == [True, False], "the rest is not too much"
    book.acquire("new")
    assert len(book.adapters) == MAX_ON_DEMAND - MAX_ON_DEMAND // 16
    assert "d0" not in book.adapters


def test_tiers_fall_from_device_to_host_to_disk():
    book = AdapterManager(1, host_bytes=10)
    for digest in ("a", "b"):
        use(book, digest, host_bytes=6)
    assert book.adapters["b"].nearest_tier is Tier.DEVICE
    assert book.adapters["a"].nearest_tier is Tier.DISK, "two copies are above the host budget"
    book.acquire("c")
    assert book.adapters["c"].nearest_tier is Tier.REMOTE
    assert book.adapters["b"].nearest_tier is Tier.DEVICE, "its slot is not needed before c is on disk"
    book.on_event(Fetched("c", None, None))
    assert book.adapters["b"].nearest_tier is Tier.HOST
    assert book.adapters["c"].state is LoadState.LOADING


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("where", ["fetch", "load"])
def test_a_failure_leaves_the_slot_free_and_is_reported(held, where):
    h = Harness(slots=1)
    h.book.apply(whole(*[desired("a")] * held))
    h.settle()
    h.enter("a")
    if where == "load":
        h.fetch()
        h.load(fails=True)
    else:
        h.fetch(fails=True)
    assert not h.book.slots.by_slot
    assert not h.waiting
    number = h.enter("good")
    h.bring()
    assert number in h.served
    error = "broken" if where == "load" else "out of reach"
    assert h.book.adapters["a"].reported
    assert h.book.adapters["a"].report() == AdapterState("a", Tier.REMOTE, error=error)


def test_what_turns_out_larger_than_the_device_is_reported_for_good_and_keeps_nobody_waiting():
    h = Harness(slots=2, pages=PageTable(9, 1), page_bytes=10)
    h.book.apply(whole(desired("a6")))
    h.settle()
    h.enter("a6")
    h.fetch()
    assert not h.waiting
    adapter = h.book.adapters["a6"]
    assert adapter.permanent_failure
    assert adapter.report().error == "95 bytes are 10 pages; of 9 an adapter may hold 7"
    number = h.enter("a1")
    h.bring()
    assert number in h.served


def test_slow_downloads_hold_neither_slots_nor_pages():
    pages = PageTable(12, 1)
    h = Harness(slots=2, pages=pages, page_bytes=10)
    for i in range(3, 6):
        h.enter(f"a{i}")
    assert len(h.fetching) == 3
    assert pages.free_pages == 12 == h.book.free_pages()
    last = h.enter("a1")
    h.fetch(3)
    h.load()
    assert last in h.served, "it came last, and its file was here first"
    assert [order.digest for order in h.fetching] == ["a3", "a4", "a5"]


def use(book: AdapterManager, digest: str, *, host_bytes: int = 1, load_cost: float = 1.0) -> None:
    """One sequence of that adapter comes, runs and goes."""
    if not book.acquire(digest):
        if book.adapters[digest].state is LoadState.FETCHING:
            book.on_event(Fetched(digest, None, None))
        book.on_event(Loaded(digest, 1, 1, host_bytes, load_cost))
    book.release(digest, joined=True)
    check_adapters(book)
