"""# The three batching mechanisms, live

`weft bench phases --part batching`: one runner (m135, 8 adapters in turn and the base) under one mix of long prompts
and chats, its iterations formed in the three ways that Splitwise compares (section 2.5, whose figure 2 has no numbers):
`request` runs a batch to the end of its last request, `continuous` stops decode rows for prompts, `mixed` runs both
together. No token time is set and a whole prompt fits into an iteration, as in the paper. Arrivals are Poisson, the
same for all, at parts of what `mixed` answers when all wait.

`value` is live, `baseline` simulated: the same requests at the same times, with step times and costs of this machine as
`weft bench fidelity` measures them, before any of these runs.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from weft_bench.cpu_context import Bar
from weft_bench.cpu_engine import pages_of
from weft_bench.cpu_models import files
from weft_bench.cpu_shapes import SHAPES
from weft_bench.fidelity_costs import Amounts, Model, calibrate
from weft_bench.fidelity_engine import measure
from weft_bench.fidelity_live import Bodies, Live
from weft_bench.lines import Line, Origin
from weft_bench.phases import ADAPTERS, CHAT_ANSWER, QUICK_REQUESTS, SHAPE, STREAMS, live_model, mixed, poisson
from weft_kernels.cpu.threads import cpu_quota
from weft_sim.report import Served, quantile
from weft_sim.simulate import PoolDescription

MECHANISMS = ("mixed", "continuous", "request")
REQUESTS = 96
LONG_PROMPT = 512
LOADS = (0.3, 0.6)
CALIBRATION, QUICK = Amounts(seconds=5.0, singles=12, answers=6), Amounts(seconds=2.0, singles=4, answers=2)


def figures(origin: Origin, *, quick: bool, seed: int, bar: Bar) -> Iterator[Line]:
    """Every mechanism at every load. Raises BenchFailed."""
    count, shape = QUICK_REQUESTS if quick else REQUESTS, SHAPES[SHAPE]
    model = live_model(LONG_PROMPT + CHAT_ANSWER, batch_tokens=LONG_PROMPT + STREAMS, token_time_ms=60_000)
    mix = mixed(random.Random(seed), model.names, count, LONG_PROMPT)
    with bar("steps of the engine alone", 1) as advanced:
        engine = measure(files(model.base), model.adapters, model.sizes, shape.vocab, seed)
        advanced(1)
    described = PoolDescription(
        total_pages=pages_of(model.sizes), max_sequences=STREAMS, adapters=ADAPTERS,
        max_batch_tokens=model.sizes.batch_tokens, slots=ADAPTERS, cores=cpu_quota(), one_host=True,
        threads=engine.threads,
    )  # fmt: skip
    simulated = Model(described, engine)
    rate = 0.0
    for name in MECHANISMS:
        with model.stack({"replicas": 1}, "weft_bench.batching_runner", name) as stack:
            live = Live(stack)
            if not rate:
                amounts = QUICK if quick else CALIBRATION
                bodies = partial(requests, model.names)
                simulated, _ = calibrate(live, bodies, simulated, amounts, random.Random(seed))
                rate = live.closed(mix.bodies, STREAMS).rate
            else:
                live.closed(mix.bodies[:STREAMS], STREAMS)  # every adapter in its slot, every path warm
            as_this = replace(simulated, pool=replace(simulated.pool, batching=name))
            for load in LOADS:
                found = poisson(live, mix, load, rate, seed, bar, name)
                replayed = as_this.replay(found.trace())
                case = f"batching, {count} requests, load {load:g}, {name}"
                gaps = [gap for answer in found.answers for gap in answer.gaps()]
                yield from _lines(origin, case, found.served(), gaps, replayed.served, replayed.gaps_s)
                yield origin.line(case, "throughput", found.tokens / found.wall_s, "tokens/s")
            live.cpu.close()


def requests(names: Sequence[str], chance: random.Random, count: int) -> Bodies:
    """Make `count` requests of the mix."""
    return mixed(chance, names, count, LONG_PROMPT).bodies


def _lines(
    origin: Origin, case: str, live: Sequence[Served], live_gaps_s: Sequence[float], simulated: Sequence[Served],
    gaps_s: Sequence[float],
) -> Iterator[Line]:  # fmt: skip
    values: dict[str, Callable[[Served], float]] = {
        "TTFT": lambda one: one.ttft_ms,
        "end to end": lambda one: one.e2e_ms,
    }
    for name, value in values.items():
        for percent in (50, 90):
            found, replayed = (quantile([value(one) for one in run], percent / 100) for run in (live, simulated))
            yield origin.line(case, f"p{percent} {name}", found, "ms", baseline=replayed)
    for percent in (50, 99):
        found, replayed = (1e3 * quantile(run, percent / 100) for run in (live_gaps_s, gaps_s))
        yield origin.line(case, f"p{percent} TBT", found, "ms", baseline=replayed)
