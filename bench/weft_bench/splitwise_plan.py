"""How long a plan takes

`weft plan capacity` for the conversation trace at a load that takes some 40 runners of four GPUs (Llama-3.1-70B; p90 of
TTFT 1 s, p99 of the time between tokens 100 ms; A100, H100 and H200, alone and in pairs), two simulations at a time,
with the confirmation by twice as many other requests. CPU is that of all its processes.
"""

import os
import time
from collections.abc import Iterator

from weft_bench.splitwise import SplitwiseContext
from weft_bench.splitwise_paper import TRACES
from weft_sim.planning.cluster import Rules
from weft_sim.planning.hardware import Limits, hardware
from weft_sim.planning.objectives import Objective
from weft_sim.planning.plan import families, plan
from weft_sim.planning.search import PlanningProblem
from weft_sim.planning.workload import Workload
from weft_sim.traces import read
from weft_stage.lines import Line

MODEL, GPUS, RATE, REQUESTS = "meta-llama/Llama-3.1-70B", 4, 225, 8_000
OBJECTIVES = (Objective.of("ttft", 0.9, 1.0), Objective.of("tbt", 0.99, 0.1))


def run(context: SplitwiseContext) -> Iterator[Line]:
    line, case = context.origin.line, f"plan, conversation at {RATE} requests/s"
    if not context.missing(case, "took"):
        return
    of = hardware(None, (), MODEL, (GPUS,), Limits())
    workload = Workload(tuple(read(context.file(TRACES["conversation"]))), RATE)
    first, second = (
        PlanningProblem(of.model, arrivals, OBJECTIVES, Rules("mixed_pool"), Rules("shortest_queue"))
        for arrivals in (workload.arrivals(REQUESTS, context.seed), workload.arrivals(2 * REQUESTS, context.seed + 1))
    )
    every = families(of.kinds, split=True, unified=True)
    begin, before = time.perf_counter(), cpu_s()
    with context.bar("plan", len(every)) as advance:
        found = plan(first, second, every, 2, advance)
    yield line(case, "took", time.perf_counter() - begin, "s", target="<= 60")
    yield line(case, "CPU", cpu_s() - before, "s")
    confirmed = found.confirmed
    yield line(case, "confirmed by other requests", float(confirmed is not None and confirmed.met), "", target=">= 1")
    if confirmed is not None:
        yield line(case, "runners", confirmed.design.runners, "")
        yield line(case, "cost", first.size(confirmed.design), "$/hour")
    yield line(case, "designs simulated", sum(len(one.trials) for one in found.found), "")


def cpu_s() -> float:
    """Return the CPU seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])
