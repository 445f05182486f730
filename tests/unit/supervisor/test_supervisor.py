from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from weft.domain.adapter import AdapterState, DesiredAdapter, DesiredChange, Tier
from weft.domain.ids import Epoch, RunnerId
from weft.domain.machine import TICK, Close, Closed, Connected, Kind, Peer, PersistTerm, Received, Send
from weft.domain.runner import (
    ClusterReport,
    Heartbeat,
    OrderedRunner,
    Overrun,
    Registered,
    ReportGap,
    Resync,
    RunnerBook,
    RunnerFigures,
    RunnerOrder,
    RunnerReport,
    RunnerSpec,
    SchedulerHello,
    SequenceState,
)
from weft_supervisor.core import FULL_REPORTS, LogEvent, Supervisor, SupervisorConfig, runner_peer
from weft_supervisor.core import supervisor as core

A1, A2, B1 = RunnerId("a", "1"), RunnerId("a", "2"), RunnerId("b", "1")
CONFIG = SupervisorConfig(lease_s=2.0, report_s=0.05, merge_s=0.0, preempt_s=5.0)
SCHEDULER = Peer(Kind.SCHEDULER, "s")


def spec_of(runner=A1, total=4) -> RunnerSpec:
    return RunnerSpec(runner, "h:1", "ns/pool", 16, total, 8, 4, 8, 16 * total)


def sequences(*names: str) -> list[SequenceState]:
    return [SequenceState(name, Epoch(1, i), "g", "", 1, 16, i) for i, name in enumerate(names)]


def report(runner=A1, version=1, *names, free=0, paused=(), full=True, **fields) -> Received:
    """A full report of these sequences, or (not `full`) a change that brings them."""
    rows = sequences(*names)
    overruns = tuple(Overrun(row.request_id, row.epoch, 1, 32) for row in rows if row.request_id in paused)
    known = RunnerReport._fields
    figures = RunnerFigures(free, len(rows), **{k: v for k, v in fields.items() if k not in known})
    rest = {k: v for k, v in fields.items() if k in known}
    return Received(
        runner_peer(runner), RunnerReport(version, full, figures, **({"sequences": rows} | rest), overruns=overruns)
    )


def change(runner=A1, version=2, *names, **fields) -> Received:
    return report(runner, version, *names, full=False, **fields)


def up(runner=A1, total=4) -> Connected:
    return Connected(runner_peer(runner), spec_of(runner, total))


def beat(runner=A1) -> Received:
    return Received(runner_peer(runner), Heartbeat())


def order(runner=A1, version=1, *digests, full=True, drain=False, removed=()) -> Received:
    adapters = tuple(DesiredAdapter(digest, 8, 100, pinned=False, tier=Tier.DISK) for digest in digests)
    desired = DesiredChange(version, full, adapters, removed) if version else None
    return Received(SCHEDULER, OrderedRunner(runner, RunnerOrder(desired, drain)))


def sent(effects) -> list[ClusterReport]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, ClusterReport)]


def to(runner, effects) -> list[object]:
    return [e.message for e in effects if isinstance(e, Send) and e.peer == runner_peer(runner)]


def closed(runner, effects) -> bool:
    return any(isinstance(e, Close) and e.peer == runner_peer(runner) for e in effects)


def logged(effects) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, LogEvent)]


def machine(*events, linked=True, config=CONFIG) -> Supervisor:
    supervisor = Supervisor(config)
    if linked:
        supervisor.handle(Connected(SCHEDULER), 0.0)
    for event in events:
        supervisor.handle(event, 0.0)
    return supervisor


def versions(merged: ClusterReport) -> list[tuple[RunnerId, int]]:
    return [(reported.runner, reported.report.version) for reported in merged.reports]


def test_quiet_changes_are_merged_in_their_order_and_sent_at_most_every_report_interval():
    supervisor = machine(up(), up(B1), report(A1, 1, "r1", free=3), report(B1, 1, free=4))
    assert sent(supervisor.handle(change(A1, 2, "r2", free=2), 0.01)) == []
    assert sent(supervisor.handle(change(B1, 2, "r3", free=3), 0.02)) == []
    assert sent(supervisor.handle(change(A1, 3, free=2), 0.03)) == []
    assert supervisor.next_deadline() == 0.05
    [merged] = sent(supervisor.handle(TICK, 0.05))
    assert versions(merged) == [(A1, 2), (A1, 3), (B1, 2)]
    assert {reported.spec for reported in merged.reports} == {None}
    assert sent(supervisor.handle(TICK, 0.2)) == []


def test_what_is_urgent_is_merged_for_a_moment_where_there_is_much_of_it():
    supervisor = machine(up(), up(B1), config=replace(CONFIG, merge_s=0.002))
    [first] = sent(supervisor.handle(report(A1, 1, "r1", free=3), 1.0))
    assert sent(supervisor.handle(change(A1, 2, free=4, ended=("r1",)), 1.0005)) == []
    assert sent(supervisor.handle(report(B1, 1, free=4), 1.001)) == []
    assert supervisor.next_deadline() == 1.002
    [second] = sent(supervisor.handle(TICK, 1.002))
    assert (versions(first), versions(second)) == ([(A1, 1)], [(A1, 2), (B1, 1)])


def test_an_end_is_reported_at_once():
    supervisor = machine(up(), report(A1, 1, "r1", "r2", free=2))
    [merged] = sent(supervisor.handle(change(A1, 2, free=3, ended=("r2",)), 0.001))
    assert versions(merged) == [(A1, 2)]


def test_an_overrun_is_reported_at_once_with_the_victim():
    supervisor = machine(up(total=2), report(A1, 1, "old", "new"))
    [merged] = sent(supervisor.handle(change(A1, 2, "old", "new", paused=("old",)), 0.001))
    [preempt] = merged.preempts
    assert (preempt.request_id, preempt.for_request_id, preempt.reservation_tokens) == ("new", "old", 16)
    assert sent(supervisor.handle(change(A1, 3, "old", "new", paused=("old",)), 0.002)) == []
    for now in range(1, 6):
        supervisor.handle(beat(), float(now))
    [again] = sent(supervisor.handle(TICK, 5.001))
    assert again.preempts == merged.preempts, "it is there still"
    supervisor.handle(change(A1, 4, "old", "new", paused=("old",)), 5.002)
    [lost] = sent(supervisor.handle(up(A2), 5.003))
    assert (lost.reports, lost.lost, lost.preempts) == ((), (A1,), ())
    supervisor.check()


def test_a_runner_that_lies_has_no_victim():
    supervisor = machine(up(total=2), report(A1, 1, "old", "new", paused=("old",)))
    assert supervisor.preemption.pending()
    supervisor.handle(report(A1, 2, free=2**32), 0.1)
    assert not supervisor.preemption.pending()


def test_a_change_that_does_not_follow_is_asked_for_whole_once():
    supervisor = machine(up(), report(A1, 1, "r1", free=3))
    effects = supervisor.handle(change(A1, 3, "r3", free=2), 0.1)
    assert (to(A1, effects), logged(effects)) == ([Resync()], ["a report is missing"])
    effects = supervisor.handle(change(A1, 4, "r4", free=1), 0.2)
    assert (to(A1, effects), sent(effects)) == ([], [])
    [merged] = sent(supervisor.handle(report(A1, 5, "r1", "r3", free=2), 0.3))
    assert [(r.runner, r.report.version, r.report.full, r.spec) for r in merged.reports] == [(A1, 5, True, spec_of())]
    assert sent(supervisor.handle(change(A1, 6, "r4", free=1), 0.5)) != []


def test_a_scheduler_that_misses_a_report_gets_the_whole_state_of_that_runner():
    supervisor = machine(up(), up(B1), report(A1, 1, "r1", free=3), report(B1, 1, free=4))
    adapter = AdapterState("sha256:1", Tier.HOST)
    supervisor.handle(change(A1, 2, "r2", free=2, adapters=(adapter,), progress=(7, 8)), 0.04)
    [merged] = sent(supervisor.handle(Received(SCHEDULER, Resync(A1)), 0.045))
    [reported] = merged.reports
    assert (reported.runner, reported.report.version, reported.report.full) == (A1, 2, True)
    assert reported.spec == spec_of()
    assert [s.request_id for s in reported.report.sequences] == ["r1", "r2"]
    assert (reported.report.adapters, reported.report.progress) == ((adapter,), (7, 8))
    assert sent(supervisor.handle(Received(SCHEDULER, Resync(A2)), 0.1)) == []


@pytest.mark.parametrize("lie", [report(A1, 2, free=2**32), change(A1, 2, *"abcdefghi", free=4)])
def test_a_report_that_contradicts_the_hello_ends_the_stream_and_nothing_else(lie):
    supervisor = machine(up(), up(B1), report(A1, 1, free=4), report(B1, 1, free=4))
    effects = supervisor.handle(lie, 0.1)
    assert closed(A1, effects)
    assert sent(effects) == []
    assert [book.spec.runner for book in supervisor.live()] == [B1]
    supervisor.check()
    supervisor.handle(up(), 0.2)
    [merged] = sent(supervisor.handle(report(A1, 3, free=4), 0.3))
    assert versions(merged) == [(A1, 3)]


def test_a_runner_that_falls_silent_is_lost_once_and_its_stream_is_ended():
    supervisor = machine(up(), report(A1, 1, free=4))
    supervisor.handle(beat(), 1.0)
    assert sent(supervisor.handle(TICK, 2.9)) == []
    effects = supervisor.handle(TICK, 3.0)
    assert [merged.lost for merged in sent(effects)] == [(A1,)]
    assert closed(A1, effects)
    assert sent(supervisor.handle(TICK, 4.0)) == []
    assert supervisor.live() == []
    assert sent(supervisor.handle(change(A1, 2, free=4), 4.1)) == [], (
        "a late report of a lost runner counts for nothing"
    )


def test_a_new_incarnation_loses_the_old_one_at_once():
    supervisor = machine(up(), report(A1, 1, "r1", free=3))
    effects = supervisor.handle(up(A2), 0.1)
    assert [merged.lost for merged in sent(effects)] == [(A1,)]
    assert closed(A1, effects)
    assert logged(effects) == ["runner replaced by a newer incarnation", "runner registered"]
    effects = supervisor.handle(up(A1), 0.2)
    assert (closed(A1, effects), logged(effects)) == (True, ["replaced incarnation refused"])
    assert supervisor.counters().lost == 1
    assert supervisor.live() == []


def test_a_new_scheduler_stream_begins_with_everything_that_still_counts():
    supervisor = machine(up(A1, 2), up(B1), report(A1, 1, "old", "new", paused=("old",)), report(B1, 1, free=4))
    supervisor.handle(Closed(SCHEDULER), 0.1)
    supervisor.handle(change(A1, 2, "old", "new", paused=("old",)), 1.5)
    assert sent(supervisor.handle(TICK, 2.0)) == []
    full, rest = sent(supervisor.handle(Connected(SCHEDULER), 2.1))
    assert [(r.runner, r.report.full, r.report.version, r.spec) for r in full.reports] == [
        (A1, True, 2, spec_of(A1, 2))
    ]
    assert rest.lost == (B1,)
    assert [p.request_id for p in rest.preempts] == ["new"]
    assert rest.reports == ()


def test_the_full_reports_of_many_runners_are_several_messages():
    runners = [RunnerId(f"u{i:02}", "1") for i in range(2 * FULL_REPORTS + 1)]
    supervisor = machine(*map(up, runners), *(report(runner, 1, free=4) for runner in runners))
    merged = sent(supervisor.handle(Connected(SCHEDULER), 0.1))
    assert [len(one.reports) for one in merged] == [FULL_REPORTS, FULL_REPORTS, 1]
    assert [runner for one in merged for runner, _ in versions(one)] == runners


def test_a_runner_that_reconnects_is_heard_whatever_its_version_and_keeps_its_victim():
    supervisor = machine(up(total=2), report(A1, 7, "old", "new", paused=("old",)))
    supervisor.handle(up(total=2), 0.1)
    [merged] = sent(supervisor.handle(report(A1, 1, "old", "new", paused=("old",)), 0.2))
    assert merged.preempts == ()
    assert supervisor.counters().preempts == 1


def test_a_runner_is_told_its_lease_when_it_connects():
    assert to(A1, machine().handle(up(), 0.0)) == [Registered(2000, 50)]


def test_a_runner_is_told_now_and_then_that_it_is_heard():
    supervisor = machine(up())
    assert to(A1, supervisor.handle(beat(), 0.7)) == []
    assert to(A1, supervisor.handle(beat(), 0.75)) == [Registered(2000, 50)]
    assert to(A1, supervisor.handle(report(A1, 1, free=4), 0.8)) == []
    assert to(A1, supervisor.handle(change(A1, 2, free=4), 1.5)) == [Registered(2000, 50)]


def test_orders_pass_as_they_come_and_a_runner_that_reconnects_gets_them_merged():
    supervisor = machine(up())
    for one in (order(A1, 1, "x", "y"), order(A1, 2, "z", full=False, removed=("x",)), order(A1, 0, drain=True)):
        assert to(A1, supervisor.handle(one, 0.1)) == [one.message.order]
    _, merged = to(A1, supervisor.handle(up(), 0.3))
    assert (merged.drain, merged.desired.version, merged.desired.full) == (True, 2, True)
    assert [adapter.digest for adapter in merged.desired.adapters] == ["y", "z"]
    assert to(A2, supervisor.handle(up(A2), 0.4)) == [Registered(2000, 50)], "orders are for one incarnation"


def test_so_many_lost_runners_are_remembered_for_the_next_scheduler(monkeypatch):
    monkeypatch.setattr(core, "MAX_LOST", 2)
    runners = [RunnerId(name, "1") for name in "abcd"]
    supervisor = machine(*map(up, runners), linked=False)
    supervisor.handle(TICK, 2.0)
    [merged] = sent(supervisor.handle(Connected(SCHEDULER), 2.1))
    assert merged.lost == tuple(runners[2:])


def test_a_lease_that_ran_out_unseen_by_the_scheduler_loses_no_order():
    supervisor = machine(up(), order(A1, 1, "x"))
    supervisor.handle(Closed(SCHEDULER), 0.0)
    supervisor.handle(TICK, 2.0)
    _, merged = to(A1, supervisor.handle(up(), 2.1))
    assert [adapter.digest for adapter in merged.desired.adapters] == ["x"]


def test_a_runner_that_the_scheduler_believes_in_and_that_never_connects_is_lost_after_a_lease():
    supervisor = machine(order(A1, 1, "x"))
    assert supervisor.live() == []
    [merged] = sent(supervisor.handle(TICK, 2.0))
    assert merged.lost == (A1,)


def test_the_highest_term_of_schedulers_is_persisted_once():
    supervisor = Supervisor(CONFIG, highest_term=3)
    hello = [supervisor.handle(Received(SCHEDULER, SchedulerHello(term)), 0.0) for term in (3, 5, 4)]
    assert hello == [[], [PersistTerm(5)], []]
    assert supervisor.highest_term == 5


def test_sums_of_counters_that_lie_still_fit_the_wire():
    supervisor = machine(up(), up(B1), report(A1, 1, free=4, doublings=2**64 - 1), report(B1, 1, free=4, doublings=9))
    assert supervisor.counters().doublings == 2**64 - 1


def test_counters_are_summed_across_incarnations_and_count_a_returning_one_once():
    supervisor = machine(up(), report(A1, 1, free=4, grown_pages=5, doublings=2))
    supervisor.handle(TICK, 2.0)
    assert (supervisor.counters().grown_pages, supervisor.counters().doublings) == (5, 2)
    supervisor.handle(up(), 2.1)
    assert supervisor.counters().grown_pages == 5
    supervisor.handle(report(A1, 2, free=4, grown_pages=6, doublings=2), 2.1)
    assert (supervisor.counters().grown_pages, supervisor.counters().doublings) == (6, 2)
    supervisor.handle(up(A2), 2.2)
    supervisor.handle(report(A2, 1, free=4, grown_pages=1, doublings=1), 2.2)
    assert (supervisor.counters().grown_pages, supervisor.counters().doublings) == (7, 3)


def test_a_page_table_that_does_not_balance_is_logged_once_and_reported_as_it_is():
    supervisor = machine(up())
    effects = supervisor.handle(report(A1, 1, "r1", free=4), 0.0)
    assert logged(effects) == ["page table does not balance"]
    assert len(sent(effects)) == 1
    assert not logged(supervisor.handle(change(A1, 2, free=4), 0.1))


def test_a_supervisor_that_stood_still_itself_does_not_blame_the_runners():
    supervisor = machine(up(), report(A1, 1, free=4))
    assert sent(supervisor.handle(TICK, 60.0)) == []
    supervisor.handle(beat(), 62.0)
    assert [book.spec.runner for book in supervisor.live()] == [A1]
    assert sent(supervisor.handle(TICK, 63.9)) == []
    assert [merged.lost for merged in sent(supervisor.handle(TICK, 64.0))] == [(A1,)]


@given(stopped_s=st.floats(0.0, 60.0), silent_s=st.floats(0.0, 0.5), back=st.floats(0.0, 1.0))
@example(stopped_s=1.5, silent_s=0.4375, back=1.0)  # 62.5 ms before the lease's end, then 37.5 ms after it
def test_however_long_it_stood_still_runners_have_the_time_to_open_new_links(stopped_s, silent_s, back):
    """A link is given up 2 s into the silence at the earliest; back-offs of reconnecting grow with it, to some seconds.
    A runner that does not come back is lost all the same."""
    supervisor = machine(up(), up(B1), report(A1, 1, free=4), report(B1, 1, free=4))
    for at in (0.25, 0.5):
        supervisor.handle(beat(), at)
        supervisor.handle(beat(B1), at)
    resumed = 0.5 + silent_s + stopped_s
    assume(not 2.5 <= resumed <= 2.5 + CONFIG.late_s)  # as late as a busy loop may be: that is no standing still
    lost = [merged.lost for merged in sent(supervisor.handle(TICK, resumed)) if merged.lost]
    returned = resumed + back * (0.1 if resumed < 2.5 else min(resumed - 2.5, CONFIG.return_s))
    # The supervisor resumes in time, and its next event is as late as a busy loop may be: B1 loses its lease.
    silent = [B1] if resumed < 2.5 and 0 <= returned - 2.5 <= CONFIG.late_s else []
    for event in (up(), report(A1, 2, free=4)):
        lost += [merged.lost for merged in sent(supervisor.handle(event, returned)) if merged.lost]
    assert [book.spec.runner for book in supervisor.live()] == [runner for runner in (A1, B1) if runner not in silent]
    assert lost == [(runner,) for runner in silent]
    supervisor.check()
    while (deadline := supervisor.next_deadline()) is not None and A1 in {b.spec.runner for b in supervisor.live()}:
        lost += [merged.lost for merged in sent(supervisor.handle(TICK, deadline)) if merged.lost]
        assert deadline <= returned + CONFIG.lease_s + CONFIG.return_s + 0.5
    assert {runner for runners in lost for runner in runners} == {A1, B1}


class Cluster(RuleBasedStateMachine):
    """Runners that start, report changes (some of which get lost), overrun, die and come back; a scheduler's books."""

    ids = st.builds(RunnerId, st.sampled_from("abc"), st.sampled_from("12"))

    @initialize()
    def begin(self) -> None:
        self.supervisor, self.now = Supervisor(CONFIG), 0.0
        self.books: dict[RunnerId, RunnerBook] = {}  # the scheduler's
        self.truth: dict[RunnerId, dict[str, SequenceState]] = {}  # what runs on each runner
        self.version: dict[RunnerId, int] = {}
        self.full: set[RunnerId] = set()  # runners whose next report is full
        self.victims: dict[RunnerId, tuple[str, float]] = {}
        self.linked = False

    def feed(self, event) -> None:
        for effect in self.supervisor.handle(event, self.now):
            if not isinstance(effect, Send):
                continue
            if isinstance(effect.message, Resync):
                self.full |= {runner for runner in self.version if runner_peer(runner) == effect.peer}
            if isinstance(effect.message, ClusterReport):
                self.take(effect.message)

    def take(self, merged: ClusterReport) -> None:
        assert self.linked
        for reported in merged.reports:
            if reported.report.full:
                self.books[reported.runner] = RunnerBook(reported.spec)
            self.books[reported.runner].apply(reported.report)
        for lost in merged.lost:
            self.books.pop(lost, None)
        for preempt in merged.preempts:
            self.on_victim(preempt)

    def on_victim(self, preempt) -> None:
        before = self.victims.get(preempt.runner)
        held = {
            name for book in self.supervisor.live() if book.spec.runner == preempt.runner for name in book.sequences
        }
        if before and before[0] != preempt.request_id and before[0] in held:
            assert self.now >= before[1] + CONFIG.preempt_s, "two pending victims"
        if before is None or before[0] != preempt.request_id:
            self.victims[preempt.runner] = (preempt.request_id, self.now)

    @rule(runner=ids)
    def starts(self, runner: RunnerId) -> None:
        self.version.setdefault(runner, 0)
        self.truth.setdefault(runner, {})
        self.full.add(runner)
        self.feed(up(runner))

    @rule(runner=ids, count=st.integers(0, 4), paused=st.integers(0, 3), arrives=st.booleans() | st.just(True))
    def reports(self, runner: RunnerId, count: int, paused: int, arrives: bool) -> None:
        if runner not in self.version:
            return
        rows = {row.request_id: row for row in sequences(*[f"r{i}" for i in range(count)])}
        before, self.truth[runner] = self.truth[runner], rows
        self.version[runner] += 1
        overruns = [Overrun(row.request_id, row.epoch, 1, 32) for row in list(rows.values())[:paused]]
        full = runner in self.full
        fresh = [row for name, row in rows.items() if full or name not in before]
        ended = () if full else tuple(before.keys() - rows.keys())
        figures = RunnerFigures(4 - count, count)
        if arrives:
            self.full.discard(runner)
            message = RunnerReport(self.version[runner], full, figures, fresh, ended, overruns=overruns)
            self.feed(Received(runner_peer(runner), message))

    @rule(runner=ids)
    def beats(self, runner: RunnerId) -> None:
        self.feed(beat(runner))

    @rule(seconds=st.floats(0.0, 1.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(TICK)

    @rule()
    def scheduler_restarts(self) -> None:
        self.feed(Closed(SCHEDULER))
        self.linked, self.books = True, {}
        self.feed(Connected(SCHEDULER))

    @rule(runner=ids)
    def scheduler_orders(self, runner: RunnerId) -> None:
        self.feed(order(runner, 1, "x"))

    @rule(runner=ids)
    def scheduler_misses_a_report(self, runner: RunnerId) -> None:
        if self.linked and self.books.pop(runner, None):
            with pytest.raises(ReportGap):
                RunnerBook(spec_of(runner)).apply(RunnerReport(2, False))
            self.feed(Received(SCHEDULER, Resync(runner)))

    @invariant()
    def the_scheduler_knows_what_is_true(self) -> None:
        self.supervisor.check()
        if self.linked:
            self.now += CONFIG.report_s
            self.feed(TICK)
            live = {book.spec.runner: book for book in self.supervisor.live()}
            assert self.books.keys() == live.keys()
            for runner, book in self.books.items():
                assert (book.version, book.sequences) == (live[runner].version, live[runner].sequences)


Cluster.TestCase.settings = settings(stateful_step_count=40)
TestCluster = Cluster.TestCase
