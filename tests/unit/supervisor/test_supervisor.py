from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from weft_supervisor.core.events import (
    Beat,
    EndStream,
    Epoch,
    Note,
    OrderGiven,
    Overrun,
    PersistTerm,
    Report,
    RunnerId,
    RunnerUp,
    SchedulerDown,
    SchedulerUp,
    SendOrder,
    SendReport,
    Sequence,
    TermSeen,
    Tick,
)
from weft_supervisor.core.supervisor import Config, Supervisor, check_supervisor

A1, A2, B1 = RunnerId("a", "1"), RunnerId("a", "2"), RunnerId("b", "1")
CONFIG = Config(lease_s=2.0, report_s=0.05, preempt_s=5.0)


def report(runner=A1, number=1, *names, free=0, paused=(), **fields) -> Report:
    rows = tuple(Sequence(name, Epoch(1, i), i, 1, 1, 16) for i, name in enumerate(names))
    overruns = tuple(Overrun(row.request_id, row.epoch, 32) for row in rows if row.request_id in paused)
    return Report(runner, number, free, len(rows), rows, overruns, **fields)


def up(runner=A1, total=4) -> RunnerUp:
    return RunnerUp(runner, "ns/pool", total)


def sent(effects) -> list[SendReport]:
    return [effect for effect in effects if isinstance(effect, SendReport)]


def machine(*events, linked=True) -> Supervisor:
    supervisor = Supervisor(CONFIG)
    if linked:
        supervisor.handle(SchedulerUp(), 0.0)
    for event in events:
        supervisor.handle(event, 0.0)
    return supervisor


def test_quiet_changes_are_merged_and_sent_at_most_every_report_interval():
    supervisor = machine(up(), up(B1), report(A1, 1, "r1", free=3), report(B1, 1, free=4))
    assert sent(supervisor.handle(report(A1, 2, "r1", "r2", free=2), 0.01)) == []
    assert sent(supervisor.handle(report(B1, 2, "r3", free=3), 0.02)) == []
    assert supervisor.next_deadline() == 0.05
    [merged] = sent(supervisor.handle(Tick(), 0.05))
    assert [(r.runner, r.sequence) for r in merged.states] == [(A1, 2), (B1, 2)]
    assert sent(supervisor.handle(Tick(), 0.2)) == []


def test_a_finish_is_told_at_once():
    supervisor = machine(up(), report(A1, 1, "r1", "r2", free=2))
    [told] = sent(supervisor.handle(report(A1, 2, "r1", free=3), 0.001))
    assert [r.sequence for r in told.states] == [2]


def test_an_overrun_is_told_at_once_with_the_victim():
    supervisor = machine(up(total=2), report(A1, 1, "old", "new"))
    [told] = sent(supervisor.handle(report(A1, 2, "old", "new", paused=("old",)), 0.001))
    [preempt] = told.preempts
    assert (preempt.request_id, preempt.for_request_id, preempt.reservation_tokens) == ("new", "old", 16)
    assert sent(supervisor.handle(report(A1, 3, "old", "new", paused=("old",)), 0.002)) == []


def test_a_runner_that_falls_silent_is_lost_once_and_its_stream_is_ended():
    supervisor = machine(up(), report(A1, 1, free=4))
    supervisor.handle(Beat(A1), 1.0)
    assert sent(supervisor.handle(Tick(), 2.9)) == []
    effects = supervisor.handle(Tick(), 3.0)
    assert [told.lost for told in sent(effects)] == [(A1,)]
    assert EndStream(A1) in effects
    assert sent(supervisor.handle(Tick(), 4.0)) == []
    assert supervisor.live() == []
    assert sent(supervisor.handle(report(A1, 2, free=4), 4.1)) == [], "late words of a lost runner count for nothing"


def test_a_lost_runner_may_come_back_and_is_no_longer_told_as_lost():
    supervisor = machine(up(), report(A1, 1, free=4))
    supervisor.handle(Tick(), 2.0)
    supervisor.handle(up(), 3.0)
    supervisor.handle(report(A1, 2, free=4), 3.0)
    [told] = sent(supervisor.handle(SchedulerUp(), 3.1))
    assert (told.lost, [r.runner for r in told.states]) == ((), [A1])


def test_a_new_incarnation_loses_the_old_one_at_once():
    supervisor = machine(up(), report(A1, 1, "r1", free=3))
    effects = supervisor.handle(up(A2), 0.1)
    assert [told.lost for told in sent(effects)] == [(A1,)]
    assert EndStream(A1) in effects
    assert EndStream(A1) in supervisor.handle(up(A1), 0.2), "the old one may not come back"
    assert supervisor.live() == []


def test_a_new_scheduler_stream_is_told_everything_that_still_counts():
    supervisor = machine(up(A1, 2), up(B1), report(A1, 1, "old", "new", paused=("old",)), report(B1, 1, free=4))
    supervisor.handle(SchedulerDown(), 0.1)
    supervisor.handle(Beat(A1), 1.5)
    assert sent(supervisor.handle(Tick(), 2.0)) == []
    [told] = sent(supervisor.handle(SchedulerUp(), 2.1))
    assert [r.runner for r in told.states] == [A1]
    assert told.lost == (B1,)
    assert [p.request_id for p in told.preempts] == ["new"]


def test_reports_told_twice_or_out_of_order_count_once():
    supervisor = machine(up(), report(A1, 2, "r1", free=3))
    for stale in (1, 2):
        assert supervisor.handle(report(A1, stale, free=4), 0.1) == []
    assert [r.report.sequence for r in supervisor.live() if r.report] == [2]


def test_a_runner_that_reconnects_is_heard_whatever_its_report_number_and_keeps_its_victim():
    supervisor = machine(up(total=2), report(A1, 7, "old", "new", paused=("old",)))
    supervisor.handle(up(total=2), 0.1)
    [told] = sent(supervisor.handle(report(A1, 1, "old", "new", paused=("old",)), 0.2))
    assert told.preempts == ()
    assert supervisor.counters().preempts == 1


def test_the_latest_order_is_kept_whole_and_sent_again_when_the_runner_reconnects():
    supervisor = machine(up())
    assert supervisor.handle(OrderGiven(A1, False, "desired-1"), 0.1) == [SendOrder(A1, False, "desired-1")]
    assert supervisor.handle(OrderGiven(A1, True), 0.2) == [SendOrder(A1, True, "desired-1")]
    effects = supervisor.handle(up(), 0.3)
    assert SendOrder(A1, True, "desired-1") in effects
    effects = supervisor.handle(up(A2), 0.4)
    assert not any(isinstance(effect, SendOrder) for effect in effects), "orders are for one incarnation"


def test_a_runner_that_the_scheduler_believes_in_and_nobody_has_met_is_lost_after_a_lease():
    supervisor = machine()
    supervisor.handle(OrderGiven(A1, False, "desired"), 0.0)
    assert supervisor.live() == []
    [told] = sent(supervisor.handle(Tick(), 2.0))
    assert told.lost == (A1,)


def test_the_highest_term_of_schedulers_is_persisted_once():
    supervisor = Supervisor(CONFIG, highest_term=3)
    assert supervisor.handle(TermSeen(3), 0.0) == []
    assert supervisor.handle(TermSeen(5), 0.0) == [PersistTerm(5)]
    assert supervisor.handle(TermSeen(4), 0.0) == []
    assert supervisor.highest_term == 5


def test_sums_of_counters_that_lie_still_fit_the_wire():
    supervisor = machine(up(), up(B1), report(A1, 1, free=4, doublings=2**64 - 1), report(B1, 1, free=4, doublings=9))
    assert supervisor.counters().doublings == 2**64 - 1


def test_counters_are_summed_across_incarnations_and_count_a_returning_one_once():
    supervisor = machine(up(), report(A1, 1, free=4, grown_pages=5, doublings=2))
    supervisor.handle(up(), 0.1)
    supervisor.handle(report(A1, 2, free=4, grown_pages=6, doublings=2), 0.1)
    assert (supervisor.counters().grows, supervisor.counters().doublings) == (6, 2)
    supervisor.handle(up(A2), 0.2)
    supervisor.handle(report(A2, 1, free=4, grown_pages=1, doublings=1), 0.2)
    assert (supervisor.counters().grows, supervisor.counters().doublings) == (7, 3)


def test_a_book_that_does_not_balance_is_noted_and_passed_on_as_told():
    supervisor = machine(up())
    effects = supervisor.handle(report(A1, 1, "r1", free=4), 0.0)
    assert any(isinstance(effect, Note) and "balance" in effect.text for effect in effects)
    assert len(sent(effects)) == 1


def test_a_supervisor_that_stood_still_itself_does_not_blame_the_runners():
    supervisor = machine(up(), report(A1, 1, free=4))
    assert sent(supervisor.handle(Tick(), 60.0)) == []
    supervisor.handle(Beat(A1), 60.1)
    assert [r.id for r in supervisor.live()] == [A1]
    assert [told.lost for told in sent(supervisor.handle(Tick(), 62.1))] == [(A1,)]


class Cluster(RuleBasedStateMachine):
    """Runners that start, report, overrun, die and come back; a scheduler that keeps what it is told."""

    ids = st.builds(RunnerId, st.sampled_from("abc"), st.sampled_from("12"))

    @initialize()
    def begin(self) -> None:
        self.supervisor, self.now, self.number = Supervisor(CONFIG), 0.0, 0
        self.linked = False
        self.known: dict[RunnerId, int] = {}  # what the scheduler believes: runner -> report number
        self.truth: dict[RunnerId, int] = {}
        self.victims: dict[RunnerId, tuple[str, float]] = {}

    def feed(self, event) -> None:
        for effect in self.supervisor.handle(event, self.now):
            if not isinstance(effect, SendReport):
                continue
            assert self.linked
            for lost in effect.lost:
                self.known.pop(lost, None)
            for state in effect.states:
                self.known[state.runner] = state.sequence
            for preempt in effect.preempts:
                self.name_victim(preempt)

    def name_victim(self, preempt) -> None:
        before = self.victims.get(preempt.runner)
        held = {s.request_id for r in self.supervisor.live() if r.id == preempt.runner for s in r.report.sequences}
        if before and before[0] != preempt.request_id and before[0] in held:
            assert self.now >= before[1] + CONFIG.preempt_s, "two undecided victims"
        if before is None or before[0] != preempt.request_id:
            self.victims[preempt.runner] = (preempt.request_id, self.now)

    @rule(runner=ids)
    def starts(self, runner: RunnerId) -> None:
        self.feed(up(runner))

    @rule(runner=ids, count=st.integers(0, 4), paused=st.integers(0, 3))
    def reports(self, runner: RunnerId, count: int, paused: int) -> None:
        self.number += 1
        names = [f"r{i}" for i in range(count)]
        self.feed(report(runner, self.number, *names, free=4 - count, paused=names[:paused]))

    @rule(runner=ids)
    def beats(self, runner: RunnerId) -> None:
        self.feed(Beat(runner))

    @rule(seconds=st.floats(0.0, 1.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    @rule()
    def scheduler_restarts(self) -> None:
        self.feed(SchedulerDown())
        self.linked, self.known = True, {}
        self.feed(SchedulerUp())

    @rule(runner=ids)
    def scheduler_orders(self, runner: RunnerId) -> None:
        self.feed(OrderGiven(runner, False, "desired"))

    @invariant()
    def the_scheduler_knows_who_is_alive(self) -> None:
        check_supervisor(self.supervisor)
        if self.linked:
            self.now += CONFIG.report_s
            self.feed(Tick())
            assert self.known == {r.id: r.report.sequence for r in self.supervisor.live() if r.report}


Cluster.TestCase.settings = settings(stateful_step_count=40)
TestCluster = Cluster.TestCase
