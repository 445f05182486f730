"""The sequences of a runner that drains: they end at once, or may move to other runners for a while before."""

from collections.abc import Callable, Mapping

from weft.domain.request import EndReason
from weft.domain.timers import TimerQueue
from weft_runner.core.batch_scheduler import BatchScheduler
from weft_runner.core.events import REPORT
from weft_runner.core.sequence import Sequence, SequencePhase
from weft_runner.core.transfer.transfers import KvTransfers

DRAIN_IDLE_S = 1.0  # without a sequence that leaves: what is left on a runner that drains has nowhere to go


class RunnerDrain:
    """The drain of a runner, owned by the request pool. `on`: no sequence is admitted. The timer ("drain",) ends
    present sequences.

    `end`: see `RequestPool.end`.
    """

    def __init__(
        self, sequences: Mapping[str, Sequence], end: Callable[..., None], kv: KvTransfers, scheduler: BatchScheduler,
        timers: TimerQueue[tuple[str, ...]],
    ) -> None:  # fmt: skip
        self._sequences, self._end, self._kv, self._scheduler, self._timers = sequences, end, kv, scheduler, timers
        self.on = False
        self._deadline, self._departures = 0.0, 0  # at the latest; of the pool, when it was looked at last

    def order(self, now: float, *, on: bool, migrate_s: float = 0.0) -> None:
        """Admit none until drained is taken back. What is here ends at once, or may move for `migrate_s`."""
        self.on = on
        self._timers.set(REPORT, 0.0)
        self._timers.clear(("drain",))
        self._deadline = now + (migrate_s if self._kv.identity is not None else 0.0)
        self._departures = self._scheduler.departures
        if on and self._deadline > now:
            self._timers.set(("drain",), min(self._deadline, now + DRAIN_IDLE_S))
        elif on:
            self.end(now)

    def end(self, now: float) -> None:
        """End the remaining sequences. Leaving sequences get more time, and sequences with KV in transfer the full
        time.
        """
        over = now >= self._deadline
        if not over and self._scheduler.departures != self._departures:
            self._departures = self._scheduler.departures
            self._timers.set(("drain",), min(self._deadline, now + DRAIN_IDLE_S))
            return
        if not over:
            self._timers.set(("drain",), self._deadline)
        for sequence in list(self._sequences.values()):
            sent = self._kv.outgoing.get(sequence.key) if sequence.phase is SequencePhase.SEND else None
            if over or sent is None:
                epoch = sent.epoch if sent is not None else None
                self._end(sequence, EndReason.DRAINED, "the runner is draining", epoch=epoch)
