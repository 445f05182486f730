"""How long steps take, for the simulator: the engine alone is run at several sizes, and lines are fitted through them.

The executor's part of a step runs on its threads, the engine's own part (form a batch, build the step, sample, account)
on one. Neither gateway nor scheduler runs beside them.
"""

import random
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from weft_bench.cpu_shapes import prompts
from weft_bench.drive.engine import Sizes, Subject
from weft_runner.model import StepInput
from weft_sim.executor_model import StepTimes
from weft_stage.playing import Ask

STREAMS = (1, 4, 16)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)  # of steps, where the curve's points are
ASKS_PER_STREAM = 2
MIN_S = 4.0  # small models need many steps for a mean that holds
ROUNDS = 30  # of the fit: each weighs an outlier less than the round before
MIN_NORM = 1e-9


@dataclass(frozen=True, slots=True)
class StepSample:
    """A step that was run; seconds. `keys`: tokens in KV that its decode rows attend to."""

    rows: int
    prompt_tokens: int
    keys: int
    adapters: int
    model_s: float
    engine_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """The engine's own part of a step: `step_s + row_s * rows`, and `prefill_s` more where it has a prompt's tokens."""

    times: StepTimes
    step_s: float
    row_s: float
    prefill_s: float
    threads: int
    executor: str


def measure(files: Mapping[str, Path], adapters: Sequence[Path], sizes: Sizes, vocab: int, seed: int) -> EngineCosts:
    """Run the engine alone. Raises EngineRefused, WrongAdapter."""
    rng = random.Random(seed)
    with Subject(files, sizes) as subject:
        subject.adapters.paths.update({path.name: path for path in adapters})
        watch = _Watch(subject)
        names = [path.name for path in adapters]
        kinds = [(streams, some) for streams in STREAMS if streams <= sizes.rows for some in (names, [""])]
        rounds, began = 0, time.perf_counter()
        while rounds < 2 or time.perf_counter() - began < MIN_S:
            for streams, some in kinds:
                subject.play(_asks(rng, ASKS_PER_STREAM * streams, some, vocab), streams=streams)
            if not rounds:
                watch.samples.clear()  # adapters came to their slots, threads and buffers to their size
            rounds += 1
        return fit(watch.samples, subject.built.threads, subject.executor)


def _asks(rng: random.Random, count: int, names: Sequence[str], vocab: int) -> list[Ask]:
    """Make requests that take turns over the adapters of these names (empty: the base)."""
    made = (prompts(rng, 1, rng.randint(8, 96), vocab)[0] for _ in range(count))
    return [Ask(names[i % len(names)], prompt, rng.randint(12, 36)) for i, prompt in enumerate(made)]


class _Watch:
    """Stands before the executor's `run` and around the engine's beats."""

    def __init__(self, subject: Subject) -> None:
        engine = subject.engine
        self.samples: list[StepSample] = []
        self._run, self._run_once = engine.executor.run, engine.run_once
        self._latest: StepSample | None = None
        engine.executor.run = self._timed_run
        engine.run_once = self._run_timed

    def _timed_run(self, step: StepInput, *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        logits = self._run(step, *arguments, **options)
        decoding = [row for row in step.rows if row.end - row.start == 1]
        self._latest = StepSample(
            rows=len(decoding),
            prompt_tokens=len(step.tokens) - len(decoding),
            keys=sum(row.context for row in decoding),
            adapters=len({segment.slot for segment in step.plan.segments}),
            model_s=time.perf_counter() - began,
        )
        return logits

    def _run_timed(self) -> None:
        began = time.perf_counter()
        self._latest = None
        self._run_once()
        latest: StepSample | None = self._latest
        if latest is not None:
            self.samples.append(replace(latest, engine_s=time.perf_counter() - began - latest.model_s))


def fit(samples: Sequence[StepSample], threads: int = 1, executor: str = "") -> EngineCosts:
    """Fit lines through what was measured; no coefficient is negative."""
    tokens = [one.rows + one.prompt_tokens for one in samples]
    points = [point for point in TOKENS if point <= max(tokens)]
    features = [(*_shares(points, count), one.keys, one.adapters) for one, count in zip(samples, tokens, strict=True)]
    *curve, key, adapter = (1e3 * seconds for seconds in least_errors(features, [one.model_s for one in samples]))
    row = (curve[-1] - curve[0]) / (points[-1] - points[0]) if len(points) > 1 else 0.0
    times = StepTimes(curve[0] - row, row, row, key, adapter, tuple(zip(points, curve, strict=True)))
    steps = [(1, one.rows, one.prompt_tokens > 0) for one in samples]
    step_s, row_s, prefill_s = least_errors(steps, [one.engine_s for one in samples])
    return EngineCosts(times, step_s, row_s, prefill_s, threads, executor)


def _shares(points: Sequence[int], tokens: int) -> list[float]:
    """Return the share of each point in a step of `tokens` tokens: a line joins two of them."""
    shares = [0.0] * len(points)
    high = min(max(bisect_left(points, tokens), 1), len(points) - 1)
    part = (tokens - points[high - 1]) / (points[high] - points[high - 1])
    shares[high - 1], shares[high] = 1.0 - part, part
    return shares


def least_errors(features: Sequence[Sequence[float]], seconds: Sequence[float], *, rounds: int = ROUNDS) -> list[float]:
    """Fit coefficients, none below zero, with the least sum of relative errors: an outlier counts as far as it is off.

    Least squares, again and again, each sample weighed by its error in the round before (one round: least squares of
    relative errors); a coefficient that would be negative is left out.
    """
    matrix, values = np.asarray(features, float), np.asarray(seconds, float)
    weights, used = 1.0 / values, list(range(matrix.shape[1]))
    fitted = np.zeros(matrix.shape[1])
    for _ in range(rounds):
        while True:
            fitted[:] = 0.0
            scaled = matrix[:, used] * weights[:, None]
            norms = np.maximum(np.linalg.norm(scaled, axis=0), MIN_NORM)
            fitted[used] = np.linalg.lstsq(scaled / norms, values * weights, rcond=None)[0] / norms
            if (fitted >= 0.0).all():
                break
            used.remove(int(np.argmin(fitted)))
        errors = np.abs(matrix @ fitted - values) / values
        weights = 1.0 / values / np.sqrt(np.maximum(errors, 1e-3))
    return [float(value) for value in fitted]
