"""The runner's machine: what its reports add up to, who receives what, and what is due when."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from harness.desired import desired, whole
from harness.runner_machine import RecordedGrammar, session, start_of
from weft.domain.adapter import DesiredChange, Tier
from weft.domain.ids import RunnerId
from weft.domain.machine import TICK, Closed, Connected, Kind, Peer, Received, Send
from weft.domain.request import Draining, EndReason, Sampling, SessionHello, Stop
from weft.domain.runner import Heartbeat, Registered, Resync, RunnerBook, RunnerOrder, RunnerReport, RunnerSpec
from weft_runner.core import BatchLimits, Drain, Fetch, Fetched, PoolLimits, Runner, SampledToken
from weft_runner.core.adapters.adapter import LoadState
from weft_runner.core.events import (
    REPORT,
    GrammarCompiled,
    Load,
    Loaded,
    LoadFailed,
    RunStep,
    StepDone,
    StepResults,
    StepSlot,
)

LIMITS = PoolLimits(12, 4, 5, 2, 40, 9, frozenset([0]), BatchLimits(1, 7), host_bytes=25)
SPEC = RunnerSpec(RunnerId("n.u", "i"), "h:1", "n/p", 4, 12, 5, 2, 64, 40)
SUPERVISOR = Peer(Kind.SUPERVISOR, "s")


def reports(effects: list[Any]) -> list[RunnerReport]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, RunnerReport)]


class ReportMachine(RuleBasedStateMachine):
    """A supervisor that applies every report has the runner's whole state, whatever happens between two reports."""

    def __init__(self) -> None:
        super().__init__()
        self.runner, self.book, self.now = Runner(LIMITS), RunnerBook(SPEC), 0.0
        self.transfers: list[Any] = []
        self.step: RunStep | None = None
        self.counter = 0
        for number in (1, 2):
            self.handle(Connected(session(number), SessionHello(f"g{number}", "i")))
        self.handle(Connected(SUPERVISOR))
        self.handle(Received(SUPERVISOR, Registered(lease_ms=2000, report_ms=50)))

    def handle(self, event: Any, seconds: float = 0.0) -> None:
        self.now += seconds
        effects = self.runner.handle(event, self.now)
        self.transfers.extend(e for e in effects if isinstance(e, Fetch | Load))
        self.step = next((e for e in effects if isinstance(e, RunStep)), self.step)
        for report in reports(effects):
            self.book.apply(report)
            assert report.full or len(report.sequences) <= len(self.runner.pool.sequences)
        self.runner.check()

    @rule(
        key=st.sampled_from("vwxyz"), owner=st.integers(1, 2), prompt=st.integers(1, 20),
        adapter=st.sampled_from(["", *"abc"]), reservation=st.integers(0, 9), salt=st.sampled_from(["", "t"]),
        grammar=st.sampled_from(["", "g"]),
    )  # fmt: skip
    def start(self, key: str, owner: int, prompt: int, adapter: str, reservation: int, salt: str, grammar: str) -> None:
        self.counter += 1
        start = start_of(
            key, self.counter, (1,) * prompt, 15, adapter=adapter, reservation_tokens=reservation, cache_salt=salt,
            sampling=Sampling(grammar=grammar),
        )  # fmt: skip
        self.handle(Received(session(owner), start))
        if grammar:
            self.handle(GrammarCompiled(session(owner), key, start.epoch, RecordedGrammar()))

    @rule(key=st.sampled_from("vwxyz"), owner=st.integers(1, 2))
    def stop(self, key: str, owner: int) -> None:
        if key in self.runner.pool.sequences:
            self.handle(Received(session(owner), Stop(key, self.runner.pool.sequences[key].start.epoch)))

    @rule(owner=st.integers(1, 2))
    def reconnect(self, owner: int) -> None:
        self.handle(Closed(session(owner)))
        self.handle(Connected(session(owner), SessionHello(f"g{owner}", "i")))

    @rule(
        tokens=st.lists(st.integers(0, 8), min_size=5, max_size=5), seconds=st.sampled_from([0.0, 0.03]),
        unready=st.sets(st.sampled_from("vwxyz")), late=st.sets(st.sampled_from("vwxyz")),
    )  # fmt: skip
    def run_step(self, tokens: list[int], seconds: float, unready: set[str], late: set[str]) -> None:
        """Masks of some are not ready as it begins, and those of some others not there by its end."""
        self.step, pool = None, self.runner.pool
        for key, sequence in pool.masks.constrained.items():
            sequence.mask.grammar.ready = key not in unready  # type: ignore[union-attr]
        self.handle(StepSlot())
        if self.step is not None:
            assert not unready & {row.key for row in self.step.batch.rows} & pool.masks.constrained.keys()
            sampling = [row.key for row in self.step.batch.rows if row.samples]
            late &= pool.masks.constrained.keys() & {*sampling}
            sampled = {key: SampledToken(t) for key, t in zip(sampling, tokens, strict=False) if key not in late}
            before = {key: (pool.sequences[key].in_kv, len(pool.sequences[key].tokens)) for key in late}
            self.handle(StepDone(self.step, StepResults(sampled, {}, late=tuple(late)), 1.0), seconds)
            assert before == {key: (pool.sequences[key].in_kv, len(pool.sequences[key].tokens)) for key in late}

    @precondition(lambda self: self.transfers)
    @rule(fails=st.booleans())
    def transfer(self, fails: bool) -> None:
        match self.transfers.pop(0):
            case Fetch(digest, to_host):
                self.handle(Fetched(digest, None, 10 if to_host else None))
            case Load(digest) if fails:
                self.handle(LoadFailed(digest, "internal", "torn", False))  # type: ignore[arg-type]
            case Load(digest):
                self.handle(Loaded(digest, 4, 1, 10, 0.1))

    @rule(held=st.sets(st.sampled_from("abc")), removed=st.sets(st.sampled_from("abc")), full=st.booleans())
    def desire(self, held: set[str], removed: set[str], full: bool) -> None:
        adapters = tuple(desired(digest, n_bytes=10, tier=Tier.HOST) for digest in sorted(held))
        change = DesiredChange(1, full, adapters, tuple(sorted(removed - held)))
        self.handle(Received(SUPERVISOR, RunnerOrder(change)))

    @rule()
    def resync(self) -> None:
        self.handle(Received(SUPERVISOR, Resync()))

    @rule()
    def wait(self) -> None:
        self.handle(TICK, 0.06)

    @rule()
    def compare(self) -> None:
        """Once everything due is reported the book is the state, whatever has happened since the last report."""
        runner = self.runner
        if runner.reporter.changed or REPORT in runner.pool.timers:
            self.handle(TICK, 0.06)
        runner.reporter.resync()
        sequences, adapters, version = self.book.sequences, self.book.adapters, self.book.version
        overruns = self.book.overruns
        self.handle(TICK)
        assert self.book.version == (version or 0) + 1
        assert list(sequences.items()) == list(self.book.sequences.items()), "in the same order, for `progress`"
        assert adapters == self.book.adapters
        assert overruns == self.book.overruns
        assert list(self.book.progress) == [s.in_kv for s in runner.pool.sequences.values()]

    def teardown(self) -> None:
        self.compare()


ReportMachine.TestCase.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=40)
test_reports_add_up_to_the_whole_state = ReportMachine.TestCase


def ready_runner() -> Runner:
    runner = Runner(LIMITS)
    runner.handle(Connected(session(1), SessionHello("g", "i")), 0.0)
    runner.handle(Connected(SUPERVISOR), 0.0)
    runner.handle(Received(SUPERVISOR, Registered(lease_ms=2000, report_ms=50)), 0.0)
    runner.handle(Received(SUPERVISOR, RunnerOrder(whole())), 0.0)
    return runner


def test_an_idle_runner_keeps_its_lease_with_heartbeats_and_reports_nothing():
    runner, now, sent = ready_runner(), 0.0, list[Any]()
    while now < 10.0:
        deadline = runner.next_deadline()
        assert deadline is not None
        assert deadline > now or now == 0.0
        now = max(now, deadline)
        sent.extend(e.message for e in runner.handle(TICK, now) if isinstance(e, Send))
    assert sum(isinstance(message, RunnerReport) for message in sent) == 1, "what was due at first"
    assert 18 <= sum(isinstance(message, Heartbeat) for message in sent) <= 21


def run_steps(runner: Runner, seconds: float, step_s: float = 0.02) -> list[tuple[float, RunnerReport]]:
    """Run a step of all sequences each `step_s`. Returns what was reported, and when."""
    sent, now = list[tuple[float, RunnerReport]](), 0.0
    while now < seconds:
        (step,) = [effect for effect in runner.handle(StepSlot(), now) if isinstance(effect, RunStep)]
        now = round(now + step_s, 3)
        sampled = {row.key: SampledToken(5) for row in step.batch.rows if row.samples}
        sent += [(now, report) for report in reports(runner.handle(StepDone(step, StepResults(sampled, {}), 1.0), now))]
    return sent


def test_how_far_sequences_are_is_reported_four_times_a_second_alone_and_with_all_else():
    runner = Runner(replace(LIMITS, total_pages=200, page_tokens=16, max_context_tokens=400))
    for event in (Connected(session(1), SessionHello("g", "i")), Connected(SUPERVISOR)):
        runner.handle(event, 0.0)
    runner.handle(Received(session(1), start_of("r", 1, (1, 1), 200, reservation_tokens=60)), 0.0)
    sent = run_steps(runner, 2.0)
    grown = [now for now, report in sent if report.sequences]
    assert len(grown) == 2, "as it began, and as its reservation grew"
    alone = [report for _, report in sent if not report.sequences]
    assert len(alone) in (6, 7), "250 ms after the last report, whatever that was of"
    assert all(report.progress for report in alone)
    pauses = [later - earlier for (earlier, _), (later, _) in pairwise(sent)]
    assert max(pauses) <= 0.27, "at most a step later"


def test_what_placement_goes_by_is_reported_within_fifty_milliseconds():
    runner = ready_runner()
    runner.handle(Received(session(1), start_of("r", 1, (1, 1), 9)), 0.0)
    first = run_steps(runner, 0.04)
    runner.handle(Received(SUPERVISOR, RunnerOrder(DesiredChange(2, False))), 0.04)
    assert runner.next_deadline() == 0.05, "50 ms after the last one"
    (report,) = reports(runner.handle(TICK, 0.05))
    assert (first, report.figures.desired_version) == ([], 2)


@pytest.mark.parametrize("ms", [0.0, 1.0])
def test_a_step_whose_time_is_not_known_teaches_nothing(ms: float):
    runner = ready_runner()
    runner.handle(Received(session(1), start_of("r", 1, (1, 1), 9)), 0.0)
    (step,) = [effect for effect in runner.handle(StepSlot(), 0.0) if isinstance(effect, RunStep)]
    before, step_time = (1.0, 1.0), runner.pool.scheduler.step_time
    runner.handle(StepDone(step, StepResults({"r": SampledToken(5)}, {}), ms), 0.0)
    assert ((step_time.decode, step_time.prompt) == before) == (ms == 0.0)


def test_a_drain_ends_every_sequence_and_then_names_it_to_each_session():
    runner = ready_runner()
    runner.handle(Received(session(1), start_of("r", 1, (1, 1), 9)), 0.0)
    (step,) = [effect for effect in runner.handle(StepSlot(), 0.0) if isinstance(effect, RunStep)]
    runner.handle(StepDone(step, StepResults({"r": SampledToken(5)}, {}), 1.0), 0.0)
    effects = runner.handle(Drain(on=True), 0.0)
    ended, draining = [e.message for e in effects if isinstance(e, Send) and e.peer == session(1)]
    assert (ended.request_id, ended.reason, ended.emitted_tokens) == ("r", EndReason.DRAINED, 1)
    assert draining == Draining()
    late = runner.handle(Connected(session(2), SessionHello("h", "i")), 0.0)
    assert Send(session(2), Draining()) in late
    (refused,) = [e for e in runner.handle(Received(session(2), start_of("s", 1, (1,), 9)), 0.0) if isinstance(e, Send)]
    assert (refused.peer, refused.message.reason) == (session(2), EndReason.DRAINED)
    runner.handle(Drain(on=False), 0.0)
    runner.handle(Received(session(2), start_of("s", 2, (1,), 9)), 0.0)
    assert set(runner.pool.sequences) == {"s"}


def test_an_adapter_that_only_a_start_names_is_loaded_on_demand():
    runner = ready_runner()
    effects = runner.handle(
        Received(session(1), start_of("r", 1, (1, 1), 9, adapter="a", rank=8, adapter_bytes=77)), 0.0
    )
    assert Fetch("a", urgent=True) in effects
    (report,) = reports(effects)
    assert [(a.digest, a.rank, a.bytes, a.loading) for a in report.adapters] == [("a", 8, 77, True)]
    assert [sequence.gateway for sequence in report.sequences] == ["g"]
    assert report.figures.ready, "it is not held: nothing waits for it"


Break = Callable[[Any, Any], Any]  # of the pool's books, or of its only adapter


@pytest.mark.parametrize(
    "spoil",
    [
        lambda pool, _: pool.pages._free.pop(),
        lambda pool, _: pool.pages.prefixes._twice.add(b"gone"),
        lambda pool, _: setattr(pool.adapters.slots, "slots", 0),
        lambda pool, _: pool.adapters.slots._unused_pages.update({False: 1}),
        lambda pool, _: setattr(pool.adapters.host, "held_bytes", 11),
        lambda _, adapter: setattr(adapter, "state", LoadState.ON_DISK),
        lambda pool, adapter: pool.adapters.prefetcher._missing.update(a=adapter),
        lambda pool, _: pool.swap.arriving.update({b"page": 1}),
        lambda pool, _: pool.host_prefixes.saves.update({1: {0: None}}),
        lambda pool, _: pool.hand_over.kv.incoming.update(nobody=None),
        lambda pool, _: pool.sequences["r"].tokens.append(5),
    ],
)
def test_a_book_that_is_wrong_breaks_a_law(spoil: Break):
    runner = ready_runner()
    for event in (
        Received(session(1), start_of("r", 1, (1, 1), 9, adapter="a")), Fetched("a", None, None),
        Loaded("a", 4, 1, 10, 0.1),
    ):  # fmt: skip
        runner.handle(event, 0.0)
    (step,) = [effect for effect in runner.handle(StepSlot(), 0.0) if isinstance(effect, RunStep)]
    runner.handle(StepDone(step, StepResults({"r": SampledToken(5)}, {}), 1.0), 0.0)
    runner.check()
    spoil(runner.pool, runner.pool.adapters.adapters["a"])
    with pytest.raises(AssertionError):
        runner.check()
