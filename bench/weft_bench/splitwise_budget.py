"""The load that the same power, or the same cost, can serve

Throughput-optimized clusters (of the paper's evaluation): the most requests a second at which all nine
objectives are met (p50, p90, p99 of TTFT at most 2, 3, 6 times, of TBT and end to end 1.25, 1.5, 5 times those of a
DGX-A100 alone), over the paper's splits into prompt and token machines, five machines apart. The power is that of 40
DGX-H100, which is that of 70 DGX-A100; the cost that of 40 DGX-H100, or 86 DGX-A100. 70 DGX-A100 cost 19 % less than 40
DGX-H100: the paper's "1.4x the throughput at 20 % lower cost"; "2.35x at the same power and cost" compares the 70 split
with the same 70 unsplit. The abstract does not say which trace its two headlines are for; each stands
beside the trace that comes nearest. Cited at second hand, not checked against the paper's text: the objectives, and
the figures under "section VI" (2.15x for Splitwise-AA against Baseline-A100 and 1.18x for Splitwise-HA at 10 % lower
cost against Baseline-H100, both for conversation at the same power; 1.4x for Splitwise-AA against Baseline-H100 at the
same cost).
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import floor

from weft_bench import charts
from weft_bench.splitwise import SplitwiseContext
from weft_bench.splitwise_paper import DGX_H100, SYSTEMS, TRACES, lengths, most
from weft_sim.planning.designs import MEASURES, Combination, Design, Measure
from weft_stage.lines import Line

BUDGET_H100, APART = 40, 5
MOST = "most requests/s within the objectives"


@dataclass(frozen=True, slots=True)
class Sweep:
    """Designs of a system, each of which has to serve more than the ones before it."""

    designs: tuple[Design, ...]
    lengths: Sequence[tuple[int, int]]
    seconds: float
    seed: int


def budgeted(family: Combination, measure: Measure) -> tuple[Design, ...]:
    """Return the designs of a family that draw or cost what 40 DGX-H100 do."""
    budget = BUDGET_H100 * measure(DGX_H100)
    whole = affordable(budget, measure(family.prompt))
    if family.token is None:
        return (Design(family, whole),)
    each = measure(family.token)
    prompts = range(APART, whole, APART)
    rests = ((count, affordable(budget - count * measure(family.prompt), each)) for count in prompts)
    return tuple(Design(family, count, rest) for count, rest in rests if rest)


def affordable(budget: float, each: float) -> int:
    return floor(budget / each + 1e-9)


def swept(sweep: Sweep) -> tuple[float, Design]:
    rate, best = 0.0, sweep.designs[0]
    for design in sweep.designs:
        found = most(sweep.lengths, design, sweep.seconds, sweep.seed, rate)
        if found is not None:
            rate, best = found, design
    return rate, best


def run(context: SplitwiseContext) -> Iterator[Line]:
    every = [(budget, trace, system) for budget in ("power", "cost") for trace in TRACES for system in SYSTEMS]
    cells = [cell for cell in every if context.missing(_case(cell), MOST)]
    rates = {cell: rate for cell in every if (rate := context.known.get((_case(cell), MOST))) is not None}
    yield from _beside_the_paper(context, rates)
    traces = {trace: lengths(context.file(name)) for trace, name in TRACES.items()}
    sweeps = {
        (trace, designs): Sweep(designs, traces[trace], context.seconds, context.seed)
        for budget, trace, system in cells
        for designs in [budgeted(SYSTEMS[system], MEASURES[budget])]
    }  # 40 DGX-H100 are the same designs for both budgets
    with ProcessPoolExecutor(context.jobs) as pool, context.bar("same power, same cost", len(cells)) as advance:
        found = {key: pool.submit(swept, sweep) for key, sweep in sweeps.items()}
        for cell in cells:
            budget, trace, system = cell
            rate, design = found[trace, budgeted(SYSTEMS[system], MEASURES[budget])].result()
            rates[cell] = rate
            yield from _lines(context, cell, rate, design, rates.get((budget, trace, "Baseline-A100")))
            advance(1)
    yield from _beside_the_paper(context, rates)


def _case(cell: tuple[str, str, str]) -> str:
    return "iso-" + ", ".join(cell)


def _lines(
    context: SplitwiseContext, cell: tuple[str, str, str], rate: float, design: Design, baseline: float | None
) -> Iterator[Line]:
    line, case = context.origin.line, _case(cell)
    yield line(case, MOST, rate, "", baseline=baseline)
    yield line(case, "prompt machines (or both)", design.prompts, "")
    yield line(case, "token machines", design.tokens, "")
    whole = Design(SYSTEMS["Baseline-H100"], BUDGET_H100)
    for measure in ("cost", "power"):
        of = MEASURES[measure]
        yield line(case, measure, design.total(of) / whole.total(of), "of 40 DGX-H100")


RATIOS: Sequence[tuple[str, str, str, str, str, float]] = (
    ("abstract: 1.4x at 20 % lower cost", "power", "coding", "Splitwise-AA", "Baseline-H100", 1.4),
    ("abstract: 2.35x at the same power and cost", "power", "conversation", "Splitwise-AA", "Baseline-A100", 2.35),
    ("section VI: 2.15x at the same power and cost", "power", "conversation", "Splitwise-AA", "Baseline-A100", 2.15),
    ("section VI: 1.18x at 10 % lower cost", "power", "conversation", "Splitwise-HA", "Baseline-H100", 1.18),
    ("section VI: 1.4x at the same cost", "cost", "conversation", "Splitwise-AA", "Baseline-H100", 1.4),
    ("section VI: 1.4x at the same cost", "cost", "coding", "Splitwise-AA", "Baseline-H100", 1.4),
)


def _beside_the_paper(context: SplitwiseContext, rates: Mapping[tuple[str, str, str], float]) -> Iterator[Line]:
    for name, budget, trace, system, other, paper in RATIOS:
        ours, theirs = rates.get((budget, trace, system)), rates.get((budget, trace, other))
        case = f"paper, {name}, {trace}, {system} against {other}"
        if ours is not None and theirs and context.missing(case, "throughput"):
            target = f">= {0.9 * paper:.4g}"
            yield context.origin.line(case, "throughput", ours / theirs, "x", baseline=paper, target=target)


def pictures(lines: Sequence[Line]) -> dict[str, str]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for line in lines:
        if line.metric == MOST and line.value is not None:
            budget, trace, system = line.case.split(", ")
            found.setdefault(budget, {}).setdefault(trace, {})[system] = line.value
    titles = {"iso-power": "The power of 40 DGX-H100", "iso-cost": "The cost of 40 DGX-H100"}
    return {budget: charts.groups(titles[budget], "requests/s", values) for budget, values in found.items()}
