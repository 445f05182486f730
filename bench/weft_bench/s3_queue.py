"""Queue: latency a token under `fcfs`, `s3` and `shortest`

Requests arrive at random (Poisson) at 1.0, 1.3 and 1.6 times what `fcfs` sustains, until all of them are answered.
A request's latency a token is its end-to-end latency over its output tokens; the mean counts each request once. The
tail is the p99 of the longest decile of answers: those that `shortest` lets others pass. Rows with
`agingSeconds` are of pools that had that bound beside the backlog (none, or a share of the span of arrivals): it is ten
minutes for all now. `max_tokens` is 2,048. The server is a described one: 32 sequences, 9 ms a step of one and 12 ms of
32, 20,000 prompt tokens/s, memory for all. Traces: LMSYS with the classes that a BERT predicted, ShareGPT with noise at
a Kendall tau of 0.50, Alpaca with our ridge. Targets are set for 10,000 requests.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from weft_bench import charts
from weft_bench.s3 import Context
from weft_bench.s3_lengths import TRACES, Answered, tau_of
from weft_sim.report import Served, quantile
from weft_sim.simulate import PoolDescription, simulate
from weft_sim.traces import TraceArrival
from weft_stage.lines import Line

QUICK_REQUESTS, TARGET_REQUESTS = 300, 10_000
CAPACITY_REQUESTS = 2_000  # all at once, for what fcfs sustains
MAX_TOKENS = 2_048
TARGET_LOAD = 1.6
TARGETS = {"LMSYS": 4.0, "ShareGPT": 2.0, "Alpaca": 2.0}
MAX_TAIL_RATIO = 1.2
LOWER, LONGER = "times lower than fcfs", "longest decile's p99 latency a token, of fcfs's"
POOL = PoolDescription(
    page_tokens=16, total_pages=20_480, max_sequences=32, max_batch_tokens=2_048, best_batch=32, step_ms_1=9.0,
    step_ms_best=12.0, prefill_tokens_per_s=20_000.0, adapters=0, cpu=False,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulated run."""

    trace: str
    load: float
    queue: str
    arrivals: tuple[TraceArrival, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one cell gave: ms a token; `ttft_ms`: the median."""

    mean: float
    tail: float
    p99: float
    ttft_ms: float
    tokens_per_s: float


def run(context: Context) -> Iterator[Line]:
    """Run every trace at every load."""
    requests = QUICK_REQUESTS if context.quick else context.requests
    with ProcessPoolExecutor(context.jobs) as pool:
        for name in context.traces:
            served = TRACES[name](context.file, context.seed)
            case = f"queue, {name}, {requests:,} requests"
            yield context.origin.line(case, "Kendall tau of the predictions", tau_of(served), "")
            chance = random.Random(f"{context.seed}/{name}")
            drawn = chance.choices(served, k=requests)
            rate = pool.submit(capacity, drawn[: min(len(drawn), CAPACITY_REQUESTS)]).result()
            yield context.origin.line(case, "capacity of fcfs", rate, "requests/s")
            cells = list(_cells(name, drawn, context.loads, rate, chance))
            with context.bar(case, len(cells)) as advanced:
                fcfs: Outcome | None = None
                for cell, outcome in zip(cells, pool.map(outcome_of, cells), strict=True):
                    fcfs = outcome if cell.queue == "fcfs" or fcfs is None else fcfs
                    yield from _lines(context, cell, outcome, fcfs)
                    advanced(1)


def capacity(drawn: Sequence[Answered]) -> float:
    """Return the requests a second that fcfs ends while its batch is full."""
    return sustained([one.e2e_ms for one in simulate(POOL, [arrival(0.0, one) for one in drawn]).figures.served])


def sustained(ends_ms: Sequence[float]) -> float:
    """Return the answers a second between the 10th and the 80th percentile of their ends."""
    ends = sorted(ends_ms)
    low, high = len(ends) // 10, len(ends) * 8 // 10
    return (high - low) / (ends[high] - ends[low]) * 1e3


def _cells(
    name: str, drawn: Sequence[Answered], loads: Sequence[float], rate: float, chance: random.Random
) -> Iterator[Cell]:
    """Return the cells, `fcfs` first at every load."""
    gaps = [chance.expovariate(1.0) for _ in drawn]
    for load in loads:
        at_s, arrivals = 0.0, list[TraceArrival]()
        for gap, one in zip(gaps, drawn, strict=True):
            at_s += gap / (rate * load)
            arrivals.append(arrival(at_s, one))
        for queue in ("fcfs", "shortest", "s3") if load == TARGET_LOAD else ("fcfs", "shortest"):
            yield Cell(name, load, queue, tuple(arrivals))


def arrival(at_s: float, one: Answered, adapter: int = -1) -> TraceArrival:
    """Return the request in the simulator's terms."""
    return TraceArrival(
        at_s, one.prompt_tokens, one.output_tokens, adapter, max_tokens=MAX_TOKENS, predicted=one.predicted, stops=True
    )


def outcome_of(cell: Cell) -> Outcome:
    """Simulate the cell."""
    figures = simulate(replace(POOL, queue=cell.queue), cell.arrivals).figures
    assert not figures.failures, figures.failures
    return summary(figures.served, figures.tokens_per_s)


def summary(served: Sequence[Served], tokens_per_s: float) -> Outcome:
    each = [one.e2e_ms / one.tokens for one in served]
    longest = sorted(served, key=lambda one: one.tokens)[-max(1, len(served) // 10) :]
    tail = quantile([one.e2e_ms / one.tokens for one in longest], 0.99)
    ttft = quantile([one.ttft_ms for one in served], 0.5)
    return Outcome(sum(each) / len(each), tail, quantile(each, 0.99), ttft, tokens_per_s)


def _lines(context: Context, cell: Cell, outcome: Outcome, fcfs: Outcome) -> Iterator[Line]:
    case = f"queue, {cell.trace}, {len(cell.arrivals):,} requests, load {cell.load:g}, {cell.queue}"
    full = cell.load == TARGET_LOAD and len(cell.arrivals) >= TARGET_REQUESTS
    aimed = full and cell.queue == "shortest"
    line = context.origin.line
    yield line(case, "mean latency a token", outcome.mean, "ms", baseline=fcfs.mean)
    lower, longer = (f">= {TARGETS[cell.trace]:g}", f"<= {MAX_TAIL_RATIO:g}") if aimed else (None, None)
    yield line(case, LOWER, fcfs.mean / outcome.mean, "x", target=lower)
    yield line(case, "p99 latency a token, longest decile", outcome.tail, "ms", baseline=fcfs.tail)
    yield line(case, LONGER, outcome.tail / fcfs.tail, "x", target=longer)
    yield line(case, "p99 latency a token", outcome.p99, "ms", baseline=fcfs.p99)
    yield line(case, "median TTFT", outcome.ttft_ms, "ms", baseline=fcfs.ttft_ms)
    yield line(case, "tokens", outcome.tokens_per_s, "1/s", baseline=fcfs.tokens_per_s)


def pictures(lines: Sequence[Line]) -> dict[str, str]:
    """Draw for each load how much lower the mean is, against what the longest answers pay."""
    ratios = {(line.case, line.metric): line.value for line in lines if line.value is not None}
    series: defaultdict[str, dict[str, list[charts.Point]]] = defaultdict(dict)
    for (case, metric), lower in ratios.items():
        part, *words = case.split(", ", 4)
        if part == "queue" and metric == LOWER and words[-1].startswith("shortest"):
            trace, requests, load, policy = words
            points = series[load].setdefault(f"{trace}, {requests}", [charts.Point(1.0, 1.0, "fcfs")])
            points.append(charts.Point(ratios[case, LONGER], lower, policy.removeprefix("shortest, ")))
    return {
        load.replace(" ", "-"): charts.curves(
            f"shortest against fcfs, {load} times its capacity",
            LONGER,
            "mean latency a token, " + LOWER,
            {trace: sorted(points, key=lambda point: point.y) for trace, points in found.items()},
        )
        for load, found in series.items()
    }
