"""Consolidation: Punica's one-hour picture, 16 runners at their best batch or idle

Requests arrive at random (Poisson) at a rate that rises for half an hour to 90 % of what 16 runners sustain, and falls
again; adapters are drawn by Zipf's law with exponent 1.5; answers are 101 tokens long on average (Punica, section 7).
A runner's best batch is 32, at the step times of a 7B model on an A100; it takes 64. A run of the whole hour takes
hours, so all times of the load and of the policies (the hour, the minute, the period of consolidation, the idle time of
autoscaling) are divided by 15: load changes 15 times as fast against the life of a request, which is harder to pack.
Predictions are log-normal quantiles about a guess that is off by a factor of 1.5 (one sigma).

A runner is *full* in a minute where its mean batch is at least 90 % of its best batch, *idle* where it runs nothing,
and *partial* otherwise; a partial one that receives nothing new is on its way to idle. Ideal packing puts the sequences
of each moment on as few runners as hold them at their best batch; `runner-minutes` are those that are not idle, and
`provided` those that are there. Packing goes beyond the best batch, so it may take less than the ideal.
"""

import math
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from weft.domain.machine import Received
from weft.domain.prediction import Prediction
from weft.domain.request import Start
from weft_bench import charts
from weft_bench.s3 import Context
from weft_runner.core import Runner
from weft_scheduler.core import Consolidated
from weft_sim.clock import Rank
from weft_sim.deployment import Deployment
from weft_sim.objects import adapter_object, pool_object
from weft_sim.report import quantile
from weft_sim.simulate import WARM_S, PoolDescription, deployment_of, simulate
from weft_sim.stack import World
from weft_sim.traces import TraceArrival, adapter_draw
from weft_stage.lines import Line

RUNNERS = 16
SCALE = 15  # times are divided by it
MINUTES = 60
MINUTE_S = 60.0 / SCALE
PERIOD_S, IDLE_S = 10.0 / SCALE, 60.0 / SCALE
SAMPLES = 12  # of every batch, in a minute
PEAK = 0.9  # of what the runners sustain
FULL = 0.9  # of the best batch
OUTPUT_TOKENS, OUTPUT_SIGMA, MAX_OUTPUT = 101, 0.8, 512
PROMPT_TOKENS, PROMPT_SIGMA, MAX_PROMPT = 150, 0.8, 1024
ERROR_SIGMA = math.log(1.5)
QUICK_RUNNERS = 4
POOL = PoolDescription(
    runners=RUNNERS, page_tokens=16, total_pages=4_096, max_sequences=64, best_batch=32, max_batch_tokens=2_048,
    step_ms_1=14.0, step_ms_best=16.0, prefill_tokens_per_s=20_000.0, adapters=64, slots=32,
    load_ms=2.0, cpu=False, max_context_tokens=2_048, consolidation_s=PERIOD_S,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """One run of the hour."""

    name: str
    consolidation: str
    autoscaled: bool


SETTINGS = (
    Setting("16 runners, never", "never", autoscaled=False),
    Setting("16 runners, always", "always", autoscaled=False),
    Setting("autoscaled, never", "never", autoscaled=True),
    Setting("autoscaled, autoscaled", "autoscaled", autoscaled=True),
)


@dataclass
class Minute:
    """One runner in one minute."""

    batches: list[int] = field(default_factory=list[int])
    received: int = 0

    @property
    def mean(self) -> float:
        return sum(self.batches) / len(self.batches) if self.batches else 0.0


@dataclass
class Hour:
    """What the runners of a run did, in `length` minutes. `minutes` by (runner, minute)."""

    best_batch: int
    length: int = MINUTES
    minutes: dict[tuple[str, int], Minute] = field(default_factory=dict[tuple[str, int], Minute])
    busy: int = 0  # samples in which a runner was not idle
    provided: int = 0
    ideal: int = 0
    migrations: int = 0
    emptied: int = 0
    requests: int = 0
    ttft_ms: float = 0.0  # p99
    token_ms: float = 0.0  # p99

    def partial(self, minute: int) -> int:
        """Runners that are neither full nor idle, and receive something new."""
        here = [seen for (_, at), seen in self.minutes.items() if at == minute]
        return sum(0 < seen.mean < FULL * self.best_batch and seen.received > 0 for seen in here)

    def in_shape(self) -> float:
        """The share of the minutes with at most one such runner."""
        return sum(self.partial(minute) <= 1 for minute in range(self.length)) / self.length

    def sample(self, minute: int, batches: Mapping[str, int]) -> None:
        """What each runner that is there runs now."""
        for name, batch in batches.items():
            self.of(name, minute).batches.append(batch)
        self.provided += len(batches)
        self.busy += sum(batch > 0 for batch in batches.values())
        self.ideal += -(-sum(batches.values()) // self.best_batch)

    def of(self, name: str, minute: int) -> Minute:
        """A runner's."""
        return self.minutes.setdefault((name, minute), Minute())


class Watch:
    """Samples every runner's batch, and counts what is started where."""

    def __init__(self, world: World, best_batch: int, begin_s: float) -> None:
        self.hour, self._world, self._begin_s = Hour(best_batch), world, begin_s
        world.on_event = self._event
        for process in world.processes.values():
            process.on_event = self._event
        world.scheduler.on_effects = self._effects
        for sample in range(MINUTES * SAMPLES):
            at_s = begin_s + (sample + 0.5) * MINUTE_S / SAMPLES
            world.clock.at(at_s, Rank.LAW, self._sample, sample // SAMPLES)

    def _event(self, process: Any, event: object, now: float) -> None:
        del now
        if isinstance(event, Received) and isinstance(event.message, Start):
            minute = math.floor((self._world.clock.now - self._begin_s) / MINUTE_S)
            self.hour.of(process.name, minute).received += 1

    def _effects(self, process: Any, event: object, effects: Any) -> None:
        del process, event
        for effect in effects:
            if type(effect) is Consolidated:
                self.hour.emptied += 1
                self.hour.migrations += len(effect.request_ids)

    def _sample(self, minute: int) -> None:
        batches = {
            name: len(process.machine.pool.sequences)
            for name, process in self._world.runners.items()
            if process.up and isinstance(process.machine, Runner)
        }
        self.hour.sample(minute, batches)


def run(context: Context) -> Iterator[Line]:
    """Every setting, on the same requests."""
    runners = QUICK_RUNNERS if context.quick else RUNNERS
    with ProcessPoolExecutor(context.jobs) as pool, context.bar("consolidation", len(SETTINGS)) as advanced:
        seeds = [context.seed] * len(SETTINGS)
        for setting, hour in zip(SETTINGS, pool.map(simulated, SETTINGS, seeds, [runners] * len(seeds)), strict=True):
            yield from _lines(context, setting, hour)
            name = setting.name.replace(" ", "-").replace(",", "")
            context.draw(f"consolidation-{name}", picture(setting.name, hour, runners))
            advanced(1)


def arrivals(seed: int, runners: int) -> list[TraceArrival]:
    """The hour's requests."""
    chance = random.Random(f"{seed}/consolidation")
    adapters = adapter_draw("skewed", POOL.adapters, chance)
    decode_s = OUTPUT_TOKENS * POOL.step_ms_best / 1e3 / POOL.best_batch
    most_s = PEAK * runners / (decode_s + PROMPT_TOKENS / POOL.prefill_tokens_per_s)
    span_s, at_s, found = MINUTES * MINUTE_S, 0.0, list[TraceArrival]()
    while (at_s := at_s + chance.expovariate(most_s)) < span_s:
        if chance.random() < 1 - abs(2 * at_s / span_s - 1):  # thinned: the rate is a triangle
            prompt, output = _length(chance, PROMPT_TOKENS, PROMPT_SIGMA, MAX_PROMPT), _output(chance)
            found.append(
                TraceArrival(
                    at_s, prompt, output, next(adapters), max_tokens=MAX_OUTPUT, predicted=_predicted(chance, output),
                    stops=True,
                )
            )  # fmt: skip
    return found


def _output(chance: random.Random) -> int:
    return _length(chance, OUTPUT_TOKENS, OUTPUT_SIGMA, MAX_OUTPUT)


def _length(chance: random.Random, mean: float, sigma: float, most: int) -> int:
    """Log-normal."""
    return max(1, min(most, round(chance.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))


def _predicted(chance: random.Random, output: int) -> Prediction:
    """A guess that is off by a random factor, and the quantiles that are calibrated for it."""
    guess = output * chance.lognormvariate(0.0, ERROR_SIGMA)
    p10, p50, p90, p99 = (max(1, round(guess * math.exp(z * ERROR_SIGMA))) for z in (-1.28, 0.0, 1.28, 2.33))
    return Prediction("", p50, p90, "drawn", p10, p99)


def simulated(setting: Setting, seed: int, runners: int) -> Hour:
    """One run of the hour."""
    pool = replace(POOL, runners=runners, consolidation=setting.consolidation)
    watches: list[Watch] = []
    requests = arrivals(seed, runners)
    deployment = _autoscaled(pool) if setting.autoscaled else deployment_of(pool)
    result = simulate(
        pool, requests, seed, deployment=deployment,
        attach=lambda world: watches.append(Watch(world, pool.best_batch, world.clock.now + WARM_S)),
    )  # fmt: skip
    figures, hour = result.figures, watches[0].hour
    assert not figures.failures, figures.failures
    hour.requests = len(figures.served)
    hour.ttft_ms = quantile([one.ttft_ms for one in figures.served], 0.99)
    hour.token_ms = quantile([one.tpot_ms for one in figures.served if one.tpot_ms is not None], 0.99)
    return hour


def _autoscaled(pool: PoolDescription) -> Deployment:
    """The same pool, sized by the operator between one runner and all of them."""
    fixed = deployment_of(pool)
    scaling = {"minReplicas": 1, "maxReplicas": pool.runners, "idleSeconds": round(IDLE_S)}
    declared = pool_object("default", "pool", fixed.runners[0].spec, autoscaling=scaling)
    declared["spec"]["advanced"] |= {
        "consolidation": pool.consolidation, "maxQueue": pool.max_queue,
    }  # fmt: skip
    adapters = [adapter_object("default", f"a{number}", "pool") for number in range(pool.adapters)]
    return replace(
        fixed, runners=(), pools=(), adapters=(), objects=(declared, *adapters), template=fixed.runners[0],
        scheduler=replace(fixed.scheduler, absent_s=1.0, work_s=fixed.scheduler.work_s / SCALE, max_migrations=1000),
    )  # fmt: skip


def _lines(context: Context, setting: Setting, hour: Hour) -> Iterator[Line]:
    case, line = f"consolidation, {setting.name}", context.origin.line
    aimed = setting.consolidation != "never" and not context.quick
    yield line(case, "requests", hour.requests, "")
    shape = ">= 0.95" if aimed else None
    yield line(case, "minutes with at most one partial runner that receives", hour.in_shape(), "share", target=shape)
    packed = "<= 1.1" if aimed else None
    yield line(case, "runner-minutes, of an ideal packing", hour.busy / hour.ideal, "x", target=packed)
    yield line(case, "runner-minutes provided, of an ideal packing", hour.provided / hour.ideal, "x")
    yield line(case, "runners emptied", hour.emptied, "")
    yield line(case, "requests that migrated for it", hour.migrations / max(1, hour.requests), "share")
    yield line(case, "p99 TTFT", hour.ttft_ms, "ms")
    yield line(case, "p99 time per token", hour.token_ms, "ms")


def picture(name: str, hour: Hour, runners: int) -> str:
    """Runners by minutes, the fuller the darker."""
    uuids = sorted({uuid for uuid, _ in hour.minutes})
    cells = {
        (minute, uuids.index(uuid)): seen.mean / hour.best_batch
        for (uuid, minute), seen in hour.minutes.items()
        if minute < MINUTES
    }
    title = f"mean batch of {runners} runners in each minute, {name} (dark: {hour.best_batch}, white: idle)"
    return charts.heatmap(title, "minute", "runner", cells)
