"""`weft bench fidelity`: the simulator's times beside those of a live stack of m135, for the same requests.

The engine alone is timed, and the processes of the stack are, at 1, 4 and 16 streams. Both go into `weft_sim`. Then
requests arrive at 50 and 80 % of the saturating load (Poisson, each for the next adapter) and go through the stack
several times. The simulator gets the same requests at the same times. Nothing is fitted to these loads.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

from weft.domain.machine import Kind
from weft_bench.cases import Fidelity
from weft_bench.cpu_shapes import RANK, SHAPES, prompts
from weft_bench.drive.engine import Sizes, adapter_pages, pages_of
from weft_bench.fidelity_engine import EngineCosts, measure
from weft_bench.figures.path import CLIENT, COMPONENTS, CPU
from weft_bench.figures.phases import ADAPTERS, SHAPE, started
from weft_bench.path_shape import NAMESPACE
from weft_bench.roofline import lora_bytes
from weft_bench.run import Run
from weft_kernels.cpu.threads import cpu_quota
from weft_sim.clock import Rank
from weft_sim.hosts import MEASURED, Costs
from weft_sim.report import Served, quantile
from weft_sim.shells import SupervisorShell
from weft_sim.simulate import WARM_S, PoolDescription, deployment_of, simulate
from weft_sim.stack import World
from weft_sim.traces import TraceArrival, poisson
from weft_stage import sse
from weft_stage.cpu_models import adapter, base_model, cache_dir, files
from weft_stage.lines import Line, Origin
from weft_stage.stack import Stack

STREAMS, QUICK_STREAMS = {1: 16, 4: 48, 16: 96}, {1: 4, 4: 12, 16: 48}  # at a time: requests; the last saturate
SECONDS, QUICK_SECONDS, QUICK_RUNS = 12.0, 4.0, 2  # of a live run
SETTLED_S = 0.3  # after the answers: outcomes are stored, reports are through
WARM_GAP_S = 0.3  # between the simulated requests that load each adapter
HOPS = 6  # messages before a first token: predictor, scheduler and runner, there and back
SWITCHES = 2  # of the interpreter's lock in a step: to the thread that sends, and back
ROUNDS = 6  # costs change how often processes are woken, which changes costs
TICK_S = 0.01  # of the kernel's count of CPU seconds
TARGETS = {50: 0.05, 90: 0.10}  # percentile -> how far the ratio may be from 1
PAGES = adapter_pages(SHAPES[SHAPE], ADAPTERS * lora_bytes(SHAPES[SHAPE], RANK), ADAPTERS)
SIZES = Sizes(
    rows=16, slots=ADAPTERS, context_tokens=256, batch_tokens=512, prefills=1, token_time_ms=100, adapter_pages=PAGES
)
TIMES: Mapping[str, Callable[[Served], float | None]] = {
    "TTFT": lambda one: one.ttft_ms, "time per token": lambda one: one.tpot_ms, "end to end": lambda one: one.e2e_ms,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LiveRun:
    """Answers of the stack, the number of each one's adapter, and the CPU seconds of each process meanwhile."""

    answers: Sequence[sse.Streamed]
    adapters: Sequence[int]
    cpu_s: Mapping[str, float]
    wall_s: float

    def trace(self) -> list[TraceArrival]:
        """Return the same requests at the same times, for the simulator."""
        first = min(answer.start for answer in self.answers)
        return [
            TraceArrival(answer.start - first, answer.prompt_tokens, answer.tokens, adapter, answer.stopped)
            for answer, adapter in zip(self.answers, self.adapters, strict=True)
        ]

    def served(self) -> list[Served]:
        """Return the answers as the simulator reports its own."""
        return [
            Served(
                (one.first - one.start) * 1e3,
                (one.end - one.first) / (one.tokens - 1) * 1e3 if one.tokens > 1 else None,
                (one.end - one.start) * 1e3, one.tokens,
            )
            for one in self.answers
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Replay:
    """A simulated run: `served` in the order of the requests, gaps between tokens, CPU seconds of each process."""

    served: Sequence[Served]
    gaps_s: Sequence[float]
    cpu_s: Mapping[Kind, float]


@dataclass(frozen=True, slots=True)
class Model:
    """The simulator's deployment of the stack on this machine."""

    pool: PoolDescription
    engine: EngineCosts
    costs: Costs = MEASURED
    delay_s: float = 0.0

    def replay(self, arrivals: Sequence[TraceArrival]) -> Replay:
        """Replay these requests, after a request for each adapter that brings it to its slot."""
        warm = [TraceArrival(WARM_GAP_S * i, 8, 2, i) for i in range(self.pool.adapters)]
        lead_s = WARM_GAP_S * (len(warm) + 3)
        trace = [*warm, *(replace(arrival, at_s=lead_s + arrival.at_s) for arrival in arrivals)]
        deployment = deployment_of(self.pool)
        runners = tuple(replace(plan, times=self.engine.times) for plan in deployment.runners)
        deployment = replace(deployment, runners=runners, costs=self.costs, delay_s=self.delay_s)
        worlds, before = list[World](), dict[Kind, float]()

        def attach(world: World) -> None:
            worlds.append(world)
            world.clock.call_after(
                WARM_S + lead_s - WARM_GAP_S, Rank.LAW, lambda: before.update(simulated_cpu_s(world))
            )

        done = simulate(self.pool, trace, deployment=deployment, attach=attach, tbt=True).figures
        cpu_s = {kind: used_s - before[kind] for kind, used_s in simulated_cpu_s(worlds[0]).items()}
        return Replay(done.served[len(warm) :], done.gaps_s, cpu_s)


def simulated_cpu_s(world: World) -> dict[Kind, float]:
    """Return the CPU seconds of each kind of process until now."""
    shell = world.supervisor.shell
    assert isinstance(shell, SupervisorShell)
    used_s = {each.kind: each.busy_s + each.python.woken * each.costs.wake.get(each.kind, 0.0)
              for each in world.processes.values()}  # fmt: skip
    used_s[Kind.SUPERVISOR] += shell.commits * world.deployment.costs.commit
    return used_s


def calibrated(model: Model, runs: Sequence[LiveRun]) -> Model:
    """Return the model with costs that explain what the processes used, and with the latencies of the stack.

    The costs of a process keep the proportions of `MEASURED`. What the time to a first token and the time per token are
    more than simulated is the time until messages and threads are noticed: the mean of the two runs with the fewest
    streams.
    """
    client_s = sum(run.cpu_s[CLIENT] for run in runs) / sum(one.tokens for run in runs for one in run.answers)
    step = (Kind.RUNNER, "StepDone")
    costs = replace(
        MEASURED, client_token=client_s, events={**MEASURED.events, step: model.engine.step_s},
        per_item={**MEASURED.per_item, step: model.engine.row_s},
    )  # fmt: skip
    delay_s = switch_s = 0.0
    for _ in range(ROUNDS):
        model = replace(model, costs=replace(costs, switch=switch_s), delay_s=delay_s)
        replays = [model.replay(run.trace()) for run in runs]
        first_s, token_s = (
            mean(_median_s(run.served(), name) - _median_s(replay.served, name)
                 for run, replay in zip(runs[:2], replays, strict=False))
            for name in ("TTFT", "time per token")
        )  # fmt: skip
        delay_s, switch_s = max(0.0, delay_s + first_s / HOPS), max(0.0, switch_s + token_s / SWITCHES)
        for kind in (Kind.GATEWAY, Kind.SCHEDULER, Kind.SUPERVISOR, Kind.PREDICTOR):
            used_s = max(sum(run.cpu_s[kind.value] for run in runs), TICK_S)
            costs = scaled(costs, kind, used_s / sum(replay.cpu_s[kind] for replay in replays))
    return replace(model, costs=replace(costs, switch=switch_s), delay_s=delay_s)


def _median_s(served: Sequence[Served], name: str) -> float:
    return median(ms for one in served if (ms := TIMES[name](one)) is not None) / 1e3


def scaled(costs: Costs, kind: Kind, factor: float) -> Costs:
    """Return the costs with those of a kind of process multiplied."""
    return replace(
        costs,
        events={key: cost * (factor if key[0] is kind else 1.0) for key, cost in costs.events.items()},
        per_item={key: cost * (factor if key[0] is kind else 1.0) for key, cost in costs.per_item.items()},
        wake={key: cost * (factor if key is kind else 1.0) for key, cost in costs.wake.items()},
        commit=costs.commit * (factor if kind is Kind.SUPERVISOR else 1.0),
    )


def figures(options: Fidelity, run: Run) -> Iterator[Line]:
    """Calibrate the simulator, then compare each load. Raises BenchFailed."""
    shape, folder, rng = SHAPES[SHAPE], cache_dir(), random.Random(options.seed)
    adapters = [adapter(folder, SHAPE, shape, number, RANK) for number in range(ADAPTERS)]
    run.say("steps of the engine alone")
    engine = measure(files(base_model(folder, SHAPE, shape)), adapters, SIZES, shape.vocab, options.seed)
    origin = run.origin("tokenizers")
    origin = replace(origin, versions=f"{origin.versions}, {engine.executor}, seed {options.seed}")
    pool = PoolDescription(
        total_pages=pages_of(SIZES), max_sequences=SIZES.rows, adapters=ADAPTERS, slots=ADAPTERS, cores=cpu_quota(),
        one_host=True, threads=engine.threads, token_time_ms=SIZES.token_time_ms,
    )  # fmt: skip
    with started(SIZES) as stack:
        run.say("what processes use")
        live(stack, bodies(rng, 6 * SIZES.rows), SIZES.rows)  # every adapter in its slot, every path warm
        streams = QUICK_STREAMS if options.quick else STREAMS
        runs = [live(stack, bodies(rng, count), clients) for clients, count in streams.items()]
        model, rate = calibrated(Model(pool, engine), runs), len(runs[-1].answers) / runs[-1].wall_s
        yield origin.line(f"{SHAPE}, saturated", "requests", rate, "1/s")
        yield from cost_lines(origin, model)
        for load in options.loads:
            run.say(f"{load} %")
            chance = random.Random(f"{options.seed}/{load}")
            count = max(SIZES.rows, round(rate * load / 100 * (QUICK_SECONDS if options.quick else SECONDS)))
            at_s = [one.at_s for one in poisson(rate * load / 100, count, [(1, 1)], iter([0] * count), chance)]
            repeats = range(QUICK_RUNS if options.quick else options.runs)
            yield from compared(origin, f"{SHAPE}, {load} %", model,
                                [live(stack, bodies(chance, count), at_s) for _ in repeats])  # fmt: skip


def bodies(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Make requests, each for the next adapter."""
    return [
        {
            "model": f"{NAMESPACE}/r{RANK}-{i % ADAPTERS}", "temperature": 0, "max_tokens": rng.randint(16, 48),
            "prompt": prompts(rng, 1, rng.randint(16, 96), SHAPES[SHAPE].vocab)[0],
        }
        for i in range(count)
    ]  # fmt: skip


def live(stack: Stack, sent: list[dict[str, Any]], at: int | Sequence[float]) -> LiveRun:
    """Send requests by `at` clients, each its next one when the last has ended, or each at its time."""

    def used_s() -> dict[str, float]:
        return {CLIENT: time.process_time(), **{name: stack.metric(name, CPU) for name in COMPONENTS}}

    before, began = used_s(), time.perf_counter()
    send = sse.run if isinstance(at, int) else sse.run_at
    answers = asyncio.run(send("127.0.0.1", stack.port, sent, at))  # pyright: ignore[reportArgumentType]
    wall_s = time.perf_counter() - began
    time.sleep(SETTLED_S)
    cpu_s = {name: seconds - before[name] for name, seconds in used_s().items()}
    return LiveRun(answers, [i % ADAPTERS for i in range(len(sent))], cpu_s, wall_s)


def cost_lines(origin: Origin, model: Model) -> Iterator[Line]:
    """Yield what the simulator takes from this machine; `weft bench slots` reads the times of steps."""
    costs, times, case = model.costs, model.engine.times, f"{SHAPE}, cost"
    seconds = {f"{kind.value}: {event}": cost for (kind, event), cost in costs.events.items()}
    seconds |= {f"{kind.value}: {event}, each sequence": cost for (kind, event), cost in costs.per_item.items()}
    seconds |= {f"{kind.value}: woken": cost for kind, cost in costs.wake.items()}
    seconds |= {"runner: lock from thread to thread": costs.switch, "supervisor: transaction": costs.commit}
    seconds |= {"client: token": costs.client_token, "a message on its way": model.delay_s}
    seconds |= {f"step of {tokens:g} tokens": ms / 1e3 for tokens, ms in times.curve}
    seconds |= {"adapter in a step": times.adapter_ms / 1e3, "key in a step": times.key_ms / 1e3}
    for event, cost in seconds.items():
        yield origin.line(case, event, cost * 1e6, "us")


def compared(origin: Origin, case: str, model: Model, runs: Sequence[LiveRun]) -> Iterator[Line]:
    """Compare quantiles of simulated and live times, each the median over the runs."""
    replays = [model.replay(run.trace()) for run in runs]
    sides = [run.served() for run in runs], [replay.served for replay in replays]
    for name, value in TIMES.items():
        each = [[[ms for one in served if (ms := value(one)) is not None] for served in side] for side in sides]
        yield from _beside(origin, case, name, *each)
    gaps_ms = [[1e3 * gap for answer in run.answers for gap in answer.gaps()] for run in runs]
    yield from _beside(origin, case, "TBT", gaps_ms, [[1e3 * gap for gap in replay.gaps_s] for replay in replays])


def _beside(
    origin: Origin, case: str, name: str, live_ms: Sequence[Sequence[float]], simulated_ms: Sequence[Sequence[float]]
) -> Iterator[Line]:
    for percent, allowed in TARGETS.items():
        lived, replayed = ([quantile(values, percent / 100) for values in runs] for runs in (live_ms, simulated_ms))
        ms, live = median(replayed), median(lived)
        yield origin.line(case, f"{name} p{percent}", ms, "ms", baseline=live)
        yield origin.line(case, f"{name} p{percent}, live spread", (max(lived) - min(lived)) / live, "share")
        yield origin.line(case, f"{name} p{percent}, off by", abs(ms / live - 1), "share", target=f"<= {allowed:g}")
