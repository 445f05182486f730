"""How long steps take, for the simulator: the engine alone is run at several sizes, and lines are fitted through them.

The executor's part of a step runs on its threads, the engine's own part (form a batch, build the step, sample, account)
on one. Neither gateway nor scheduler runs beside them.
"""

import random
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from weft_bench.cpu_engine import Ask, Sizes, Subject
from weft_bench.cpu_shapes import prompts
from weft_runner.model import StepInput
from weft_sim.executor_model import StepTimes

STREAMS = (1, 4, 16)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)  # of steps, where the curve's points are
ASKS_PER_STREAM = 2
MIN_S = 4.0  # small models need many steps for a mean that holds
ROUNDS = 30  # of the fit: each weighs an outlier less than the one before
MIN_NORM = 1e-9


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step that was run; seconds. `keys`: tokens in KV that its decode rows attend to."""

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
    beside: float = 1.0  # times as long a step takes beside the same in another process


def measure_beside(
    files: Mapping[str, Path], adapters: Sequence[Path], sizes: Sizes, vocab: int, seed: int
) -> EngineCosts:
    """Measure the engine alone, then with the same in another process. Raises EngineRefused, WrongAdapter."""
    alone = measure(files, adapters, sizes, vocab, seed)
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        running = other.submit(measure, files, adapters, sizes, vocab, seed)
        together = measure(files, adapters, sizes, vocab, seed)
        running.result()
    ratios = [
        long / short for (_, long), (_, short) in zip(together.times.curve, alone.times.curve, strict=False) if short
    ]
    return replace(alone, beside=max(1.0, median(ratios)))


def measure(files: Mapping[str, Path], adapters: Sequence[Path], sizes: Sizes, vocab: int, seed: int) -> EngineCosts:
    """Run the engine alone. Raises EngineRefused, WrongAdapter."""
    rng, samples = random.Random(seed), list[StepSample]()
    with Subject(files, sizes) as subject:
        subject.adapters.paths.update({path.name: path for path in adapters})
        watch = _Watch(subject)
        kinds = [(streams, names) for streams in STREAMS if streams <= sizes.rows for names in ([*adapters], [None])]
        rounds, began = 0, time.perf_counter()
        while rounds < 2 or time.perf_counter() - began < MIN_S:
            for streams, names in kinds:
                subject.play(_asks(rng, ASKS_PER_STREAM * streams, names, vocab), streams=streams)
            if not rounds:
                watch.samples.clear()  # adapters came to their slots, threads and buffers to their size
            rounds += 1
        samples, threads, executor = list(watch.samples), subject.built.threads, subject.executor
    return fit(samples, threads, executor)


def _asks(rng: random.Random, count: int, adapters: Sequence[Path | None], vocab: int) -> list[Ask]:
    """Make requests that take turns over the adapters (None: the base)."""
    names = ["" if path is None else path.name for path in adapters]
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
    found = np.zeros(matrix.shape[1])
    for _ in range(rounds):
        while True:
            found[:] = 0.0
            scaled = matrix[:, used] * weights[:, None]
            norms = np.maximum(np.linalg.norm(scaled, axis=0), MIN_NORM)
            found[used] = np.linalg.lstsq(scaled / norms, values * weights, rcond=None)[0] / norms
            if (found >= 0.0).all():
                break
            used.remove(int(np.argmin(found)))
        errors = np.abs(matrix @ found - values) / values
        weights = 1.0 / values / np.sqrt(np.maximum(errors, 1e-3))
    return [float(value) for value in found]
