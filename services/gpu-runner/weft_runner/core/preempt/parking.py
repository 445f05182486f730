"""Sequences of tenants beyond their share wait, so that those of tenants within theirs run at once.

The scheduler says which ones (`Allotment.parks`), and beside whom. A parked sequence computes nothing and keeps its
pages, so that it costs nothing and goes on at once; where pages are short as well its KV goes to host memory. It is
never computed again for this, and is parked for `MAX_PARKED_S` of its life at most.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from weft.domain.machine import Peer
from weft.domain.request import Start
from weft.domain.runner import Parking
from weft.domain.timers import TimerQueue
from weft_runner.core.admission import PoolLimits
from weft_runner.core.batch_scheduler import BatchScheduler
from weft_runner.core.page_table import PageTable
from weft_runner.core.sequence import RUNNING, Sequence, SequencePhase
from weft_runner.core.swap.swapping import Swapping
from weft_runner.core.swap.swaps import MAX_SWAPS
from weft_runner.core.token_mask import GrammarState

MAX_PARKED_S = 60.0  # of a sequence, in all
COMPUTED = (*RUNNING, SequencePhase.PAUSED)


class Parked(NamedTuple):
    """Since when a sequence is parked, and until when at most; after that nobody new is admitted before it runs."""

    parked_at: float
    resume_at: float


@dataclass(frozen=True, slots=True)
class DeferredStart:
    """A Start that waits until the KV of the `leaving` sequences is in host memory. `n_pages`: its reservation."""

    start: Start
    owner: Peer
    gateway: str
    grammar: GrammarState | None
    n_pages: int
    leaving: tuple[str, ...]


class SequenceParking:
    """Parking of sequences, owned by the request pool. `admit` admits a Start with room, or refuses it."""

    def __init__(
        self, sequences: Mapping[str, Sequence], limits: PoolLimits, pages: PageTable, scheduler: BatchScheduler,
        swapping: Swapping, timers: TimerQueue[tuple[str, ...]], admit: Callable[[DeferredStart], None],
    ) -> None:  # fmt: skip
        self._sequences, self._max_sequences, self._pages = sequences, limits.max_sequences, pages
        self._scheduler, self._swapping, self._timers, self._admit = scheduler, swapping, timers, admit
        self.parked: dict[str, Parked] = {}  # the longest parked first
        self.deferred: dict[str, DeferredStart] = {}  # by request
        self._spent_s: dict[str, float] = {}  # for how long sequences that are here were parked before

    # ---- questions

    def places_taken(self, now: float) -> int:
        """Count the sequences with a place: all sequences except sequences that may stay parked at `now`."""
        return (
            len(self._sequences) + len(self.deferred) - sum(now < parked.resume_at for parked in self.parked.values())
        )

    @property
    def owed_pages(self) -> int:
        """Count the pages awaited by deferred Starts."""
        return sum(deferred.n_pages for deferred in self.deferred.values())

    def state_of(self, sequence: Sequence, now: float) -> Parking:
        """Return the reported state of a sequence."""
        if (parked := self.parked.get(sequence.key)) is not None:
            return Parking.PARKED if now < parked.resume_at else Parking.OVER
        return Parking.OVER if self._left_s(sequence) <= 0.0 else Parking.NONE

    # ---- moments of the pool

    def free_capacity(self, start: Start, short_pages: int, now: float) -> tuple[str, ...] | None:
        """Park sequences for a new sequence without a place or pages. Return None if parking makes no room.

        Returns the sequences whose KV has to be in host memory before the room is there.
        """
        places = self.places_taken(now) + 1 - self._max_sequences
        may_park = [
            sequence
            for key in start.allotment.parks
            if (sequence := self._sequences.get(key)) and self._may_park(sequence)
        ]
        parking, rest = may_park[: max(0, places)], may_park[max(0, places) :]
        # 1. who leaves for host memory: those that are parked, then others
        leaving, free = list[Sequence](), 0
        idle = (self._sequences[key] for key in self.parked)
        for sequence in (*filter(self._may_leave, idle), *filter(self._may_leave, (*parking, *rest))):
            if free >= short_pages:
                break
            leaving.append(sequence)
            free += self._pages.reserved_by(sequence.key)
        parking += [sequence for sequence in leaving if sequence in rest]
        if len(parking) < places or free < short_pages or len(self.parked) + len(parking) > self._max_sequences:
            return None
        # 2. they wait from the next batch on, their pages are free once they are copied
        for sequence in parking:
            self._park(sequence, now)
        copied = [sequence.key for sequence in leaving if self._swapping.swap_out(sequence, parked=True)]
        if len(copied) < len(leaving):  # host memory is full
            for sequence in parking:
                if sequence.key not in copied:
                    self._unpark(sequence, now)
            return None
        return tuple(copied)

    def defer(self, deferred: DeferredStart) -> None:
        """Admit a Start once the leaving sequences are in host memory."""
        self.deferred[deferred.start.request_id] = deferred

    def withdraw(self, request_id: str) -> None:
        """Forget the deferred Start of a request, if it has one."""
        self.deferred.pop(request_id, None)

    def serve(self, now: float) -> None:
        """Give free pages to deferred Starts, then to parked sequences, the longest parked first."""
        for request_id in [*self.deferred]:
            deferred = self.deferred.get(request_id)  # admitting one serves others
            if deferred is not None and not any(self._is_leaving(key) for key in deferred.leaving):
                del self.deferred[request_id]
                self._admit(deferred)
        for key in self._returning(now):
            self._unpark(self._sequences[key], now)

    def expire(self, now: float) -> None:
        """Admit new sequences only after parked sequences at the end of their time."""
        for key, parked in self.parked.items():
            if now >= parked.resume_at:
                self._pages.mark(key)
            else:
                self._timers.set_earlier(("parked",), parked.resume_at)

    def forget(self, sequence: Sequence) -> None:
        """Forget the parking state of an ended sequence."""
        self.parked.pop(sequence.key, None)
        self._spent_s.pop(sequence.key, None)

    # ---- how

    def _left_s(self, sequence: Sequence) -> float:
        return MAX_PARKED_S - self._spent_s.get(sequence.key, 0.0)

    def _may_park(self, sequence: Sequence) -> bool:
        stays = sequence.key in self.parked or self._left_s(sequence) <= 0.0
        return not stays and sequence.phase in (SequencePhase.WAITING, *COMPUTED)

    def _may_leave(self, sequence: Sequence) -> bool:
        """Say whether the KV of a sequence can go to host memory now, and as often as it may still have to.

        Pages that leave for another runner stay: a stream reads them until the transfer ends.
        """
        idle = sequence.phase in COMPUTED and not sequence.in_flight and sequence.start.kv_to is None
        return idle and sequence.in_kv > 0 and sequence.swaps < MAX_SWAPS - 1 and self._swapping.swap.page_bytes > 0

    def _park(self, sequence: Sequence, now: float) -> None:
        parked = self.parked[sequence.key] = Parked(now, now + self._left_s(sequence))
        self._timers.set_earlier(("parked",), parked.resume_at)
        self._pages.mark(sequence.key)
        self._scheduler.invalidate()

    def _unpark(self, sequence: Sequence, now: float) -> None:
        """Let a sequence run from the next batch on."""
        self._spent_s[sequence.key] = (
            self._spent_s.get(sequence.key, 0.0) + now - self.parked.pop(sequence.key).parked_at
        )
        self._pages.mark(sequence.key)
        self._scheduler.invalidate()

    def _is_leaving(self, key: str) -> bool:
        sequence = self._sequences.get(key)
        return sequence is not None and sequence.phase is SequencePhase.SWAP_OUT

    def _returning(self, now: float) -> Iterator[str]:
        """Yield the sequences that run again: one for each free place, from host memory only with free pages."""
        for key, parked in [*self.parked.items()]:
            if len(self._sequences) + len(self.deferred) - len(self.parked) >= self._max_sequences:
                return
            match self._sequences[key].phase:
                case SequencePhase.SWAP_OUT:
                    continue
                case SequencePhase.SWAPPED if now >= parked.resume_at:
                    self._swapping.swap.by_key[key].unpark()  # from now on it is owed its pages
                    yield key
                case SequencePhase.SWAPPED:
                    if not self.deferred and self._swapping.bring_back_parked(key):
                        yield key
                case _:
                    yield key


def check_parking(parking: SequenceParking) -> None:
    """Check that parked sequences are present, and that each deferred Start waits for a running copy."""
    sequences = parking._sequences  # pyright: ignore[reportPrivateUsage]
    assert parking.parked.keys() <= sequences.keys(), parking.parked
    assert parking._spent_s.keys() <= sequences.keys(), parking._spent_s  # pyright: ignore[reportPrivateUsage]
    for request_id, deferred in parking.deferred.items():
        assert request_id not in sequences, request_id
        assert any(parking._is_leaving(key) for key in deferred.leaving), request_id  # pyright: ignore[reportPrivateUsage]
