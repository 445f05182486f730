"""The same requests as splitwise-sim

Its own example and eight runs on traces drawn from Azure's, with the results of every request kept
(`splitwise_ref_*`): the largest difference of any request's end to end time, and of p50 and p90 of TTFT, TBT and end to
end. TBT is splitwise-sim's: from the first token to the last, divided by all tokens. `simulated` counts one core, with
its ordering of simultaneous events.
"""

import csv
import gzip
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from weft.domain.runner import RunnerRole
from weft_bench.splitwise import SplitwiseContext
from weft_sim.planning.cluster import Cluster, Rules
from weft_sim.planning.machine import MachineKind
from weft_sim.planning.request import PlannedRequest
from weft_sim.planning.splitwise import A100, BASELINE, BLOOM_176B, H100, SPLIT, HeapClock, machine_kind
from weft_sim.report import quantile
from weft_sim.traces import TraceArrival
from weft_stage.lines import Line

H, A = machine_kind(H100), machine_kind(A100)
Machines = Sequence[tuple[MachineKind, RunnerRole]]
UNIFIED = [(H, RunnerRole.MIXED)] * 4
HH = [(H, RunnerRole.PROMPT)] * 2 + [(H, RunnerRole.TOKEN)] * 2
HA = [(H, RunnerRole.PROMPT)] * 2 + [(A, RunnerRole.TOKEN)] * 3
EXAMPLE = (TraceArrival(1, 4_096, 32), TraceArrival(3, 2_048, 8), TraceArrival(4, 2_048, 16))
RUNS: Mapping[str, tuple[str, Machines, Rules]] = {
    "ex_base_h100x1": ("", [(H, RunnerRole.MIXED)], BASELINE),
    "ex_ha_1h1a": ("", [(H, RunnerRole.PROMPT), (A, RunnerRole.TOKEN)], SPLIT),
    "base_h100x4_conv8": ("conv_8", UNIFIED, BASELINE),
    "hh_2p2t_conv8": ("conv_8", HH, SPLIT),
    "ha_2h3a_conv8": ("conv_8", HA, SPLIT),
    "base_h100x4_code8": ("code_8", UNIFIED, BASELINE),
    "hh_2p2t_code8": ("code_8", HH, SPLIT),
    "ha_2h3a_code8": ("code_8", HA, SPLIT),
    "base_h100x40_conv80": ("conv_80", [(H, RunnerRole.MIXED)] * 40, BASELINE),
    "ha_25h26a_conv80": ("conv_80", [(H, RunnerRole.PROMPT)] * 25 + [(A, RunnerRole.TOKEN)] * 26, SPLIT),
}
VALUES: Mapping[str, Callable[[PlannedRequest], float]] = {
    "response_times": lambda request: request.e2e_s,
    "ttft_times": lambda request: request.ttft_s,
    "tbt_times": lambda request: (request.e2e_s - request.ttft_s) / request.output_tokens,
}


def run(context: SplitwiseContext) -> Iterator[Line]:
    expected: dict[str, dict[int, dict[str, str]]] = {}
    with gzip.open(context.file("splitwise_ref_requests.csv.gz"), "rt") as rows:
        for row in csv.DictReader(rows):
            expected.setdefault(row["run"], {})[int(float(row["request_ids"]))] = row
    names = [name for name in RUNS if context.missing(f"compat, {name}", "completed")]
    with context.bar("compat", len(names)) as advance:
        for name in names:
            yield from _compared(context, name, expected[name])
            advance(1)


def _compared(context: SplitwiseContext, name: str, expected: Mapping[int, Mapping[str, str]]) -> Iterator[Line]:
    trace, machines, rules = RUNS[name]
    arrivals = _arrivals(context, trace)
    cluster = Cluster(machines, BLOOM_176B, rules, clock=HeapClock())
    begin = time.perf_counter()
    cluster.serve(arrivals)
    rate = len(arrivals) / (time.perf_counter() - begin)
    done = [request for request in cluster.requests if request.ended is not None]
    line, case = context.origin.line, f"compat, {name}"
    yield line(case, "completed", len(done), "", baseline=len(expected), target=f">= {len(expected)}")
    furthest = max(abs(request.e2e_s - float(expected[request.number]["response_times"])) for request in done)
    yield line(case, "largest difference of a request", furthest * 1e6, "us", target="<= 1")
    worst = 0.0
    for column, value in VALUES.items():
        ours, theirs = list(map(value, done)), [float(row[column]) for row in expected.values()]
        worst = max(worst, *(abs(quantile(ours, level) / quantile(theirs, level) - 1) for level in (0.5, 0.9)))
    yield line(case, "largest difference of p50 and p90", worst, "share", target="<= 0.01")
    target = ">= 1000" if len(machines) >= 40 else None
    yield line(case, "simulated", rate, "requests/s", target=target)


def _arrivals(context: SplitwiseContext, trace: str) -> Sequence[TraceArrival]:
    """With the times of the file, which `weft_sim.traces.read` would move to 0."""
    if not trace:
        return EXAMPLE
    with gzip.open(context.file(f"splitwise_ref_trace_{trace}.csv.gz"), "rt") as rows:
        return [
            TraceArrival(float(row["arrival_timestamp"]), int(row["prompt_size"]), int(row["token_size"]))
            for row in csv.DictReader(rows)
        ]
