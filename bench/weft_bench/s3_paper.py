"""The paper's settings: throughput against reserving the maximum

S3's models on its GPUs (A100 80GB; GPT-3 175B on pipelines of 6, 8 and 10), Alpaca, all requests there at the start.
Step times and memory are a roofline of byte and operation counts. `max` reserves the model's 2,048 tokens (ORCA); `s3`
the upper edge of one of ten buckets, predicted as well as the paper's predictor (98.61 %, wrong ones 1 bucket off), and
packs by decreasing first fit; `oracle` knows each length; `constant`, `paged`, `calibrated` and `pooled` (with our
ridge) are Weft's others. The paper: 1.13 to 6.49 times ORCA, 9.34 to 40.52 % below the oracle, alike under an SLO of
187.5 ms a token; a tenth of the time for predictor, scheduler, supervisor and preemption together. A batch under the
SLO is capped where its tokens would come slower; attainment counts from the first token, since requests wait from the
start.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from weft.domain.machine import Kind
from weft_bench import charts
from weft_bench.s3 import Context
from weft_bench.s3_hardware import GPT_3, GPT_J, LLAMA_13B, LLAMA_33B, NEOX, PAGE_TOKENS, Machine
from weft_bench.s3_lengths import Answered, alpaca
from weft_sim.hosts import MEASURED, Costs
from weft_sim.report import Served
from weft_sim.shells import RunnerShell
from weft_sim.simulate import PoolDescription, simulate
from weft_sim.stack import World
from weft_sim.traces import TraceArrival
from weft_stage.lines import Line

MACHINES = (
    *(Machine(model) for model in (LLAMA_33B, NEOX, LLAMA_13B, GPT_J)),
    *(Machine(GPT_3, stages=stages) for stages in (6, 8, 10)),
)
MAXIMUM = 2_048
BUCKETS = 10
BUCKET_ACCURACY = 0.9861
SLO_S = 0.187_5
MIN_REQUESTS, MAX_REQUESTS, BATCHES = 1_000, 8_000, 8  # with 300 and 4 a rate is off by up to a fifth
MAX_SEQUENCES = 4_000
POLICIES: Mapping[str, tuple[str, str]] = {  # by name: queue, reservation
    "max": ("fcfs", "max"),
    "s3": ("s3", "s3"),
    "oracle": ("s3", "calibrated"),
    "constant": ("fcfs", "constant"),
    "paged": ("fcfs", "paged"),
    "calibrated": ("fcfs", "calibrated"),
    "pooled": ("fcfs", "pooled"),
}
OVERHEAD = (Kind.PREDICTOR, Kind.SCHEDULER, Kind.SUPERVISOR)
CHARGED = Costs(
    events={of: seconds for of, seconds in MEASURED.events.items() if of[0] in OVERHEAD},
    wake={kind: seconds for kind, seconds in MEASURED.wake.items() if kind in OVERHEAD},
    commit=MEASURED.commit,
)
SPEED, BATCH = "times max's tokens/s", "mean batch"


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulated run. `most`: sequences at a time; `charged`: predictor, scheduler and supervisor need CPU."""

    machine: Machine
    policy: str
    most: int
    requests: tuple[Answered, ...]
    charged: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """`recomputed`: the share of step time in which preempted sequences' tokens are computed a second time; `within`:
    the share of requests that meet the SLO."""

    tokens_per_s: float
    batch: float
    recomputed: float
    within: float


def name_of(machine: Machine) -> str:
    return machine.model.name if machine.stages == 1 else f"{machine.model.name}, {machine.stages} stages"


def run(context: Context) -> Iterator[Line]:
    """Run every machine under every policy, then under the SLO."""
    served, chance = alpaca(context.file, context.seed), random.Random(f"{context.seed}/buckets")
    served = [replace(one, predicted=replace(one.predicted, bucket_tokens=bucket(one, chance))) for one in served]
    machines = MACHINES[:1] if context.quick else MACHINES
    with ProcessPoolExecutor(context.jobs) as pool, context.bar("paper", 2 * len(POLICIES) * len(machines)) as advanced:
        for machine in machines:
            free = dict[str, Outcome]()
            cells = [cell_of(machine, policy, served, MAX_SEQUENCES, chance) for policy in POLICIES]
            for cell, outcome in zip(cells, pool.map(outcome_of, cells), strict=True):
                free[cell.policy] = outcome
                advanced(1)
            yield from _lines(context, f"paper, {name_of(machine)}", free)
            yield _overhead(context, cells[list(POLICIES).index("s3")], free["s3"])
            context_tokens = sum(one.prompt_tokens + one.output_tokens / 2 for one in served) / len(served)
            most = machine.batch_within(SLO_S, context_tokens)
            over = [policy for policy, outcome in free.items() if outcome.batch > most]
            cells = [cell_of(machine, policy, served, most, chance) for policy in over]
            capped = free | dict(zip(over, pool.map(outcome_of, cells), strict=True))
            advanced(len(POLICIES))
            yield context.origin.line(f"paper, {name_of(machine)}, SLO", "largest batch within it", most, "")
            yield from _lines(context, f"paper, {name_of(machine)}, SLO", capped)


def bucket(one: Answered, chance: random.Random) -> int:
    """Return the upper edge of the bucket, in tokens, that a predictor as good as the paper's finds."""
    width = MAXIMUM / BUCKETS
    number = min(BUCKETS - 1, int(one.output_tokens / width))
    if chance.random() > BUCKET_ACCURACY:
        number += chance.choice((-1, 1)) if 0 < number < BUCKETS - 1 else 1 if number == 0 else -1
    return int(width * (number + 1)) + 1


def cell_of(machine: Machine, policy: str, served: Sequence[Answered], most: int, chance: random.Random) -> Cell:
    """Make a cell with enough requests that its batch is full most of the time."""
    mean = sum(one.prompt_tokens + one.output_tokens for one in served) / len(served)
    reserved = {"max": float(MAXIMUM), "s3": mean + MAXIMUM / BUCKETS / 2}.get(policy, mean)
    batch = min(most, machine.kv_pages * PAGE_TOKENS / reserved)
    count = int(max(MIN_REQUESTS, min(MAX_REQUESTS, BATCHES * batch)))
    requests = chance.choices(served, k=count)
    return Cell(machine, policy, most, tuple(one.exactly() if policy == "oracle" else one for one in requests))


def outcome_of(cell: Cell) -> Outcome:
    """Simulate the cell; the control plane has a host of its own."""
    queue, reservation = POLICIES[cell.policy]
    machine, worlds = cell.machine, list[World]()
    pool = PoolDescription(
        page_tokens=PAGE_TOKENS, total_pages=machine.kv_pages, max_context_tokens=MAXIMUM, max_sequences=cell.most,
        best_batch=cell.most, max_batch_tokens=max(4_096, cell.most), max_prefills=256, adapters=0, queue=queue,
        reservation=reservation, cpu=False,
    )  # fmt: skip
    arrivals = [
        TraceArrival(
            1e-4 * number, one.prompt_tokens, one.output_tokens, stops=True,
            max_tokens=MAXIMUM - one.prompt_tokens - 1, predicted=one.predicted,
        )
        for number, one in enumerate(cell.requests)
    ]  # fmt: skip
    deployment = replace(machine.deployment(pool), costs=CHARGED if cell.charged else Costs())
    result = simulate(pool, arrivals, deployment=deployment, attach=worlds.append)
    assert not result.figures.failures, result.figures.failures
    (runner,) = worlds[0].runners.values()
    assert isinstance(runner.shell, RunnerShell)
    again = runner.shell.prompt_tokens - sum(one.prompt_tokens for one in cell.requests)
    rate, batch = steady(result.figures.served)
    within = [_within(one) for one in result.figures.served]
    recomputed = again * machine.times.prompt_token_ms / 1e3 / runner.shell.model_s
    return Outcome(rate, batch, recomputed, sum(within) / len(within))


def steady(served: Sequence[Served]) -> tuple[float, float]:
    """Return tokens a second between the first requests' start and the last ones' drain, and the mean batch."""
    ordered = sorted(served, key=lambda one: one.e2e_ms)
    low, high = len(ordered) * 3 // 10, len(ordered) * 3 // 4
    window, seconds = ordered[low:high], (ordered[high].e2e_ms - ordered[low].e2e_ms) / 1e3
    rate = sum(one.tokens for one in window) / seconds
    return rate, sum(one.e2e_ms - one.ttft_ms for one in window) / 1e3 / seconds


def _overhead(context: Context, cell: Cell, free: Outcome) -> Line:
    """Return what preemption and the control plane's CPU take from generation, for S3's policies."""
    charged = outcome_of(replace(cell, charged=True))
    share = free.recomputed + 1 - charged.tokens_per_s / free.tokens_per_s
    case, metric = (
        f"paper, {name_of(cell.machine)}, s3",
        "recomputing, predictor, scheduler and supervisor, of generation",
    )
    return context.origin.line(case, metric, share, "share", target="<= 0.11")


def _within(one: Served) -> bool:
    return one.e2e_ms - one.ttft_ms <= 1e3 * SLO_S * one.tokens


def _lines(context: Context, case: str, found: Mapping[str, Outcome]) -> Iterator[Line]:
    line, of_max, oracle = context.origin.line, found["max"], found["oracle"]
    for policy, outcome in found.items():
        of = f"{case}, {policy}"
        yield line(of, "tokens", outcome.tokens_per_s, "1/s", baseline=of_max.tokens_per_s)
        yield line(of, SPEED, outcome.tokens_per_s / of_max.tokens_per_s, "x")
        yield line(of, "below the oracle", 1 - outcome.tokens_per_s / oracle.tokens_per_s, "share")
        yield line(of, BATCH, outcome.batch, "", baseline=of_max.batch)
        yield line(of, "recomputing, of generation", outcome.recomputed, "share")
        yield line(of, "within the SLO, from the first token", outcome.within, "share")


def pictures(lines: Sequence[Line]) -> dict[str, str]:
    """Draw each setting's policies against `max`."""
    found: dict[str, dict[str, dict[str, float]]] = {"free": {}, "slo": {}}
    for line in lines:
        if line.case.startswith("paper, ") and line.metric == SPEED and line.value is not None:
            setting, _, policy = line.case.removeprefix("paper, ").rpartition(", ")
            kind = "slo" if setting.endswith(", SLO") else "free"
            setting = setting.removesuffix(", SLO").replace("GPT-3 175B, ", "GPT-3, ")
            found[kind].setdefault(setting, {})[policy] = line.value
    titles = {"free": "Throughput against max", "slo": "Throughput against max, 187.5 ms a token"}
    return {kind: charts.groups(titles[kind], SPEED, values) for kind, values in found.items() if values}
