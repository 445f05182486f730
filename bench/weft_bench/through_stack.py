"""Run the cases of `weft bench path` against a stack of our own."""

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from weft_bench.path import CASES, CLIENT, GATEWAY, RUNNER, Case, Taken, bodies, lines
from weft_stage import sse
from weft_stage.lines import Line
from weft_stage.machine import origin
from weft_stage.stack import Stack, quickstart

BUSY, CPU = "weft_runner_busy_seconds_total", "process_cpu_seconds_total"
COMPONENTS = (GATEWAY, RUNNER, "scheduler", "predictor", "supervisor", "depot", "batch")


async def measure(seed: int) -> list[Line]:
    """All cases, one after the other, on one stack; each is warmed up with a few requests of its own kind."""
    with TemporaryDirectory(prefix="weft-bench-") as scratch, Stack(quickstart(), Path(scratch)) as stack:
        models = stack.wait_for_models(timeout_s=60)
        figures = [await _case(stack, models, case, seed) for case in CASES]
    return [line for case in figures for line in case]


async def _case(stack: Stack, models: Sequence[str], case: Case, seed: int) -> list[Line]:
    async def send(count: int, seed: int) -> list[sse.Streamed]:
        return await sse.run("127.0.0.1", stack.port, list(bodies(models, case, count, seed)), case.streams)

    await send(case.streams + len(models), seed + 1)
    before = _taken(stack)
    answers = await send(case.requests, seed)
    after = _taken(stack)
    cpu_s = {name: seconds - before.cpu_s[name] for name, seconds in after.cpu_s.items()}
    return list(
        lines(origin(), case, answers, Taken(after.wall_s - before.wall_s, after.busy_s - before.busy_s, cpu_s))
    )


def _taken(stack: Stack) -> Taken:
    """Up to now."""
    now, busy_s = time.perf_counter(), stack.metric(RUNNER, BUSY)
    cpu_s = {name: stack.metric(name, CPU) for name in COMPONENTS}
    return Taken(now, busy_s, {**cpu_s, CLIENT: time.process_time()})
