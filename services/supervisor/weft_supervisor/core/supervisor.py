"""handle(event, now) -> effects: the supervisor as a pure machine.

To the scheduler go merged reports: whole states of the runners that changed, at most every `report_s`, at once for
overruns, finishes and lost runners, so that freed room is used within one iteration. What a broken stream may have lost
is told again on the next one: all live runners, the latest leases that ran out, undecided victims. The shell tells the
highest term first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weft_supervisor.core import memory
from weft_supervisor.core.counters import Counters, Tally
from weft_supervisor.core.events import (
    Beat,
    Effect,
    EndStream,
    Event,
    Note,
    OrderGiven,
    PersistTerm,
    Report,
    RunnerId,
    RunnerUp,
    SchedulerDown,
    SchedulerUp,
    SendOrder,
    SendReport,
    TermSeen,
    Tick,
)
from weft_supervisor.core.leases import Leases
from weft_supervisor.core.overruns import Overruns

MAX_LOST = 1_000  # lost runners told again to a new scheduler, which finds others missing by itself


@dataclass(frozen=True, slots=True)
class Config:
    """Times in seconds. `preempt_s`: how long a named victim may take to leave before it is named again."""

    lease_s: float = 2.0
    report_s: float = 0.05
    preempt_s: float = 5.0


@dataclass(slots=True)
class Runner:
    """One incarnation: what it said of itself, its last report, the scheduler's last order for it."""

    id: RunnerId
    pool: str = ""
    total_pages: int = 0
    report: Report | None = None
    drain: bool = False
    desired: object | None = None
    ordered: bool = False
    retells: bool = False  # a new stream: the next report counts whatever its number


class Supervisor:
    """One owner, one thread. Call `handle` with whatever happens and with `Tick` at `next_deadline()`."""

    def __init__(self, config: Config, *, highest_term: int = 0) -> None:
        self.config = config
        self.highest_term = highest_term
        self.runners: dict[RunnerId, Runner] = {}
        self.leases = Leases(config.lease_s)
        self.overruns = Overruns(config.preempt_s)
        self._linked = False
        self._dirty: dict[RunnerId, None] = {}
        self._lost: OrderedDict[RunnerId, None] = OrderedDict()
        self._untold: dict[RunnerId, None] = {}  # of the lost ones
        self._preempts: dict[RunnerId, None] = {}  # runners whose undecided victim has to be told
        self._next_report = 0.0
        self._urgent = False
        self._tally = Tally()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Everything that follows from `event` at `now` (seconds, monotonic)."""
        self._forgive_own_stall(now)
        effects = list(self._react(event, now))
        effects += self._expire(now)
        effects += self._flush(now)
        return effects

    def next_deadline(self) -> float | None:
        """When `Tick` is due next; None: nothing to wait for."""
        times = [self.leases.next_deadline(), self.overruns.next_deadline()]
        if self._linked and self._dirty:
            times.append(self._next_report)
        return min((time for time in times if time is not None), default=None)

    def live(self) -> list[Runner]:
        """Runners that hold a lease and have reported, by id."""
        return [self.runners[id_] for id_ in sorted(self.runners) if self.runners[id_].report is not None]

    def counters(self) -> Counters:
        """Sums over the incarnations that are and that were."""
        grows, doublings = self._tally.sums()
        return Counters(grows, self.overruns.preempts, doublings, self._tally.lost)

    def memory(self) -> dict[str, memory.Memory]:
        """The memory picture, by pool."""
        return memory.picture((r.pool, memory.memory_of(r.report, r.total_pages)) for r in self.live() if r.report)

    # -------------------------------------------------------------------------------------------- events

    def _react(self, event: Event, now: float) -> Iterator[Effect]:
        match event:
            case RunnerUp():
                yield from self._runner_up(event, now)
            case Report():
                yield from self._report(event, now)
            case Beat():
                self.leases.renew(event.runner, now)
            case OrderGiven():
                yield from self._order(event, now)
            case SchedulerUp():
                self._scheduler_up()
            case SchedulerDown():
                self._linked = False
            case TermSeen():
                yield from self._term(event.term)
            case Tick():
                self._repeat_preempts(now)

    def _runner_up(self, event: RunnerUp, now: float) -> Iterator[Effect]:
        if self.leases.replaced(event.runner):
            yield Note("replaced incarnation refused", event.runner)
            yield EndStream(event.runner)
            return
        old = self.leases.grant(event.runner, now)
        if old is not None:
            self._lose(old)
            yield Note("runner restarted", event.runner, (("old", old.incarnation),))
            yield EndStream(old)
        runner = self.runners.setdefault(event.runner, Runner(event.runner))
        runner.pool, runner.total_pages = event.pool, event.total_pages
        runner.retells = True
        self._lost.pop(event.runner, None)
        self._untold.pop(event.runner, None)
        yield Note("runner registered", event.runner, (("pool", event.pool), ("total_pages", event.total_pages)))
        if runner.ordered:
            yield SendOrder(runner.id, runner.drain, runner.desired)

    def _report(self, report: Report, now: float) -> Iterator[Effect]:
        if not self.leases.renew(report.runner, now):
            return  # late words of an incarnation that is gone
        runner = self.runners[report.runner]
        before = runner.report
        if before is not None and report.sequence <= before.sequence and not runner.retells:
            return  # told before
        if broken := memory.fault(report, runner.total_pages):
            yield Note("page book does not balance", report.runner, (("fault", broken),))
        runner.report, runner.retells = report, False
        self._tally.count(report)
        self._dirty[report.runner] = None
        self._urgent |= before is None or _urgent(before, report)
        self._decide(report, now)

    def _order(self, event: OrderGiven, now: float) -> Iterator[Effect]:
        if self.leases.replaced(event.runner):
            return
        current = self.leases.current(event.runner.uuid)
        if current is None:
            # The scheduler believes in a runner that this supervisor has not met (it was restarted): it gets one lease
            # to say hello, and is reported lost if it does not.
            self.leases.grant(event.runner, now)
        elif current != event.runner:
            return
        runner = self.runners.setdefault(event.runner, Runner(event.runner))
        runner.drain, runner.ordered = event.drain, True
        runner.desired = runner.desired if event.desired is None else event.desired
        yield SendOrder(runner.id, runner.drain, runner.desired)

    def _scheduler_up(self) -> None:
        self._linked = self._urgent = True
        self._dirty = {runner.id: None for runner in self.live()}
        self._untold = dict(self._lost)
        self._preempts = {preempt.runner: None for preempt in self.overruns.undecided()}

    def _term(self, term: int) -> Iterator[Effect]:
        if term > self.highest_term:
            self.highest_term = term
            yield PersistTerm(term)

    # -------------------------------------------------------------------------------------------- overruns, leases

    def _decide(self, report: Report, now: float) -> None:
        preempt = self.overruns.handle(report, now)
        if preempt is not None:
            self._preempts[preempt.runner] = None
            self._urgent = True

    def _repeat_preempts(self, now: float) -> None:
        for id_ in self.overruns.due(now):
            report = self.runners[id_].report
            assert report is not None, "a victim was named without a report"
            self._decide(report, now)

    def _expire(self, now: float) -> Iterator[Effect]:
        for id_ in self.leases.expire(now):
            self._lose(id_)
            yield Note("runner lost: its lease ran out", id_)
            yield EndStream(id_)

    def _lose(self, id_: RunnerId) -> None:
        self.runners.pop(id_, None)
        self.overruns.forget(id_)
        for book in (self._dirty, self._preempts):
            book.pop(id_, None)
        self._tally.lost += 1
        self._lost[id_] = self._untold[id_] = None
        if len(self._lost) > MAX_LOST:
            oldest, _ = self._lost.popitem(last=False)
            self._untold.pop(oldest, None)
        self._urgent = True

    def _forgive_own_stall(self, now: float) -> None:
        """A supervisor that itself stood still has heard of nobody: that is no evidence against the runners."""
        deadline = self.leases.next_deadline()
        if deadline is not None and now - deadline > self.config.lease_s / 4:
            self.leases.prolong(now - deadline + self.config.lease_s / 2)

    # -------------------------------------------------------------------------------------------- to the scheduler

    def _flush(self, now: float) -> Iterator[Effect]:
        if not self._linked or not (self._dirty or self._untold or self._preempts):
            return
        if not self._urgent and now < self._next_report:
            return
        told = self._preempts
        yield SendReport(
            states=tuple(_reports(self.runners[id_] for id_ in self._dirty)),
            lost=tuple(self._untold),
            preempts=tuple(preempt for preempt in self.overruns.undecided() if preempt.runner in told),
        )
        self._dirty, self._untold, self._preempts, self._urgent = {}, {}, {}, False
        self._next_report = now + self.config.report_s


def check_supervisor(supervisor: Supervisor) -> None:
    """Whoever holds a lease is known, and nobody else; every undecided victim's runner is alive."""
    runners = set(supervisor.runners)
    assert all(supervisor.leases.holds(id_) for id_ in runners), "a runner without a lease is known"
    assert len(runners) == len(supervisor.leases), "a lease without a runner"
    assert {preempt.runner for preempt in supervisor.overruns.undecided()} <= runners, "a victim on a lost runner"


def _urgent(before: Report, after: Report) -> bool:
    """Overruns, finishes and changes of readiness are told at once."""
    held = {(s.request_id, s.epoch) for s in after.sequences}
    finished = any((s.request_id, s.epoch) not in held for s in before.sequences)
    changed = (before.ready, before.draining) != (after.ready, after.draining)
    return finished or changed or bool(set(after.overruns) - set(before.overruns))


def _reports(runners: Iterable[Runner]) -> Iterator[Report]:
    return (runner.report for runner in runners if runner.report is not None)
