"""Requests over time: from trace files, or drawn as the papers draw them."""

import csv
import gzip
import io
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from weft.domain.prediction import Prediction


class TraceError(Exception):
    """A trace file cannot be read. The text has the place and the fault."""


@dataclass(frozen=True, slots=True)
class TraceArrival:
    """One request of a trace. `adapter`: index of the adapter it names, -1: the base.

    `stops`: the model ends the answer, which takes one step more; else it is as long as was asked for. `max_tokens`:
    what the client asks for, if that is more than the answer has. `predicted`: what the predictor answers. `tenant`:
    the namespace of its caller.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    adapter: int = -1
    stops: bool = False
    max_tokens: int = 0
    predicted: Prediction | None = None
    tenant: str = "default"


# The names that public traces give to their columns (Azure 2023 and 2024, Splitwise, Vidur, BurstGPT, our own).
TIMES = ("arrival_s", "arrival_timestamp", "TIMESTAMP", "timestamp", "Timestamp", "t_s")
PROMPTS = (
    "prompt_tokens",
    "ContextTokens",
    "prompt_size",
    "input_length",
    "num_prefill_tokens",
    "input_toks",
    "in_tokens",
)
OUTPUTS = (
    "output_tokens",
    "GeneratedTokens",
    "token_size",
    "output_length",
    "num_decode_tokens",
    "output_toks",
    "out_tokens",
)
ADAPTERS = ("adapter", "model", "client")
PREDICTED = ("p10_tokens", "p50_tokens", "p90_tokens", "p99_tokens", "bucket_tokens")  # with p90 all count, absent as 0


def read(path: Path) -> list[TraceArrival]:
    """A trace file: .csv or .jsonl, also gzipped, with the columns of any trace that TIMES ... name. From time 0 on.

    Raises TraceError.
    """
    arrivals: list[TraceArrival] = []
    names: dict[str, int] = {}
    start: float | None = None
    for number, row in enumerate(_rows(path), 2):
        try:
            time, prompt, output = (_value(row, columns) for columns in (TIMES, PROMPTS, OUTPUTS))
            at_s = _seconds(time, milliseconds="hash_ids" in row)
            start = at_s if start is None else start
            name = next((str(row[column]) for column in ADAPTERS if row.get(column)), "")
            adapter = names.setdefault(name, len(names)) if name else -1
            arrivals.append(
                TraceArrival(
                    at_s - start,
                    max(1, int(prompt)),
                    max(1, int(output)),
                    adapter,
                    max_tokens=int(row.get("max_tokens") or 0),
                    predicted=_predicted(row),
                )
            )
        except (KeyError, ValueError) as error:
            raise TraceError(f"{path.name}, line {number}: {error}") from None
    if not arrivals:
        raise TraceError(f"{path.name} has no requests")
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _predicted(row: Mapping[str, str]) -> Prediction | None:
    if not row.get("p90_tokens"):
        return None
    p10, p50, p90, p99, bucket = (int(float(row.get(column) or 0)) for column in PREDICTED)
    return Prediction("", p50, p90, "trace", p10, p99, bucket)


def _rows(path: Path) -> Iterator[dict[str, str]]:
    try:
        with _open(path) as lines:
            if ".jsonl" in path.name:
                yield from map(json.loads, lines)
            else:
                yield from csv.DictReader(lines)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        raise TraceError(f"{path.name}: {error}") from None


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), newline="")
    return path.open(newline="")


def _value(row: dict[str, str], columns: Sequence[str]) -> str:
    for column in columns:
        if row.get(column) not in (None, ""):
            return row[column]
    raise KeyError(f"no column of {', '.join(columns)}")


def _seconds(time: str, *, milliseconds: bool) -> float:
    try:
        return float(time) / (1e3 if milliseconds else 1.0)
    except ValueError:
        return datetime.fromisoformat(time[:26]).timestamp()


def adapter_draw(popularity: str, adapters: int, chance: random.Random) -> Iterator[int]:
    """The adapter of each next request, by Punica's popularities (section 7): identical, distinct, uniform, skewed.

    -1 for ever if absent. Skewed is Zipf with exponent 1.5.
    """
    if adapters == 0 or popularity == "identical":
        while True:
            yield 0 if adapters else -1
    if popularity == "distinct":
        while True:
            yield from range(adapters)
    exponent = 1.5 if popularity == "skewed" else 0.0
    weights = [1 / (i + 1) ** exponent for i in range(adapters)]
    while True:
        yield from chance.choices(range(adapters), weights, k=64)


def poisson(
    rate_s: float, count: int, lengths: Sequence[tuple[int, int]], adapters: Iterator[int], chance: random.Random
) -> list[TraceArrival]:
    """`count` arrivals with exponential gaps; (prompt, output) are drawn from `lengths`."""
    at_s, arrivals = 0.0, list[TraceArrival]()
    for _ in range(count):
        at_s += chance.expovariate(rate_s)
        prompt, output = chance.choice(lengths)
        arrivals.append(TraceArrival(at_s, prompt, output, next(adapters)))
    return arrivals
