"""An overrun without free pages: who leaves (S3, section 3.4; Punica, section 5.3).

Growth in place is the runner's. What is left here is a runner with a paused sequence and not one free page: its newest
sequence leaves (it may be the overrunner), one at a time, until a report shows it gone or `bound_s` has passed. The
oldest sequence is never chosen while another one is there, so it always makes progress, then the next: it terminates.
Only an overrunner's reservation doubles; another victim keeps its own.
"""

from dataclasses import dataclass

from weft_supervisor.core.events import Preempt, Report, RunnerId, Sequence


@dataclass(frozen=True, slots=True)
class Undecided:
    """A victim that has been named and not yet been seen to leave; asked again after `until` (seconds)."""

    preempt: Preempt
    until: float


class Overruns:
    """At most one undecided victim per runner."""

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._undecided: dict[RunnerId, Undecided] = {}
        self.preempts = 0  # victims named, repeats not counted

    def handle(self, report: Report, now: float) -> Preempt | None:
        """The victim that this report calls for, if any."""
        waiting = self._undecided.get(report.runner)
        if waiting and _still_there(waiting.preempt, report):
            return self._again(waiting.preempt, report, now) if now >= waiting.until else None
        self._undecided.pop(report.runner, None)
        preempt = choose(report)
        if preempt is None:
            return None
        self.preempts += 1
        return self._name(preempt, now)

    def undecided(self) -> list[Preempt]:
        """Victims named and not yet gone: told again to a new scheduler."""
        return [waiting.preempt for waiting in self._undecided.values()]

    def forget(self, runner: RunnerId) -> None:
        """The runner is gone, and its sequences with it."""
        self._undecided.pop(runner, None)

    def due(self, now: float) -> list[RunnerId]:
        """Runners whose victim should have left by now."""
        return [runner for runner, waiting in self._undecided.items() if waiting.until <= now]

    def next_deadline(self) -> float | None:
        """When the next bound passes."""
        return min((waiting.until for waiting in self._undecided.values()), default=None)

    def _again(self, before: Preempt, report: Report, now: float) -> Preempt | None:
        """The bound has passed and the victim is still there: name it again, or nobody if nobody waits any more."""
        preempt = choose(report)
        if preempt is None:
            del self._undecided[report.runner]
            return None
        self.preempts += preempt.request_id != before.request_id or preempt.epoch != before.epoch
        return self._name(preempt, now)

    def _name(self, preempt: Preempt, now: float) -> Preempt:
        self._undecided[preempt.runner] = Undecided(preempt, now + self._bound_s)
        return preempt


def choose(report: Report) -> Preempt | None:
    """The newest sequence, where one is paused, no page is free and it is not alone."""
    paused = {(overrun.request_id, overrun.epoch): overrun for overrun in report.overruns}
    waiting = [s for s in report.sequences if (s.request_id, s.epoch) in paused]
    if not waiting or report.free_pages > 0 or len(report.sequences) < 2:
        return None  # free pages: the runner grants them itself; alone: nobody's pages would help
    victim = max(report.sequences, key=_age)
    own = paused.get((victim.request_id, victim.epoch))
    reservation = own.reservation_tokens if own else victim.reservation_tokens
    oldest = min(waiting, key=_age)
    return Preempt(report.runner, victim.request_id, victim.epoch, oldest.request_id, reservation)


def _age(sequence: Sequence) -> int:
    return sequence.admitted


def _still_there(preempt: Preempt, report: Report) -> bool:
    return any(s.request_id == preempt.request_id and s.epoch == preempt.epoch for s in report.sequences)
