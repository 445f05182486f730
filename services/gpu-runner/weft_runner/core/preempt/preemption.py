"""Who loses its place on the device when pages are short, and how: swapped to host memory, or computed once more."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from weft.domain.machine import Send
from weft.domain.preemption import latest_arrival, victim_candidates
from weft.domain.timers import TimerQueue
from weft_runner.core.adapters.manager import AdapterManager
from weft_runner.core.admission import no_capacity
from weft_runner.core.events import REPORT, Effect
from weft_runner.core.preempt.parking import SequenceParking
from weft_runner.core.reserve.reservations import Reservations
from weft_runner.core.sequence import BETWEEN_RUNNERS, RUNNING, SequencePhase
from weft_runner.core.sequence import Sequence as PoolSequence
from weft_runner.core.swap.swapping import Swapping
from weft_runner.core.swap.swaps import MAX_SWAPS
from weft_runner.core.transfer.transfers import KvTransfers

ELSEWHERE = (SequencePhase.SWAPPED, SequencePhase.SWAP_IN, *BETWEEN_RUNNERS)
_priority, _arrived = attrgetter("start.priority"), attrgetter("arrived")


class Preemptor:
    """Preemption, owned by the request pool. `stalled_s`: the time of all paused, swapped or parked sequences.

    `stuck`: no swap helps those that are paused, so that the supervisor has to name a victim.
    """

    def __init__(
        self, sequences: Mapping[str, PoolSequence], settle: Callable[[], None], remove: Callable[[PoolSequence], None],
        reservations: Reservations, swapping: Swapping, kv: KvTransfers, adapters: AdapterManager,
        effects: list[Effect], timers: TimerQueue[tuple[str, ...]], parking: SequenceParking,
    ) -> None:  # fmt: skip
        """`settle`, `remove`: see `RequestPool`."""
        self._sequences, self._settle, self._remove = sequences, settle, remove
        self._reservations, self._swapping, self._kv = reservations, swapping, kv
        self._adapters, self._effects, self._timers, self.parking = adapters, effects, timers, parking
        self.stuck = True
        self.preemptions, self.stalled_s = 0, 0.0

    def stand_still(self, seconds: float) -> None:
        """Add elapsed time to paused, swapped and parked sequences."""
        swapped_out = {key for key, swap in self._swapping.swap.by_key.items() if not swap.is_new}
        self.stalled_s += len(swapped_out | self._reservations.paused.keys() | self.parking.parked.keys()) * seconds

    def count(self) -> None:
        """Count a sequence chosen by the supervisor."""
        self.preemptions += 1

    def overruns(self) -> dict[str, int]:
        """Paused sequences, and pages that they want, if the supervisor has to name a victim."""
        return self._reservations.paused if self.stuck else {}

    def before_step(self, depth: int, *, overrun: bool) -> None:
        """Free pages for paused sequences. `overrun`: a sequence was paused now; `depth`: as in `schedule`."""
        overrun, self.stuck = overrun or not self.stuck, depth > 1 or not self._swap_out()
        if overrun and self.stuck:
            self._timers.set(REPORT, 0.0)

    def _swap_out(self) -> bool:
        """Begin to free pages for those that are paused, or wait for some. False: recomputing is better, or is left."""
        sequences, swap = self._sequences, self._swapping.swap
        if any(one.sequence.phase is SequencePhase.SWAP_OUT for one in swap.by_key.values()):
            return True
        # Pages that leave for another runner stay: a stream reads them until the transfer ends.
        here = [s for s in sequences.values() if s.phase not in ELSEWHERE and s.start.kv_to is None]
        if len(here) < 2:
            return swap.moving
        if parked := [s for s in here if s.key in self.parking.parked]:
            victim = latest_arrival(parked, _arrived)  # it stands still anyway
        else:
            victim = select_victim(here, map(sequences.__getitem__, self._reservations.paused))
        swapped = self._swapping.swap_out(victim, parked=bool(parked))
        self.preemptions += swapped
        return swapped

    def resolve_deadlock(self) -> None:
        """Evict pinned adapters, then end the newest, until a sequence runs, one is copied or an adapter loads."""
        for sequence in self._sequences.values():  # after every iteration: no call where one runs
            if sequence.phase in RUNNING and sequence.key not in self.parking.parked:
                return
        while self._is_stuck():
            if self._reservations.paused:
                if not self._adapters.slots.evict_for(1, pinned_too=True):
                    return  # the supervisor names a victim
            elif self._adapters.queue.force_evict_pinned():
                return
            elif not self._swapping.bring_back(pinned_too=True):
                if self._adapters.queue.fetching:
                    return
                here = [s for s in self._sequences.values() if s.phase is not SequencePhase.SWAPPED]
                here = here or list(self._sequences.values())
                self.give_back(latest_arrival(victim_candidates(here, _priority), _arrived))
            self._settle()

    def _is_stuck(self) -> bool:
        sequences, parked = self._sequences.values(), self.parking.parked
        return bool(sequences) and not (
            any(s.phase in RUNNING and s.key not in parked for s in sequences) or self._adapters.slots.loading
            or self._swapping.swap.moving or self._kv.moving
        )  # fmt: skip

    def give_back(self, sequence: PoolSequence) -> None:
        """End it here, if it cannot run now: it is scheduled again, and computed once more."""
        self.preemptions += sequence.times.scheduled_at is not None
        self._remove(sequence)
        answer = no_capacity(sequence.start, self._adapters.free_pages(), "pages")
        self._effects.append(Send(sequence.owner, answer))


def select_victim(here: Sequence[PoolSequence], paused: Iterable[PoolSequence]) -> PoolSequence:
    """Choose the victim: within the lowest priority a paused sequence marked to leave first, or else the latest
    arrival.

    One that was swapped often, or is to stay, leaves only where all of them are such.
    """
    last = victim_candidates(here, _priority)
    if (leaving := next((s for s in paused if s.start.allotment.leaves and s in last), None)) is not None:
        return leaving
    again = [s for s in last if s.swaps < MAX_SWAPS and not s.start.allotment.stays]
    return latest_arrival(again or last, _arrived)
