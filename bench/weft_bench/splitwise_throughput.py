"""The machines that the same throughput needs

Cost- and power-optimized clusters for 70 requests a second within the same objectives, found by the search of
`weft plan`. The sizes for coding in splitwise-sim's scripts/run_throughput.sh, found by a full grid at
70 requests a second, stand beside ours: 113 DGX-A100 or 51 DGX-H100 unsplit; 54 + 10, 23 + 10, 23 + 16 and 23 + 10 for
AA, HH, HA and HHcap. The paper, cited at second hand: Splitwise-AA serves at 25 % lower cost what Baseline-H100 does,
Splitwise-HHcap at 25 % lower power.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from math import inf

from weft_bench.splitwise import SplitwiseContext
from weft_bench.splitwise_paper import SYSTEMS, TRACES, drawn, lengths, problem
from weft_sim.planning.designs import MEASURES, Combination
from weft_sim.planning.search import Found, Frontier, PlanningProblem
from weft_stage.lines import Line

RATE = 70
PUBLISHED: Mapping[str, int] = {  # machines for coding, of splitwise-sim's scripts
    "Baseline-A100": 113, "Baseline-H100": 51, "Splitwise-AA": 64, "Splitwise-HH": 33, "Splitwise-HA": 39,
    "Splitwise-HHcap": 33,
}  # fmt: skip


def found(job: tuple[PlanningProblem, Combination]) -> Found:
    return Frontier(*job, inf).run()


def run(context: SplitwiseContext) -> Iterator[Line]:
    cells = [
        (measure, trace, system)
        for measure in ("cost", "power")
        for trace in TRACES
        for system, family in SYSTEMS.items()
        if measure == "cost" or family.token not in (None, family.prompt)  # else the same design is least in both
        if context.missing(f"iso-throughput, least {measure}, {trace}, {system}", "machines")
    ]
    arrivals = {
        trace: drawn(lengths(context.file(name)), RATE, context.seconds, context.seed) for trace, name in TRACES.items()
    }
    jobs = [(problem(arrivals[trace], measure), SYSTEMS[system]) for measure, trace, system in cells]
    baselines: dict[tuple[str, str], Found] = {}
    with ProcessPoolExecutor(context.jobs) as pool, context.bar("same throughput", len(cells)) as advance:
        for (measure, trace, system), result in zip(cells, pool.map(found, jobs), strict=True):
            if system == "Baseline-H100":
                baselines[measure, trace] = result
            yield from _lines(context, measure, trace, system, result, baselines.get(("cost", trace)))
            advance(1)


def _lines(
    context: SplitwiseContext, measure: str, trace: str, system: str, result: Found, baseline: Found | None
) -> Iterator[Line]:
    line, case = context.origin.line, f"iso-throughput, least {measure}, {trace}, {system}"
    if result.best is None:
        yield line(case, "machines", None, "")
        return
    design, other = result.best.design, baseline.best if baseline is not None else None
    published = PUBLISHED[system] if (measure, trace) == ("cost", "coding") else None
    yield line(case, "machines", design.runners, "", baseline=published)
    yield line(case, "prompt machines (or both)", design.prompts, "")
    yield line(case, "token machines", design.tokens, "")
    for of in ("cost", "power"):
        beside = other.design.total(MEASURES[of]) if other is not None else None
        unit = "$/GPU-hour x machines" if of == "cost" else "splitwise-sim's units"
        yield line(case, of, design.total(MEASURES[of]), unit, baseline=beside)
    yield line(case, "designs simulated", len(result.trials), "")
