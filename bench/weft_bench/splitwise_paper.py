"""The paper's clusters, its objectives, and traces drawn as splitwise-sim draws them."""

import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from weft_sim.performance.step import StepShape
from weft_sim.planning.designs import Combination, Design, PricedKind
from weft_sim.planning.objectives import Objective
from weft_sim.planning.request import PlannedRequest
from weft_sim.planning.search import PlanningProblem, decode_row_s, prompt_token_s, simulate
from weft_sim.planning.splitwise import A100, BASELINE, BLOOM_176B, H100, H100_CAPPED, SPLIT, machine_kind
from weft_sim.traces import TraceArrival, read

# Prices a GPU-hour and power of a machine (in its GPUs' thermal design power, with what is around them), as
# splitwise-sim compares with; a capped machine has 70 % of the power at the same price.
DGX_A100 = PricedKind(machine_kind(A100), 8, 2.21, 24.8)
DGX_H100 = PricedKind(machine_kind(H100), 8, 4.76, 44.0)
DGX_H100_CAPPED = PricedKind(machine_kind(H100_CAPPED), 8, 4.76, 30.8)
SYSTEMS: Mapping[str, Combination] = {
    "Baseline-A100": Combination(DGX_A100),
    "Baseline-H100": Combination(DGX_H100),
    "Splitwise-AA": Combination(DGX_A100, DGX_A100),
    "Splitwise-HH": Combination(DGX_H100, DGX_H100),
    "Splitwise-HA": Combination(DGX_H100, DGX_A100),
    "Splitwise-HHcap": Combination(DGX_H100, DGX_H100_CAPPED),
}
TRACES: Mapping[str, str] = {"conversation": "azure2023_conv.csv.gz", "coding": "azure2023_code.csv.gz"}
LEVELS = (0.5, 0.9, 0.99)
SLOWDOWNS: Mapping[str, tuple[float, float, float]] = {  # of a DGX-A100 without contention, by level
    "ttft": (2, 3, 6),
    "tbt": (1.25, 1.5, 5),
    "e2e": (1.25, 1.5, 5),
}


@cache
def prompt_s(tokens: int) -> float:
    """Return the seconds of a prompt alone on a DGX-A100."""
    return DGX_A100.kind.model.seconds(StepShape(prompts=1, prompt_tokens=tokens))


@cache
def token_s(prompt_tokens: int) -> float:
    """Return the seconds of a token after that prompt, as splitwise-sim: from the table at the prompt's tokens."""
    return DGX_A100.kind.model.seconds(StepShape(decode_rows=prompt_tokens))


def ttft(request: PlannedRequest) -> float:
    return request.ttft_s / prompt_s(request.prompt_tokens)


def tbt(request: PlannedRequest) -> float:
    return (request.e2e_s - request.ttft_s) / request.output_tokens / token_s(request.prompt_tokens)


def e2e(request: PlannedRequest) -> float:
    tokens = request.output_tokens - 1
    return request.e2e_s / (prompt_s(request.prompt_tokens) + token_s(request.prompt_tokens) * tokens)


OBJECTIVES = tuple(
    Objective(name, level, bound, value, at_first=name == "ttft")
    for name, value in (("ttft", ttft), ("tbt", tbt), ("e2e", e2e))
    for level, bound in zip(LEVELS, SLOWDOWNS[name], strict=True)
)


def lengths(path: Path) -> Sequence[tuple[int, int]]:
    return [(arrival.prompt_tokens, arrival.output_tokens) for arrival in read(path)]


def drawn(lengths: Sequence[tuple[int, int]], rate: float, seconds: float, seed: int) -> tuple[TraceArrival, ...]:
    """Draw requests at `rate` a second. Another rate has the same ones, more or fewer of them, closer together."""
    chance, at_s, arrivals = random.Random(f"splitwise/{seed}"), 0.0, list[TraceArrival]()
    while True:
        at_s += chance.expovariate(1.0) / rate
        (prompt, _), (_, output) = chance.choice(lengths), chance.choice(lengths)
        if at_s >= seconds:
            return tuple(arrivals)
        arrivals.append(TraceArrival(at_s, prompt, output))


def problem(arrivals: tuple[TraceArrival, ...], measure: str = "cost") -> PlanningProblem:
    return PlanningProblem(BLOOM_176B, arrivals, OBJECTIVES, SPLIT, BASELINE, measure)


def most(
    lengths: Sequence[tuple[int, int]], design: Design, seconds: float, seed: int, above: float, step: float = 1.0
) -> float | None:
    """Return the most requests a second with which a design meets the objectives, to `step`; None: not `above`."""

    def meets(rate: float) -> bool:
        return simulate(problem(drawn(lengths, rate, seconds, seed)), design).met

    if not meets(above + step):
        return None
    low, high = above + step, max(above + 2 * step, _busy_rate(lengths, design))
    while meets(high):
        low, high = high, 1.25 * high
    while high - low > step:
        middle = (low + high) / 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def _busy_rate(lengths: Sequence[tuple[int, int]], design: Design) -> float:
    """Return the requests a second that keep all machines busy, by the step models."""
    kinds = design.family.prompt.kind, (design.family.token or design.family.prompt).kind
    prompts, outputs = (sum(column) / len(lengths) for column in zip(*lengths, strict=True))
    work = prompts * prompt_token_s(kinds[0]) + outputs * decode_row_s(kinds[1], BLOOM_176B, prompts)
    return design.runners / work
