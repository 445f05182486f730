"""One step after the other. A step that fails is run again row by row, so that only the rows that fail again end."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from weft.domain.request import TokenLogprob
from weft_runner.core.batch import Row
from weft_runner.core.events import RunStep, StepDone, StepResults, StepSlot
from weft_runner.core.runner import Runner
from weft_runner.core.sampling import SampledToken
from weft_runner.core.sequence import Sequence
from weft_runner.errors import ExecutorLost
from weft_runner.model.executor import Executor
from weft_runner.model.layer_progress import CalledLayerCounter
from weft_runner.step.builder import StepBuilder

log = logging.getLogger(__name__)
ONE = StepSlot()
Schedule = Callable[[StepSlot], RunStep | None]  # offers the machine a step, performs what follows


class StepStrategy(Protocol):
    """How an executor's steps are run. `in_flight`: a step is launched and not complete."""

    @property
    def in_flight(self) -> bool: ...

    def advance(self, schedule: Schedule, /) -> StepDone | None:
        """Launch a step, or complete the oldest, or both. Raises ExecutorLost: then no row can run."""
        ...


@dataclass(slots=True)
class LayerReports:
    """What threads beside the steps have to know. `counter`: None if nobody asks, or the executor raises its own.

    `again`: called before a step's rows run once more, each alone, and write the same pages.
    """

    counter: CalledLayerCounter | None = None
    again: Callable[[], None] = lambda: None


class SyncSteps:
    def __init__(self, runner: Runner, executor: Executor, ranks: Mapping[int, int], reports: LayerReports) -> None:
        self._runner, self._executor, self._reports = runner, executor, reports
        self._builder = StepBuilder(runner.pool, ranks)

    @property
    def in_flight(self) -> bool:
        return False

    def advance(self, schedule: Schedule) -> StepDone | None:
        began = time.monotonic()
        if (step := schedule(ONE)) is None:
            return None
        try:
            results = self._forward(
                step.batch.rows, step.sequences, keep=step.batch is self._runner.pool.scheduler.standing
            )
        except ExecutorLost:
            raise
        except Exception:
            log.exception("the forward of a batch failed; its rows run alone")
            results = self._run_alone(step)
        ms = (time.monotonic() - began) * 1e3
        return StepDone(step, results.tokens, results.failures, ms, results.prompts)

    def _forward(self, rows: tuple[Row, ...], sequences: tuple[Sequence, ...], *, keep: bool = False) -> StepResults:
        built = self._builder.build(rows, sequences, keep=keep)
        if (counter := self._reports.counter) is None:
            logits = self._executor.run(built.step)
        else:
            logits = self._executor.run(built.step, layer_done=counter.layer_done)
        self._runner.pool.forwards += 1
        return built.by_key(self._executor.sample(logits, built.draws()))

    def _run_alone(self, step: RunStep) -> StepResults:
        """Each row whose sequence is still there runs alone; those that fail again end."""
        self._reports.again()
        tokens: dict[str, SampledToken] = {}
        failures: dict[str, str] = {}
        prompts: dict[str, list[TokenLogprob]] = {}
        for row, sequence in zip(step.batch.rows, step.sequences, strict=True):
            if self._runner.pool.sequences.get(row.key) is not sequence:
                continue
            try:
                found = self._forward((row,), (sequence,))
            except ExecutorLost:
                raise
            except Exception as error:  # noqa: BLE001 (it ends this sequence, with its name, and reaches its gateway)
                found = StepResults({}, {row.key: f"{type(error).__name__}: {error}"})
            tokens.update(found.tokens)
            failures.update(found.failures)
            prompts.update(found.prompts)
        return StepResults(tokens, failures, prompts)
