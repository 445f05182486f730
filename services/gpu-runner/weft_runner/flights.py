"""Steps in flight: an executor that looks ahead is given the next step before the present one's tokens are here.

A batch of decode rows that is likely to run on goes on from the tokens on the device, so that accounting, sending and
choosing overlap the running step. Should a row end with the present step, what the next one computes for it is dropped:
its pages are written to in the device's order, before whoever gets them, and nobody else notices.

An executor of several stages is given other sequences' steps meanwhile, until each stage has work (`Pipeline`).
"""

import time
from collections import deque
from dataclasses import dataclass

from weft_runner.core.choice import Choice
from weft_runner.core.iteration import Batch
from weft_runner.core.request_pool import RequestPool
from weft_runner.model.executor import AsyncExecutor, Pipelined, StepHandle
from weft_runner.model.sampling import SamplingArgs
from weft_runner.steps import Prepared, Steps


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A batch whose step was launched; `landing` tells what it chooses."""

    batch: Batch
    prepared: Prepared
    draws: list[SamplingArgs]
    landing: StepHandle

    def still_there(self, pool: RequestPool) -> Batch:
        """The batch without the rows whose sequences have left since it was launched."""
        here = zip(self.batch.rows, self.prepared.sequences, strict=True)
        rows = tuple(row for row, sequence in here if pool.sequences.get(row.key) is sequence)
        return self.batch if len(rows) == len(self.batch.rows) else Batch(rows, 0)


class Flights:
    """Launches for one engine."""

    def __init__(self, pool: RequestPool, steps: Steps, executor: AsyncExecutor) -> None:
        self._pool, self._steps, self._executor = pool, steps, executor

    def launch(self, batch: Batch) -> InFlight:
        """A batch that was chosen just now."""
        prepared = self._steps.prepare(batch.rows, keep=batch is self._pool.chooser.standing)
        self._pool.forwards += 1
        draws = draws_of(prepared)
        return InFlight(batch, prepared, draws, self._executor.launch(prepared.step, draws))

    def follow(self, flight: InFlight) -> InFlight | None:
        """The step behind that one, if its batch can run on as it is and needs no choice of it on the host."""
        prepared = flight.prepared
        if not self._pool.chooser.lasts(flight.batch, 2) or not self._executor.can_follow(prepared.step, flight.draws):
            return None
        if not self._steps.ahead(prepared):
            return None
        self._pool.forwards += 1
        draws = [draw._replace(position=draw.position + 1) for draw in flight.draws]
        return InFlight(flight.batch, prepared, draws, self._executor.follow(prepared.step, draws))


@dataclass(frozen=True, slots=True, eq=False)
class Landed:
    """`found`: a choice for each row that samples; `keys`: of the batch's decode rows when it was launched."""

    flight: InFlight
    found: list[Choice | None]
    keys: int
    ms: float  # since it was launched; about what a row waits for its token while the pipeline is full


class Pipeline:
    """Batches in flight through the stages of one executor, the oldest first. No sequence is in two of them."""

    def __init__(self, pool: RequestPool, steps: Steps, executor: Pipelined) -> None:
        self._pool, self._steps, self._executor = pool, steps, executor
        self._flying: deque[tuple[InFlight, int, float]] = deque()

    def __len__(self) -> int:
        return len(self._flying)

    def choose(self) -> Batch:
        """What can be launched now; nothing while every stage has work."""
        depth = self._executor.depth
        left = depth - len(self._flying)
        return self._pool.choose(depth, left) if left else NOTHING

    def launch(self, batch: Batch) -> None:
        """A batch that was chosen just now."""
        began = time.monotonic()
        prepared = self._steps.prepare(batch.rows, keep=False)
        draws = draws_of(prepared)
        self._pool.forwards += 1
        self._pool.launched(batch)
        flight = InFlight(batch, prepared, draws, self._executor.launch(prepared.step, draws))
        self._flying.append((flight, self._pool.chooser.keys, began))

    def land(self) -> Landed:
        """Wait for the oldest one."""
        flight, keys, began = self._flying[0]
        found = flight.landing.result()
        self._flying.popleft()
        return Landed(flight, found, keys, (time.monotonic() - began) * 1e3)


NOTHING = Batch((), 0)


def draws_of(prepared: Prepared) -> list[SamplingArgs]:
    """How the rows that get a token choose it."""
    return [SamplingArgs(s.request.sampling, len(s.tokens), s.shifts) for s in prepared.sampled]
