"""The choice of a victim at an overrun without free pages (S3, section 3.4; Punica, section 5.3).

The runner itself grows sequences in place and swaps them to its host memory. This module handles a runner with a paused
sequence, no free page and no helpful swap. The newest sequence leaves, one at a time, until a report shows it gone or
`bound_s` has passed. It may be the overrunner; under reservation policy s3 it is. The oldest sequence is chosen only as
the last candidate. So it makes progress, then the next, and the process terminates. Only an overrunner's reservation
doubles; any other victim keeps its reservation. A request that is the youngest everywhere would leave one runner after
another. Therefore a request at the limit of preemptions stays, on all its pages.
"""

from typing import NamedTuple

from weft.domain.ids import RunnerId
from weft.domain.preemption import latest_arrival, victim_candidates
from weft.domain.runner import PreemptDecision, RunnerBook


class PendingPreemption(NamedTuple):
    """A chosen victim that has not left yet; chosen again after `deadline` (seconds)."""

    decision: PreemptDecision
    deadline: float


class Preemption:
    """The pending victims, at most one for each runner."""

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._pending: dict[RunnerId, PendingPreemption] = {}
        self.preempts = 0  # victims chosen, repeats not counted

    def on_report(self, book: RunnerBook, now: float) -> PreemptDecision | None:
        """Choose the victim that the state of a runner calls for, if it is new or has not left in time."""
        runner = book.spec.runner
        pending = self._pending.get(runner)
        if pending is None and not book.overruns:
            return None
        previous = (pending.decision.request_id, pending.decision.epoch) if pending is not None else None
        victim = book.sequences.get(previous[0]) if previous is not None else None
        leaving = victim is not None and (victim.request_id, victim.epoch) == previous  # it is still there
        if pending is not None and leaving and now < pending.deadline:
            return None
        decision = select_victim(book)
        if decision is None:
            self._pending.pop(runner, None)  # it has left, or no sequence waits for its pages any more
            return None
        self.preempts += not (leaving and previous == (decision.request_id, decision.epoch))
        self._pending[runner] = PendingPreemption(decision, now + self._bound_s)
        return decision

    def pending(self) -> list[PreemptDecision]:
        """List the victims still there, for a new scheduler."""
        return [pending.decision for pending in self._pending.values()]

    def forget(self, runner: RunnerId) -> None:
        """Forget a lost runner and its sequences."""
        self._pending.pop(runner, None)

    def due(self, now: float) -> list[RunnerId]:
        """List the runners with an overdue victim."""
        return [runner for runner, pending in self._pending.items() if pending.deadline <= now]

    def next_deadline(self) -> float | None:
        """Return the next deadline of a victim."""
        return min((pending.deadline for pending in self._pending.values()), default=None)


def select_victim(book: RunnerBook) -> PreemptDecision | None:
    """Choose the latest arrival, or an overrunner that leaves itself. Return None if no sequence is paused, a page is
    free, or fewer than two sequences have pages.

    A sequence without pages is in host memory: its leaving would help no request. A sequence that stays has reached the
    limit of preemptions and has all its pages. So a sequence that waits for a page is always there to leave instead.
    Batch requests leave before interactive requests; the rules above hold within each priority.
    """
    here = [sequence for sequence in book.sequences.values() if sequence.reserved_pages]
    if book.figures.free_pages > 0 or len(here) < 2:
        return None  # the runner grants free pages itself; a single sequence gains nothing from a preemption
    paused = {(overrun.request_id, overrun.epoch): overrun for overrun in book.overruns}
    waiting = [s for s in book.sequences.values() if (s.request_id, s.epoch) in paused]
    if not waiting:
        return None
    candidates = victim_candidates(here, lambda sequence: sequence.priority)
    leaving = [s for s in waiting if paused[s.request_id, s.epoch].leaves and s in candidates]
    movable = [sequence for sequence in candidates if not sequence.stays]
    victim = latest_arrival(leaving or movable or candidates, lambda sequence: sequence.arrived_ms)
    allotment = paused.get((victim.request_id, victim.epoch))
    reservation = allotment.reservation_tokens if allotment else victim.reservation_tokens
    oldest = min(waiting, key=lambda sequence: (sequence.priority, sequence.arrived_ms))
    return PreemptDecision(book.spec.runner, victim.request_id, victim.epoch, oldest.request_id, reservation)
