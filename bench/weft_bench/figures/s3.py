"""`weft bench s3`: scheduling with predicted output lengths, simulated on described hardware.

`queue`: latency a token under `fcfs`, `shortest` and `s3`, below. `reservations`: see `weft_bench.s3_reservations`.
"""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import accumulate
from statistics import mean
from typing import NamedTuple

from weft_bench import s3_reservations
from weft_bench.cases import S3
from weft_bench.data import find
from weft_bench.run import Run
from weft_bench.s3_lengths import TRACES, Answered, tau_of
from weft_sim.report import quantile
from weft_sim.simulate import PoolDescription, simulate
from weft_sim.traces import TraceArrival
from weft_stage.lines import Line, Origin

QUICK_REQUESTS, TARGET_REQUESTS = 300, 10_000
CAPACITY_REQUESTS = 2_000  # all at once, for what fcfs sustains
MAX_TOKENS = 2_048
TARGET_LOAD = 1.6
TARGETS = {"LMSYS": 4.0, "ShareGPT": 2.0, "Alpaca": 2.0}
MAX_TAIL_RATIO = 1.2
POOL = PoolDescription(
    page_tokens=16, total_pages=20_480, max_sequences=32, max_batch_tokens=2_048, best_batch=32, step_ms_1=9.0,
    step_ms_best=12.0, prefill_tokens_per_s=20_000.0, adapters=0, cpu=False,
)  # fmt: skip


class Outcome(NamedTuple):
    """Latencies of a cell: ms a token; `ttft_ms`: the median."""

    mean: float
    tail: float
    p99: float
    ttft_ms: float
    tokens_per_s: float


UNITS = {  # of the fields of an outcome, in their order
    "mean latency a token": "ms", "p99 latency a token, longest decile": "ms", "p99 latency a token": "ms",
    "median TTFT": "ms", "tokens": "1/s",
}  # fmt: skip


def figures(options: S3, run: Run) -> Iterator[Line]:
    """Run each part on each trace whose file is there."""
    origin = run.origin("scipy")
    with ProcessPoolExecutor(options.jobs) as pool:
        for name in options.traces:
            file, read = TRACES[name]
            path = find(file, options.data)
            if path is None:
                run.say(f"skipped: {name}: no {file} in {options.data or 'any folder: give --data DIR'}")
                continue
            run.say(f"{name}: {' and '.join(options.part)}")
            served = read(path, options.seed)
            if "queue" in options.part:
                yield from queue_figures(options, origin, name, served, pool)
            if "reservations" in options.part:
                yield from s3_reservations.figures(origin, name, served, options.seed, options.quick, pool)


def queue_figures(options: S3, origin: Origin, name: str, served: Sequence[Answered], pool: Executor) -> Iterator[Line]:
    """Compare the queues on one trace at every load."""
    requests = QUICK_REQUESTS if options.quick else options.requests
    case, chance = f"queue, {name}, {requests:,} requests", random.Random(f"{options.seed}/{name}")
    yield origin.line(case, "Kendall tau of the predictions", tau_of(served), "")
    drawn = chance.choices(served, k=requests)
    rate = pool.submit(capacity, drawn[:CAPACITY_REQUESTS]).result()
    yield origin.line(case, "capacity of fcfs", rate, "requests/s")
    gaps = [chance.expovariate(1.0) for _ in drawn]
    for load in options.loads:
        aimed = load == TARGET_LOAD
        arrivals = [_arrival(at / (rate * load), one) for at, one in zip(accumulate(gaps), drawn, strict=True)]
        queues = ("fcfs", "shortest", "s3") if aimed else ("fcfs", "shortest")
        outcomes = dict(zip(queues, pool.map(partial(outcome_of, arrivals), queues), strict=True))
        for queue, outcome in outcomes.items():
            target = TARGETS[name] if aimed and queue == "shortest" and requests >= TARGET_REQUESTS else None
            yield from _lines(origin, f"{case}, load {load:g}, {queue}", outcome, outcomes["fcfs"], target)


def capacity(drawn: Sequence[Answered]) -> float:
    """Return the requests a second that fcfs ends while its batch is full: from the 10th to the 80th percentile."""
    ends = sorted(one.e2e_ms for one in simulate(POOL, [_arrival(0.0, one) for one in drawn]).figures.served)
    low, high = len(ends) // 10, len(ends) * 8 // 10
    return (high - low) / (ends[high] - ends[low]) * 1e3


def _arrival(at_s: float, one: Answered) -> TraceArrival:
    return TraceArrival(
        at_s, one.prompt_tokens, one.output_tokens, max_tokens=MAX_TOKENS, predicted=one.predicted, stops=True
    )


def outcome_of(arrivals: Sequence[TraceArrival], queue: str) -> Outcome:
    """Simulate these requests."""
    simulated = simulate(replace(POOL, queue=queue), arrivals).figures
    assert not simulated.failures, simulated.failures
    each = [one.e2e_ms / one.tokens for one in simulated.served]
    longest = sorted(simulated.served, key=lambda one: one.tokens)[-max(1, len(each) // 10) :]
    tail = quantile([one.e2e_ms / one.tokens for one in longest], 0.99)
    ttft_ms = quantile([one.ttft_ms for one in simulated.served], 0.5)
    return Outcome(mean(each), tail, quantile(each, 0.99), ttft_ms, simulated.tokens_per_s)


def _lines(origin: Origin, case: str, outcome: Outcome, fcfs: Outcome, target: float | None) -> Iterator[Line]:
    """Yield the figures of a queue. `target`: times lower than fcfs."""
    lower, longer = (f">= {target:g}", f"<= {MAX_TAIL_RATIO:g}") if target else (None, None)
    for (metric, unit), value, baseline in zip(UNITS.items(), outcome, fcfs, strict=True):
        yield origin.line(case, metric, value, unit, baseline=baseline)
    if outcome is not fcfs:
        ratio = outcome.tail / fcfs.tail
        yield origin.line(case, "times lower than fcfs", fcfs.mean / outcome.mean, "x", target=lower)
        yield origin.line(case, "longest decile's p99 latency a token, of fcfs's", ratio, "x", target=longer)
