"""Several steps in flight through the stages of one executor, the oldest first. No sequence is in two of them."""

import time
from collections import deque
from collections.abc import Mapping

from weft_runner.core.events import StepDone, StepSlot
from weft_runner.core.runner import Runner
from weft_runner.model.executor import Pipelined
from weft_runner.step.asynchronous import LaunchedStep
from weft_runner.step.builder import StepBuilder
from weft_runner.step.sync import Schedule


class PipelinedSteps:
    def __init__(self, runner: Runner, executor: Pipelined, ranks: Mapping[int, int]) -> None:
        self._runner, self._executor = runner, executor
        self._builder = StepBuilder(runner.pool, ranks)
        self._launched: deque[tuple[LaunchedStep, float]] = deque()
        self._depth = 1

    @property
    def in_flight(self) -> bool:
        return bool(self._launched)

    def advance(self, schedule: Schedule) -> StepDone | None:
        """Launch a step while a stage has no work, else complete the oldest. One at a time is both at once."""
        depth = self._depth = self._next_depth()
        free, began = depth - len(self._launched), time.monotonic()
        step = schedule(StepSlot(depth, free)) if free > 0 else None
        if step is not None:
            built = self._builder.build(step.batch.rows, step.sequences, keep=False)
            draws = built.draws()
            self._runner.pool.forwards += 1
            launched = LaunchedStep(step, built, draws, self._executor.launch(built.step, draws))
            self._launched.append((launched, began))
            if depth > 1:
                return None
        if not self._launched:
            return None
        oldest, began = self._launched[0]
        found = oldest.handle.result()
        self._launched.popleft()
        # About what a row waits for its token in a full pipeline; nothing waits for a step that samples nothing.
        ms = (time.monotonic() - began) * 1e3 if found else 0.0
        results = oldest.built.by_key(found)
        return StepDone(oldest.step, results.tokens, results.failures, ms, results.prompts)

    def _next_depth(self) -> int:
        """More are in flight only once none is: of one alone the pool does not know that it is (`Runner`)."""
        pool = self._runner.pool
        wanted = self._executor.depth_for(lambda: min(pool.next_tokens, pool.limits.batch.max_batch_tokens))
        return min(wanted, self._depth) if self._launched else wanted
