"""The request pool without a model: every command in any order, every book balanced, every sequence ended once."""

import random
from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harness.desired import desired, whole
from harness.runner_machine import flat, session, start_of, state_of, take
from weft.domain.adapter import DesiredChange
from weft.domain.ids import Epoch
from weft.domain.machine import Send
from weft.domain.request import Ended, EndReason, FinishReason, NoCapacity, Priority, Sampling, SequenceTokens
from weft_runner.core import Action, Batch, BatchLimits, Fetch, Fetched, PoolLimits, SampledToken, Sequence
from weft_runner.core.admission import HighestEpochs
from weft_runner.core.events import REPORT, FetchFailed, Load, Loaded, LoadFailed, StepResults
from weft_runner.core.request_pool import RequestPool, check_pool
from weft_runner.core.reserve.reservations import first_reservation_pages, next_growth
from weft_runner.core.sequence import SequencePhase

EOS = 0
LIMITS = PoolLimits(
    total_pages=12, page_tokens=4, max_sequences=5, max_adapters=2, max_context_tokens=40, vocab_size=9,
    eos=frozenset([EOS]), batch=BatchLimits(max_prefills=1, max_batch_tokens=7),
)  # fmt: skip


def begin(pool: RequestPool, key: str, counter: int, prompt: int, max_tokens: int, owner=1, gateway="g", **fields):
    pool.start(start_of(key, counter, (1,) * prompt, max_tokens, **fields), session(owner), gateway, 0.0)


def step(pool: RequestPool, token: int = 5) -> None:
    """One heartbeat with a model that always chooses the same token."""
    batch = pool.schedule()
    if batch.rows:
        pool.account(batch, StepResults({row.key: SampledToken(token) for row in batch.rows if row.samples}, {}))


def bring(pool: RequestPool, digest: str) -> None:
    """Let an adapter's file arrive, then load it."""
    pool.on_adapter_event(Fetched(digest, None, None))
    pool.on_adapter_event(Loaded(digest, 1, 1, 1, 1.0))


class PoolMachine(RuleBasedStateMachine):
    """Two gateways, five requests, three adapters; a model that answers anything; loads that may fail."""

    batches = 1  # in flight at a time

    def __init__(self) -> None:
        super().__init__()
        self.pool = RequestPool(LIMITS)
        self.pool.apply(whole(desired("a"), desired("b", pinned=True)))
        self.counter = 0
        self.live: dict[str, tuple[Epoch, int]] = {}  # request -> epoch, owner
        self.seen: dict[str, int] = {}  # request -> the highest epoch that it was started or stopped with
        self.answers: dict[tuple[str, Epoch], list[int]] = {}
        self.transfers: list[Load | Fetch] = []
        self.draining = False
        self.flying: list[tuple[Batch, list[Sequence]]] = []

    @rule(
        key=st.sampled_from("uvwxyz"),
        owner=st.integers(1, 2),
        prompt=st.integers(0, 45),
        emitted=st.integers(0, 4),
        max_tokens=st.integers(0, 20),
        reservation=st.integers(0, 20),
        adapter=st.sampled_from(["", "a", "b", "c"]),
        stale=st.booleans(),
        priority=st.sampled_from(Priority),
        parks=st.lists(st.sampled_from("uvwxyz"), max_size=3, unique=True).map(tuple),
    )
    def start(self, key, owner, prompt, emitted, max_tokens, reservation, adapter, stale, priority, parks) -> None:
        if not stale:
            self.counter += 1
        request = start_of(
            key, self.counter, (1,) * prompt, max_tokens, adapter=adapter, emitted=(1,) * emitted,
            reservation_tokens=reservation, priority=priority, parks=parks,
        )  # fmt: skip
        known = self.counter <= self.seen.get(key, -1)
        self.seen[key] = max(self.counter, self.seen.get(key, -1))
        before = self.live.get(key)
        self.pool.start(request, session(owner), "g", 0.0)
        if known:
            assert self.live.get(key) == before
            return
        self.live.pop(key, None)
        self.answers[key, request.epoch] = list(request.emitted)
        if key in self.pool.sequences:
            assert not self.draining
            self.live[key] = (request.epoch, owner)
        self.hear()

    @rule(key=st.sampled_from("uvwxyz"), offset=st.integers(-1, 1), owner=st.integers(1, 2))
    def stop(self, key: str, offset: int, owner: int) -> None:
        counter = max(1, (self.live[key][0].counter if key in self.live else self.counter) + offset)
        self.pool.stop(key, Epoch(1, counter), session(owner))
        if key in self.live and self.live[key][0] <= Epoch(1, counter) and self.live[key][1] == owner:
            del self.live[key]
            self.seen[key] = max(counter, self.seen[key])
        self.counter = max(self.counter, counter)
        self.hear()

    @rule(owner=st.integers(1, 2))
    def lose_a_session(self, owner: int) -> None:
        self.pool.cancel_session(session(owner))
        self.live = {key: (epoch, mine) for key, (epoch, mine) in self.live.items() if mine != owner}
        self.hear()

    @rule(on=st.booleans())
    def drain(self, on: bool) -> None:
        self.draining = on
        self.pool.drain.order(0.0, on=on)
        self.hear()
        assert not (on and self.live), "every sequence was given back"

    @precondition(lambda self: self.transfers)
    @rule(fails=st.sampled_from([None, None, EndReason.LOAD_FAILED, EndReason.UNKNOWN_ADAPTER]))
    def transfer(self, fails: EndReason | None) -> None:
        match self.transfers.pop(0), fails:
            case Load(digest), None:
                self.pool.on_adapter_event(Loaded(digest, 1, 1, 1, 1.0))
            case Load(digest), reason:
                self.pool.on_adapter_event(LoadFailed(digest, reason, "broken", permanent=False))
            case Fetch(digest), None:
                self.pool.on_adapter_event(Fetched(digest, None, None))
            case Fetch(digest), reason:
                self.pool.on_adapter_event(FetchFailed(digest, reason, "broken", permanent=False))
        self.hear()

    @rule(wanted=st.sets(st.sampled_from("abc")))
    def desire(self, wanted: set[str]) -> None:
        version = (self.pool.adapters.catalog.version or 0) + 1
        removed = {*"abc"} - wanted
        self.pool.apply(whole(*map(desired, sorted(wanted)), removed=sorted(removed), version=version))
        self.hear()

    @precondition(lambda self: self.batches == 1)
    @rule(tokens=st.lists(st.integers(0, 8), min_size=5, max_size=5), fails=st.booleans())
    def iterate(self, tokens: list[int], fails: bool) -> None:
        batch = self.pool.schedule()
        if batch.rows:
            self.account(batch, tokens, fails)

    @precondition(lambda self: self.batches > 1 and len(self.flying) < self.batches)
    @rule()
    def launch(self) -> None:
        batch = self.pool.schedule(self.batches, self.batches - len(self.flying))
        if batch.rows:
            self.flying.append((batch, [self.pool.sequences[row.key] for row in batch.rows]))
        self.hear()

    @precondition(lambda self: self.flying)
    @rule(tokens=st.lists(st.integers(0, 8), min_size=5, max_size=5), fails=st.booleans())
    def land(self, tokens: list[int], fails: bool) -> None:
        """The rows whose sequences are still there; nothing has happened to them in flight."""
        launched, sequences = self.flying.pop(0)
        here = zip(launched.rows, sequences, strict=True)
        batch = Batch(tuple(row for row, s in here if self.pool.sequences.get(row.key) is s), 0)
        for row in batch.rows:
            room = len(self.pool.pages.pages_of(row.key)) * LIMITS.page_tokens
            sequence = self.pool.sequences[row.key]
            assert sequence.in_kv + row.n_tokens <= room
            assert row.samples == (sequence.pending == row.n_tokens)
        if batch.rows:
            self.account(batch, tokens, fails)

    def account(self, batch: Batch, tokens: list[int], fails: bool) -> None:
        failing = {batch.rows[0].key: "broken"} if fails else {}
        sampling = [row.key for row in batch.rows if row.samples and row.key not in failing]
        self.pool.account(batch, StepResults(dict(zip(sampling, map(SampledToken, tokens), strict=False)), failing))
        self.hear()
        assert not (failing.keys() & self.pool.sequences.keys())

    def hear(self) -> None:
        self.transfers.extend(a for a in take(self.pool, Action) if isinstance(a, Load | Fetch))
        for event in flat(take(self.pool, Send)):
            key = event.request_id
            if isinstance(event, SequenceTokens):
                answer = self.answers[key, event.epoch]
                assert event.position == len(answer), "no token is lost or comes twice"
                answer.extend(event.tokens)
                assert EOS not in event.tokens
            if isinstance(event, Ended | NoCapacity) or event.finish is not None:
                self.live.pop(key, None)

    @invariant()
    def everything_balances(self) -> None:
        check_pool(self.pool)
        assert {key: (s.start.epoch, int(s.owner.name)) for key, s in self.pool.sequences.items()} == self.live
        state = state_of(self.pool)
        assert state.free_pages + sum(s.reserved_pages for s in state.sequences) == state.total_pages
        assert state.used_pages == sum(s.used_pages for s in state.sequences)


class PipelinedPoolMachine(PoolMachine):
    """The same with three batches in flight."""

    batches = 3


PoolMachine.TestCase.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=40)
test_every_book_balances_under_any_commands = PoolMachine.TestCase
PipelinedPoolMachine.TestCase.settings = settings(
    max_examples=settings.default.max_examples // 2, stateful_step_count=50
)
test_every_book_balances_with_batches_in_flight = PipelinedPoolMachine.TestCase


# ---- several batches in flight


def decoding_pool(count: int) -> RequestPool:
    """Make a pool of `count` sequences with their prompts behind them."""
    pool = RequestPool(
        replace(LIMITS, total_pages=200, max_sequences=32, batch=BatchLimits(max_prefills=32, max_batch_tokens=512))
    )
    for i in range(count):
        begin(pool, f"r{i}", i + 1, prompt=2, max_tokens=30)
    step(pool)
    return pool


Flying = list[tuple[Batch, list[Sequence]]]


def land(pool: RequestPool, batch: Batch) -> None:
    pool.account(batch, StepResults({row.key: SampledToken(5) for row in batch.rows if row.samples}, {}))


def beat(pool: RequestPool, flying: Flying, batches: int) -> Batch:
    """Beat as the engine does: launch a batch and return it; with none to launch the oldest one lands."""
    batch = pool.schedule(batches, batches - len(flying)) if len(flying) < batches else Batch((), 0)
    if batch.rows:
        flying.append((batch, [pool.sequences[row.key] for row in batch.rows]))
    elif flying:
        launched, sequences = flying.pop(0)
        here = zip(launched.rows, sequences, strict=True)
        land(pool, Batch(tuple(row for row, s in here if pool.sequences.get(row.key) is s), 0))
    check_pool(pool)
    return batch


@given(count=st.integers(1, 20), batches=st.integers(2, 5))
def test_batches_share_out_those_who_decode_and_all_have_a_turn_in_a_round(count, batches):
    pool, flying = decoding_pool(count), Flying()
    launched = [batch for _ in range(8 * batches) if (batch := beat(pool, flying, batches)).rows]
    per_round = min(batches, count)
    for start in range(0, len(launched) - per_round, per_round):
        sizes = [len(batch.rows) for batch in launched[start : start + per_round]]
        assert sum(sizes) == count
        assert max(sizes) - min(sizes) <= 1
        assert len({row.key for batch in launched[start : start + per_round] for row in batch.rows}) == count


@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data(), batches=st.integers(2, 4))
def test_whoever_joins_or_leaves_nobody_is_passed_for_long_and_no_batch_is_larger_than_its_part(data, batches):
    pool, flying, counter = decoding_pool(6), Flying(), 100
    waited: dict[str, int] = {}
    for _ in range(60):
        match data.draw(st.sampled_from(["", "", "", "join", "leave"])):
            case "join" if len(pool.sequences) < 20:
                counter += 1
                begin(pool, f"r{counter}", counter, prompt=2, max_tokens=30)
            case "leave" if pool.sequences:
                key = data.draw(st.sampled_from(sorted(pool.sequences)))
                pool.stop(key, pool.sequences[key].start.epoch, pool.sequences[key].owner)
        decoding = sum(s.phase is SequencePhase.DECODE for s in pool.sequences.values())
        batch = beat(pool, flying, batches)
        assert len(batch.rows) - batch.n_prefills <= -(-decoding // batches)
        waited = {key: waited.get(key, 0) + bool(batch.rows) for key, s in pool.sequences.items() if not s.in_flight}
        assert all(turns <= 2 * batches for turns in waited.values()), waited


def test_a_batch_that_others_fly_beside_is_chosen_anew_each_time():
    """What stands runs as it is: here it would be in flight twice."""
    pool = decoding_pool(4)
    first = pool.schedule(2)
    second = pool.schedule(2)
    assert {row.key for row in first.rows} & {row.key for row in second.rows} == set()
    assert pool.scheduler.reusable_batch is None


def test_in_flight_nobody_grows_pauses_or_reads_what_others_have_computed():
    pool = RequestPool(replace(LIMITS, total_pages=3))
    begin(pool, "a", 1, prompt=4, max_tokens=30, reservation_tokens=0)
    batch = pool.schedule(2)
    for _ in range(3):
        assert pool.schedule(2).rows == ()
    assert len(pool.pages.pages_of("a")) == 1, "full, and not yet accounted for"
    assert not pool.runnable
    land(pool, batch)
    assert pool.runnable
    assert len(pool.schedule(2).rows) == 1
    assert len(pool.pages.pages_of("a")) == 2


def test_prompts_run_in_the_order_of_arrival_and_of_what_the_policy_adds_to_it():
    """Whatever the order of their Starts: a migrated request keeps its age."""
    pool = RequestPool(LIMITS)
    for key, waited_s, delay_s in (("young", 1.0, 0.0), ("old", 9.0, 0.0), ("long", 9.5, 4.0)):
        begin(pool, key, 1, prompt=7, max_tokens=2, waited_s=waited_s, delay_s=delay_s)
    through: list[str] = []
    while len(through) < 3:
        batch = pool.schedule()
        through += [row.key for row in batch.rows[: batch.n_prefills] if row.samples]
        pool.account(batch, StepResults({row.key: SampledToken(5) for row in batch.rows if row.samples}, {}))
    assert through == ["old", "long", "young"]


def test_an_epoch_that_is_not_above_the_highest_seen_is_ignored_and_one_above_replaces():
    pool = RequestPool(LIMITS)
    begin(pool, "r", 5, prompt=3, max_tokens=4)
    begin(pool, "r", 5, prompt=9, max_tokens=4)
    begin(pool, "r", 4, prompt=9, max_tokens=4)
    assert len(pool.sequences["r"].start.prompt) == 3
    begin(pool, "r", 6, prompt=9, max_tokens=4)
    assert len(pool.sequences["r"].start.prompt) == 9
    assert pool.pages.reserved_pages == 4
    assert not flat(take(pool, Send)), "the replaced one is not told: its gateway asked for it"
    pool.stop("r", Epoch(1, 5), session(1))
    assert "r" in pool.sequences, "a stop of a lower epoch is stale"
    pool.stop("r", Epoch(1, 6), session(1), preempted=True)
    assert (pool.pages.free_pages, pool.preemption.preemptions) == (12, 1)
    begin(pool, "r", 6, prompt=3, max_tokens=4)
    assert not pool.sequences, "a start that arrives after its stop"


def test_only_the_session_that_started_a_request_stops_it():
    pool = RequestPool(LIMITS)
    begin(pool, "r", 1, prompt=3, max_tokens=4, owner=1)
    for counter in (1, 2**60):
        pool.stop("r", Epoch(1, counter), session(2))
    assert "r" in pool.sequences
    pool.stop("unknown", Epoch(1, 2**60), session(2))
    begin(pool, "unknown", 2, prompt=3, max_tokens=4, owner=1)
    assert "unknown" in pool.sequences, "a stop of nothing shuts nobody out"
    begin(pool, "r", 3, prompt=5, max_tokens=4, owner=3)
    assert pool.sequences["r"].owner == session(3), "its gateway's next session"


def test_another_gateway_does_not_take_over_a_request():
    pool = RequestPool(LIMITS)
    begin(pool, "r", 1, prompt=3, max_tokens=4, owner=1, gateway="g")
    begin(pool, "r", 9, prompt=5, max_tokens=4, owner=2, gateway="h")
    assert pool.sequences["r"].owner == session(1)
    [(peer, refused)] = take(pool, Send)
    assert (peer, refused.reason) == (session(2), EndReason.INTERNAL)
    begin(pool, "r", 2, prompt=4, max_tokens=4, owner=1, gateway="g")
    assert len(pool.sequences["r"].start.prompt) == 4, "its own epochs go on"


def test_a_request_without_room_is_told_why_and_changes_nothing():
    pool = RequestPool(LIMITS)
    begin(pool, "big", 1, prompt=30, max_tokens=10)
    begin(pool, "r", 2, prompt=8, max_tokens=1, reservation_tokens=1)
    assert flat(take(pool, Send)) == [NoCapacity("r", Epoch(1, 2), 2, "pages")]
    for i in range(4):
        begin(pool, f"s{i}", 3 + i, prompt=1, max_tokens=2, reservation_tokens=0)
    events = flat(take(pool, Send))
    assert [e.reason for e in events if isinstance(e, NoCapacity)] == ["pages", "pages"]
    full = RequestPool(replace(LIMITS, max_sequences=1))
    begin(full, "a", 1, prompt=1, max_tokens=1)
    begin(full, "b", 2, prompt=1, max_tokens=1)
    begin(full, "c", 3, prompt=40, max_tokens=1)
    assert [(e.request_id, e.reason) for e in flat(take(full, Send))] == [("b", "sequences"), ("c", "context")]


def test_a_reservation_counts_prompt_emitted_and_output_and_never_more_than_the_context():
    assert first_reservation_pages(10, 6, 4, 40) == 4
    assert first_reservation_pages(10, 7, 4, 40) == 5
    assert first_reservation_pages(10, 1000, 4, 40) == 10
    pool = RequestPool(LIMITS)
    begin(pool, "r", 1, prompt=5, max_tokens=20, emitted=(1,) * 4, reservation_tokens=3)
    assert pool.pages.reserved_by("r") == 3


def test_a_full_reservation_doubles_in_place_and_the_doubling_is_told():
    pool = RequestPool(LIMITS)
    begin(pool, "r", 1, prompt=4, max_tokens=30, reservation_tokens=4)
    while pool.pages.reserved_by("r") == 2:
        step(pool)
    assert pool.sequences["r"].in_kv == 9, "it grew when the ninth token needed a page"
    assert (pool.sequences["r"].reservation_tokens, pool.pages.reserved_by("r")) == (8, 3)
    assert (pool.reservations.doublings, pool.reservations.grown_pages) == (1, 1)
    assert [e.doublings for e in flat(take(pool, Send)) if isinstance(e, SequenceTokens)][-1] == 1


def test_a_reservation_of_nothing_still_grows_by_a_page_at_a_time():
    pool = RequestPool(LIMITS)
    begin(pool, "r", 1, prompt=4, max_tokens=30, reservation_tokens=0)
    step(pool)
    step(pool)
    assert pool.pages.reserved_by("r") == 2
    assert pool.sequences["r"].reservation_tokens == 4


def test_one_that_reserves_nothing_ahead_takes_a_page_whenever_it_needs_one():
    pool = RequestPool(LIMITS)
    begin(pool, "r", 1, prompt=4, max_tokens=20, reservation_tokens=1, by_page=True)
    held: list[int] = []
    while "r" in pool.sequences:
        held.append(len(pool.pages.pages_of("r")))
        step(pool)
    assert [*dict.fromkeys(held)] == [2, 3, 4, 5, 6]
    assert (pool.reservations.doublings, pool.reservations.grown_pages) == (0, 4)


def test_a_partial_grant_is_completed_before_the_reservation_doubles_again():
    pool = RequestPool(replace(LIMITS, total_pages=6))
    begin(pool, "r", 1, prompt=4, max_tokens=30, reservation_tokens=8)
    begin(pool, "other", 2, prompt=8, max_tokens=2, reservation_tokens=0, adapter="still loading")
    while pool.runnable:
        step(pool)
    assert (pool.sequences["r"].in_kv, pool.pages.reserved_by("r")) == (16, 4), "one of the two pages it asked for"
    assert pool.reservations.doublings == 1
    assert [o.wanted_pages for o in state_of(pool).overruns] == [1]
    pool.stop("other", Epoch(1, 2), session(1))
    assert pool.pages.reserved_by("r") == 5
    assert pool.reservations.doublings == 1


def test_without_a_free_page_a_sequence_pauses_keeps_its_place_and_gets_the_first_page_that_is_freed():
    pool = RequestPool(replace(LIMITS, total_pages=4))
    begin(pool, "old", 1, prompt=4, max_tokens=30, reservation_tokens=0)
    begin(pool, "mid", 2, prompt=4, max_tokens=30, reservation_tokens=0)
    begin(pool, "new", 3, prompt=8, max_tokens=30, reservation_tokens=0)
    while pool.runnable:
        step(pool)
    assert REPORT in pool.timers
    assert list(pool.reservations.paused) == ["old", "mid", "new"]
    first = state_of(pool).overruns[0]
    assert (first.request_id, first.wanted_pages, first.reservation_tokens) == ("old", 1, 4)
    assert not pool.runnable
    held = pool.pages.pages_of("old")[:]
    pool.stop("new", Epoch(1, 3), session(1))
    assert list(pool.reservations.paused) == []
    assert pool.pages.pages_of("old")[:1] == held, "it kept its pages"
    step(pool)
    assert pool.sequences["old"].phase is SequencePhase.DECODE


def test_freed_pages_go_to_the_longest_paused_sequence_before_any_newcomer():
    pool = RequestPool(replace(LIMITS, total_pages=3))
    begin(pool, "old", 1, prompt=4, max_tokens=30, reservation_tokens=0)
    begin(pool, "new", 2, prompt=8, max_tokens=30, reservation_tokens=0)
    while pool.runnable:
        step(pool)
    assert list(pool.reservations.paused) == ["old", "new"]
    pool.stop("new", Epoch(1, 2), session(1))
    begin(pool, "newcomer", 3, prompt=8, max_tokens=1, reservation_tokens=0)
    assert "newcomer" not in pool.sequences
    assert pool.pages.reserved_by("old") == 2


@pytest.mark.parametrize("token", [EOS, 5])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_the_end_of_sequence_token_of_base_or_adapter_is_not_emitted_unless_it_is_ignored(ignore_eos, token):
    pool = RequestPool(LIMITS)
    begin(pool, "r", 1, prompt=2, max_tokens=3, sampling=Sampling(ignore_eos=ignore_eos, eos_token_ids=(5,)))
    step(pool, token=token)
    event = flat(take(pool, Send))[0]
    assert isinstance(event, SequenceTokens)
    assert (event.tokens, event.finish) == (((token,), None) if ignore_eos else ((), FinishReason.EOS))
    assert ("r" in pool.sequences) == ignore_eos


def test_max_tokens_counts_the_emitted_ones_and_the_context_ends_an_answer():
    pool = RequestPool(LIMITS)
    begin(pool, "r", 1, prompt=2, max_tokens=3, emitted=(5, 5))
    step(pool)
    assert flat(take(pool, Send)) == [SequenceTokens("r", Epoch(1, 1), 2, (5,), FinishReason.LENGTH, 0)]
    begin(pool, "done", 2, prompt=2, max_tokens=2, emitted=(5, 5))
    assert flat(take(pool, Send)) == [SequenceTokens("done", Epoch(1, 2), 2, (), FinishReason.LENGTH, 0)]
    begin(pool, "long", 3, prompt=38, max_tokens=30, reservation_tokens=2)
    while pool.sequences:
        step(pool)
    tokens = [e for e in flat(take(pool, Send)) if isinstance(e, SequenceTokens)]
    assert (len(tokens), tokens[-1].finish) == (2, FinishReason.LENGTH)


@pytest.mark.parametrize("sampling", [Sampling(prompt_logprobs=0), Sampling(pooling=True)])
@pytest.mark.parametrize("total_pages", [10, 12])
def test_a_prompt_as_long_as_the_context_is_computed_where_nothing_is_generated(total_pages, sampling):
    pool = RequestPool(replace(LIMITS, total_pages=total_pages))
    for key, prompt, max_tokens in (("r", 40, 0), ("one more", 41, 0), ("with an answer", 40, 1)):
        begin(pool, key, 1, prompt=prompt, max_tokens=max_tokens, reservation_tokens=1, sampling=sampling)
    assert [(answer.request_id, answer.reason) for answer in flat(take(pool, Send))] == [
        ("one more", "context"), ("with an answer", "context"),
    ]  # fmt: skip
    if total_pages == 12:
        begin(pool, "beside", 2, prompt=8, max_tokens=0, reservation_tokens=1, sampling=sampling)
    assert pool.pages.free_pages == 0, "no page is reserved for an answer"
    while pool.sequences:
        step(pool)
        check_pool(pool)
    ended = [("r", Epoch(1, 1)), ("beside", Epoch(1, 2))][: 2 if total_pages == 12 else 1]
    assert flat(take(pool, Send)) == [SequenceTokens(*one, 0, (), FinishReason.LENGTH) for one in ended]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"prompt": ()}, "no tokens"),
        ({"prompt": (99,)}, "outside the vocabulary"),
        ({"emitted": (99,)}, "outside the vocabulary"),
        *(
            ({"sampling": Sampling(**{name: value})}, name)
            for name, values in {
                "temperature": (-1.0, nan),
                "top_p": (0.0,),
                "frequency_penalty": (nan, inf, -inf),
                "presence_penalty": (nan, inf, -inf),
                "min_p": (-0.1, 1.1, nan),
                "repetition_penalty": (0.0, -1.0, nan, inf, -inf),
            }.items()
            for value in values
        ),
        *(({"sampling": Sampling(logit_bias=((1, 0.0), (3, x)))}, "logit_bias of token 3") for x in (nan, inf, -inf)),
        *(
            ({"sampling": Sampling(**fields)}, why)
            for fields, why in (
                ({"logit_bias": ((1, 0.0), (9, 0.0))}, "logit_bias token 9 is outside the vocabulary of 9"),
                ({"logit_bias": ((2**32 - 1, 0.0),)}, "outside the vocabulary"),
                ({"top_logprobs": 21}, "top_logprobs 21 is more than 20"),
                ({"prompt_logprobs": 21}, "prompt_logprobs 21 is more than 20"),
                ({"eos_token_ids": (9,)}, "eos_token_ids token 9 is outside the vocabulary of 9"),
                ({"stop_token_ids": (3, 9)}, "stop_token_ids token 9 is outside the vocabulary of 9"),
                ({"bad_words": ((1, 2), (5, 77))}, "bad_words token 77 is outside the vocabulary of 9"),
                ({"bad_words": ((1, 2), ())}, "a sequence of bad_words has no tokens"),
                ({"allowed_token_ids": (5, 9)}, "allowed_token_ids token 9 is outside the vocabulary of 9"),
            )
        ),
    ],
)
def test_an_impossible_request_ends_alone_with_its_reason(fields, why):
    pool = RequestPool(LIMITS)
    begin(pool, "good", 1, prompt=2, max_tokens=2)
    pool.start(replace(start_of("bad", 2, (1, 1), 2), **fields), session(), "g", 0.0)
    (event,) = flat(take(pool, Send))
    assert isinstance(event, Ended)
    assert (event.request_id, event.reason) == ("bad", EndReason.INTERNAL)
    assert why in event.detail
    assert set(pool.sequences) == {"good"}


def test_a_sequence_waits_for_its_adapter_with_its_pages_while_the_others_run():
    pool = RequestPool(LIMITS)
    begin(pool, "waits", 1, prompt=2, max_tokens=4, adapter="a")
    begin(pool, "runs", 2, prompt=2, max_tokens=4)
    step(pool)
    assert {e.request_id for e in flat(take(pool, Send))} == {"runs"}
    assert pool.pages.reserved_by("waits") == 2
    bring(pool, "a")
    step(pool)
    assert {e.request_id for e in flat(take(pool, Send))} == {"runs", "waits"}


def test_an_admission_that_waits_for_its_adapter_is_told_at_once():
    pool = RequestPool(LIMITS)
    begin(pool, "runs", 1, prompt=2, max_tokens=4)
    assert REPORT not in pool.timers, "its first iteration tells"
    begin(pool, "waits", 2, prompt=2, max_tokens=4, adapter="a")
    assert REPORT in pool.timers


class Unscanned(dict):
    """A dictionary that is looked up and never walked."""

    def __iter__(self):
        raise AssertionError("walked")

    values = items = keys = __iter__


def test_neither_a_sequence_nor_a_report_costs_more_with_the_number_of_adapters_known():
    pool = RequestPool(LIMITS)
    pool.apply(whole(*(desired(f"a{i}", pinned=i == 0) for i in range(1000))))
    adapters = pool.adapters.adapters
    pool.adapters.adapters = pool.adapters.catalog.adapters = Unscanned(adapters)
    bring(pool, "a0")
    begin(pool, "r", 1, prompt=2, max_tokens=2, adapter="a7")
    begin(pool, "bad", 2, prompt=2, max_tokens=2, adapter="a9")
    bring(pool, "a7")
    step(pool)
    step(pool)
    pool.on_adapter_event(FetchFailed("a9", EndReason.LOAD_FAILED, "torn", permanent=False))
    pool.adapters.adapters = pool.adapters.catalog.adapters = adapters
    state = state_of(pool)
    assert {(a.digest, a.error) for a in state.adapters} == {("a0", ""), ("a7", ""), ("a9", "torn")}
    assert state.adapters_known == 1000
    pool.apply(DesiredChange(2, full=False, removed=("a0", "a7", "a9")))
    assert not state_of(pool).adapters, "what is forgotten is listed no more"
    check_pool(pool)


def test_a_load_that_fails_ends_only_those_who_waited_for_it():
    pool = RequestPool(LIMITS)
    for i, adapter in enumerate(("a", "b", "a")):
        begin(pool, f"r{i}", i + 1, prompt=2, max_tokens=4, adapter=adapter)
    pool.on_adapter_event(FetchFailed("a", EndReason.UNKNOWN_ADAPTER, "the depot does not hold it", permanent=False))
    assert {(e.request_id, e.reason) for e in flat(take(pool, Send)) if isinstance(e, Ended)} == {
        ("r0", EndReason.UNKNOWN_ADAPTER),
        ("r2", EndReason.UNKNOWN_ADAPTER),
    }
    assert set(pool.sequences) == {"r1"}
    assert {a.digest: a.error for a in state_of(pool).adapters} == {"a": "the depot does not hold it", "b": ""}


def test_ready_is_told_only_with_desired_known_and_pinned_resident():
    pool = RequestPool(LIMITS)
    assert "not known" in state_of(pool).not_ready
    assert state_of(pool).desired_version == 0
    pool.apply(whole(desired("a", pinned=True), desired("b"), version=7))
    assert "pinned" in state_of(pool).not_ready
    bring(pool, "a")
    assert state_of(pool).not_ready == ""
    assert state_of(pool).desired_version == 7


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3), st.integers(1, 9)), max_size=80))
def test_the_epoch_book_remembers_the_highest_and_stays_bounded(seen):
    book, model = HighestEpochs(limit=10), {}
    for number, term, counter in seen:
        epoch = Epoch(term, counter)
        if len(book) < 10:
            assert book.is_stale(f"r{number}", epoch) == (number in model and epoch <= model[number])
        book.see(f"r{number}", epoch)
        model[number] = max(model.get(number, epoch), epoch)
        assert book.is_stale(f"r{number}", epoch)
    assert len(book) <= 10


@given(
    base=st.integers(1, 60),
    reservation=st.integers(0, 60),
    max_tokens=st.integers(1, 100),
    page_tokens=st.integers(1, 17),
)
def test_growth_asks_for_a_page_at_least_and_never_for_more_than_can_be_filled(
    base, reservation, max_tokens, page_tokens
):
    context = 128
    sequence = Sequence(
        start_of("r", 1, (1,) * base, max_tokens, reservation_tokens=reservation), session(), "g", admitted=1, now=0.0,
        max_context_tokens=context,
    )  # fmt: skip
    reserved = first_reservation_pages(base, reservation, page_tokens, context)
    most = -(-sequence.max_len // page_tokens)
    while reserved * page_tokens < sequence.max_len - 1:
        growth = next_growth(sequence, reserved, page_tokens)
        assert growth.wanted_pages >= 1
        assert reserved + growth.wanted_pages <= most
        assert growth.reservation_tokens >= sequence.reservation_tokens or not growth.doubled
        sequence.reservation_tokens = growth.reservation_tokens
        reserved += random.Random(base).randint(1, growth.wanted_pages)
