"""How long steps take, for the simulator: the engine alone is run at several sizes, and lines are fitted through them.

The executor's part of a step runs on its threads, the engine's own part (form a batch, build the step, sample, account)
on one. Neither gateway nor scheduler runs beside them.
"""

import random
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

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
    """Times of the executor's part of a step. The engine's own part is `step_s + row_s * rows`."""

    times: StepTimes
    step_s: float
    row_s: float
    threads: int
    executor: str


def measure(files: Mapping[str, Path], adapters: Sequence[Path], sizes: Sizes, vocab: int, seed: int) -> EngineCosts:
    """Run the engine alone, with adapters and with the base. Raises EngineRefused, WrongAdapter."""
    rng = random.Random(seed)
    with Subject(files, sizes) as subject:
        subject.adapters.paths.update({path.name: path for path in adapters})
        samples = watched(subject)
        play(subject, adapters, vocab, rng)
        samples.clear()  # adapters came to their slots, threads and buffers to their size
        began = time.perf_counter()
        while time.perf_counter() - began < MIN_S:
            play(subject, adapters, vocab, rng)
        return fit(samples, subject.built.threads, subject.executor)


def play(subject: Subject, adapters: Sequence[Path], vocab: int, rng: random.Random) -> None:
    """Play requests that take turns over the adapters, then requests for the base, at each number of streams."""
    for streams, names in product(STREAMS, ([path.name for path in adapters], [""])):
        made = [prompts(rng, 1, rng.randint(8, 96), vocab)[0] for _ in range(ASKS_PER_STREAM * streams)]
        asks = [Ask(names[i % len(names)], prompt, rng.randint(12, 36)) for i, prompt in enumerate(made)]
        subject.play(asks, streams=streams)


def watched(subject: Subject) -> list[StepSample]:
    """Return the list to which each step of the engine is appended from here on."""
    engine, samples = subject.engine, list[StepSample]()
    run, run_once, steps = engine.executor.run, engine.run_once, list[StepSample]()

    def timed_run(step: StepInput, *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        logits = run(step, *arguments, **options)
        decoding = [row for row in step.rows if row.end - row.start == 1]
        steps[:] = [StepSample(
            len(decoding), len(step.tokens) - len(decoding), sum(row.context for row in decoding),
            len({segment.slot for segment in step.plan.segments}), time.perf_counter() - began,
        )]  # fmt: skip
        return logits

    def timed_beat() -> None:
        began = time.perf_counter()
        run_once()
        if steps:
            step = steps.pop()
            samples.append(replace(step, engine_s=time.perf_counter() - began - step.model_s))

    engine.executor.run, engine.run_once = timed_run, timed_beat
    return samples


def fit(samples: Sequence[StepSample], threads: int = 1, executor: str = "") -> EngineCosts:
    """Fit lines through what was measured; no coefficient is negative."""
    tokens = [one.rows + one.prompt_tokens for one in samples]
    points = [point for point in TOKENS if point <= max(tokens)]
    features = [(*_shares(points, count), one.keys, one.adapters) for one, count in zip(samples, tokens, strict=True)]
    *curve, key, adapter = (1e3 * seconds for seconds in least_errors(features, [one.model_s for one in samples]))
    row = (curve[-1] - curve[0]) / (points[-1] - points[0])
    times = StepTimes(curve[0] - row, row, row, key, adapter, tuple(zip(points, curve, strict=True)))
    step_s, row_s, _ = least_errors([(1, one.rows, one.prompt_tokens > 0) for one in samples],
                                    [one.engine_s for one in samples])  # fmt: skip
    return EngineCosts(times, step_s, row_s, threads, executor)


def _shares(points: Sequence[int], tokens: int) -> list[float]:
    """Return the share of each point in a step of `tokens` tokens: a line joins two of them."""
    shares = [0.0] * len(points)
    high = min(max(bisect_left(points, tokens), 1), len(points) - 1)
    part = (tokens - points[high - 1]) / (points[high] - points[high - 1])
    shares[high - 1], shares[high] = 1.0 - part, part
    return shares


def least_errors(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Fit coefficients, none below zero, with the least sum of relative errors: an outlier counts as far as it is off.

    Least squares, again and again, each sample weighed by its error in the round before.
    """
    matrix, values = np.asarray(features, float), np.asarray(seconds, float)
    weights, fitted = 1.0 / values, np.zeros(matrix.shape[1])
    for _ in range(ROUNDS):
        fitted: Any = nnls(matrix * weights[:, None], values * weights)[0]
        errors = np.abs(matrix @ fitted - values) / values
        weights = 1.0 / values / np.sqrt(np.maximum(errors, 1e-3))
    return [float(value) for value in fitted]
