"""The choice of the sequence that leaves at an overrun without free pages (S3, section 3.4; Punica, section 5.3).

Growth in place is the runner's, and so is a swap to its host memory. What is left here is a runner with a paused
sequence, not one free page and no swap that helps: its newest sequence leaves (it may be the overrunner, and under
reservation policy s3 it is), one at a time, until a report shows it gone or `bound_s` has passed. The oldest sequence
is not chosen while another one may be, so it makes progress, then the next: it terminates. Only an overrunner's
reservation doubles; another victim keeps its own. A request that is the youngest wherever it comes would leave one
runner after another: one that was preempted as often as a request may be stays, on all its pages.
"""

from typing import NamedTuple

from weft.domain.ids import RunnerId
from weft.domain.preemption import latest_arrival, victim_candidates
from weft.domain.runner import PreemptDecision, RunnerBook


class PendingPreemption(NamedTuple):
    """A victim that has been chosen and not yet been seen to leave; chosen again after `deadline` (seconds)."""

    decision: PreemptDecision
    deadline: float


class Preemption:
    """The pending victims, at most one per runner."""

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
        """List victims that have not left: a new scheduler has to hear of them."""
        return [pending.decision for pending in self._pending.values()]

    def forget(self, runner: RunnerId) -> None:
        """Forget a runner that is gone, and its sequences with it."""
        self._pending.pop(runner, None)

    def due(self, now: float) -> list[RunnerId]:
        """List runners whose victim should have left by now."""
        return [runner for runner, pending in self._pending.items() if pending.deadline <= now]

    def next_deadline(self) -> float | None:
        """The time at which the next bound passes."""
        return min((pending.deadline for pending in self._pending.values()), default=None)


def select_victim(book: RunnerBook) -> PreemptDecision | None:
    """Choose the latest arrival, or an overrunner that leaves itself, where one is paused and no page is free; never
    alone.

    A sequence without pages of its own is in host memory: its leaving would help nobody. One that stays was preempted
    as often as a request may be; it has all its pages, so one that waits for a page is always there to leave instead.
    Batch requests leave before interactive ones, whatever holds among themselves.
    """
    here = [sequence for sequence in book.sequences.values() if sequence.reserved_pages]
    if book.figures.free_pages > 0 or len(here) < 2:
        return None  # free pages: the runner grants them itself; alone: no other sequence's pages would help
    paused = {(overrun.request_id, overrun.epoch): overrun for overrun in book.overruns}
    waiting = [s for s in book.sequences.values() if (s.request_id, s.epoch) in paused]
    if not waiting:
        return None
    candidates = victim_candidates(here, lambda sequence: sequence.priority)
    leaving = [s for s in waiting if paused[s.request_id, s.epoch].leaves and s in candidates]
    movable = [sequence for sequence in candidates if not sequence.stays]
    victim = latest_arrival(leaving or movable or candidates, lambda sequence: sequence.arrived_ms)
    growth = paused.get((victim.request_id, victim.epoch))
    reservation = growth.reservation_tokens if growth else victim.reservation_tokens
    oldest = min(waiting, key=lambda sequence: (sequence.priority, sequence.arrived_ms))
    return PreemptDecision(book.spec.runner, victim.request_id, victim.epoch, oldest.request_id, reservation)
