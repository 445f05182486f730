"""The next step is launched behind the running one, before the tokens of that are here.

Rows continue from the tokens on the device, so that accounting, sending and scheduling overlap the running step: the
same batch of decode rows once more, or one that is scheduled anew, with prompts that have come and without rows whose
last token the present step makes. Should a row end otherwise with the present step, what the next one computes for it
is dropped: its pages are written to in the device's order, before the sequence that gets them writes there.

A row whose next token depends on the present one beyond being fed (penalties, masks), or whose log probabilities are
read from the logits, makes the next step wait for the present one.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft_runner.core.events import RunStep, StepDone, StepSlot
from weft_runner.core.runner import Runner
from weft_runner.errors import ExecutorLost
from weft_runner.model.executor import AsyncExecutor, Executor, StepHandle
from weft_runner.model.sampling import SamplingArgs
from weft_runner.step.builder import BuiltStep
from weft_runner.step.sync import ONE, LayerReports, Schedule, SyncSteps

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A step on the device; `handle` waits for what it samples."""

    step: RunStep
    built: BuiltStep
    draws: list[SamplingArgs]
    handle: StepHandle


class AsyncSteps(SyncSteps):
    """`has_work`: something waits for the end of the present step, so that no step is launched behind it."""

    def __init__(
        self, runner: Runner, executor: Executor, launcher: AsyncExecutor, ranks: Mapping[int, int],
        has_work: Callable[[], bool], reports: LayerReports,
    ) -> None:  # fmt: skip
        super().__init__(runner, executor, ranks, reports)
        self._launcher, self._has_work = launcher, has_work
        self._next: LaunchedStep | None = None

    @property
    def in_flight(self) -> bool:
        return self._next is not None

    def advance(self, schedule: Schedule) -> StepDone | None:
        began = time.monotonic()
        launched, self._next = self._next, None
        step = launched.step if launched else schedule(ONE)
        if step is None:
            return None
        try:
            launched = launched or self._launch(step)
            if not self._has_work():
                self._next = self._follow(launched, schedule)
            results = launched.built.by_key(launched.handle.result())
            if self._reports.counter is not None:
                self._reports.counter.raise_by(self._executor.spec.layers)
        except ExecutorLost:
            raise
        except Exception:
            log.exception("the forward of a batch failed; its rows run alone")
            self._next = None
            results = self._run_alone(step)
        ms = (time.monotonic() - began) * 1e3
        return StepDone(step, results.tokens, results.failures, ms, results.prompts)

    def _launch(self, step: RunStep, behind: BuiltStep | None = None) -> LaunchedStep:
        built = self._builder.build(
            step.batch.rows, step.sequences, keep=step.batch is self._runner.pool.scheduler.standing, behind=behind
        )
        self._runner.pool.forwards += 1
        draws = built.draws()
        return LaunchedStep(step, built, draws, self._launcher.launch(built.step, draws))

    def _follow(self, launched: LaunchedStep, schedule: Schedule) -> LaunchedStep | None:
        """The step behind that one, if it needs no token of it on the host."""
        built = launched.built
        if not self._launcher.keeps_tokens(launched.draws):
            return None
        if not self._runner.may_repeat(launched.step):
            step = schedule(StepSlot(behind=launched.step))
            return None if step is None else self._launch(step, built)
        if not self._launcher.can_follow(built.step, launched.draws) or not self._builder.advance_unseen(built):
            return None
        self._runner.pool.forwards += 1
        draws = [draw._replace(position=draw.position + 1) for draw in launched.draws]
        step = self._runner.repeat(launched.step)
        return LaunchedStep(step, built, draws, self._launcher.follow(built.step, draws))
