"""Who is where and who gets the next slot, under any sequence of commands; nobody starves."""

import itertools
import random
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft_runner.core.events import Desired, DropHost, Fetch, Load, Retain, Tier, Unload
from weft_runner.core.pages import PageBook
from weft_runner.core.residency import Residency, check_slots

DIGESTS = st.sampled_from([f"a{i}" for i in range(7)])
DESIRED = st.builds(  # sizes that are not known, true, too small, larger than all there is
    Desired,
    DIGESTS,
    n_bytes=st.sampled_from([0, 50, 20, 500]),
    pinned=st.booleans(),
    tier=st.sampled_from([Tier.REMOTE, Tier.DISK, Tier.HOST]),
)


class Harness:
    """A residency book with the adapter pool it orders: what is in a slot, on its way, in host memory."""

    HOST_BYTES = 50  # of a copy
    SIZES: ClassVar = {
        f"a{i}": n for i, n in enumerate((1, 10, 25, 40, 60, 75, 95))
    }  # on the device, whatever the list says

    def __init__(self, **settings: Any) -> None:
        self.book = Residency(**settings)
        self.device: dict[int, str] = {}
        self.loading: list[Load] = []
        self.fetching: list[Fetch] = []
        self.from_host: set[int] = set()  # slots that are loaded from a copy that was there
        self.host: set[str] = set()
        self.joined: list[tuple[str, int]] = []
        self.waiting: list[tuple[str, int]] = []
        self.numbers = itertools.count()
        self.served: set[int] = set()

    def enter(self, digest: str) -> int:
        number = next(self.numbers)
        if self.book.enter(digest):
            self.joined.append((digest, number))
            self.served.add(number)
        else:
            self.waiting.append((digest, number))
        self.settle()
        return number

    def leave(self, index: int) -> None:
        digest, _ = self.joined.pop(index)
        self.book.leave(digest, joined=True)
        self.settle()

    def cancel(self, index: int) -> None:
        digest, _ = self.waiting.pop(index)
        self.book.leave(digest, joined=False)
        self.settle()

    def load(self, index: int = 0, *, fails: bool = False, hopeless: bool = False) -> None:
        order = self.loading.pop(index)
        if order.slot not in self.from_host and order.to_host and not order.only_size:
            self.host.add(order.digest)  # it may have been read before it failed
        self.from_host.discard(order.slot)
        host_bytes = self.HOST_BYTES if order.digest in self.host else None
        if fails:
            self.book.failed(order.digest, "broken", hopeless=hopeless)
            self.give_up(order.digest)
        elif order.only_size:
            self.book.sized(order.digest, n_bytes=self.HOST_BYTES, host_bytes=host_bytes)
        else:
            self.device[order.slot] = order.digest
            size = self.SIZES.get(order.digest, 100)
            if self.book.loaded(order.digest, rank=4, n_bytes=size, host_bytes=host_bytes, cost=1.0):
                assert size == 95, "only what is larger than the device"
                self.give_up(order.digest)
        self.settle()

    def give_up(self, digest: str) -> None:
        for item in [w for w in self.waiting if w[0] == digest]:
            self.waiting.remove(item)
            self.book.leave(digest, joined=False)

    def fetch(self, index: int = 0, *, fails: bool = False, hopeless: bool = False) -> None:
        order = self.fetching.pop(index)
        if fails:
            self.book.fetch_failed(order.digest, "out of reach", hopeless=hopeless)
        elif order.to_host:
            self.host.add(order.digest)
            self.book.fetched(order.digest, host_bytes=self.HOST_BYTES)
        else:
            self.book.fetched(order.digest, host_bytes=None)
        self.settle()

    def settle(self) -> None:
        for action in self.book.take_actions():
            match action:
                case Load():
                    assert action.slot not in self.device, "a slot is emptied before it is given away"
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
        for digest in self.book.take_joinable():
            mine = [w for w in self.waiting if w[0] == digest]
            self.waiting = [w for w in self.waiting if w[0] != digest]
            self.joined.extend(mine)
            self.served.update(number for _, number in mine)
        check_slots(self.book)
        extra = self.host ^ set(self.book.host)
        assert extra <= {order.digest for order in self.loading} & self.host, "the books say what is in host memory"
        for order in self.loading:
            need = self.book.device.need(self.book.adapters[order.digest])
            assert self.book.device.pages.lent_to(order.digest) >= (0 if order.only_size else min(need, 1))
        assert set(self.device.values()) == {a.digest for a in self.book.in_slots().values() if a.resident}
        assert {d for d, _ in self.joined} <= set(self.device.values())
        for digest, adapter in self.book.adapters.items():
            assert adapter.running == sum(d == digest for d, _ in self.joined)
            assert adapter.waiting == sum(d == digest for d, _ in self.waiting)


class ResidencyMachine(RuleBasedStateMachine):
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
    @rule(fails=st.booleans(), hopeless=st.booleans())
    def load(self, fails: bool, hopeless: bool) -> None:
        self.h.load(fails=fails, hopeless=hopeless)

    @precondition(lambda self: self.h.fetching)
    @rule(pick=st.randoms(use_true_random=False), fails=st.booleans(), hopeless=st.booleans())
    def fetch(self, pick: random.Random, fails: bool, hopeless: bool) -> None:
        self.h.fetch(pick.randrange(len(self.h.fetching)), fails=fails, hopeless=hopeless)

    @rule()
    def retry(self) -> None:
        self.h.book.retry()
        self.h.settle()

    @rule(wanted=st.lists(DESIRED, max_size=6, unique_by=lambda d: d.digest))
    def desire(self, wanted: list[Desired]) -> None:
        self.h.book.set_desired(wanted)
        self.h.settle()
        coming = {order.digest for order in (*self.h.loading, *self.h.fetching)}
        live = {d for d, _ in (*self.h.joined, *self.h.waiting)} | coming
        assert set(self.h.book.adapters) <= {d.digest for d in wanted} | live, "the rest is forgotten"

    @invariant()
    def what_is_not_missing_is_held_at_its_tier_or_says_why_not(self) -> None:
        book = self.h.book
        waited_for = {*book.keeper.missing()}
        for adapter in book.adapters.values():
            if adapter.tier > Tier.REMOTE and adapter.digest not in waited_for and not adapter.hopeless:
                least = Tier.DISK if adapter.shortfall else adapter.tier
                assert adapter.digest in book.host or least is Tier.DISK
                assert book.tier_of(adapter) >= least

    @invariant()
    def a_free_slot_is_never_left_while_somebody_waits_for_one(self) -> None:
        if len(self.h.book.in_slots()) < 3:
            assert not self.h.book.queue

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
                assert self.h.book.force(), "pinned adapters give way where nothing else can go on"
                self.h.settle()
            else:
                break
        assert not self.h.waiting
        assert not self.h.loading
        self.h.book.retry()
        self.h.settle()
        while self.h.loading or self.h.fetching:
            self.h.load() if self.h.loading else self.h.fetch()
        assert not self.h.book.keeper.missing(), "nobody waits for a tier for ever"


ResidencyMachine.TestCase.settings = settings(stateful_step_count=40)
test_slots_and_references_balance_under_any_commands = ResidencyMachine.TestCase


class PagedMachine(ResidencyMachine):
    """The same where adapters hold pages, and sequences take and give back some of them as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageBook(12, 1)
        self.h = Harness(slots=3, starvation=2, host_bytes=120, keep_copies=False, pages=self.pages, page_bytes=10)

    @rule(n_pages=st.integers(1, 12))
    def sequences_take(self, n_pages: int) -> None:
        free = self.h.book.free_pages()
        if not self.pages.holders() and self.h.book.device.give_way(n_pages):
            assert self.pages.reserve("kv", n_pages) is not None, "room was made"
            assert n_pages <= free + self.h.book.waited_pages()
        self.h.settle()

    @precondition(lambda self: self.pages.holders())
    @rule()
    def sequences_give_back(self) -> None:
        self.pages.release("kv")
        self.h.book.settle()
        self.h.settle()

    @invariant()
    def a_free_slot_is_never_left_while_somebody_waits_for_one(self) -> None:
        book = self.h.book
        if book.queue and len(book.in_slots()) < 3:
            need = book.device.need(book.adapters[book.queue[0]])
            assert need > self.pages.free_pages + book.device.give_back_pages(), "it waits for pages, then"

    @invariant()
    def pinned_ones_leave_pages_for_sequences(self) -> None:
        device = self.h.book.device
        assert sum(device.need(a) for a in self.h.book.adapters.values() if a.protected) <= device.most_pages

    def teardown(self) -> None:
        if self.pages.holders():
            self.sequences_give_back()
        super().teardown()


PagedMachine.TestCase.settings = settings(stateful_step_count=40)
test_pages_of_adapters_balance_and_everybody_who_waits_is_served_in_the_end = PagedMachine.TestCase


def test_a_cold_adapter_is_not_starved_by_adapters_that_never_fall_idle():
    h = Harness(slots=2, starvation=5)
    for digest in ("hot1", "hot2"):
        h.enter(digest)
        h.load()
    cold = h.enter("cold")
    for turn in range(40):  # each hot adapter always has a sequence: a newcomer arrives before the last one leaves
        h.enter(f"hot{turn % 2 + 1}")
        h.leave(0)
        if h.loading:
            h.load()
        if cold in h.served:
            break
    assert cold in h.served
    assert turn <= 16, "five passes close a slot, and its last sequences then finish"


def test_without_ageing_the_same_adapter_would_wait_for_ever():
    h = Harness(slots=2, starvation=10**9)
    for digest in ("hot1", "hot2"):
        h.enter(digest)
        h.load()
    cold = h.enter("cold")
    h.enter("hot1")
    h.enter("hot2")
    for turn in range(40):
        h.enter(f"hot{turn % 2 + 1}")
        h.leave(0)
    assert cold not in h.served


def test_newcomers_of_a_closed_adapter_join_again_when_the_waiting_one_goes_away():
    h = Harness(slots=1, starvation=1)
    h.enter("hot")
    h.load()
    h.enter("cold")
    h.enter("hot")
    late = h.enter("hot")
    assert late not in h.served
    h.cancel([d for d, _ in h.waiting].index("cold"))
    assert late in h.served


def test_the_least_valuable_unused_adapter_goes_first():
    book = Residency(2, starvation=9)
    for digest, cost in (("dear", 10.0), ("cheap", 1.0)):
        book.enter(digest)
        book.loaded(digest, rank=1, n_bytes=1, host_bytes=1, cost=cost)
        book.leave(digest, joined=True)
    book.enter("new")
    assert {a.digest for a in book.in_slots().values()} == {"dear", "new"}
    assert Unload(1) in book.take_actions()
    book.loaded("new", rank=1, n_bytes=1, host_bytes=1, cost=1.0)
    book.leave("new", joined=True)
    for turn in range(12):  # the clock rises with what is evicted: nothing stays for ever
        book.enter(f"next{turn}")
        book.loaded(f"next{turn}", rank=1, n_bytes=1, host_bytes=1, cost=1.0)
        book.leave(f"next{turn}", joined=True)
    assert "dear" not in {a.digest for a in book.in_slots().values()}


def test_pinned_adapters_load_unasked_stay_and_leave_one_slot_for_the_others():
    h = Harness(slots=3, starvation=2)
    h.book.set_desired([Desired(f"p{i}", pinned=True) for i in range(4)])
    h.settle()
    assert [order.digest for order in h.loading] == ["p0", "p1"]
    assert h.book.missing_pinned() == ["p0", "p1"]
    h.load()
    h.load()
    assert not h.book.missing_pinned()
    for turn in range(5):
        number = h.enter(f"other{turn}")
        h.load()
        assert number in h.served
        h.leave(0)
    assert {"p0", "p1"} <= set(h.device.values())


def test_a_digest_that_is_no_longer_desired_leaves_every_tier_after_its_last_sequence():
    h = Harness(slots=2)
    h.book.set_desired([Desired("a"), Desired("b")])
    h.enter("a")
    h.load()
    h.book.set_desired([Desired("b")])
    h.settle()
    assert h.book.tier_of(h.book.adapters["a"]) is Tier.DEVICE, "a running stream finishes on it"
    h.leave(0)
    assert set(h.book.adapters) == {"b"}
    assert not h.device
    assert not h.host


def test_tiers_fall_from_device_to_host_to_disk():
    book = Residency(1, host_bytes=10)
    for digest in ("a", "b"):
        book.enter(digest)
        book.loaded(digest, rank=1, n_bytes=1, host_bytes=6, cost=1.0)
        book.leave(digest, joined=True)
    assert book.tier_of(book.adapters["b"]) is Tier.DEVICE
    assert book.tier_of(book.adapters["a"]) is Tier.DISK, "two copies are above the host budget"
    book.enter("c")
    assert book.tier_of(book.adapters["b"]) is Tier.HOST
    assert book.tier_of(book.adapters["c"]) is Tier.REMOTE


@pytest.mark.parametrize("digest", ["known", "unknown"])
def test_a_failed_load_leaves_the_slot_free_and_the_error_told(digest):
    h = Harness(slots=1)
    if digest == "known":
        h.book.set_desired([Desired("known")])
    h.enter(digest)
    h.load(fails=True)
    assert not h.book.in_slots()
    assert not h.waiting
    number = h.enter("good")
    h.load()
    assert number in h.served
    if digest == "known":
        assert h.book.adapters["known"].error == "broken"


def test_an_adapter_that_is_larger_than_was_told_does_not_give_way_to_itself():
    pages = PageBook(4, 16)
    book = Residency(2, pages=pages, page_bytes=10)
    book.set_desired([Desired("other", n_bytes=20, pinned=True)])
    book.loaded("other", rank=1, n_bytes=20, host_bytes=None, cost=1.0)
    book.set_desired([Desired("other", n_bytes=20), Desired("larger", n_bytes=10)])
    assert not book.enter("larger")
    assert pages.reserve("sequence", 1) is not None
    book.leave("larger", joined=False)
    assert pages.free_pages == 0
    assert book.loaded("larger", rank=1, n_bytes=30, host_bytes=None, cost=1.0) == ""
    assert [adapter.digest for adapter in book.in_slots().values()] == ["larger"]
    assert pages.lent_to("larger") == 3
    check_slots(book)
