"""Fairness live: a tenant beside one that floods a stack on the CPU engine

Tenants with equal weights and a key each send requests for the base model of `live` to a stack that asks for keys. One
of them floods it, with ten times its share of what the pool answers when all wait; the others load half of their
shares, and come 5 s later. A victim's time to first token is compared with that of the same requests alone on a pool
of its share's size. On one machine a second runner would compete for the cores, so the share of a pool is one of its
sequences: 8 of 16 for two tenants, 4 for four. Such a pool has more than its share of the cores, since it has all.

Rows with one order for all are of pools that did not tell tenants apart: a request that waited there had the whole
flood before it, so only the first 5 of a victim were sent. Lengths are ShareGPT's, of which one token here stands for
eight; their predictions are replayed. Simulated are the same requests at the same times, with costs that were measured
of this machine.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from weft_bench.fidelity import Case, calibrate, case_of, seen
from weft_bench.fidelity_costs import Model
from weft_bench.fidelity_engine import measure
from weft_bench.fidelity_live import Live, LiveRun
from weft_bench.s3 import Context
from weft_bench.s3_fairness import FLOOD, MAX_TTFT_RATIO, TENANTS, TRACE
from weft_bench.s3_lengths import TRACES, Answered
from weft_bench.s3_live import (
    CALIBRATION,
    CAPACITY_REQUESTS,
    MODEL,
    SCALES,
    SIMULATED,
    Workload,
    capacity,
    check_answers,
    prepared,
    scaled,
    stack_of,
    times,
    with_prompts,
)
from weft_bench.s3_queue import MAX_TOKENS
from weft_sim.report import Served, quantile
from weft_sim.traces import TraceArrival
from weft_stage.cpu_models import cache_dir
from weft_stage.lines import Line
from weft_stage.stack import Stack

REQUESTS, QUICK_REQUESTS = 60, 10  # of a victim
LOAD = 0.5  # of its share, of a victim
LATER_S = 5.0
VICTIM, FLOODING = "victim-1", "flood"
CAPACITY, P99, RATIO = "capacity of the pool", "p99 TTFT", "p99 TTFT, of that alone"


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. `requests`: of each victim; `rows`: sequences of the pool, of `all_rows`."""

    tenants: int
    requests: int
    flooded: bool
    all_rows: int

    @property
    def rows(self) -> int:
        return self.all_rows if self.flooded else self.all_rows // self.tenants

    @property
    def name(self) -> str:
        beside = "beside a flood" if self.flooded else "alone"
        return f"fairness-live, {TRACE}, {self.requests} requests of a victim, {self.tenants} tenants, {beside}"

    @property
    def alone(self) -> "Cell":
        """The cell that this one is compared with."""
        return replace(self, flooded=False)

    @property
    def scheduler(self) -> dict[str, object]:
        return {"maxSequences": self.rows}


@dataclass(frozen=True, slots=True)
class Sent:
    """A tenant's request and when it is due."""

    tenant: str
    at_s: float
    answered: Answered


def run(context: Context) -> Iterator[Line]:
    """Run every cell that is not there, and simulate it."""
    known = dict(context.known)
    for line in _lines(context, known):
        known[line.case, line.metric] = line.value
        yield line


def _lines(context: Context, known: dict[tuple[str, str], float | None]) -> Iterator[Line]:
    """Measure what `known`, which also gets this run's lines, does not have."""
    line = context.origin.line
    served = [scaled(one, SCALES[TRACE]) for one in TRACES[TRACE](context.file, context.seed)]
    with case_of(MODEL, cache_dir()) as case, TemporaryDirectory(prefix="weft-bench-") as scratch:
        pool = f"fairness-live, {TRACE}, {case.sizes.rows} sequences"
        cells = list(cells_of(QUICK_REQUESTS if context.quick else REQUESTS, case.sizes.rows))
        if context.missing(pool, CAPACITY):
            drawn = random.Random(context.seed).choices(served, k=CAPACITY_REQUESTS)
            work = _work([Sent(VICTIM, 0.0, one) for one in drawn], context.seed, Path(scratch))
            with stack_of(case, work, cells[-1].scheduler) as stack:
                live = Live(stack)
                yield line(pool, CAPACITY, capacity(case, live, work), "requests/s")
                live.cpu.close()
        if (rate := known.get((pool, CAPACITY))) is None:
            return
        for cell in cells:
            if context.missing(cell.name, P99):
                sent = list(requests_of(cell, served, rate, context.seed))
                found = _live(context, case, cell, sent, Path(scratch))
                yield from _figures(context, cell, [seen(answer) for answer in found.answers], known)
                yield line(cell.name, "of the machine, by others", 100 * found.others, "%")
        left = [cell for cell in cells if (cell.name, P99) in known and (cell.name, P99 + SIMULATED) not in known]
        if left and context.missing(cells[-1].name, P99 + SIMULATED):
            model = _model(context, case, served, Path(scratch))
            for cell in left:
                sent = list(requests_of(cell, served, rate, context.seed))
                yield from _figures(context, cell, simulated(model, cell, sent), known, SIMULATED)


def cells_of(requests: int, rows: int) -> Iterator[Cell]:
    """Return the cells, the victim alone first."""
    for tenants in TENANTS:
        flooded = Cell(tenants, requests, flooded=True, all_rows=rows)
        yield from (flooded.alone, flooded)


def requests_of(cell: Cell, served: Sequence[Answered], rate: float, seed: int) -> Iterator[Sent]:
    """Draw a cell's requests, by time; a victim's are alike for as many tenants. `rate`: of the whole pool."""
    share = rate / cell.tenants
    victims = [f"victim-{number}" for number in range(1, cell.tenants)] if cell.flooded else [VICTIM]
    found = [one for name in victims for one in _of(name, served, share * LOAD, cell.requests, LATER_S, seed)]
    span_s = max(one.at_s for one in found)
    if cell.flooded:
        found += _of(FLOODING, served, share * FLOOD, round(share * FLOOD * span_s), 0.0, seed)
    yield from sorted(found, key=lambda one: one.at_s)


def _of(tenant: str, served: Sequence[Answered], rate: float, count: int, after_s: float, seed: int) -> Iterator[Sent]:
    chance = random.Random(f"{seed}/fairness-live/{tenant}")
    at_s = times([chance.expovariate(1.0) for _ in range(count)], rate)
    for time_s in at_s:
        yield Sent(tenant, after_s + time_s, chance.choice(served))


def _work(sent: Sequence[Sent], seed: int, scratch: Path) -> Workload:
    prompts = with_prompts([one.answered for one in sent], 0, random.Random(f"{seed}/fairness-live"))
    return prepared(TRACE, prompts, scratch)


def _live(context: Context, case: Case, cell: Cell, sent: Sequence[Sent], scratch: Path) -> LiveRun:
    """Measure what the first victim saw. Raises RequestFailed."""
    work, awaited = _work(sent, context.seed, scratch), [i for i, one in enumerate(sent) if one.tenant == VICTIM]
    with (
        stack_of(case, work, cell.scheduler, auth=True) as stack,
        context.bar(f"{cell.name}, {sent[-1].at_s:.0f} s of arrivals", 1) as advanced,
    ):
        keys = _keys(stack, sorted({one.tenant for one in sent}))
        live = Live(stack)
        live.open(work.bodies(case, 1), [0.0], [keys[VICTIM]])  # every path is warm
        at_s, of = [one.at_s for one in sent], [keys[one.tenant] for one in sent]
        found = live.open(work.bodies(case), at_s, of, awaited)
        live.cpu.close()
        advanced(1)
    victims = replace(work, requests=tuple(work.requests[number] for number in awaited))
    check_answers(victims, found)
    return found


def _keys(stack: Stack, tenants: Sequence[str]) -> dict[str, str]:
    """Make a key for each tenant, that the gateway knows."""
    keys = {tenant: stack.create_key(tenant) for tenant in tenants}
    for key in keys.values():
        stack.key = key
        stack.wait_for_models(1)
    return keys


def _model(context: Context, case: Case, served: Sequence[Answered], scratch: Path) -> Model:
    """Return the simulator with this machine's costs."""
    with context.bar(f"{MODEL}: steps of the engine alone", 1) as advanced:
        engine = measure(case.files, case.adapters, case.sizes, case.vocab, context.seed)
        advanced(1)
    work = _work([Sent(VICTIM, 0.0, served[0])], context.seed, scratch)
    with stack_of(case, work, {"maxSequences": case.sizes.rows}) as stack:
        live, model = Live(stack), Model(replace(case.pool, threads=engine.threads), engine)
        model, _ = calibrate(case, live, model, CALIBRATION, random.Random(context.seed), context.bar)
        live.cpu.close()
    return model


def simulated(model: Model, cell: Cell, sent: Sequence[Sent]) -> list[Served]:
    """Simulate what the first victim sees."""
    arrivals = [
        TraceArrival(
            one.at_s, one.answered.prompt_tokens, one.answered.output_tokens, -1, True, MAX_TOKENS,
            one.answered.predicted, one.tenant,
        )
        for one in sent
    ]  # fmt: skip
    described = replace(model, pool=replace(model.pool, max_sequences=cell.rows, adapters=0))
    replayed = described.replay(arrivals, lambda one: one.tenant == VICTIM)
    return [one for one in replayed.served if one.tenant == VICTIM]


def _figures(
    context: Context, cell: Cell, found: Sequence[Served], known: dict[tuple[str, str], float | None], suffix: str = ""
) -> Iterator[Line]:
    line, ttft = context.origin.line, [one.ttft_ms for one in found]
    p99, alone = quantile(ttft, 0.99), known.get((cell.alone.name, P99 + suffix))
    lived = known.get((cell.name, P99)) if suffix else alone
    yield line(cell.name, "median TTFT" + suffix, quantile(ttft, 0.5), "ms")
    yield line(cell.name, P99 + suffix, p99, "ms", baseline=lived)
    if cell.flooded and alone:
        target = f"<= {MAX_TTFT_RATIO:g}" if not suffix else None
        yield line(cell.name, RATIO + suffix, p99 / alone, "x", target=target)
