"""`weft bench slots`: how many adapters may share a runner's memory, with no number set and with each of some numbers.

Every cell of a grid of adapters and loads is simulated with the machines that ship, once with no bound, where adapters
take pages like KV does, and once for each bound of `SLOTS`. The model is m135 on the cpu engine: step times are those
that `weft bench fidelity` measured on this machine, an adapter (rank 16, 9.3 MiB) takes 27 of 768 pages, a sequence 4
to 12, and loads follow each other at 64 MiB/s. Popularity is uniform, prompts and answers have 32 to 96 tokens. Load 1
is the most that any bound finishes of this many adapters when all requests come at once (`saturated`).

Too few slots leave requests waiting for one while memory is free; too many let adapters take the memory of the batch.
The figure is finished tokens a second with no bound over the best bound of the same cell.

The rows of m-large and deepseek-r1 are a record of forecast prefetch, which is gone: two hours of the clients of these
ServeGen pools as adapters of 80 MiB, which came from the depot to the disks of runners when a request named them, or
before, by a forecast of its time; 70 to 79 % of what the forecast fetched was used by no request.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from weft_bench.charts import groups
from weft_bench.cpu_context import Bar
from weft_sim.executor_model import StepTimes
from weft_sim.report import quantile
from weft_sim.simulate import PoolDescription, deployment_of, simulate
from weft_sim.traces import TraceArrival
from weft_stage.errors import BenchFailed
from weft_stage.lines import Line, Origin, newest, read

ADAPTERS, LOADS, SLOTS = (16, 64, 128), (0.5, 0.9), (8, 16, 32, 64, 128)
UNBOUNDED = 0
SATURATED = "saturated"
LOAD_MIB_S = 64.0
SHORTEST, LONGEST = 32, 96  # tokens of prompts and of answers
POOL = PoolDescription(
    total_pages=768, max_sequences=64, best_batch=64, max_prefills=4, page_kib=360.0, adapter_mib=9.32,
    load_ms=9.32 / LOAD_MIB_S * 1e3, popularity="uniform", cpu=False,
)  # fmt: skip
TOKENS, TTFT, RATIO = "finished tokens", "TTFT p50", "no bound / best bound"


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run gave."""

    tokens_per_s: float
    ttft_p50_s: float


def engine_of(raw: Path) -> StepTimes:
    """Return m135's step times by the newest lines of `weft bench fidelity`. Raises BenchFailed without any."""
    lines = newest(read(raw)) if raw.exists() else []
    cost = {line.metric: line.value for line in lines if line.case == "m135, cost"}
    steps = {int(name.split()[2]): value for name, value in cost.items() if name.startswith("step of ") and value}
    adapter_us = cost.get("adapter in a step")
    if not steps or adapter_us is None:
        raise BenchFailed(f"{raw} has no step times: run `weft bench fidelity --of m135` first")
    highest, curve = 0.0, list[tuple[float, float]]()
    for tokens, micros in sorted(steps.items()):
        highest = max(highest, micros / 1e3)
        curve.append((float(tokens), highest))
    return StepTimes(0.0, 0.0, 0.0, adapter_ms=adapter_us / 1e3, curve=tuple(curve))


def figures(
    origin: Origin, times: StepTimes, known: Iterable[Line], *, seed: int, quick: bool, bar: Bar
) -> Iterator[Line]:
    """Yield the lines of every run that is not known, and of each cell's best."""
    requests, counts, loads = (24, (16,), ()) if quick else (240, ADAPTERS, LOADS)
    label = f", seed {seed}" + (" (quick)" if quick else "")
    there = {line.key: line for line in known if line.machine == origin.machine}
    with bar("slots", len(counts) * (1 + len(loads)) * (1 + len(SLOTS))) as advance:
        for adapters in counts:
            most = 0.0
            for load in (SATURATED, *loads):
                rate = 1e6 if isinstance(load, str) else load * most / ((SHORTEST + LONGEST) / 2)
                cell, found = f"{adapters} adapters, load {load}{label}", dict[int, Measured]()
                for bound in (UNBOUNDED, *SLOTS):
                    case = f"{cell}, {named(bound)}"
                    names = [(case, metric, origin.machine) for metric in (TOKENS, TTFT)]
                    if all(name in there for name in names):
                        tokens, ttft = (there[name].value or 0.0 for name in names)
                        found[bound] = Measured(tokens, ttft)
                    else:
                        found[bound] = one = measure(times, adapters, bound, rate, requests, seed)
                        yield origin.line(case, TOKENS, one.tokens_per_s, "tokens/s")
                        half = bound == UNBOUNDED and load == LOADS[0] and adapters == ADAPTERS[-1]
                        yield origin.line(case, TTFT, one.ttft_p50_s, "s", target="<= 0.5" if half else None)
                    advance(1)
                best = max(found[bound].tokens_per_s for bound in SLOTS)
                if load == SATURATED:
                    most = best
                ours = found[UNBOUNDED].tokens_per_s
                yield origin.line(cell, RATIO, ours / best, "x", target=None if quick else ">= 0.95")


def measure(times: StepTimes, adapters: int, bound: int, rate_s: float, requests: int, seed: int) -> Measured:
    """Simulate one runner from cold, to the last answer."""
    chance, at_s, arrivals = random.Random(f"slots {seed}"), 0.0, list[TraceArrival]()
    for _ in range(requests):
        at_s += chance.expovariate(rate_s)
        lengths = chance.randint(SHORTEST, LONGEST), chance.randint(SHORTEST, LONGEST)
        arrivals.append(TraceArrival(at_s, *lengths, chance.randrange(adapters), stops=True))
    pool = replace(POOL, adapters=adapters, slots=bound)
    deployment = deployment_of(pool)
    runners = tuple(replace(plan, times=times) for plan in deployment.runners)
    result = simulate(pool, arrivals, seed, deployment=replace(deployment, runners=runners)).figures
    if result.failures or len(result.served) != requests:
        raise BenchFailed(f"{len(result.served)} of {requests} requests were answered: {result.failures}")
    return Measured(result.tokens_per_s, quantile([one.ttft_ms for one in result.served], 0.5) / 1e3)


def named(bound: int) -> str:
    """Name a configuration in words."""
    return f"at most {bound}" if bound else "no bound"


def about(lines: Iterable[Line], picture: Path, folder: Path) -> str:
    """Return what the page says first, with the picture of the saturated cells, which it draws anew."""
    values: dict[str, dict[str, float]] = {}
    for line in newest(lines):
        cell, _, bound = line.case.rpartition(", ")
        other = "quick" in cell or cell.startswith("live")
        if line.metric == TOKENS and SATURATED in cell and line.value is not None and not other:
            values.setdefault(cell.partition(",")[0], {})[bound] = line.value
    text = (__doc__ or "").strip()
    if not values:
        return text
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text(groups("All requests at once", "finished tokens/s", values), encoding="utf-8")
    return f"{text}\n\n![finished tokens a second]({picture.relative_to(folder).as_posix()})"
