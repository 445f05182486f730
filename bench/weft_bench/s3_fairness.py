"""Fairness: a tenant beside one that floods the pool

Tenants with equal weights share a pool of one runner for each of them. One of them floods it, with ten times its
share of the capacity; the others load their shares as stated. What a victim's first tokens take is compared with the
same requests alone on a pool of its share's size, one runner; rows with one order for all are of pools that did not
tell tenants apart. Lengths are ShareGPT's, predictions those of noise at a Kendall tau of 0.50.
Attainment is under S3's objective: end to end within 187.5 ms times the answer's tokens.
"""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from weft_bench.s3 import Context
from weft_bench.s3_lengths import TRACES, Answered
from weft_bench.s3_queue import MAX_TOKENS, POOL, capacity
from weft_sim.report import Served, quantile
from weft_sim.simulate import simulate
from weft_sim.traces import TraceArrival
from weft_stage.lines import Line

TRACE = "ShareGPT"
REQUESTS, QUICK_REQUESTS = 600, 40  # of each victim
CAPACITY_REQUESTS = 1_000
FLOOD = 10.0  # times its share
LOADS = (0.5, 0.8)  # of its share, of a victim
TENANTS = (2, 4)  # of whom one floods
LATER_S = 30.0  # the victims come: the pool is full of the flood
MAX_TTFT_RATIO = 1.5  # of a victim's p99 TTFT alone
SLO_TOKEN_MS = 187.5


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulated run. `queue`: the order inside a tenant."""

    tenants: int
    load: float
    queue: str
    flooded: bool
    arrivals: tuple[TraceArrival, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the victims saw, in ms; `attained`: the share of them within the objective."""

    p50: float
    p99: float
    attained: float


def run(context: Context) -> Iterator[Line]:
    """Run every load, with and without the flood."""
    served = TRACES[TRACE](context.file, context.seed)
    chance = random.Random(f"{context.seed}/fairness")
    drawn = chance.choices(served, k=CAPACITY_REQUESTS)
    requests = QUICK_REQUESTS if context.quick else REQUESTS
    with ProcessPoolExecutor(context.jobs) as pool:
        rate = pool.submit(capacity, drawn).result()
        yield context.origin.line("fairness", "capacity of a runner", rate, "requests/s")
        cells = list(_cells(served, rate, requests, chance))
        with context.bar("fairness", len(cells)) as advanced:
            alone: Outcome | None = None
            for cell, outcome in zip(cells, pool.map(outcome_of, cells), strict=True):
                alone = outcome if not cell.flooded else alone
                assert alone is not None, "alone comes first"
                yield from _lines(context, cell, outcome, alone)
                advanced(1)


def _cells(served: Sequence[Answered], rate: float, requests: int, chance: random.Random) -> Iterator[Cell]:
    """Return the cells of each load and order, the victim alone first."""
    for load in LOADS:
        first = tuple(_requests("victim-1", served, rate * load, requests, chance))
        span_s = first[-1].at_s
        for queue in ("fcfs", "shortest"):
            yield Cell(1, load, queue, False, first)
            for tenants in TENANTS:
                flood = _requests("flood", served, rate * FLOOD, round(rate * FLOOD * span_s), chance)
                others = [
                    one
                    for number in range(2, tenants)
                    for one in _requests(f"victim-{number}", served, rate * load, requests, chance)
                ]
                arrivals = tuple(sorted((*first, *flood, *others), key=lambda one: one.at_s))
                yield Cell(tenants, load, queue, True, arrivals)


def _requests(
    tenant: str, served: Sequence[Answered], rate: float, count: int, chance: random.Random
) -> Iterator[TraceArrival]:
    at_s = 0.0 if tenant == "flood" else LATER_S
    for one in chance.choices(served, k=count):
        at_s += chance.expovariate(rate)
        yield TraceArrival(
            at_s, one.prompt_tokens, one.output_tokens, max_tokens=MAX_TOKENS, predicted=one.predicted, stops=True,
            tenant=tenant,
        )  # fmt: skip


def outcome_of(cell: Cell) -> Outcome:
    """Simulate the cell until the victims have their answers."""
    pool = replace(POOL, runners=cell.tenants, queue=cell.queue)
    figures = simulate(pool, cell.arrivals, awaited=lambda one: one.tenant == "victim-1").figures
    assert not figures.failures, figures.failures
    return summary([one for one in figures.served if one.tenant == "victim-1"])


def summary(served: Sequence[Served]) -> Outcome:
    ttft = [one.ttft_ms for one in served]
    attained = sum(one.e2e_ms <= SLO_TOKEN_MS * one.tokens for one in served) / len(served)
    return Outcome(quantile(ttft, 0.5), quantile(ttft, 0.99), attained)


def _lines(context: Context, cell: Cell, outcome: Outcome, alone: Outcome) -> Iterator[Line]:
    line = context.origin.line
    pool = f"beside a flood, {cell.tenants} tenants, fair"
    case = f"fairness, {cell.queue}, load {cell.load:g} of a share, {pool if cell.flooded else 'alone'}"
    yield line(case, "median TTFT", outcome.p50, "ms", baseline=alone.p50)
    yield line(case, "p99 TTFT", outcome.p99, "ms", baseline=alone.p99)
    if cell.flooded:
        yield line(case, "p99 TTFT, of that alone", outcome.p99 / alone.p99, "x", target=f"<= {MAX_TTFT_RATIO:g}")
    yield line(case, "within 187.5 ms a token", 100 * outcome.attained, "%", baseline=100 * alone.attained)
