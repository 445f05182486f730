"""`weft bench slots`: how many adapters may share a runner's memory, with no number set and with each of some numbers.

Every cell of a grid of adapters and loads is simulated, once with no bound, where adapters take pages like KV does, and
once for each bound of `SLOTS`.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from weft_bench.cases import Slots
from weft_bench.run import Run
from weft_sim.executor_model import StepTimes
from weft_sim.report import Figures, quantile
from weft_sim.simulate import PoolDescription, deployment_of, simulate
from weft_sim.traces import TraceArrival
from weft_stage.errors import BenchFailed
from weft_stage.lines import Line, newest, read

MODEL = "m135"
ADAPTERS, LOADS, SLOTS = (16, 64, 128), (0.5, 0.9), (8, 16, 32, 64, 128)
UNBOUNDED = 0
SHORTEST, LONGEST = 32, 96  # tokens of prompts and of answers
ADAPTER_MIB, LOAD_MIB_S = 9.32, 64.0
POOL = PoolDescription(
    total_pages=768, max_sequences=64, best_batch=64, max_prefills=4, page_kib=360.0, adapter_mib=ADAPTER_MIB,
    load_ms=ADAPTER_MIB / LOAD_MIB_S * 1e3, popularity="uniform", cpu=False,
)  # fmt: skip
TOKENS, TTFT = "finished tokens", "TTFT p50"


def figures(options: Slots, run: Run) -> Iterator[Line]:
    """Simulate every cell with every bound.

    A load is a part of what the best bound finishes when all requests come at once (`saturated`). Raises BenchFailed.
    """
    origin, times = run.origin(), step_times(run.docs / "raw" / "fidelity.jsonl")
    requests, counts, loads = (24, (16,), ()) if options.quick else (240, ADAPTERS, LOADS)
    label = f", seed {options.seed}" + (" (quick)" if options.quick else "")
    for adapters in counts:
        saturated = 0.0
        for load in ("saturated", *loads):
            rate = 1e6 if isinstance(load, str) else load * saturated / ((SHORTEST + LONGEST) / 2)
            cell, tokens_per_s = f"{adapters} adapters, load {load}{label}", dict[int, float]()
            for bound in (UNBOUNDED, *SLOTS):
                done = simulated(times, adapters, bound, rate, requests, options.seed)
                tokens_per_s[bound] = done.tokens_per_s
                ttft_s = quantile([one.ttft_ms for one in done.served], 0.5) / 1e3
                target = "<= 0.5" if (bound, load, adapters) == (UNBOUNDED, LOADS[0], ADAPTERS[-1]) else None
                yield origin.line(f"{cell}, {named(bound)}", TOKENS, done.tokens_per_s, "tokens/s")
                yield origin.line(f"{cell}, {named(bound)}", TTFT, ttft_s, "s", target=target)
            best = max(tokens_per_s[bound] for bound in SLOTS)
            saturated = saturated or best
            ratio = tokens_per_s[UNBOUNDED] / best
            yield origin.line(cell, "no bound / best bound", ratio, "x", target=None if options.quick else ">= 0.95")


def step_times(raw: Path) -> StepTimes:
    """Return m135's step times by the newest lines of `weft bench fidelity`. Raises BenchFailed without any."""
    lines = newest(read(raw)) if raw.exists() else []
    costs = {line.metric: line.value for line in lines if line.case == f"{MODEL}, cost" and line.value is not None}
    steps = sorted((float(name.split()[2]), us / 1e3) for name, us in costs.items() if name.startswith("step of "))
    if not steps or "adapter in a step" not in costs:
        raise BenchFailed(f"{raw} has no step times: run `weft bench fidelity` first")
    curve = tuple((tokens, max(ms for _, ms in steps[: i + 1])) for i, (tokens, _) in enumerate(steps))
    return StepTimes(0.0, 0.0, 0.0, adapter_ms=costs["adapter in a step"] / 1e3, curve=curve)


def simulated(times: StepTimes, adapters: int, bound: int, rate_s: float, requests: int, seed: int) -> Figures:
    """Simulate one runner from cold, to the last answer. Raises BenchFailed."""
    chance, at_s, arrivals = random.Random(f"slots {seed}"), 0.0, list[TraceArrival]()
    for _ in range(requests):
        at_s += chance.expovariate(rate_s)
        lengths = chance.randint(SHORTEST, LONGEST), chance.randint(SHORTEST, LONGEST)
        arrivals.append(TraceArrival(at_s, *lengths, chance.randrange(adapters), stops=True))
    pool = replace(POOL, adapters=adapters, slots=bound)
    deployment = deployment_of(pool)
    runners = tuple(replace(plan, times=times) for plan in deployment.runners)
    done = simulate(pool, arrivals, seed, deployment=replace(deployment, runners=runners)).figures
    if done.failures or len(done.served) != requests:
        raise BenchFailed(f"{len(done.served)} of {requests} requests were answered: {done.failures}")
    return done


def named(bound: int) -> str:
    """Name a configuration in words."""
    return f"at most {bound}" if bound else "no bound"
