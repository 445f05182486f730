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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from weft_runner.core.batch import Batch
from weft_runner.core.events import Effect, RunStep, StepDone, StepResults, StepSlot
from weft_runner.core.request_pool import RequestPool
from weft_runner.core.runner import Runner
from weft_runner.core.sampling import SampledToken
from weft_runner.engine.builder import BuiltStep, StepBuilder
from weft_runner.errors import ExecutorLost
from weft_runner.model.executor import AsyncExecutor, Executor, Pipelined, Rows, StepHandle
from weft_runner.model.layer_progress import LayerReports
from weft_runner.model.sampling import SamplingArgs

log = logging.getLogger(__name__)
ONE = StepSlot()  # at every iteration of most executors


class Surroundings(Protocol):
    """What is done around the steps, when the loop says so: by the engine."""

    def perform(self, effects: Sequence[Effect]) -> None:
        """What the machine wants done, in order. A step is not among it."""
        ...

    def between_steps(self, step_s: float | None) -> None:
        """Nothing is in flight. `step_s`: what the last step took, and the next one waits; None: there is none."""
        ...

    def has_work(self) -> bool:
        """Return whether work waits for the end of the present step, so that no step is launched after it."""
        ...


class LaunchedStep(NamedTuple):
    """A step given to the executor, with its handle.

    `handle` waits for what it samples; None: it was computed at once, and sampled `tokens`, or its tokens are to be
    drawn from `logits`. `began_s`: None: it was launched behind another one, and begins when that one is complete.
    """

    step: RunStep
    built: BuiltStep
    logits: Rows | None
    handle: StepHandle | None
    tokens: list[SampledToken | None]
    began_s: float | None


# At every iteration: their own constructors are Python functions.
_launched, _done = partial(tuple.__new__, LaunchedStep), partial(tuple.__new__, StepDone)


class StepLoop:
    """Runs the steps of one engine, a turn at a time. `ranks`: the width of the adapter in each slot that is in use."""

    def __init__(
        self, runner: Runner, executor: Executor, ranks: Mapping[int, int], around: Surroundings,
        reports: LayerReports, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._runner, self._executor, self._around, self._reports = runner, executor, around, reports
        can = executor.can
        self._pipelined, self._follows = can.pipelined, can.follows
        self._runs_ahead = can.follows is not None and can.follows.keeps_tokens
        self._builder, self._clock = StepBuilder(runner.pool, ranks), clock
        self._launched: deque[LaunchedStep] = deque()
        self._depth, self._step_s = 1, 0.0

    @property
    def in_flight(self) -> bool:
        """Say whether a step is launched and not complete."""
        return bool(self._launched)

    def advance(self) -> StepDone | None:
        """Launch a step, or complete the oldest and account for it, or both. Raises ExecutorLost: no row can run."""
        turn_s, launched = self._clock(), self._launched
        # 1. Schedule a step where the executor has a place for one.
        depth = self._depth = 1 if self._pipelined is None else self._next_depth(self._pipelined)
        free = depth - len(launched)
        step = self._schedule(ONE if depth == 1 else StepSlot(depth, free)) if free > 0 else None
        oldest = launched[0].step if launched else step
        if oldest is None:
            return None
        began_s = turn_s
        try:
            # 2. Launch it. Nothing is completed as long as stages have no work.
            if step is not None:
                launched.append(self._launch(step, turn_s))
                if depth > 1:
                    return None
            # 3. Draw the oldest's tokens, where that waited for those before; launch the next step behind it.
            if self._follows is not None:
                if launched[0].logits is not None:
                    launched[0] = self._draw_late(self._follows, launched[0])
                if self._runs_ahead and not self._around.has_work():
                    self._launch_behind(self._follows, launched[0])
            # 4. Complete the oldest.
            found = launched[0].tokens if (handle := launched[0].handle) is None else handle.result()
            done = launched.popleft()
            results, began_s = done.built.by_key(found), turn_s if done.began_s is None else done.began_s
            if self._follows is not None and self._reports.counter is not None:
                self._reports.counter.raise_by(self._executor.spec.layers)
        except ExecutorLost:
            raise
        except Exception:
            if self._pipelined is not None:
                raise
            log.exception("the forward of a batch failed; its rows run alone")
            launched.clear()
            self._reports.again()
            found, results = [], run_alone(oldest, self._runner.pool, self._builder, self._executor, self._reports)
        # 5. Account. Nothing waits for a step of a pipeline that samples nothing.
        now_s = self._clock()
        self._step_s = now_s - turn_s
        ms = 0.0 if self._pipelined is not None and not found else (now_s - began_s) * 1e3
        event = _done((oldest, results, ms))
        self._around.perform(self._runner.handle(event, now_s))
        return event

    def _schedule(self, slot: StepSlot) -> RunStep | None:
        """Ask the machine for a step, and do what it wants done before."""
        effects = self._runner.handle(slot, self._clock())
        step = last if effects and isinstance(last := effects[-1], RunStep) else None
        if len(effects) > (step is not None):
            self._around.perform(effects if step is None else effects[:-1])
        if step is not None and step.clear_pages:
            self._executor.clear_pages(step.clear_pages)
        if slot.previous is None:  # else another one runs
            self._around.between_steps(None if step is None else self._step_s)
        return step

    def _next_depth(self, pipelined: Pipelined) -> int:
        """How many steps may be launched; more than before only once none is.

        Of one step alone the pool does not know that it is launched (`Runner`).
        """
        pool = self._runner.pool
        depth = pipelined.depth_for(lambda: min(pool.next_tokens, pool.limits.batch.max_batch_tokens))
        return min(depth, self._depth) if self._launched else depth

    def _launch(self, step: RunStep, began_s: float | None, previous: BuiltStep | None = None) -> LaunchedStep:
        """Build a step and give it to the executor. `previous`: the step in flight whose tokens it goes on from."""
        keep = self._pipelined is None and step.stands
        built = self._builder.build(step.batch, step.sequences, keep=keep, previous=previous)
        logits = handle = None
        tokens = list[SampledToken | None]()
        if self._follows is not None:
            logits, handle = self._draw(self._follows, built, self._executor.run(built.step))
        elif self._pipelined is not None:
            handle = self._pipelined.launch(built.step, built.draws())
        else:
            tokens = sample_step(self._executor, self._executor.run(built.step, **self._reports.options), built)
        return _launched((step, built, logits, handle, tokens, began_s))

    def _launch_behind(self, follows: AsyncExecutor, present: LaunchedStep) -> None:
        """Launch the next step after the present step, unless it must wait for it."""
        step, built = present.step, present.built
        may_follow = self._runner.may_repeat(step) and follows.can_follow(built.step)
        if may_follow and (once_more := self._builder.advance_speculatively(built)) is not None:
            logits, handle = self._draw(follows, once_more, follows.follow(built.step))
            self._launched.append(_launched((self._runner.repeat(step), once_more, logits, handle, [], None)))
        elif (following := self._schedule(StepSlot(previous=step))) is not None:
            self._launched.append(self._launch(following, None, built))

    def _draw(self, follows: AsyncExecutor, built: BuiltStep, logits: Rows) -> tuple[Rows, StepHandle | None]:
        """Sample from a step as it is launched. Logits come back: that waits for the tokens before."""
        return (logits, None) if built.waits else (None, follows.draw(logits, built.draws()))

    def _draw_late(self, follows: AsyncExecutor, present: LaunchedStep) -> LaunchedStep:
        """Sample from a launched step, once the tokens before are accounted for."""
        pool, departures = self._runner.pool, present.step.departures
        draws = present.built.late_draws(lambda sequence: pool.runs(sequence, departures))
        return present._replace(logits=None, handle=follows.draw(present.logits, draws))


def sample_step(executor: Executor, logits: Rows, built: BuiltStep) -> list[SampledToken | None]:
    """Sample from each row of a step's logits.

    Rows with guesses are sampled at every position at once. Where penalties or a grammar make of the guesses what may
    come behind them, a position is sampled once the guess before it was right and has been taken.
    """
    results = executor.sample(logits, built.draws())
    if not built.batch.guesses:
        return results
    guessed, n_checked = built.guessed(), 0
    while guessed := [row for row in guessed if row.is_right(n_checked, results)]:
        for row in guessed:
            row.sequence.check(row.drafted[n_checked])
        n_checked += 1
        places = [row.first + n_checked for row in guessed]
        draws = [SamplingArgs(s.start.sampling, len(s.tokens) + n_checked, s.adjustments, s.mask) for s, *_ in guessed]
        for place, token in zip(places, executor.sample(logits[places], draws), strict=True):
            results[place] = token
    return results


def run_alone(
    step: RunStep, pool: RequestPool, builder: StepBuilder, executor: Executor, reports: LayerReports
) -> StepResults:
    """Run each row of a failed step separately, so that a row that cannot be computed ends only its sequence.

    Rows whose sequences are gone are left out; those that fail again are failures. Raises ExecutorLost.
    """
    parts: list[StepResults] = []
    for row, sequence in zip(step.batch.rows, step.sequences, strict=True):
        if not pool.runs(sequence, step.departures):
            continue
        try:
            if sequence.early:
                raise RuntimeError("the step failed while guesses were checked")
            built = builder.build(Batch((row,), 0), (sequence,), keep=False)
            parts.append(built.by_key(sample_step(executor, executor.run(built.step, **reports.options), built)))
        except ExecutorLost:
            raise
        except Exception as error:  # noqa: BLE001 (it ends this sequence, with its name, and reaches its gateway)
            parts.append(StepResults({}, {row.key: f"{type(error).__name__}: {error}"}, forwards=0))
    tokens = {key: token for part in parts for key, token in part.tokens.items()}
    failures = {key: reason for part in parts for key, reason in part.failures.items()}
    prompts = {key: logprobs for part in parts for key, logprobs in part.prompts.items()}
    late = tuple(key for part in parts for key in part.late)
    checked = {key: sampled for part in parts for key, sampled in part.checked.items()}
    return StepResults(tokens, failures, prompts, late, sum(part.forwards for part in parts), checked)
