"""What a report carries, and when one is due.

A report costs what changed since the one before: sequences by the page table's marks, adapters by the manager's. It is
due `report_s` after the last one while something changes that placement goes by, and at once for overruns, ends and
finishes. How far sequences are goes with these, and alone once in `PROGRESS_REPORTS` times that: a report costs each
process on its way a wake-up, whatever it carries. A connection to the supervisor and a Resync make the next one full.
Heartbeats renew the lease while nothing changes.
"""

from collections.abc import Callable
from math import inf

from weft.domain.machine import Peer, Send
from weft.domain.runner import (
    Heartbeat,
    OffloadState,
    Overrun,
    Registered,
    RunnerFigures,
    RunnerReport,
    RunnerRole,
    SequenceState,
)
from weft_runner.core.events import AdaptersChanged, AdapterUse, RunnerStatus
from weft_runner.core.request_pool import RequestPool
from weft_runner.core.sequence import Sequence

LEASE_S = 2.0  # both until the supervisor has said it
REPORT_S = 0.05
PROGRESS_REPORTS = 5


class Reporter:
    """One owner: the runner's machine."""

    def __init__(self, pool: RequestPool) -> None:
        self._pool = pool
        self.supervisor: Peer | None = None  # while a stream is open
        self.changed = True  # since the last report
        self.full_due = True
        self._lease_s, self._report_s = LEASE_S, REPORT_S
        self._version = 0
        self._due_at = self._heartbeat_at = self._progress_at = 0.0
        self._placed_by: tuple[object, ...] = ()  # of the last report
        self._sequences: dict[str, int] = {}  # reported, with their admission numbers
        self._adapters: set[str] = set()  # reported
        self._offload: Callable[[], OffloadState | None] = lambda: None

    def watch_offload(self, state: Callable[[], OffloadState]) -> None:
        """Report the executor's state of offloaded memory."""
        self._offload = state

    def register(self, registered: Registered) -> None:
        self._lease_s = max(registered.lease_ms, 1) / 1e3
        self._report_s = max(registered.report_ms, 1) / 1e3

    def connect(self, supervisor: Peer | None) -> None:
        self.supervisor = supervisor
        self.resync()

    def resync(self) -> None:
        self.full_due = True
        self.report_now()

    def deadline(self) -> float:
        """When a report or a heartbeat is due; in the past: now."""
        report_at = self._due_at if self.changed else inf
        return report_at if self.supervisor is None else min(report_at, self._heartbeat_at)

    def report_now(self) -> None:
        """Let the next report be due at once."""
        self.changed, self._due_at, self._progress_at = True, 0.0, 0.0

    def effects(self, now: float, *, changed: bool) -> list[Send | RunnerStatus | AdaptersChanged]:
        """Return the due reports. `changed`: state has changed."""
        self.changed = self.changed or changed
        if self.changed and now >= self._due_at:
            status = self._status()
            if now >= self._progress_at or self._shifts(status.figures):
                return self._report_all(status, now)
            self._due_at = min(now + self._report_s, self._progress_at)
        if self.supervisor is not None and now >= self._heartbeat_at:
            self._heartbeat_at = now + self._lease_s / 4
            return [Send(self.supervisor, Heartbeat())]
        return []

    def _shifts(self, figures: RunnerFigures) -> bool:
        """Say whether placement goes by anything that has changed since the last report."""
        pool = self._pool
        return bool(pool.pages.dirty or pool.adapters.dirty) or self._placing(figures) != self._placed_by

    def _placing(self, figures: RunnerFigures) -> tuple[object, ...]:
        """Return the figures used by placement.

        Prompts that are computed count for a runner of prompts alone: any other is given none while it has half a
        second of them, so that it has some left when the next report of progress comes.
        """
        prompts = figures.pending_prompt_tokens if figures.role is RunnerRole.PROMPT else 0
        return figures.free_pages, figures.draining, figures.ready, figures.desired_version, figures.role, prompts

    # ---- what a report carries

    def _report_all(self, status: RunnerStatus, now: float) -> list[Send | RunnerStatus | AdaptersChanged]:
        self.changed, self._placed_by = False, self._placing(status.figures)
        self._due_at, self._progress_at = now + self._report_s, now + PROGRESS_REPORTS * self._report_s
        self._heartbeat_at = now + self._lease_s / 4
        effects: list[Send | RunnerStatus | AdaptersChanged] = [status]
        if self._pool.adapters.dirty:
            effects.append(self._adapters_changed())
        if self.supervisor is not None:
            effects.append(Send(self.supervisor, self._report(status.figures)))
        self._pool.pages.take_marks()
        self._pool.adapters.take_marks()
        return effects

    def _report(self, figures: RunnerFigures) -> RunnerReport:
        pool, full, self.full_due = self._pool, self.full_due, False
        if full:
            self._sequences, self._adapters = {}, set()
        changed = pool.sequences if full else pool.pages.dirty
        ended = [key for key in changed if self._has_ended(key)]
        for key in ended:
            del self._sequences[key]
        here = [pool.sequences[key] for key in changed if key in pool.sequences]
        here.sort(key=lambda sequence: sequence.admitted)  # new ones last, in the order in which the pool lists them
        self._sequences.update((sequence.key, sequence.admitted) for sequence in here)
        adapters = list((pool.adapters.adapters if full else pool.adapters.dirty).values())
        reported = [adapter.report() for adapter in adapters if adapter.reported]
        removed = [a.digest for a in adapters if not a.reported and a.digest in self._adapters]
        self._adapters.difference_update(removed)
        self._adapters.update(adapter.digest for adapter in reported)
        self._version += 1
        return RunnerReport(
            self._version, full, figures, sequences=[self._sequence_state(sequence) for sequence in here], ended=ended,
            adapters=reported, removed_adapters=removed,
            overruns=[_overrun(pool.sequences[key], pages) for key, pages in pool.preemption.overruns().items()],
            progress=[sequence.in_kv for sequence in pool.sequences.values()],
        )  # fmt: skip

    def _has_ended(self, key: str) -> bool:
        """Return whether the reported sequence of this id has ended, even if a new sequence has its id."""
        reported, here = self._sequences.get(key), self._pool.sequences.get(key)
        return reported is not None and (here is None or here.admitted != reported)

    def _sequence_state(self, sequence: Sequence) -> SequenceState:
        start = sequence.start
        return SequenceState(
            start.request_id, start.epoch, sequence.gateway, start.adapter,
            self._pool.pages.reserved_by(sequence.key), sequence.reservation_tokens, round(1000 * sequence.arrived),
            start.allotment.stays, start.priority, self._pool.preemption.parking.state_of(sequence, self._pool.now),
        )  # fmt: skip

    def _adapters_changed(self) -> AdaptersChanged:
        return AdaptersChanged(
            tuple(
                AdapterUse(a.digest, a.nearest_tier, a.rank, a.protected, a.running, a.waiting + a.swapped)
                for a in self._pool.adapters.dirty.values()
            )
        )

    def _status(self) -> RunnerStatus:
        pool, not_ready = self._pool, self._pool.adapters.not_ready_reason()
        figures = pool.figures(ready=not not_ready, offload=self._offload())
        return RunnerStatus(figures, not_ready, pool.drain.on and not pool.sequences)


def _overrun(sequence: Sequence, wanted_pages: int) -> Overrun:
    start = sequence.start
    return Overrun(start.request_id, start.epoch, wanted_pages, sequence.reservation_tokens, start.allotment.leaves)
