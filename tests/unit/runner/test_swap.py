"""KV in host memory: who leaves, when it comes back, and that its answer is the one of an undisturbed run."""

import ctypes
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

from harness.desired import whole
from harness.native_library import native_library
from harness.runner_machine import flat, session, start_of, state_of, take
from harness.small_runner import executor_of
from harness.waiting import PATIENCE_S, wait_until
from weft.domain.ids import Epoch
from weft.domain.machine import Send
from weft.domain.request import Ended, NoCapacity, Priority, Sampling
from weft_kernels.cpu import memory as host_memory
from weft_runner.core import Action, BatchLimits, Fetch, Fetched, PoolLimits, SampledToken, StepModel, Unload
from weft_runner.core.adapters.adapter import Adapter, HostCopy
from weft_runner.core.events import REPORT, DropSwap, Load, Loaded, StepResults, SwapDone, SwapFailed, SwapIn, SwapOut
from weft_runner.core.host_cache import CachedPage, HostCache, check_host_cache
from weft_runner.core.request_pool import RequestPool, check_pool
from weft_runner.core.sequence import SequencePhase
from weft_runner.core.swap.swaps import MAX_SWAPS
from weft_runner.model import LocalKvMemory, NativeKvMemory
from weft_runner.shell import KvSwapper, StepGaps

PAGE = 10  # bytes
LIMITS = PoolLimits(
    total_pages=8, page_tokens=4, max_sequences=5, max_adapters=2, max_context_tokens=32, vocab_size=99,
    batch=BatchLimits(max_prefills=2, max_batch_tokens=32), host_bytes=100, swap_page_bytes=PAGE,
)  # fmt: skip


def begin(pool: RequestPool, key: str, arrived: float, prompt: int = 8, **fields: Any) -> None:
    fields = {"max_tokens": 20, "reservation_tokens": 1, **fields}
    start = start_of(key, round(arrived), (1,) * prompt, **fields)
    pool.start(start, session(), "g", arrived)


def step(pool: RequestPool) -> None:
    batch = pool.schedule()
    if batch.rows:
        pool.account(batch, StepResults({row.key: SampledToken(5) for row in batch.rows if row.samples}, {}))
    check_pool(pool)


def copies(pool: RequestPool) -> list[SwapOut | SwapIn]:
    return take(pool, SwapOut, SwapIn)


def dropped(pool: RequestPool) -> DropSwap:
    drops = take(pool, DropSwap)
    return DropSwap(*(tuple(one for drop in drops for one in of(drop)) for of in map(attrgetter, ("numbers", "hosts"))))


def copied(pool: RequestPool, order: SwapOut | SwapIn, seconds: float = 1e-9) -> None:
    pool.on_swap_event(SwapDone(order.number, len(order.pages), seconds))
    check_pool(pool)


def until_one_leaves(pool: RequestPool) -> SwapOut:
    for _ in range(40):
        step(pool)
        if found := copies(pool):
            assert isinstance(found[0], SwapOut)
            return found[0]
    raise AssertionError("nobody left")


def two(limits: PoolLimits = LIMITS, **fields: Any) -> RequestPool:
    """Make a pool of eight pages: the old sequence has three, and grows."""
    pool = RequestPool(limits)
    begin(pool, "old", 1, **fields)
    begin(pool, "new", 2, reservation_tokens=12, **fields)
    return pool


def refused(pool: RequestPool) -> list[str]:
    return [message.request_id for message in flat(take(pool, Send)) if isinstance(message, NoCapacity)]


def phase(pool: RequestPool, key: str) -> SequencePhase:
    return pool.sequences[key].phase


def test_the_latest_arrival_is_swapped_to_host_memory_and_comes_back_when_its_pages_are_free():
    pool = two()
    order = until_one_leaves(pool)
    assert phase(pool, "new") is SequencePhase.SWAP_OUT
    assert phase(pool, "old") is SequencePhase.PAUSED, "no page has another owner before its copy is complete"
    assert pool.swap.moving
    assert not state_of(pool).overruns, "nobody has to be moved"
    assert len(order.pages) == pool.pages.pages_for(pool.sequences["new"].in_kv)
    copied(pool, order)
    assert (phase(pool, "new"), phase(pool, "old")) == (SequencePhase.SWAPPED, SequencePhase.DECODE)
    assert (pool.swapping.owed_pages(), pool.preemption.preemptions) == (5, 1), "it wants back what it had"
    assert not pool.swap.moving, "nothing says that a copy is complete while none is under way"
    assert pool.sequences["new"].reservation_tokens == 12, "the overrunner's doubles, not the victim's"
    assert pool.adapters.host.kv_bytes == PAGE * len(order.pages)
    while "old" in pool.sequences:
        step(pool)
    (back,) = copies(pool)
    assert back == SwapIn(order.number, order.hosts, tuple(pool.pages.pages_of("new")[: len(order.pages)]))
    assert phase(pool, "new") is SequencePhase.SWAP_IN
    assert pool.swap.moving
    copied(pool, back)
    assert phase(pool, "new") is SequencePhase.DECODE
    assert dropped(pool) == DropSwap((order.number,), order.hosts)
    assert (pool.adapters.host.kv_bytes, pool.swap.by_key) == (0, {})
    while pool.sequences:
        step(pool)
    assert sum(len(m.tokens) for m in flat(take(pool, Send))) == 40


def test_a_sequence_whose_pages_are_back_is_not_on_its_way_though_it_may_wait_for_its_adapter():
    pool = two()
    copied(pool, until_one_leaves(pool))
    while "old" in pool.sequences:
        step(pool)
    (back,) = copies(pool)
    pool.swap.on_copied(back.number, len(back.pages), 1e-9)
    assert phase(pool, "new") is SequencePhase.SWAP_IN
    assert not pool.swap.moving


@pytest.mark.parametrize(("pages", "seconds"), [(0, 0.5), (4, 0.0)])
def test_a_copy_that_measures_nothing_changes_no_estimate(pages: int, seconds: float):
    """A sequence may leave with no pages of its own; a clock may not have moved."""
    pool = two()
    before = pool.swap.copy_ms(10)
    pool.swap.on_copied(pool.swap.next_number(), pages, seconds)
    assert pool.swap.copy_ms(10) == before


def test_the_time_of_copies_and_of_sequences_that_stand_still_is_counted():
    pool = two()
    order = until_one_leaves(pool)
    pool.account_stall_time(10.0)
    pool.account_stall_time(11.0)  # one on its way out, the other one paused
    copied(pool, order, seconds=0.5)
    pool.account_stall_time(14.0)  # one out
    assert (pool.swap.copy_s, pool.preemption.stalled_s) == (0.5, pytest.approx(2 * 11.0 + 3.0))
    while pool.sequences:
        step(pool)
        for back in copies(pool):
            copied(pool, back, seconds=0.25)
    stalled_s = pool.preemption.stalled_s
    pool.account_stall_time(20.0)
    assert (pool.swap.copy_s, pool.preemption.stalled_s) == (0.75, stalled_s)


def test_no_newcomer_gets_the_pages_that_a_swapped_sequence_waits_for():
    pool = two()
    copied(pool, until_one_leaves(pool))
    assert pool.pages.free_pages > 0
    assert state_of(pool).free_pages == 0, "and the scheduler is told so"
    begin(pool, "late", 3, prompt=1)
    assert refused(pool) == ["late"]
    assert "late" not in pool.sequences


def test_a_batch_sequence_leaves_first_and_holds_no_interactive_newcomer_up():
    """However old it is; a batch newcomer waits for it, and it comes back before that one."""
    pool = RequestPool(LIMITS)
    begin(pool, "line", 1, reservation_tokens=12, priority=Priority.BATCH)
    begin(pool, "chat", 2)
    order = until_one_leaves(pool)
    assert pool.sequences["line"].phase is SequencePhase.SWAP_OUT
    copied(pool, order)
    assert state_of(pool).free_pages > 0, "what it wants back is promised to no interactive newcomer"
    begin(pool, "another line", 3, prompt=1, priority=Priority.BATCH)
    assert refused(pool) == ["another line"]
    begin(pool, "more", 4, prompt=1)
    assert "more" in pool.sequences
    check_pool(pool)


def test_under_s3_the_overrunner_itself_leaves_and_wants_twice_its_reservation():
    pool = RequestPool(LIMITS)
    begin(pool, "old", 1, leaves=True, reservation_tokens=5)
    begin(pool, "new", 2, leaves=True, reservation_tokens=12, prompt=3)
    order = until_one_leaves(pool)
    assert phase(pool, "old") is SequencePhase.SWAP_OUT
    assert phase(pool, "new") is SequencePhase.DECODE
    assert pool.sequences["old"].reservation_tokens == 12
    copied(pool, order)
    assert pool.swap.by_key["old"].wanted_pages == pool.pages.pages_for(8 + 12)


@pytest.mark.parametrize(
    ("why", "limits", "seconds"),
    [
        ("host memory is full", replace(LIMITS, host_bytes=2 * PAGE), 0.0),
        ("recomputing is cheaper", LIMITS, 100.0),
        ("this executor swaps nothing", replace(LIMITS, swap_page_bytes=0), 0.0),
    ],
)
def test_where_no_swap_helps_the_supervisor_names_a_victim(why, limits, seconds):
    pool = two(limits)
    if seconds:
        for _ in range(100):
            pool.on_swap_event(SwapDone(0, 1, seconds))  # of one that has ended: how fast it was counts
    while not pool.reservations.paused:
        step(pool)
    assert not copies(pool), why
    assert [overrun.request_id for overrun in state_of(pool).overruns] == [next(iter(pool.reservations.paused))]
    assert REPORT in pool.timers


DEAR = StepModel(base_ms=1.0, row_ms=0.0, key_ms=0.0, token_ms=0.25)  # a page of a prompt: a millisecond


@pytest.mark.parametrize(("pages_per_s", "dearer"), [(2000, False), (2001, True)])
def test_kv_is_copied_where_computing_it_again_is_dearer_than_both_ways(pages_per_s: int, dearer: bool):
    pool = RequestPool(LIMITS, DEAR)
    pool.swap.bytes_per_s = float(PAGE * pages_per_s)
    begin(pool, "old", 1)
    begin(pool, "new", 2, reservation_tokens=12)
    while not pool.reservations.paused:
        step(pool)
    assert bool(copies(pool)) == dearer


@pytest.mark.parametrize(("pages_per_s", "dearer"), [(2000, False), (2001, True)])
def test_pages_of_earlier_prompts_are_copied_where_that_is_so_for_them_and_not_too_many_at_once(pages_per_s, dearer):
    pool = RequestPool(replace(LIMITS, total_pages=40, max_context_tokens=160, host_bytes=1000), DEAR)
    pool.swap.bytes_per_s = float(PAGE * pages_per_s)
    for key, prompt in (("first", 145), ("second", 145), ("third", 9)):
        begin(pool, key, 1, prompt=prompt, max_tokens=3, cache_salt="t")
        while pool.sequences:
            step(pool)
    assert [len(order.pages) for order in copies(pool)] == [32] * dearer


@pytest.mark.parametrize(("pages_per_s", "sooner"), [(1000, False), (1001, True)])
@pytest.mark.parametrize("beside", [False, True])
def test_pages_are_read_from_host_memory_where_that_is_sooner_than_computing_them(pages_per_s, sooner, beside):
    """Who waits for a copy misses a step of those that run meanwhile."""
    pool = RequestPool(replace(LIMITS, host_bytes=1000), DEAR)
    for key, salt in (("first", "t"), ("second", "t"), ("other", "u"), ("last", "v"), ("all", "w")):
        begin(pool, key, 1, prompt=29 if key == "all" else 9, max_tokens=3, cache_salt=salt)
        while pool.sequences:
            step(pool)
            for order in copies(pool):
                copied(pool, order)
    assert len(pool.host_prefixes) == 2
    if beside:
        begin(pool, "beside", 1, prompt=4)
        step(pool)
    pool.swap.bytes_per_s = float(PAGE * pages_per_s)
    begin(pool, "again", 2, prompt=9, cache_salt="t")
    assert (phase(pool, "again") is SequencePhase.SWAP_IN) == (sooner and not beside)


@pytest.mark.parametrize("when", [SequencePhase.SWAP_OUT, SequencePhase.SWAPPED, SequencePhase.SWAP_IN])
@pytest.mark.parametrize("how", ["stop", "close", "drain", "higher epoch"])
def test_whatever_ends_a_swapped_sequence_frees_both_sides_at_once(when, how):
    pool = two()
    order = until_one_leaves(pool)
    if when is not SequencePhase.SWAP_OUT:
        copied(pool, order)
    if when is SequencePhase.SWAP_IN:
        pool.stop("old", Epoch(1, 1), session())
    assert phase(pool, "new") is when
    match how:
        case "stop":
            pool.stop("new", Epoch(1, 2), session())
        case "close":
            pool.cancel_session(session())
        case "drain":
            pool.drain.order(0.0, on=True)
        case _:
            begin(pool, "new", 3, prompt=1)
    check_pool(pool)
    assert pool.adapters.host.kv_bytes == 0
    drop = dropped(pool)
    assert order.number in drop.numbers
    assert {*order.hosts} <= {*drop.hosts}
    assert order.number not in [copy.number for copy in copies(pool)], "a copy that has not begun never does"
    pool.on_swap_event(SwapDone(order.number, 1, 1.0))  # it had ended already
    check_pool(pool)
    if how in ("close", "drain"):
        assert pool.pages.free_pages == 8


@pytest.mark.parametrize("back", [False, True])
def test_a_copy_that_fails_gives_its_sequence_back_to_be_recomputed(back):
    pool = two()
    order = until_one_leaves(pool)
    if back:
        copied(pool, order)
        pool.stop("old", Epoch(1, 1), session())
    pool.on_swap_event(SwapFailed(order.number, "no memory"))
    check_pool(pool)
    assert "new" not in pool.sequences
    assert refused(pool) == ["new"]
    assert (pool.adapters.host.kv_bytes, pool.preemption.preemptions) == (0, 1)


def test_one_request_is_swapped_a_bounded_number_of_times_and_then_has_all_its_pages():
    pool = two(max_tokens=24)
    pool.sequences["new"].swaps = MAX_SWAPS - 1
    copied(pool, until_one_leaves(pool))
    assert pool.swap.by_key["new"].wanted_pages == 8
    while "old" in pool.sequences:
        step(pool)
    copied(pool, copies(pool)[0])
    assert len(pool.pages.pages_of("new")) == 8


def joined(pool: RequestPool, digest: str, host_bytes: int = 30) -> None:
    pool.on_adapter_event(Fetched(digest, 20, None))
    pool.on_adapter_event(Loaded(digest, 1, 20, host_bytes, 1.0))
    take(pool, Action)


def test_an_adapter_may_leave_the_device_with_its_sequence_and_comes_back_with_it():
    pool = RequestPool(replace(LIMITS, page_bytes=PAGE, total_pages=9))
    begin(pool, "old", 1, max_tokens=24)
    begin(pool, "new", 2, adapter="a", adapter_bytes=20)
    joined(pool, "a")
    order = until_one_leaves(pool)
    copied(pool, order)
    assert pool.swapping.owed_pages() == pool.swap.by_key["new"].wanted_pages, "its adapter is still there"
    while "old" in pool.sequences and Unload(0) not in pool.effects:
        step(pool)
    assert pool.swapping.owed_pages() == pool.swap.by_key["new"].wanted_pages + 2
    while "old" in pool.sequences:
        step(pool)
    copied(pool, copies(pool)[0])
    assert phase(pool, "new") is SequencePhase.SWAP_IN, "its KV waits for its adapter"
    joined(pool, "a")
    assert phase(pool, "new") is SequencePhase.DECODE
    check_pool(pool)


def test_an_adapter_whose_swapped_sequence_has_ended_is_reported_anew():
    pool = RequestPool(LIMITS)
    begin(pool, "old", 1)
    begin(pool, "new", 2, reservation_tokens=12, adapter="a")
    joined(pool, "a")
    copied(pool, until_one_leaves(pool))
    pool.adapters.dirty.clear()
    pool.stop("new", Epoch(1, 2), session())
    assert [adapter.report().running for adapter in pool.adapters.dirty.values()] == [0]


def test_copies_of_adapters_leave_host_memory_for_kv_but_for_the_one_that_the_kv_needs():
    pool = RequestPool(replace(LIMITS, max_adapters=3, host_bytes=100))
    for digest in ("other", "a"):
        begin(pool, digest, 1, prompt=1, max_tokens=1, adapter=digest)
        joined(pool, digest, host_bytes=40)
        while pool.sequences:
            step(pool)
    begin(pool, "old", 1)
    begin(pool, "new", 2, adapter="a")
    assert set(pool.adapters.host.adapters) == {"other", "a"}
    copied(pool, until_one_leaves(pool))
    assert set(pool.adapters.host.adapters) == {"a"}
    assert pool.adapters.host.kv_bytes == 40
    assert not pool.adapters.host.reserve_kv(40, ""), "KV without its adapter is of no use"


def test_pages_that_others_still_read_are_read_again_instead_of_being_copied_back():
    pool = RequestPool(replace(LIMITS, total_pages=8))
    for arrived, key in enumerate(("old", "new"), 1):
        begin(pool, key, arrived, cache_salt="t", prompt=9, max_tokens=16)
        step(pool)
    order = until_one_leaves(pool)
    copied(pool, order)
    assert len(order.pages) >= 3
    pool.stop("old", Epoch(1, 1), session())
    (back,) = copies(pool)
    assert isinstance(back, SwapIn)
    assert (back.hosts, back.pages) == ((), ()), "they are in the prefix cache"


# ---- pages of earlier prompts


def held(host: HostCache, digest: str, n_bytes: int) -> Adapter:
    adapter = Adapter(digest)
    adapter.advance_copy(HostCopy.COPYING)
    host.hold(adapter, n_bytes)
    return adapter


def cached(host: HostCache, name: bytes, adapter: str) -> bool:
    page = CachedPage(name, adapter, host=1, host_bytes=20, number=1)
    there, page.number = host.cache(page), 0
    check_host_cache(host)
    return there


def test_what_was_used_longest_ago_leaves_host_memory_and_pages_before_their_adapter():
    host = HostCache(100, lambda _: None, lambda _: None)
    held(host, "a", 20)
    held(host, "b", 20)
    assert cached(host, b"of a", "a")
    assert cached(host, b"of the base", "")
    assert cached(host, b"more of a", "a")
    assert host.free_bytes == 0
    assert host.reserve_kv(20, "")
    assert (list(host.adapters), list(host.cached)) == (["a"], [b"of a", b"of the base", b"more of a"])
    assert cached(host, b"new", "")
    assert (list(host.adapters), list(host.cached)) == (["a"], [b"of the base", b"more of a", b"new"])
    assert host.reserve_kv(60, "a"), "KV of a sequence is never refused for that of earlier prompts"
    assert (list(host.adapters), list(host.cached)) == (["a"], []), "nor does it take the adapter that it needs"
    assert not cached(host, b"newest", "a")
    check_host_cache(host)


def served(pool: RequestPool, key: str, salt: str) -> None:
    """A prompt of two full pages, for adapter `a`, to its end."""
    begin(pool, key, 1, prompt=9, max_tokens=3, adapter="a", cache_salt=salt)
    for _ in range(20):
        step(pool)
        for order in take(pool, Action):
            if isinstance(order, Load):
                pool.on_adapter_event(Loaded("a", 1, 20, None, 1.0))
            elif isinstance(order, Fetch):
                pool.on_adapter_event(Fetched("a", 20, None))
        for order in copies(pool):
            copied(pool, order)
    assert not pool.sequences


def test_only_a_page_that_was_needed_twice_is_copied_and_it_leaves_with_its_adapter():
    pool = RequestPool(replace(LIMITS, host_bytes=1000))
    for number, salt in enumerate("ttuvwx"):
        served(pool, str(number), salt)
    assert len(pool.host_prefixes) == 2, "the first prompt's pages, which the second one has read"
    served(pool, "again", "u")
    assert len(pool.host_prefixes) == 4, "and those that were computed again"
    served(pool, "back", "t")
    assert pool.reuse.host_tokens == 8
    pool.apply(whole(removed=["a"]))
    check_pool(pool)
    assert len(pool.host_prefixes) == 0
    assert len(dropped(pool).hosts) == 4


def test_who_takes_a_page_whose_copy_is_under_way_ends_the_copy():
    pool = RequestPool(replace(LIMITS, host_bytes=1000))
    for key, salt in (("first", "t"), ("second", "t"), ("other", "u"), ("last", "v")):
        begin(pool, key, 1, prompt=9, max_tokens=3, cache_salt=salt)
        while pool.sequences:
            step(pool)
    (order,) = copies(pool)
    assert len(order.pages) == 2, "those that the second one has read"
    begin(pool, "large", 2, prompt=29, max_tokens=3)
    step(pool)
    assert pool.pages.free_pages == 0
    assert dropped(pool).numbers == (order.number,)
    assert len(pool.host_prefixes) == 0


def test_a_copy_ends_before_host_memory_drops_a_page_that_it_reads():
    """The copy of a large adapter takes host memory while a sequence waits for its prompt's pages, and is stopped."""
    pool = RequestPool(replace(LIMITS, host_bytes=40))
    for key, salt in (("first", "t"), ("second", "t"), ("other", "u"), ("last", "v"), ("all", "w")):
        begin(pool, key, 1, prompt=29 if key == "all" else 9, max_tokens=3, cache_salt=salt)
        while pool.sequences:
            step(pool)
            for order in copies(pool):
                copied(pool, order)
    begin(pool, "again", 2, prompt=9, cache_salt="t")
    (read,) = copies(pool)
    held(pool.adapters.host, "large", 40)
    pool.stop("again", Epoch(1, 2), session())
    first, second = read.hosts
    drops = take(pool, DropSwap)[-3:]
    assert drops == [DropSwap((read.number,), ()), DropSwap((), (second,)), DropSwap((), (first,))]


def test_an_adapters_page_is_not_cleared_for_a_sequence_that_ended_before_its_first_step():
    pool = RequestPool(replace(LIMITS, page_bytes=PAGE))
    begin(pool, "all", 1, prompt=30)
    assert pool.pages.free_pages == 0
    pool.stop("all", Epoch(1, 1), session())
    begin(pool, "new", 2, prompt=1, adapter="a")
    joined(pool, "a")
    assert {*pool.reservations.take_granted()}.isdisjoint(pool.adapters.adapters["a"].pages)


# ---- copies


class Beside(LocalKvMemory):
    """A model whose copies run on a thread of their own."""

    between_steps = False


class Slow(Beside):
    """A copy waits at its second page."""

    def __init__(self, pages: Any) -> None:
        super().__init__(pages)
        self.reached, self.go, self.count = threading.Event(), threading.Event(), 0

    def copy_out(self, pages: Sequence[int], hosts: Sequence[Any], fence: None) -> None:
        self.count += 1
        if self.count == 2:
            self.reached.set()
            assert self.go.wait(PATIENCE_S)
        super().copy_out(pages, hosts, fence)


def gaps() -> StepGaps:
    return StepGaps(lambda: None)


def test_a_drop_ends_a_copy_that_is_under_way_before_anything_else_is_done(monkeypatch):
    monkeypatch.setattr("weft_runner.shell.kv_swapper.SLICE_BYTES", PAGE)
    memory = Slow(np.arange(80, dtype=np.uint8).reshape(8, 10))
    reports: list[Any] = []
    swapper = KvSwapper(memory, reports.append, gaps())
    swapper.execute(SwapOut(1, (0, 1, 2, 3), (6, 7, 8, 9)))
    assert memory.reached.wait(PATIENCE_S)
    copy = swapper._copies[1]
    dropping = threading.Thread(target=swapper.execute, args=(DropSwap((1,), (6, 7, 8, 9)),))
    dropping.start()
    wait_until(lambda: copy.dropped, "the copy is dropped")
    memory.go.set()
    dropping.join(PATIENCE_S)
    swapper.execute(SwapOut(2, (5,), (1,)))
    swapper.execute(SwapIn(2, (1,), (6,)))
    swapper._thread.shutdown(wait=True)
    assert memory.count == 3, "the page that was being copied, the one before it, and the other sequence's"
    assert [(report.number, report.pages) for report in reports] == [(2, 1), (2, 1)]
    assert memory._pages[6].tolist() == list(range(50, 60))


def native_memory(pages: Any) -> NativeKvMemory:
    library = native_library()
    memory = host_memory.MappedMemory(pages.nbytes)
    ctypes.memmove(memory.address, pages.ctypes.data, pages.nbytes)
    return NativeKvMemory(library, library.pool(2), memory, pages.shape[1])


def bytes_of(memory: Any) -> Any:
    if isinstance(memory, LocalKvMemory):
        return memory._pages
    held = memory._memory
    return np.frombuffer(ctypes.string_at(held.address, held.n_bytes), np.uint8).reshape(-1, memory.page_bytes)


@pytest.mark.parametrize("make", [LocalKvMemory, Beside, native_memory])
@pytest.mark.parametrize("slice_bytes", [1, 2 * 130_000, 1 << 30])
def test_what_is_copied_out_and_back_is_the_same_bytes_in_slices(monkeypatch, make, slice_bytes):
    monkeypatch.setattr("weft_runner.shell.kv_swapper.SLICE_BYTES", slice_bytes)
    drawn = np.random.default_rng(1).integers(0, 256, (6, 130_000), dtype=np.uint8)
    memory, reports, between = make(drawn.copy()), [], gaps()
    swapper = KvSwapper(memory, reports.append, between)
    swapper.execute(SwapOut(1, (4, 1, 3), (7, 8, 9)))
    swapper.execute(SwapIn(1, (8, 9), (0, 5)))
    between.close()
    swapper._thread.shutdown(wait=True)
    assert [type(report) for report in reports] == [SwapDone, SwapDone]
    assert np.array_equal(bytes_of(memory), drawn[[1, 1, 2, 3, 4, 3]])


def test_between_steps_a_drop_ends_a_copy_and_a_failure_is_reported(monkeypatch):
    monkeypatch.setattr("weft_runner.shell.kv_swapper.SLICE_BYTES", PAGE)
    memory, reports, between = LocalKvMemory(np.zeros((8, PAGE), np.uint8)), [], gaps()
    swapper = KvSwapper(memory, reports.append, between)
    swapper.execute(SwapOut(1, (0, 1, 2), (1, 2, 3)))
    swapper.execute(SwapOut(2, (9,), (4,)))
    between.advance()
    swapper.execute(DropSwap((1,), (1, 2, 3)))
    while between.advance():
        pass
    (failed,) = reports
    assert isinstance(failed, SwapFailed)
    assert failed.number == 2


def test_a_copy_back_of_a_page_that_is_not_there_fails_and_leaves_none():
    memory, reports, between = LocalKvMemory(np.zeros((8, PAGE), np.uint8)), [], gaps()
    swapper = KvSwapper(memory, reports.append, between)
    swapper.execute(SwapIn(1, (7,), (0,)))
    between.advance()
    assert [type(report) for report in reports] == [SwapFailed]
    assert not swapper._host


# ---- answers


GREEDY = Sampling(ignore_eos=True)


def answers_of(make: Callable[..., Any], **limits: Any) -> tuple[dict[str, list[int]], Any]:
    driver, adapters, drawn = make(max_sequences=6, **limits), ("a", "b", ""), random.Random(3)
    driver.post(*(driver.request(f"first of {name}", [7, 8, 9], 1, name, reservation_tokens=1) for name in adapters))
    driver.finish(5000)  # however slowly adapters load, all that is compared runs at the same time
    requests = [
        driver.request(
            f"r{i}", drawn.choices(range(3, 60), k=drawn.randint(5, 30)), 60, adapters[i % 3],
            reservation_tokens=3, cache_salt="t",
            sampling=GREEDY if i % 2 else Sampling(temperature=1.0, top_p=0.9, seed=i, ignore_eos=True),
        )
        for i in range(6)
    ]  # fmt: skip
    driver.post(*requests)
    driver.finish(5000)
    assert not [event for event in driver.events if isinstance(event, Ended | NoCapacity)]
    return {request.request_id: driver.answer(request.request_id) for request in requests}, driver


@pytest.fixture
def copies_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, the measured rate of copies does not make computing again the cheaper way."""
    monkeypatch.setattr("weft_runner.core.swap.swaps.RATE", 0.0)


@pytest.mark.parametrize("kind", ["reference", "cpu"])
@pytest.mark.usefixtures("copies_are_cheap")
def test_swapped_sequences_answer_as_undisturbed_ones_do(kind, make_driver, new_world, small_config, tmp_path):
    wide = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    world = new_world(tmp_path / "wide", {**small_config, **wide})
    world.write_base()
    for seed, name in enumerate("ab"):
        world.write_adapter(name, seed=seed)
    make = partial(make_driver, world, make_executor=partial(executor_of, kind=kind), page_tokens=16)
    undisturbed, _ = answers_of(make, total_pages=64)
    swapped, driver = answers_of(make, total_pages=14, swap_page_bytes=1)
    assert driver.pool.swap.out_bytes > 0
    assert driver.pool.swap.in_bytes > 0
    beside = [o for o, away in zip(driver.outputs, driver.swapped, strict=True) if o.done is not None and away]
    assert beside, "steps ran while sequences were in host memory"
    assert swapped == undisturbed
