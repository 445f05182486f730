"""Unasked: admission where nobody asks for `max_tokens`

The runner of `reservations`, whose context is all of its memory: more an answer cannot have. `1,024` bounds each answer
at that, as gateways once did; `context` lets it have what the context holds beside its prompt. Answers are as long as
the trace has them either way. `no predictor` is `calibrated` where nothing is predicted.

What to see: what is reserved comes from predicted and running quantiles of lengths, so the bound does not matter to
admission. Under `max`, which reserves the bound (ORCA), one request has the runner to itself: such a pool wants
`maxOutputTokens`.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from statistics import mean

from weft.domain.prediction import Prediction
from weft_bench.s3 import Context
from weft_bench.s3_lengths import TRACES, Answered
from weft_bench.s3_reservations import FIT, LIMITS, PAGE_TOKENS, QUICK, REQUESTS, Cell, bucketed, outcome_of
from weft_sim.traces import TraceArrival
from weft_stage.lines import Line

POLICIES = ("calibrated", "no predictor", "pooled", "max")
SERVED_BY = {"no predictor": "calibrated"}
BOUNDS = {"1,024": 1024, "context": 1 << 20}
NOTHING = Prediction("")


def run(context: Context) -> Iterator[Line]:
    """Every policy on every trace, both ways."""
    line = context.origin.line
    with ProcessPoolExecutor(context.jobs) as pool:
        for name in context.traces:
            requests = REQUESTS[name] // (QUICK if context.quick else 1)
            served = TRACES[name](context.file, context.seed)
            drawn = random.Random(f"{context.seed}/{name}").choices(served, k=requests)
            cells = {(policy, bound): cell_of(name, drawn, policy, bound) for policy in POLICIES for bound in BOUNDS}
            rates = dict[tuple[str, str], float]()
            with context.bar(f"unasked, {name}", len(cells)) as advanced:
                for (policy, bound), outcome in zip(cells, pool.map(outcome_of, cells.values()), strict=True):
                    case, rates[policy, bound] = f"unasked, {name}, {policy}, {bound}", outcome.tokens_per_s
                    yield line(case, "tokens", outcome.tokens_per_s, "1/s")
                    yield line(case, "sequences in flight", outcome.sequences, "")
                    yield line(case, "preempted requests", outcome.preempted, "share")
                    advanced(1)
            for policy in POLICIES:
                ratio = rates[policy, "context"] / rates[policy, "1,024"]
                target = None if policy == "max" else ">= 0.98"
                yield line(f"unasked, {name}", f"{policy}, context of 1,024", ratio, "x", target=target)


def cell_of(name: str, drawn: list[Answered], policy: str, bound: str) -> Cell:
    limit = LIMITS[name]
    drawn = [replace(one, output_tokens=min(one.output_tokens, limit - 1)) for one in drawn]
    pages = round(FIT * mean(one.prompt_tokens + one.output_tokens for one in drawn)) // PAGE_TOKENS
    arrivals = [
        TraceArrival(
            0.0, one.prompt_tokens, one.output_tokens, -1, True,
            min(BOUNDS[bound], pages * PAGE_TOKENS - one.prompt_tokens),
            NOTHING if policy == "no predictor" else bucketed(one.predicted, limit),
        )
        for one in drawn
    ]  # fmt: skip
    return Cell(SERVED_BY.get(policy, policy), 0, pages, tuple(arrivals))
