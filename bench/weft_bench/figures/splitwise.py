"""`weft bench splitwise`: prompt and token phases on machines of their own, simulated in planning mode.

Machines are those of the paper, DGX-A100 and DGX-H100 with BLOOM-176B, by splitwise-sim's published performance model
(github.com/Mutinifni/splitwise-sim @8f99e7d, MIT). Traces are drawn as it draws them: exponential gaps, prompt and
output lengths independently from the Azure traces of 2023.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import product
from math import inf

from weft_bench.cases import Splitwise
from weft_bench.data import find
from weft_bench.run import Run
from weft_sim.performance.step import StepShape
from weft_sim.planning.cluster import Cluster, Rules
from weft_sim.planning.designs import MEASURES, Combination, Design, PricedKind
from weft_sim.planning.hardware import Limits, hardware
from weft_sim.planning.machine import GAP_S, Stepping
from weft_sim.planning.objectives import Objective, counted_quantile
from weft_sim.planning.plan import families, plan
from weft_sim.planning.request import PlannedRequest
from weft_sim.planning.search import Found, Frontier, PlanningProblem
from weft_sim.planning.splitwise import A100, BASELINE, BLOOM_176B, H100, H100_CAPPED, SPLIT, machine_kind
from weft_sim.planning.workload import Workload
from weft_sim.report import quantile
from weft_sim.traces import TraceArrival, read
from weft_stage.lines import Line, Origin

TRACES = {"conversation": "azure2023_conv.csv.gz", "coding": "azure2023_code.csv.gz"}
# Price of a GPU-hour and power of a machine, as splitwise-sim has them; capped: 70 % of the power at the same price.
DGX_A100 = PricedKind(machine_kind(A100), 8, 2.21, 24.8)
DGX_H100 = PricedKind(machine_kind(H100), 8, 4.76, 44.0)
DGX_H100_CAPPED = PricedKind(machine_kind(H100_CAPPED), 8, 4.76, 30.8)
SYSTEMS: Mapping[str, tuple[Combination, int]] = {  # machines for coding in splitwise-sim's scripts
    "Baseline-A100": (Combination(DGX_A100), 113),
    "Baseline-H100": (Combination(DGX_H100), 51),
    "Splitwise-AA": (Combination(DGX_A100, DGX_A100), 64),
    "Splitwise-HH": (Combination(DGX_H100, DGX_H100), 33),
    "Splitwise-HA": (Combination(DGX_H100, DGX_A100), 39),
    "Splitwise-HHcap": (Combination(DGX_H100, DGX_H100_CAPPED), 33),
}
SLOWDOWNS = {"ttft": (2, 3, 6), "tbt": (1.25, 1.5, 5), "e2e": (1.25, 1.5, 5)}  # p50, p90, p99; of a DGX-A100 alone
RATE = 70  # requests a second that clusters have to serve
BATCHING_RATES, MACHINES = (4, 8), 4
WHOLE = Rules("shortest_queue", Stepping("mixed"), SPLIT.transfer)
PLAN_MODEL, PLAN_GPUS, PLAN_RATE, PLAN_REQUESTS = "meta-llama/Llama-3.1-70B", 4, 225, 8_000
PLAN_OBJECTIVES = (Objective.of_level("ttft", 0.9, 1.0), Objective.of_level("tbt", 0.99, 0.1))


def slowdown(measure: str, request: PlannedRequest) -> float:
    """Return a time of a request over that on a DGX-A100 alone, where each token takes the first token's time."""
    prompt_s, token_s = step_s(request.prompt_tokens, 0), step_s(0, request.prompt_tokens)
    if measure == "ttft":
        return request.ttft_s / prompt_s
    if measure == "tbt":
        return (request.e2e_s - request.ttft_s) / request.output_tokens / token_s
    return request.e2e_s / (prompt_s + token_s * (request.output_tokens - 1))


@cache
def step_s(prompt_tokens: int, decode_rows: int) -> float:
    """Return the seconds of a step alone on a DGX-A100."""
    return DGX_A100.kind.model.seconds(StepShape(min(1, prompt_tokens), prompt_tokens, decode_rows=decode_rows))


def figures(options: Splitwise, run: Run) -> Iterator[Line]:
    """Run each part whose traces are there."""
    origin, data = run.origin(), options.data
    traces = {name: list(read(path)) for name, file in TRACES.items() if (path := find(file, data))}
    if absent := [file for name, file in TRACES.items() if name not in traces]:
        run.say(f"skipped: no {', '.join(absent)} in {data or 'any folder: give --data DIR'}")
    if "throughput" in options.part:
        yield from throughput(options, origin, traces)
    for part, measure in (("batching", batching), ("plan", planned)):
        if part in options.part and "conversation" in traces:
            yield from measure(options, origin, traces["conversation"])


def drawn(trace: Sequence[TraceArrival], rate: float, seconds: float, seed: int) -> tuple[TraceArrival, ...]:
    """Draw requests at `rate` a second. Another rate has the same ones, more or fewer of them, closer together."""
    chance, at_s, arrivals = random.Random(f"splitwise/{seed}"), 0.0, list[TraceArrival]()
    while True:
        at_s += chance.expovariate(1.0) / rate
        prompt, output = chance.choice(trace).prompt_tokens, chance.choice(trace).output_tokens
        if at_s >= seconds:
            return tuple(arrivals)
        arrivals.append(TraceArrival(at_s, prompt, output))


def batching(options: Splitwise, origin: Origin, trace: Sequence[TraceArrival]) -> Iterator[Line]:
    """Compare the batching mechanisms, and phases apart, on four DGX-H100."""
    together, apart = Design(Combination(DGX_H100), MACHINES), Combination(DGX_H100, DGX_H100)
    names = ("request", "continuous", "mixed", "chunked")
    mechanisms = {name: (replace(WHOLE, stepping=Stepping(name)), together) for name in names}
    mechanisms["split"] = replace(WHOLE, scheduling="mixed_pool"), Design(apart, MACHINES // 2, MACHINES // 2)
    for rate in BATCHING_RATES:
        for name, (rules, design) in mechanisms.items():
            cluster = Cluster(design.machines(), BLOOM_176B, rules)
            cluster.serve(drawn(trace, rate, 4 * options.seconds, options.seed))
            case, requests = f"batching, conversation at {rate} requests/s, {name}", cluster.requests
            tokens = sum(request.output_tokens for request in requests)
            yield origin.line(case, "tokens", tokens / cluster.clock.now, "1/s")
            for level in (0.5, 0.99):
                percent, tbt_ms = f"p{100 * level:g}", 1e3 * GAP_S * counted_quantile(cluster.gaps, level)
                ttft_ms = 1e3 * quantile([request.ttft_s for request in requests], level)
                yield origin.line(case, f"TTFT {percent}", ttft_ms, "ms")
                yield origin.line(case, f"TBT {percent}", tbt_ms, "ms")
                yield origin.line(case, f"E2E {percent}", quantile([one.e2e_s for one in requests], level), "s")


def throughput(options: Splitwise, origin: Origin, traces: Mapping[str, Sequence[TraceArrival]]) -> Iterator[Line]:
    """Find the cheapest cluster of each system that serves `RATE` requests a second within the objectives."""
    cells = list(product(traces, SYSTEMS))
    with ProcessPoolExecutor(options.jobs) as pool:
        jobs = [drawn(traces[trace], RATE, options.seconds, options.seed) for trace, _ in cells]
        results = pool.map(cheapest, jobs, [system for _, system in cells])
        for (trace, system), result in zip(cells, results, strict=True):
            case = f"iso-throughput, least cost, {trace}, {system}"
            design = result.best.design if result.best else None
            published = SYSTEMS[system][1] if trace == "coding" else None
            yield origin.line(case, "machines", design.runners if design else None, "", baseline=published)
            if design:
                yield origin.line(case, "prompt machines (or both)", design.prompts, "")
                yield origin.line(case, "cost", design.total(MEASURES["cost"]), "$/GPU-hour x machines")


def cheapest(arrivals: tuple[TraceArrival, ...], system: str) -> Found:
    """Search the cheapest design of a system for these requests, as `weft plan` does."""
    objectives = tuple(
        Objective(name, level, bound, partial(slowdown, name), at_first=name == "ttft")
        for name, bounds in SLOWDOWNS.items()
        for level, bound in zip((0.5, 0.9, 0.99), bounds, strict=True)
    )
    problem = PlanningProblem(BLOOM_176B, arrivals, objectives, SPLIT, BASELINE, "cost")
    return Frontier(problem, SYSTEMS[system][0], inf).run()


def planned(options: Splitwise, origin: Origin, trace: Sequence[TraceArrival]) -> Iterator[Line]:
    """Time `weft plan capacity` for a load that takes some 40 runners of four GPUs, two simulations at a time."""
    case, workload = f"plan, conversation at {PLAN_RATE} requests/s", Workload(tuple(trace), PLAN_RATE)
    machines = hardware(None, (), PLAN_MODEL, (PLAN_GPUS,), Limits())
    first, second = (
        PlanningProblem(machines.model, workload.arrivals(times * PLAN_REQUESTS, options.seed + times - 1),
                        PLAN_OBJECTIVES, Rules("mixed_pool"), Rules("shortest_queue"))
        for times in (1, 2)
    )  # fmt: skip
    begin = time.perf_counter()
    result = plan(first, second, families(machines.kinds, split=True, unified=True), 2, lambda _: None)
    yield origin.line(case, "took", time.perf_counter() - begin, "s", target="<= 60")
    met = float(result.confirmed is not None and result.confirmed.met)
    yield origin.line(case, "confirmed by other requests", met, "", target=">= 1")
    if confirmed := result.confirmed:
        yield origin.line(case, "runners", confirmed.design.runners, "")
        yield origin.line(case, "cost", first.size(confirmed.design), "$/hour")
