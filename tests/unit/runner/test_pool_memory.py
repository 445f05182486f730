"""One budget for tokens and adapters, and prefixes that are read again.

Under any commands the books balance, every page that is read holds what its reader would have written, and everybody is
served in the end.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harness.desired import desired, whole
from harness.runner_machine import flat, session, start_of, state_of, take
from weft.domain.adapter import DesiredAdapter
from weft.domain.ids import Epoch
from weft.domain.machine import Send
from weft.domain.request import Ended, EndReason, NoCapacity, SequenceTokens
from weft_runner.core import BatchLimits, Fetch, Fetched, PoolLimits, SampledToken, StepModel, Unload
from weft_runner.core.events import (
    AdapterPages,
    DropSwap,
    FetchFailed,
    Load,
    Loaded,
    LoadFailed,
    StepResults,
    SwapDone,
    SwapFailed,
    SwapIn,
    SwapOut,
)
from weft_runner.core.request_pool import RequestPool, check_pool
from weft_runner.core.swap.swaps import MAX_SWAPS

P = 4
LIMITS = PoolLimits(
    total_pages=12, page_tokens=P, max_sequences=5, max_adapters=3, max_context_tokens=40, vocab_size=9,
    batch=BatchLimits(max_prefills=1, max_batch_tokens=9), page_bytes=10, keep_copies=False,
)  # fmt: skip
SWAPPING = replace(LIMITS, swap_page_bytes=10, host_bytes=60, keep_copies=True)  # six pages of KV, or adapters
# 0, 1, 2, 5, 9 pages; ten are more than a pool of 12 lends.
SIZES = {"": 0, "a": 5, "b": 20, "c": 45, "d": 90, "huge": 95}
DEAR = StepModel(base_ms=1.0, row_ms=0.0, key_ms=0.0, token_ms=1.0)  # prompts: any copy is sooner there
TOLD = (0, 10, 30, 500)  # what a list may say of a size


class Device:
    """A pool with what it orders about: loads under way, and what each place of each page holds."""

    def __init__(self, limits: PoolLimits = LIMITS, model: StepModel = DEAR) -> None:
        self.pool = RequestPool(limits, model)
        self.places: dict[int, list[tuple | None]] = {page: [None] * P for page in range(limits.total_pages)}
        self.loading: list[Load | Fetch] = []
        self.in_slots: dict[int, str] = {}
        self.copies: list[SwapOut | SwapIn] = []  # under way
        self.host: dict[int, list[tuple | None]] = {}

    def written(self, key: str, position: int) -> tuple:
        """What a sequence would write there: it follows from its text so far and its adapter, and is its tenant's."""
        sequence = self.pool.sequences[key]
        request = sequence.start
        return (request.cache_salt or key, request.adapter, tuple(sequence.tokens[: position + 1]))

    def step(self, tokens: Iterator[int], failing: bool = False) -> None:
        pool = self.pool
        batch = pool.schedule()
        self.execute()
        if not batch.rows:
            return
        granted = pool.reservations.take_granted()
        self.check_owners(granted)
        for page in granted:
            self.places[page] = [None] * P
        for row in batch.rows:
            sequence = pool.sequences[row.key]
            pages = pool.pages.pages_of(row.key)
            for position in range(sequence.in_kv):
                assert self.places[pages[position // P]][position % P] == self.written(row.key, position)
            for position in range(sequence.in_kv, sequence.in_kv + row.n_tokens):
                place = self.places[pages[position // P]]
                assert place[position % P] is None, "what is there is never written over"
                place[position % P] = self.written(row.key, position)
        failures = {batch.rows[0].key: "broken"} if failing else {}
        sampling = [row.key for row in batch.rows if row.samples and row.key not in failures]
        pool.account(batch, StepResults({key: SampledToken(next(tokens)) for key in sampling}, failures))
        self.execute()

    def execute(self) -> None:
        sends, effects = take(self.pool, Send), [*self.pool.effects]
        self.pool.effects[:] = sends
        for effect in effects:
            match effect:
                case Fetch():
                    self.loading.append(effect)
                case Load(digest):
                    self.loading.append(effect)
                    assert digest not in self.in_slots.values()
                case Unload(slot):
                    self.in_slots.pop(slot)
                case AdapterPages(pages):
                    self.check_owners(pages, adapters=False)
                    self.places.update((page, [None] * P) for page in pages)
                case DropSwap(numbers, hosts):
                    self.copies = [copy for copy in self.copies if copy.number not in numbers]
                    in_copies = {host for copy in self.copies for host in copy.hosts}
                    assert in_copies.isdisjoint(hosts), "a copy goes on with a page that is free"
                    for host in hosts:
                        self.host.pop(host, None)
                case SwapOut() | SwapIn():
                    is_there = [host in self.host for host in effect.hosts]
                    assert not any(is_there) if isinstance(effect, SwapOut) else all(is_there), effect
                    self.copies.append(effect)
                    for page in effect.pages if isinstance(effect, SwapIn) else ():
                        self.places[page] = [("half copied",)] * P
                case _:
                    pass

    def check_owners(self, pages: list[int], *, adapters: bool = True) -> None:
        """Check that no copy reads or writes pages that change hands. `adapters`: none of the pages is an adapter's."""
        in_use = {page for copy in self.copies for page in copy.pages}
        if adapters:
            in_use |= {page for adapter in self.pool.adapters.adapters.values() for page in adapter.pages}
        assert in_use.isdisjoint(pages), (in_use, pages)

    def load(self, index: int = 0, fails: EndReason | None = None) -> None:
        order = self.loading.pop(index)
        if isinstance(order, Fetch):
            if fails is None:
                n_bytes = SIZES[order.digest] if order.measure else None
                self.pool.on_adapter_event(Fetched(order.digest, n_bytes, None))
            else:
                self.pool.on_adapter_event(FetchFailed(order.digest, fails, "broken", permanent=False))
        elif fails is not None:
            self.pool.on_adapter_event(LoadFailed(order.digest, fails, "broken", permanent=False))
        else:
            self.in_slots[order.slot] = order.digest
            host_bytes = SIZES[order.digest] if order.to_host else None
            self.pool.on_adapter_event(Loaded(order.digest, 1, SIZES[order.digest], host_bytes, 1.0))
        self.execute()

    def copy(self, index: int = 0, *, fails: bool = False) -> None:
        """A copy ends: what it reads and writes is read and written as late as can be."""
        match self.copies.pop(index):
            case SwapOut(number, pages, hosts):
                for page, host in zip(pages, hosts, strict=True) if not fails else ():
                    self.host[host] = list(self.places[page])
            case SwapIn(number, hosts, pages):
                for page, host in zip(pages, hosts, strict=True) if not fails else ():
                    self.places[page] = list(self.host[host])
        self.pool.on_swap_event(SwapFailed(number, "full") if fails else SwapDone(number, len(pages), 1e-9))
        self.execute()

    def check(self) -> None:
        pending = [effect for effect in self.pool.effects if not isinstance(effect, Send)]
        assert not pending, "an order of the pool was not executed before the check"
        check_pool(self.pool)
        kept = {host for swap in self.pool.swap.by_key.values() for host in swap.hosts}
        kept |= {page.host for page in self.pool.adapters.host.cached.values()}
        assert self.host.keys() <= kept, "left in host memory"
        state = state_of(self.pool)
        reserved = sum(s.reserved_pages for s in state.sequences)
        assert state.free_pages + state.adapter_pages + reserved == state.total_pages
        assert state.used_pages == sum(s.used_pages for s in state.sequences)
        assert all(s.used_pages <= s.reserved_pages for s in state.sequences)
        assert state.adapter_pages >= 0
        assert not state.overruns or state.free_pages == 0, "else the supervisor names no victim"


DESIRED = st.builds(
    desired, st.sampled_from([d for d in SIZES if d]), n_bytes=st.sampled_from(TOLD), pinned=st.booleans()
)
PROMPTS = [(n,) * 4 + (1,) * 13 for n in range(5)]
TEXTS = st.sampled_from([(1,) * 4, (1,) * 9, (1,) * 13 + (2,), (1,) * 13 + (3, 3, 3, 3), (2,) * 30, (1,) * 38])


class MemoryMachine(RuleBasedStateMachine):
    """Two tenants and one without a salt, adapters of all sizes, growth, victims, lost owners, failures."""

    limits = LIMITS
    model = DEAR

    def __init__(self) -> None:
        super().__init__()
        self.device = Device(self.limits, self.model)
        self.pool = self.device.pool
        self.counter = self.drawn = 0
        self.live: dict[str, Epoch] = {}
        self.deferred: set[str] = set()  # started, and waiting for copies

    @rule(
        key=st.sampled_from("vwxyz"),
        owner=st.integers(1, 2),
        prompt=TEXTS,
        emitted=st.integers(0, 4),
        max_tokens=st.integers(1, 20),
        reservation=st.integers(0, 20),
        adapter=st.sampled_from(["", "", *SIZES]),
        salt=st.sampled_from(["", "t", "t", "u"]),
        parks=st.lists(st.sampled_from("vwxyz"), max_size=3, unique=True).map(tuple),
    )
    def start(self, key, owner, prompt, emitted, max_tokens, reservation, adapter, salt, parks=()) -> None:
        self.counter += 1
        request = start_of(
            key, self.counter, prompt, max_tokens, adapter=adapter, emitted=(1,) * emitted,
            reservation_tokens=reservation, cache_salt=salt, parks=parks,
        )  # fmt: skip
        self.pool.start(request, session(owner), "g", 0.0)
        self.live.pop(key, None)
        self.deferred.discard(key)
        if key in self.pool.sequences:
            self.live[key] = request.epoch
        elif key in self.pool.preemption.parking.deferred:
            self.deferred.add(key)
        self.hear()

    @rule(key=st.sampled_from("vwxyz"))
    def stop(self, key: str) -> None:
        if key in self.pool.sequences:
            self.pool.stop(key, Epoch(1, self.counter), self.pool.sequences[key].owner)
        self.live.pop(key, None)
        self.hear()

    @rule(owner=st.integers(1, 2))
    def lose_a_session(self, owner: int) -> None:
        mine = [key for key, s in self.pool.sequences.items() if s.owner == session(owner)]
        self.pool.cancel_session(session(owner))
        for key in mine:
            del self.live[key]
        self.hear()

    @precondition(lambda self: self.device.loading)
    @rule(fails=st.sampled_from([None, None, None, EndReason.LOAD_FAILED]), last=st.booleans())
    def load(self, fails: EndReason | None, last: bool) -> None:
        self.device.load(-1 if last else 0, fails)
        self.hear()

    @precondition(lambda self: self.device.copies)
    @rule(fails=st.sampled_from([False, False, False, True]), last=st.booleans())
    def copy(self, fails: bool, last: bool) -> None:
        self.device.copy(-1 if last else 0, fails=fails)
        self.hear()

    @rule(wanted=st.lists(DESIRED, unique_by=lambda d: d.digest))
    def desire(self, wanted: list[DesiredAdapter]) -> None:
        removed = [d for d in SIZES if d and d not in {item.digest for item in wanted}]
        self.pool.apply(whole(*wanted, removed=removed))
        self.hear()

    @rule()
    def retry(self) -> None:
        self.pool.adapters.retry()
        self.hear()

    @rule(tokens=st.lists(st.integers(0, 8), min_size=5, max_size=5), fails=st.booleans(), times=st.integers(1, 4))
    def iterate(self, tokens: list[int], fails: bool, times: int) -> None:
        self.device.step(iter(tokens), failing=fails)
        for _ in range(times - 1):
            self.device.step(iter(tokens))
        self.hear()

    def hear(self) -> None:
        self.device.execute()
        for key in self.deferred - self.pool.preemption.parking.deferred.keys():
            self.deferred.remove(key)
            if key in self.pool.sequences:
                self.live[key] = self.pool.sequences[key].start.epoch
        for event in flat(take(self.pool, Send)):
            ended = isinstance(event, Ended | NoCapacity) or event.finish is not None
            if ended and self.live.get(event.request_id) == event.epoch:
                del self.live[event.request_id]
            if isinstance(event, Ended) and "pages; of" in event.detail:
                assert event.reason is EndReason.LOAD_FAILED

    @invariant()
    def everything_balances(self) -> None:
        self.device.check()
        assert {key: s.start.epoch for key, s in self.pool.sequences.items()} == self.live, "each ends once"
        assert set(self.device.in_slots.values()) == {
            a.digest for a in self.pool.adapters.slots.by_slot.values() if a.resident
        }

    @invariant()
    def somebody_can_go_on(self) -> None:
        """Nobody runs, nothing is on its way: then a victim is named, or the next choice makes room."""
        self.device.step(iter([1] * 5)) if not self.pool.runnable else None
        self.hear()
        if self.pool.sequences and not (self.pool.runnable or self.device.loading or self.device.copies):
            assert self.pool.reservations.paused
            assert len(self.pool.sequences) > 1, "alone, and without a page: it would wait for ever"


class SwappingMachine(MemoryMachine):
    """The same where preempted and parked sequences go to host memory, which adapters need, too."""

    limits = replace(SWAPPING, max_sequences=3)


class PrefixMachine(MemoryMachine):
    """The same where few prompts come again and again, their pages in and out of host memory."""

    limits = replace(SWAPPING, host_bytes=120, max_sequences=4)

    @rule(
        key=st.sampled_from("vwxyz"), prompt=st.sampled_from(PROMPTS), emitted=st.integers(0, 4),
        max_tokens=st.integers(1, 9), adapter=st.sampled_from(["", "", "a", "b"]),
    )  # fmt: skip
    def start(self, key, prompt, emitted, max_tokens, adapter) -> None:
        super().start(key, 1 + (key > "x"), prompt, emitted, emitted + max_tokens, 0, adapter, "t")

    @rule(
        asked=st.lists(
            st.tuples(st.sampled_from(PROMPTS), st.sampled_from(["", "a"]), st.sampled_from(["v", "v", "vw"])),
            min_size=1, max_size=6,
        ),
        copies=st.integers(0, 2),
    )  # fmt: skip
    def serve(self, asked, copies: int) -> None:
        """One after the other, or two at once, to its end or as far as copies that do not end let it come."""
        for prompt, adapter, keys in asked:
            for key in keys:
                self.start(key, prompt, 0, 3, adapter)
            for _ in range(8):
                self.device.step(iter([1] * 5))
                while self.device.loading:
                    self.device.load()
                for _ in range(min(copies, len(self.device.copies))):
                    self.device.copy()
                self.hear()


MACHINES = (MemoryMachine, SwappingMachine, PrefixMachine)
for machine in MACHINES:
    machine.TestCase.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=40)
test_every_book_balances_and_every_page_holds_what_its_readers_would_write = MemoryMachine.TestCase
test_so_they_do_where_sequences_are_swapped = SwappingMachine.TestCase
test_so_they_do_where_prompts_come_again_and_again = PrefixMachine.TestCase


@pytest.mark.parametrize(("adapter", "prompt"), [("", 38), ("d", 4)])
def test_a_pinned_adapter_that_made_way_is_loaded_again_as_soon_as_its_pages_are_free(adapter: str, prompt: int):
    device = Device()
    pool = device.pool
    pool.apply(whole(desired("c", n_bytes=SIZES["c"], pinned=True)))
    device.execute()
    while device.loading:
        device.load()
    assert pool.adapters.free_pages() == pool.adapters.free_pages("c") == 7
    pool.start(start_of("r", 1, (1,) * prompt, 1, adapter=adapter), session(), "g", 0.0)
    device.execute()
    while pool.sequences:
        device.step(iter([1] * 5))
        while device.loading and pool.sequences:
            device.load()
    (said,) = flat(take(pool, Send))
    assert said.tokens == (1,)
    assert "c" not in device.in_slots.values()
    assert [action.digest for action in device.loading] == ["c"]
    device.check()


# ---- nobody starves


WANTS = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "b", "c", "d"]),
        st.integers(1, 11),
        st.integers(1, 16),
        st.integers(0, 12),
        st.sampled_from(["", "t"]),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=settings.default.max_examples // 2)
@given(
    WANTS,
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(TOLD)), max_size=3, unique_by=lambda p: p[0]),
    st.sampled_from((0, 40, 400)),
    st.sampled_from((LIMITS, SWAPPING)),
    st.booleans(),
)
def test_adapters_and_sequences_do_not_starve_each_other(wants, pinned, host_bytes, limits, leaves):
    """All at once: whoever is told NoCapacity asks again, the newest leaves where the supervisor would name it."""
    device = Device(replace(limits, max_context_tokens=48, host_bytes=host_bytes))
    pool = device.pool
    pool.apply(whole(*(desired(digest, n_bytes=announced, pinned=True) for digest, announced in pinned)))
    todo, answers, counter = dict(enumerate(wants)), {str(i): [] for i in range(len(wants))}, 0
    for turn in range(3000):
        for i, (adapter, prompt, max_tokens, reservation, salt) in todo.items():
            if str(i) not in pool.sequences:
                counter += 1
                fields = {"adapter": adapter, "cache_salt": salt, "reservation_tokens": reservation, "leaves": leaves}
                emitted = tuple(answers[str(i)])
                start = start_of(str(i), counter, (1,) * prompt, max_tokens, emitted=emitted, **fields)
                pool.start(start, session(), "g", 0.0)
        device.step(iter([5] * 5))
        if device.copies and turn % 4 == 0:
            device.copy()
        if device.loading and turn % 3 == 0:
            device.load()
        if state_of(pool).overruns and state_of(pool).free_pages == 0 and len(pool.sequences) > 1:
            newest = max(
                (s for s in pool.sequences.values() if pool.pages.reserved_by(s.key)), key=lambda s: s.admitted
            )
            pool.stop(newest.key, newest.start.epoch, newest.owner)
            device.execute()
        for event in flat(take(pool, Send)):
            assert not isinstance(event, Ended)
            if isinstance(event, SequenceTokens):
                assert event.position == len(answers[event.request_id])
                answers[event.request_id].extend(event.tokens)
                if event.finish is not None:
                    del todo[int(event.request_id)]
        device.check()
        assert all(sequence.swaps <= MAX_SWAPS for sequence in pool.sequences.values())
        if not todo:
            break
    assert not todo, "everybody is served"
    for i, (adapter, prompt, max_tokens, _, _) in enumerate(wants):
        context = (12 - -(-SIZES[adapter] // 10)) * P  # what it and its adapter alone have on this device
        assert answers[str(i)] == [5] * min(max_tokens, context - prompt)
