"""The supervisor's machine: leases of runners, their latest reports, victims of overruns.

The scheduler gets the runners' reports merged and in their order, at most every `report_s`. A report is urgent if a
sequence ended or overran its reservation, or if a runner is lost. Urgent reports leave within `merge_s`, so that freed
pages are used within one iteration. Nothing is sent twice on a stream. A new stream begins with a full report of every
live runner, the runners lost last, and the pending victims.

Orders go to the runners as they come. The supervisor also keeps the merged desired adapters of each runner, and gives
all of them to a runner that reconnects. Asking the scheduler instead would not be exact, because a change does not name
its predecessor. A change sent between the break of a runner's stream and the scheduler's answer would hide a lost
change.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from weft.domain.adapter import DesiredAdapter, DesiredChange
from weft.domain.ids import RunnerId
from weft.domain.machine import Close, Closed, Connected, Kind, Peer, PersistTerm, Received, Send, Tick
from weft.domain.runner import (
    ANSWER_LEASES,
    ClusterReport,
    Heartbeat,
    OrderedRunner,
    Registered,
    ReportedRunner,
    ReportGap,
    ReportInvalid,
    Resync,
    RunnerBook,
    RunnerOrder,
    RunnerReport,
    RunnerRole,
    RunnerSpec,
    SchedulerHello,
)
from weft_supervisor.core.leases import Leases
from weft_supervisor.core.preemption import Preemption
from weft_supervisor.core.totals import Counters, LostCounters, PoolMemory, summarize, violation

MAX_LOST = 1_000  # lost runners reported to a new scheduler, which detects further losses itself
FULL_REPORTS = 8  # per message: a report with 2,000 adapters takes some 15 ms to encode and to decode


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """The constants of the machine, in seconds. Tests choose shorter ones."""

    # A runner silent for this time is lost. It sends four times as often, and its requests wait meanwhile.
    lease_s: float = 2.0
    # If the end of a lease is noticed this late, the supervisor stood still and has unread messages.
    late_s: float = 0.1
    # A runner that gave up its link meanwhile returns within this time. Of 60 runners the slowest took 0.9 s, after 5
    # to 12 s.
    return_s: float = 3.0
    # The shortest time between two merged reports to the scheduler, about a few steps of a runner.
    report_s: float = 0.05
    merge_s: float = 0.002  # urgent reports of several runners are merged for this long: each costs gRPC 90 us
    preempt_s: float = 5.0  # a victim that has not left after this time is chosen again


# ------------------------------------------------------------------------------------- further effects


@dataclass(frozen=True, slots=True)
class LogEvent:
    """A line for the log about a runner."""

    text: str
    runner: RunnerId
    fields: tuple[tuple[str, object], ...] = ()


Effect = Send | Close | PersistTerm | LogEvent


# ------------------------------------------------------------------------------------- state


@dataclass(slots=True)
class Desired:
    """The scheduler's merged orders for a runner."""

    version: int = 0
    adapters: dict[str, DesiredAdapter] = field(default_factory=dict[str, DesiredAdapter])
    drain: bool = False
    role: RunnerRole | None = None

    def apply(self, order: RunnerOrder) -> None:
        self.drain, self.role = order.drain, order.role or self.role
        if (change := order.desired) is None:
            return
        if change.full:
            self.adapters = {}
        self.version = change.version
        for digest in change.removed:
            self.adapters.pop(digest, None)
        self.adapters.update((adapter.digest, adapter) for adapter in change.adapters)

    def full(self) -> RunnerOrder | None:
        """Join all orders; None before the first order."""
        if not (self.version or self.drain or self.role):
            return None
        change = DesiredChange(self.version, True, tuple(self.adapters.values())) if self.version else None
        return RunnerOrder(change, self.drain, role=self.role)


@dataclass(slots=True)
class LeasedRunner:
    """An incarnation with a lease. `book` None: the scheduler knows the runner, but it has not connected."""

    id: RunnerId
    peer: Peer
    book: RunnerBook | None = None
    desired: Desired = field(default_factory=Desired)
    answered_at: float = 0.0
    resyncing: bool = False  # a full report is on its way: changes before it cannot be applied
    violation: str | None = None


class Supervisor:
    """The machine of the supervisor, used by a single thread. Runners' peers are named "uuid/incarnation"."""

    def __init__(self, config: SupervisorConfig, *, highest_term: int = 0) -> None:
        self.config = config
        self.highest_term = highest_term
        self.leases = Leases(config.lease_s)
        self.preemption = Preemption(config.preempt_s)
        self._runners: dict[str, LeasedRunner] = {}  # by the name of the peer
        self._lost: OrderedDict[RunnerId, Desired] = OrderedDict()
        self._lost_counters = LostCounters()
        # The unsent part of the next report.
        self._scheduler: Peer | None = None
        self._reports: dict[RunnerId, list[ReportedRunner]] = {}
        self._unreported_losses: dict[RunnerId, None] = {}
        self._unreported_preempts: dict[RunnerId, None] = {}  # runners with an unreported victim
        self._urgent = False
        self._flushed_at = float("-inf")
        self._now, self._effects = 0.0, list[Effect]()  # of the present event
        # By peer and by class of the message, or of the event without a message. Decoded reports have a subclass.
        self._handlers: list[tuple[Kind, type, Callable[[Peer, Any], object]]] = [
            (Kind.RUNNER, RunnerReport, self._on_report),
            (Kind.RUNNER, Heartbeat, self._renew),
            (Kind.RUNNER, Connected, self._on_runner_connected),
            (Kind.SCHEDULER, OrderedRunner, self._on_order),
            (Kind.SCHEDULER, Resync, self._on_resync),
            (Kind.SCHEDULER, SchedulerHello, self._on_scheduler_hello),
            (Kind.SCHEDULER, Connected, self._on_scheduler_connected),
            (Kind.SCHEDULER, Closed, self._on_scheduler_closed),
        ]

    def handle(self, event: Received | Connected | Closed | Tick, now: float) -> list[Effect]:
        """Return the effects of `event` at `now` (seconds, monotonic)."""
        self._now, self._effects = now, []
        # 1. A supervisor that stood still has received no message, so silence proves nothing about the runners. The
        # longer it stood still, the more runners have given up their links and have to come back.
        deadline, config = self.leases.next_deadline(), self.config
        if deadline is not None and now - deadline > config.late_s:
            self.leases.hold_all(now + config.lease_s / 4 + min(now - deadline, config.return_s))
        # 2. The event.
        if isinstance(event, Tick):
            self._review_victims()
        else:
            content = event.message if isinstance(event, Received) else event
            for kind, peer_kind, handler in self._handlers:
                if event.peer.kind is kind and isinstance(content, peer_kind):
                    handler(event.peer, content)
        # 3. Expired leases.
        for id_ in self.leases.expire(now):
            self._lose(id_, "runner lost: its lease ran out")
        # 4. The report to the scheduler, if it is due.
        self._flush()
        return self._effects

    def next_deadline(self) -> float | None:
        """Return the time of the next TICK; None: no deadline is pending."""
        times = [self.leases.next_deadline(), self.preemption.next_deadline(), self._flush_due()]
        return min((time for time in times if time is not None), default=None)

    def check(self) -> None:
        """Check the state of leases and runners. Raises AssertionError if it is inconsistent."""
        self.leases.check()
        self.check_runners()

    def check_runners(self) -> None:
        """Check the match of leases and runners, the sums of books, and that pending victims live."""
        runners = {runner.id for runner in self._runners.values()}
        assert all(self.leases.holds(id_) for id_ in runners), "a runner without a lease is known"
        assert len(runners) == len(self.leases), "a lease without a runner"
        assert {decision.runner for decision in self.preemption.pending()} <= runners, "a victim on a lost runner"
        assert self._reports.keys() <= runners, "a report of a lost runner waits"
        for book in self.live():
            reserved = sum(sequence.reserved_pages for sequence in book.sequences.values())
            assert reserved == book.reserved_pages, f"{book.spec.runner}: {reserved} pages are reserved"

    # -------------------------------------------------------------------------------------------- for people

    def live(self) -> list[RunnerBook]:
        """List the leased runners after their first report, by id."""
        books = [runner.book for runner in self._runners.values() if runner.book]
        return sorted((book for book in books if book.version is not None), key=lambda book: book.spec.runner)

    def counters(self) -> Counters:
        """Sum counters over the live and the lost incarnations."""
        grown, doubled = self._lost_counters.sums(self.live())
        return Counters(grown, self.preemption.preempts, doubled, self._lost_counters.lost)

    def memory(self) -> dict[str, PoolMemory]:
        """Sum pages by pool."""
        return summarize(self.live())

    # -------------------------------------------------------------------------------------------- runners

    def _on_runner_connected(self, peer: Peer, connected: Connected) -> None:
        spec = connected.hello
        assert isinstance(spec, RunnerSpec)
        id_ = spec.runner
        if self.leases.replaced(id_):
            reason = f"runner {id_.uuid} has a newer incarnation than {id_.incarnation}"
            self._effects += [LogEvent("replaced incarnation refused", id_), Close(peer, reason)]
            return
        if (old := self.leases.grant(id_, self._now)) is not None:
            self._lose(old, "runner replaced by a newer incarnation")
        runner = self._runners.get(peer.name) or self._add(id_)
        if runner.book is None or runner.book.spec != spec:
            runner.book = RunnerBook(spec)
        runner.resyncing = False
        about = ("pool", spec.pool), ("total_pages", spec.total_pages)
        self._effects.append(LogEvent("runner registered", id_, about))
        self._answer(runner)
        if (order := runner.desired.full()) is not None:
            self._effects.append(Send(peer, order))

    def _add(self, id_: RunnerId) -> LeasedRunner:
        """Add an incarnation with a new lease, at first or again after a loss."""
        runner = LeasedRunner(id_, runner_peer(id_), desired=self._lost.pop(id_, None) or Desired())
        self._unreported_losses.pop(id_, None)
        self._runners[runner.peer.name] = runner
        return runner

    def _renew(self, peer: Peer, _message: object) -> LeasedRunner | None:
        """Renew a runner's lease at any message. Return None for a late message of a lost incarnation."""
        runner = self._runners.get(peer.name)
        if runner is None or runner.book is None or not self.leases.renew(runner.id, self._now):
            return None
        if self._now >= runner.answered_at + self.config.lease_s * ANSWER_LEASES:
            self._answer(runner)
        return runner

    def _answer(self, runner: LeasedRunner) -> None:
        """Confirm to a runner that its messages arrive: without it the runner seeks another connection."""
        runner.answered_at = self._now
        lease_ms, report_ms = round(self.config.lease_s * 1000), round(self.config.report_s * 1000)
        self._effects.append(Send(runner.peer, Registered(lease_ms, report_ms)))

    def _on_report(self, peer: Peer, report: RunnerReport) -> None:
        runner = self._renew(peer, report)
        if runner is None or runner.book is None or (runner.resyncing and not report.full):
            return
        book = runner.book
        first, urgent = book.version is None, _urgent(book, report)
        try:
            book.apply(report)
        except ReportGap as gap:
            runner.resyncing = True
            self._effects += [LogEvent("a report is missing", runner.id, (("gap", gap),)), Send(peer, Resync())]
            return
        except ReportInvalid as fault:
            runner.book, runner.resyncing = RunnerBook(book.spec), False
            self.preemption.forget(runner.id)
            self._effects.append(Close(peer, str(fault)))
            return
        runner.resyncing = False
        if first:
            self._lost_counters.drop(runner.id)
        if (broken := violation(book)) != runner.violation:
            runner.violation = broken
            if broken:
                self._effects.append(LogEvent("page table does not balance", runner.id, (("violation", broken),)))
        self._forward(runner.id, report, book.spec)
        self._urgent |= urgent
        self._preempt(book)

    def _review_victims(self) -> None:
        """Choose again at the runners with an overdue victim."""
        for id_ in self.preemption.due(self._now):
            book = self._runners[_name(id_)].book
            assert book is not None, "a victim without a report"
            self._preempt(book)

    def _preempt(self, book: RunnerBook) -> None:
        if (decision := self.preemption.on_report(book, self._now)) is not None:
            self._unreported_preempts[decision.runner] = None
            self._urgent = True

    def _lose(self, id_: RunnerId, text: str) -> None:
        runner = self._runners.pop(_name(id_))
        self._lost_counters.lose(id_, runner.book)
        self.preemption.forget(id_)
        self._reports.pop(id_, None)
        self._lost[id_], self._unreported_losses[id_] = runner.desired, None
        if len(self._lost) > MAX_LOST:
            oldest, _ = self._lost.popitem(last=False)
            self._unreported_losses.pop(oldest, None)
        self._urgent = True
        self._effects += [LogEvent(text, id_), Close(runner.peer, text)]

    # -------------------------------------------------------------------------------------------- scheduler

    def _on_scheduler_connected(self, peer: Peer, _connected: Connected) -> None:
        self._scheduler, self._urgent = peer, True
        self._unreported_losses = dict.fromkeys(self._lost)
        self._unreported_preempts = {decision.runner: None for decision in self.preemption.pending()}
        books = self.live()
        for first in range(0, len(books), FULL_REPORTS):
            reports = [ReportedRunner(b.spec.runner, b.full(), b.spec) for b in books[first : first + FULL_REPORTS]]
            self._effects.append(Send(peer, ClusterReport(tuple(reports))))
        self._reports = {}

    def _on_scheduler_closed(self, peer: Peer, _closed: Closed) -> None:
        if peer == self._scheduler:  # a runner's lease runs on: it may be back within it
            self._scheduler, self._reports = None, {}

    def _on_scheduler_hello(self, _peer: Peer, hello: SchedulerHello) -> None:
        if hello.term > self.highest_term:
            self.highest_term = hello.term
            self._effects.append(PersistTerm(hello.term))

    def _on_resync(self, _peer: Peer, resync: Resync) -> None:
        runner = self._runners.get(_name(resync.runner)) if resync.runner is not None else None
        if runner is not None and runner.book is not None and runner.book.version is not None:
            self._forward(runner.id, runner.book.full(), runner.book.spec)
            self._urgent = True

    def _on_order(self, _peer: Peer, ordered: OrderedRunner) -> None:
        id_ = ordered.runner
        if self.leases.replaced(id_):
            return
        current = self.leases.current(id_.uuid)
        if current is None:
            # A restarted supervisor may not know a runner of the scheduler's. The runner gets a single lease to
            # connect, and is reported lost if it does not.
            self.leases.grant(id_, self._now)
            self._add(id_)
        elif current != id_:
            return
        runner = self._runners[_name(id_)]
        runner.desired.apply(ordered.order)
        self._effects.append(Send(runner.peer, ordered.order))

    def _forward(self, id_: RunnerId, report: RunnerReport, spec: RunnerSpec) -> None:
        """Forward a report, in order; a full report replaces the reports that wait."""
        if self._scheduler is None:
            return
        if report.full:
            self._reports[id_] = [ReportedRunner(id_, report, spec)]
        else:
            self._reports.setdefault(id_, []).append(ReportedRunner(id_, report))

    def _flush_due(self) -> float | None:
        if self._scheduler is None or not (self._reports or self._unreported_losses or self._unreported_preempts):
            return None
        return self._flushed_at + (self.config.merge_s if self._urgent else self.config.report_s)

    def _flush(self) -> None:
        due = self._flush_due()
        if due is None or self._now < due:
            return
        assert self._scheduler is not None
        unreported = self._unreported_preempts
        preempts = [d for d in self.preemption.pending() if d.runner in unreported] if unreported else ()
        reports = [reported for reports in self._reports.values() for reported in reports]
        report = ClusterReport(tuple(reports), tuple(self._unreported_losses), tuple(preempts))
        self._effects.append(Send(self._scheduler, report))
        self._reports, self._unreported_losses, self._unreported_preempts, self._urgent = {}, {}, {}, False
        self._flushed_at = self._now


def runner_peer(runner: RunnerId) -> Peer:
    """Return the peer of an incarnation."""
    return Peer(Kind.RUNNER, _name(runner))


def _name(runner: RunnerId) -> str:
    return f"{runner.uuid}/{runner.incarnation}"


def _urgent(book: RunnerBook, report: RunnerReport) -> bool:
    """Whether a report must reach the scheduler at once: ends, overruns, changes of readiness."""
    old, new = book.figures, report.figures
    if book.version is None or report.ended or (old.ready, old.draining) != (new.ready, new.draining):
        return True
    if report.overruns and not set(report.overruns) <= set(book.overruns):
        return True
    sequences = book.sequences
    if any(s.request_id in sequences and sequences[s.request_id].epoch != s.epoch for s in report.sequences):
        return True
    return report.full and not sequences.keys() <= {sequence.request_id for sequence in report.sequences}
