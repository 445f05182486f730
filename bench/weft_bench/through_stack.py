"""Run the cases of `weft bench path` against a stack of our own."""

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from weft_bench.lines import Line
from weft_bench.load import run
from weft_bench.machine import origin
from weft_bench.path import CASES, Case, bodies, lines
from weft_bench.stack import Stack, quickstart

BUSY = "weft_runner_busy_seconds_total"


async def measure(seed: int) -> list[Line]:
    """All cases, one after the other, on one stack; each is warmed up with a few requests of its own kind."""
    with TemporaryDirectory(prefix="weft-bench-") as scratch, Stack(quickstart(), Path(scratch)) as stack:
        models = stack.wait_for_models(timeout_s=60)
        figures = [await _case(stack, models, case, seed) for case in CASES]
    return [line for case in figures for line in case]


async def _case(stack: Stack, models: Sequence[str], case: Case, seed: int) -> list[Line]:
    await run(stack.url, list(bodies(models, case.streams + len(models), seed + 1)), case.streams)
    busy_before, start = stack.metric("runner", BUSY), time.perf_counter()
    timings = await run(stack.url, list(bodies(models, case.requests, seed)), case.streams)
    wall_s, busy_s = time.perf_counter() - start, stack.metric("runner", BUSY) - busy_before
    return list(lines(origin(), case.name, timings, wall_s, busy_s))
