"""splitwise-sim's published performance model: medians of its measurements by tokens of the batch, lines between them.

`splitwise_medians.csv` holds the medians of data/perf_model.csv of github.com/Mutinifni/splitwise-sim @8f99e7d (MIT,
`splitwise_medians.LICENSE`): DGX-A100 and DGX-H100, also with the power of its GPUs capped to 70 %, BLOOM-176B and
Llama-2-70B. A decode step is looked up on the same axis by its number of rows: its context is ignored, and a batch of
64 x 512 tokens is charged half of what was measured. It serves to compare with that simulator, not to plan by.
"""

import csv
import gzip
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from statistics import median

from weft_sim.performance.step import StepShape

MIXED = 1.1  # time of a batch of prompts and decode rows over that of prompts of as many tokens

Key = tuple[str, str, int]  # model, hardware, tensor-parallel ranks
Curve = tuple[tuple[float, ...], tuple[float, ...]]  # tokens of the batch, the fewest first, and their seconds


class SplitwiseTable:
    """A model on one kind of machine, as a PerformanceModel."""

    def __init__(self, prompt: Curve, token: Curve) -> None:
        self._prompt, self._token = prompt, token
        self._measured: dict[tuple[int, int], float] = {}

    def seconds(self, step: StepShape) -> float:
        key = step.prompt_tokens, step.decode_rows
        if (duration_s := self._measured.get(key)) is None:
            duration_s = self._measured[key] = self._seconds(*key)
        return duration_s

    def _seconds(self, prompt_tokens: int, rows: int) -> float:
        if not prompt_tokens:
            return interpolated(self._token, rows)
        alone = interpolated(self._prompt, prompt_tokens + rows)
        return alone * MIXED if rows else alone


def interpolated(curve: Curve, x: float) -> float:
    """On the line between the two nearest points; beyond the ends on the outermost line."""
    xs, ys = curve
    at = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    low, high = at - 1, at
    return ys[low] + (ys[high] - ys[low]) / (xs[high] - xs[low]) * (x - xs[low])


def read(path: Path) -> Mapping[Key, SplitwiseTable]:
    """Every table of a file with the columns of splitwise-sim's perf_model.csv, gzipped or not."""
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as lines:
        return tables(csv.DictReader(lines))


@cache
def published() -> Mapping[Key, SplitwiseTable]:
    """Return the tables of this package."""
    return read(Path(__file__).with_name("splitwise_medians.csv"))


def tables(rows: Iterable[Mapping[str, str]]) -> Mapping[Key, SplitwiseTable]:
    """Times of the rows are in ms; several rows with as many tokens count by their median."""
    points: dict[Key, dict[int, list[tuple[float, float]]]] = {}
    for row in rows:
        key = row["model"], row["hardware"], int(row["tensor_parallel"])
        tokens = int(row["prompt_size"]) * int(row["batch_size"])
        times = float(row["prompt_time"]) / 1e3, float(row["token_time"]) / 1e3
        points.setdefault(key, {}).setdefault(tokens, []).append(times)
    return {key: SplitwiseTable(_curve(curves, 0), _curve(curves, 1)) for key, curves in points.items()}


def _curve(measured: Mapping[int, list[tuple[float, float]]], column: int) -> Curve:
    xs = sorted(measured)
    return tuple(map(float, xs)), tuple(median(times[column] for times in measured[x]) for x in xs)
