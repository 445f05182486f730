"""The loop over steps: schedule, launch, launch the next one behind, complete the oldest, account for it.

One queue of launched steps serves every executor. An executor that computes while it is called leaves it empty between
two turns. One that computes beside the host gets the next step before this one's tokens are here: rows go on from the
tokens on the device, the same batch of decode rows once more, or one that is scheduled anew, with prompts that have
come and without rows whose last token the present step makes. Should a row end otherwise with the present step, what
the next one computes for it is dropped: its pages are written to in the device's order, before the sequence that gets
them writes there. Where what a row may sample depends on the present token beyond being fed (penalties, grammars), the
next step's model is launched all the same, and its tokens are drawn while it computes, once the present step is
accounted for; a mask that takes longer keeps its own row out of the step behind. An executor of several stages gets as
many steps as it has stages, and no sequence is in two of them.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from weft.domain.request import TokenLogprob
from weft_runner.core.events import RunStep, StepDone, StepResults, StepSlot
from weft_runner.core.runner import Runner
from weft_runner.core.sampling import SampledToken
from weft_runner.engine.builder import BuiltStep, StepBuilder
from weft_runner.errors import ExecutorLost
from weft_runner.model.executor import AsyncExecutor, Executor, Pipelined, Rows, StepHandle, capabilities_of
from weft_runner.model.layer_progress import CalledLayerCounter

log = logging.getLogger(__name__)
ONE = StepSlot()  # at every iteration of most executors
Schedule = Callable[[StepSlot], RunStep | None]  # offers the machine a step, performs what follows


@dataclass(slots=True)
class LayerReports:
    """What threads beside the steps have to know. `counter`: None if nobody asks, or the executor raises its own.

    `options`: of `Executor.run`; `again`: called before a step's rows run once more, each alone, and write the same
    pages.
    """

    counter: CalledLayerCounter | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    again: Callable[[], None] = lambda: None

    def raise_counter(self, counter: CalledLayerCounter) -> None:
        """Raise that counter from now on."""
        self.counter, self.options = counter, {"layer_done": counter.layer_done}


class LaunchedStep(NamedTuple):
    """A step that was given to the executor.

    `handle` waits for what it samples; None: it was computed at once, and sampled `tokens`, or its tokens are to be
    drawn from `logits`. `began_s`: None: it was launched behind another one, and begins when that one is complete.
    """

    step: RunStep
    built: BuiltStep
    logits: Rows | None
    handle: StepHandle | None
    tokens: list[SampledToken | None]
    began_s: float | None


_launched = partial(tuple.__new__, LaunchedStep)  # at every iteration: its own constructor is a Python function


class StepLoop:
    """Runs the steps of one engine, a turn at a time. `ranks`: the width of the adapter in each slot that is in use.

    `has_work`: something waits for the end of the present step, so that no step is launched behind it.
    """

    def __init__(
        self, runner: Runner, executor: Executor, ranks: Mapping[int, int], has_work: Callable[[], bool],
        reports: LayerReports,
    ) -> None:  # fmt: skip
        self._runner, self._executor, self._has_work, self._reports = runner, executor, has_work, reports
        can = capabilities_of(executor)
        self._pipelined, self._follows = can.pipelined, can.follows
        self._ahead = can.follows is not None and can.follows.keeps_tokens
        self._builder = StepBuilder(runner.pool, ranks)
        self._launched: deque[LaunchedStep] = deque()
        self._depth = 1

    @property
    def in_flight(self) -> bool:
        """Say whether a step is launched and not complete."""
        return bool(self._launched)

    def advance(self, schedule: Schedule) -> StepDone | None:
        """Launch a step, or complete the oldest, or both. Raises ExecutorLost: then no row can run."""
        began_s, launched = time.monotonic(), self._launched
        # 1. Schedule a step where the executor has a place for one.
        depth = self._depth = 1 if self._pipelined is None else self._next_depth(self._pipelined)
        free = depth - len(launched)
        step = schedule(ONE if depth == 1 else StepSlot(depth, free)) if free > 0 else None
        oldest = launched[0].step if launched else step
        if oldest is None:
            return None
        try:
            # 2. Launch it. Nothing is completed as long as stages have no work.
            if step is not None:
                launched.append(self._launch(step, began_s))
                if depth > 1:
                    return None
            # 3. Draw the oldest's tokens, where that waited for those before; launch the next step behind it.
            if self._follows is not None:
                if launched[0].logits is not None:
                    launched[0] = self._draw_late(self._follows, launched[0])
                if self._ahead and not self._has_work():
                    following = self._launch_behind(self._follows, launched[0], schedule)
                    if following is not None:
                        launched.append(following)
            # 4. Complete the oldest.
            found = launched[0].tokens if (handle := launched[0].handle) is None else handle.result()
            done = launched.popleft()
            results, began_s = done.built.by_key(found), began_s if done.began_s is None else done.began_s
            if self._follows is not None and self._reports.counter is not None:
                self._reports.counter.raise_by(self._executor.spec.layers)
        except ExecutorLost:
            raise
        except Exception:
            if self._pipelined is not None:
                raise
            log.exception("the forward of a batch failed; its rows run alone")
            launched.clear()
            found, results = [], self._run_alone(oldest)
        # 5. Account. Nothing waits for a step of a pipeline that samples nothing.
        ms = 0.0 if self._pipelined is not None and not found else (time.monotonic() - began_s) * 1e3
        return StepDone(oldest, results.tokens, results.failures, ms, results.prompts, results.late)

    def _next_depth(self, pipelined: Pipelined) -> int:
        """How many steps may be launched; more than before only once none is.

        Of one step alone the pool does not know that it is launched (`Runner`).
        """
        pool = self._runner.pool
        wanted = pipelined.depth_for(lambda: min(pool.next_tokens, pool.limits.batch.max_batch_tokens))
        return min(wanted, self._depth) if self._launched else wanted

    def _launch(self, step: RunStep, began_s: float | None, behind: BuiltStep | None = None) -> LaunchedStep:
        """Build a step and give it to the executor. `behind`: the step in flight whose tokens it goes on from."""
        pool = self._runner.pool
        keep = self._pipelined is None and step.batch is pool.scheduler.standing
        built = self._builder.build(step.batch.rows, step.sequences, keep=keep, behind=behind)
        logits = handle = None
        tokens = list[SampledToken | None]()
        if self._follows is not None:
            logits, handle = self._draw(self._follows, built, self._executor.run(built.step))
        elif self._pipelined is not None:
            handle = self._pipelined.launch(built.step, built.draws())
        else:
            tokens = self._executor.sample(self._executor.run(built.step, **self._reports.options), built.draws())
        pool.forwards += 1
        return _launched((step, built, logits, handle, tokens, began_s))

    def _draw(self, follows: AsyncExecutor, built: BuiltStep, logits: Rows) -> tuple[Rows, StepHandle | None]:
        """Sample from a step as it is launched. Logits come back: that waits for the tokens before."""
        return (logits, None) if built.waits else (None, follows.draw(logits, built.draws()))

    def _draw_late(self, follows: AsyncExecutor, present: LaunchedStep) -> LaunchedStep:
        """The same, once those tokens are accounted for."""
        draws = present.built.late_draws(self._runner.pool.runs)
        return present._replace(logits=None, handle=follows.draw(present.logits, draws))

    def _launch_behind(self, follows: AsyncExecutor, present: LaunchedStep, schedule: Schedule) -> LaunchedStep | None:
        """Launch the step behind a present one; None: it waits for that one."""
        step, built = present.step, present.built
        same = self._runner.may_repeat(step) and follows.can_follow(built.step)
        if same and (once_more := self._builder.advance_unseen(built)) is not None:
            logits, handle = self._draw(follows, once_more, follows.follow(built.step))
            self._runner.pool.forwards += 1
            return _launched((self._runner.repeat(step), once_more, logits, handle, [], None))
        following = schedule(StepSlot(behind=step))
        return None if following is None else self._launch(following, None, built)

    def _run_alone(self, step: RunStep) -> StepResults:
        """Run each row whose sequence is still there alone; those that fail again end."""
        self._reports.again()
        tokens: dict[str, SampledToken] = {}
        failures: dict[str, str] = {}
        prompts: dict[str, list[TokenLogprob]] = {}
        late: list[str] = []
        for row, sequence in zip(step.batch.rows, step.sequences, strict=True):
            if not self._runner.pool.runs(sequence):
                continue
            try:
                built = self._builder.build((row,), (sequence,), keep=False)
                logits = self._executor.run(built.step, **self._reports.options)
                found = built.by_key(self._executor.sample(logits, built.draws()))
                self._runner.pool.forwards += 1
            except ExecutorLost:
                raise
            except Exception as error:  # noqa: BLE001 (it ends this sequence, with its name, and reaches its gateway)
                found = StepResults({}, {row.key: f"{type(error).__name__}: {error}"})
            tokens.update(found.tokens)
            failures.update(found.failures)
            prompts.update(found.prompts)
            late += found.late
        return StepResults(tokens, failures, prompts, tuple(late))
