"""Penalty: what swapping and the control plane take of the generation time, live and simulated

Memory is short: the runner of `live` has pages for one adapter and eight average requests of LMSYS at their full
length, which all wait from the start. Tokens are the trace's own, and `max_tokens` is 2,048. A sequence that outgrows
its reservation where no page is free makes one leave: its KV is copied to host memory, and back once there are pages.

Generation time is the runner's seconds in steps. The penalty is the seconds of its copies, out and in; they are made
beside steps, so this is the most that they can delay them. Overhead is the CPU of predictor, scheduler and supervisor
(the predictor only looks its predictions up). The paper has both together at 11 %. What streams feel is another figure:
the time for which sequences are paused or in host memory, of all the time between the first token and the last.

The simulator is given the same requests, with the costs of this machine as `weft bench fidelity` measures them and the
time of a page's copy while nothing else runs.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from weft_bench.cpu_engine import PAGE_TOKENS, Subject
from weft_bench.cpu_shapes import RANK, SHAPES
from weft_bench.fidelity import Case, calibrate, case_of, seen
from weft_bench.fidelity_costs import Model
from weft_bench.fidelity_engine import measure
from weft_bench.fidelity_live import Live
from weft_bench.path_shape import BUSY
from weft_bench.roofline import lora_bytes
from weft_bench.s3 import Context
from weft_bench.s3_lengths import TRACES, Answered
from weft_bench.s3_live import (
    CALIBRATION,
    MAX_OVERHEAD_PERCENT,
    MODEL,
    OVERHEAD,
    SIMULATED,
    Workload,
    check_answers,
    prepared,
    stack_of,
    with_prompts,
)
from weft_bench.s3_reservations import LIMITS, bucketed
from weft_sim.report import Served
from weft_stage.cpu_models import cache_dir
from weft_stage.lines import Line
from weft_stage.stack import Stack

TRACE = "LMSYS"
TOGETHER = "copies and control plane, of generation time"
REQUESTS, QUICK_REQUESTS = 64, 24
FIT = 8  # average requests in memory
RESERVATIONS = ("s3", "calibrated", "paged")  # the last preempts most
COPIES = 64  # of a page, to time one
COUNTERS = {
    "busy": BUSY,
    "copy": "weft_runner_swap_copy_seconds_total",
    "stalled": "weft_runner_stalled_sequence_seconds_total",
    "bytes": "weft_runner_swapped_bytes_total",
}


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the runner. `page_ms`: to copy a page."""

    pages: int
    page_bytes: int
    page_ms: float


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds. `busy`: in steps; `copy`: of KV out and in; `control`: CPU of the control plane; `stalled` of the
    sequences' `streamed` ones.
    """

    busy: float
    copy: float
    control: float
    stalled: float
    streamed: float
    tokens_per_s: float

    @property
    def figures(self) -> Mapping[str, tuple[float, str]]:
        penalty, overhead = 100 * self.copy / self.busy, 100 * self.control / self.busy
        return {
            "copies, of generation time": (penalty, "%"),
            "control plane, of generation time": (overhead, "%"),
            TOGETHER: (penalty + overhead, "%"),
            "streams stand still, of the time between first and last tokens": (100 * self.stalled / self.streamed, "%"),
            "tokens": (self.tokens_per_s, "1/s"),
        }


def run(context: Context) -> Iterator[Line]:
    """Run every reservation."""
    count = QUICK_REQUESTS if context.quick else REQUESTS
    chance = random.Random(f"{context.seed}/penalty")
    drawn = chance.choices(TRACES[TRACE](context.file, context.seed), k=count)
    ours = [replace(one, predicted=bucketed(one.predicted, LIMITS[TRACE])) for one in drawn]
    with case_of(MODEL, cache_dir()) as case, TemporaryDirectory(prefix="weft-bench-") as scratch:
        work = prepared(TRACE, with_prompts(ours, 1, chance), Path(scratch))
        with context.bar(f"{MODEL}: steps and copies of the engine alone", 1) as advanced:
            engine = measure(case.files, case.adapters, case.sizes, case.vocab, context.seed)
            memory = memory_for(case, drawn)
            advanced(1)
        with stack_of(case, work, {}) as stack:
            live = Live(stack)
            model = Model(replace(case.pool, threads=engine.threads), engine)
            model, _ = calibrate(case, live, model, CALIBRATION, random.Random(context.seed), context.bar)
            live.cpu.close()
        for reservation in RESERVATIONS:
            if not context.missing(cell_name(work, reservation), TOGETHER):
                continue
            with (
                stack_of(case, work, {"reservation": reservation}, pages=memory.pages) as stack,
                context.bar(f"penalty, {reservation}", 1) as advanced,
            ):
                yield from _cell(context, case, work, stack, described(model, memory, reservation))
                advanced(1)


def cell_name(work: Workload, reservation: str) -> str:
    return f"penalty, {work.name}, {len(work.requests):,} requests, {reservation}"


def memory_for(case: Case, drawn: Sequence[Answered]) -> Memory:
    """Return pages for one adapter and `FIT` average ones of these requests."""
    with Subject(case.files, case.sizes) as subject:
        kv = subject.engine.executor.kv_memory
        assert kv is not None, "an executor that swaps nothing"
        host, fence = kv.host_page(), kv.fence()
        began = time.perf_counter()
        for page in range(COPIES):
            kv.copy_out([page], [host], fence)
        page_ms = (time.perf_counter() - began) / COPIES * 1e3
        page_bytes = kv.page_bytes
    adapter = -(-lora_bytes(SHAPES[MODEL], RANK) // page_bytes)
    tokens = FIT * mean(one.prompt_tokens + one.output_tokens for one in drawn)
    return Memory(int(adapter) + round(tokens / PAGE_TOKENS), page_bytes, page_ms)


def described(model: Model, memory: Memory, reservation: str) -> Model:
    """Return the simulator's deployment with this memory, which KV leaves for the host's."""
    pool = replace(
        model.pool, total_pages=memory.pages, page_kib=memory.page_bytes / 1024, swaps=True, reservation=reservation,
        adapter_mib=lora_bytes(SHAPES[MODEL], RANK) / 2**20,
    )  # fmt: skip
    times = replace(model.engine.times, page_copy_ms=memory.page_ms)
    return replace(model, pool=pool, engine=replace(model.engine, times=times))


def _cell(context: Context, case: Case, work: Workload, stack: Stack, model: Model) -> Iterator[Line]:
    live, line, at_s = Live(stack), context.origin.line, [0.0] * len(work.requests)
    live.closed(work.bodies(case, 1), 1)  # its adapter is there
    live.rest(1.0)
    before = _counters(stack)
    found = live.open(work.bodies(case), at_s)
    live.cpu.close()
    check_answers(work, found)
    used = {name: value - before[name] for name, value in _counters(stack).items()}
    served = [seen(answer) for answer in found.answers]
    control = sum(found.cpu[name] for name in OVERHEAD)
    lived = Spent(used["busy"], used["copy"], control, used["stalled"], streamed_s(served), found.tokens / found.wall_s)
    replayed = model.replay(work.arrivals(at_s))
    counted = replayed.counted.memory
    span_s = max(one.e2e_ms for one in replayed.served) / 1e3
    simulated = Spent(
        counted["busy"], counted["copy"], sum(replayed.counted.cpu[name] for name in OVERHEAD), counted["stalled"],
        streamed_s(replayed.served), sum(one.tokens for one in replayed.served) / span_s,
    )  # fmt: skip
    name = cell_name(work, model.pool.reservation)
    for metric, (value, unit) in lived.figures.items():
        yield line(name, metric, value, unit, target=f"<= {MAX_OVERHEAD_PERCENT:g}" if metric == TOGETHER else None)
        yield line(name, metric + SIMULATED, simulated.figures[metric][0], unit, baseline=value)
    yield line(name, "KV swapped", used["bytes"] / 2**20, "MiB")
    yield line(name, "sequences computed again", used["preempted"], "")
    yield line(name, "of the machine, by others", 100 * found.others, "%")


def streamed_s(served: Sequence[Served]) -> float:
    """Return the time between first tokens and last ones, of all."""
    return sum(one.e2e_ms - one.ttft_ms for one in served) / 1e3


def _counters(stack: Stack) -> dict[str, float]:
    found = {name: stack.metric("runner", sample) for name, sample in COUNTERS.items()}
    return {**found, "preempted": stack.metric("scheduler", "weft_scheduler_preempts_total")}
