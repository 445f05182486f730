"""`weft bench fidelity`: the simulator's times beside those of the live CPU engine, for the same requests.

For each stack: the engine alone is timed (what steps take), the stack is measured with single requests and at
saturation (what each process's events cost here), and both go into `weft_sim`. Then requests arrive at 50 and 80 % of
the saturating load (Poisson, each for the next adapter) and go through the stack several times; the simulator is given
the same requests at the same times. Nothing is fitted to these loads.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from weft_bench.cases import Fidelity
from weft_bench.cpu_shapes import RANK, SHAPES, prompts
from weft_bench.drive.engine import Sizes, adapter_pages, pages_of
from weft_bench.fidelity_costs import STREAMS, Amounts, Model, calibrate
from weft_bench.fidelity_engine import measure
from weft_bench.fidelity_live import Bodies, Live, LiveRun
from weft_bench.path_shape import NAMESPACE, write_manifests
from weft_bench.roofline import Shape, lora_bytes
from weft_bench.run import Run
from weft_kernels.cpu.threads import cpu_quota
from weft_sim.report import Served, quantile
from weft_sim.simulate import PoolDescription
from weft_sim.traces import poisson
from weft_stage.cpu_models import adapter, base_model, cache_dir, files
from weft_stage.lines import Line, Origin
from weft_stage.sse import WORDS
from weft_stage.stack import Stack, quickstart

QUICKSTART_SHAPE = Shape(hidden=128, layers=4, heads=4, kv_heads=2, inner=384, vocab=106)
TENANTS = {"upper": "acme", "reverse-words": "acme", "initials": "globex", "digits": "globex"}
ADAPTERS = 8
READY_S = 180.0
DISTURBED = 0.05  # of the machine, by other people's processes: such a run is made again, as often as there are runs
TARGETS = {50: 0.05, 90: 0.10}  # percentile -> how far the ratio may be from 1
SIZES = Sizes(rows=16, slots=ADAPTERS, context_tokens=256, batch_tokens=512, prefills=1, token_time_ms=100)
QUICK = Amounts(2, 4.0, 8, 4)
COST_FIELDS = {
    "runner: lock from thread to thread": "switch",
    "supervisor: transaction": "commit",
    "supervisor: outcome": "outcome",
    "client: request": "client_request",
    "client: token": "client_token",
    "client: woken": "client_wake",
}
TIMES: Mapping[str, Callable[[Served], float | None]] = {
    "TTFT": lambda one: one.ttft_ms,
    "time per token": lambda one: one.tpot_ms,
    "end to end": lambda one: one.e2e_ms,
}


@dataclass(frozen=True)
class Case:
    """A model with its stack. `bodies(chance, count)`: `count` requests, each for the next adapter."""

    name: str
    manifests: Path
    files: Mapping[str, Path]
    adapters: Sequence[Path]
    sizes: Sizes
    vocab: int
    pool: PoolDescription
    bodies: Callable[[random.Random, int], Bodies]


def figures(options: Fidelity, run: Run) -> Iterator[Line]:
    """Calibrate each stack, then compare each load. Raises BenchFailed."""
    amounts = QUICK if options.quick else Amounts(runs=options.runs)
    for name in options.stacks:
        with TemporaryDirectory(prefix="weft-bench-") as scratch:
            folder = options.models or cache_dir()
            case = quickstart_case() if name == "quickstart" else random_case(name, folder, Path(scratch))
            run.say(f"{name}: steps of the engine alone")
            engine = measure(case.files, case.adapters, case.sizes, case.vocab, options.seed)
            origin = run.origin("tokenizers")
            origin = replace(origin, versions=f"{origin.versions}, {engine.executor}, seed {options.seed}")
            with Stack(case.manifests, Path(scratch) / "data") as stack:
                stack.wait_for_models(timeout_s=READY_S)
                live, rng = Live(stack), random.Random(options.seed)
                run.say(f"{name}: what events cost")
                uncalibrated = Model(replace(case.pool, threads=engine.threads), engine)
                model, saturated = calibrate(live, case.bodies, uncalibrated, amounts, rng)
                yield from calibration_lines(origin, name, model, saturated)
                for load in options.loads:
                    run.say(f"{name}: {load} %")
                    chance = random.Random(f"{options.seed}/{load}")
                    runs = runs_at(case, live, saturated.rate * load / 100, amounts, chance)
                    yield from compared(origin, f"{name}, {load} %", model, runs)
                live.cpu.close()


def quickstart_case() -> Case:
    """Prepare the quickstart as it is in the checkout."""
    folders = sorted(path.parent for path in (quickstart() / "adapters").glob("*/adapter_config.json"))
    names = [f"{TENANTS.get(path.name, 'initech')}/{path.name}" for path in folders]
    sizes = replace(SIZES, adapter_pages=adapter_pages(QUICKSTART_SHAPE, 8 * lora_bytes(QUICKSTART_SHAPE, 32), 8))

    def bodies(rng: random.Random, count: int) -> Bodies:
        texts = [" ".join(rng.choices(WORDS, k=rng.randint(8, 16))) for _ in range(count)]
        return [
            (i % len(names), {"model": names[i % len(names)], "prompt": text, "temperature": 0, "max_tokens": 200})
            for i, text in enumerate(texts)
        ]

    return Case(
        "quickstart", quickstart(), files(quickstart() / "model"), folders, sizes, QUICKSTART_SHAPE.vocab,
        _pool(total_pages=1024, max_sequences=32, adapters=len(folders)), bodies,
    )  # fmt: skip


def random_case(name: str, folder: Path, scratch: Path) -> Case:
    """Prepare a random model of a shape, with random adapters."""
    shape = SHAPES[name]
    base = base_model(folder, name, shape)
    adapters = [adapter(folder, name, shape, number, RANK) for number in range(ADAPTERS)]
    sizes = replace(SIZES, adapter_pages=adapter_pages(shape, ADAPTERS * lora_bytes(shape, RANK), ADAPTERS))
    manifests = write_manifests(scratch / "manifests", base, adapters, shape, sizes)

    def bodies(rng: random.Random, count: int) -> Bodies:
        requests = list[tuple[int, dict[str, Any]]]()
        for i in range(count):
            (prompt,) = prompts(rng, 1, rng.randint(16, 96), shape.vocab)
            number = i % ADAPTERS
            body = {"model": f"{NAMESPACE}/{adapters[number].name}", "prompt": prompt, "temperature": 0}
            requests.append((number, {**body, "max_tokens": rng.randint(16, 48)}))
        return requests

    pool = _pool(total_pages=pages_of(sizes), max_sequences=sizes.rows, adapters=ADAPTERS)
    return Case(name, manifests, files(base), adapters, sizes, shape.vocab, pool, bodies)


def _pool(**sizes: int) -> PoolDescription:
    """Return a pool of these sizes on this machine, with everything on its cores."""
    return PoolDescription(**sizes, cores=cpu_quota(), one_host=True, slots=ADAPTERS, token_time_ms=SIZES.token_time_ms)  # pyright: ignore[reportArgumentType]


def runs_at(case: Case, live: Live, rate: float, amounts: Amounts, chance: random.Random) -> list[LiveRun]:
    """Run the load `amounts.runs` times at the same times of arrival."""
    count = max(STREAMS, round(rate * amounts.seconds))
    at_s = [one.at_s for one in poisson(rate, count, [(1, 1)], iter([0] * count), chance)]
    runs, repeats = list[LiveRun](), amounts.runs
    while len(runs) < amounts.runs:
        run = live.open(case.bodies(chance, count), at_s)
        if run.others > DISTURBED and repeats:
            repeats -= 1
        else:
            runs.append(run)
    return runs


def calibration_lines(origin: Origin, name: str, model: Model, saturated: LiveRun) -> Iterator[Line]:
    """Yield what saturates the stack and what the simulator takes from this machine (`weft_sim.hosts.MEASURED`)."""
    costs, times = model.costs, model.engine.times
    seconds = {f"{kind.value}: {event}": cost for (kind, event), cost in costs.events.items()}
    seconds |= {f"{kind.value}: {event}, each sequence": cost for (kind, event), cost in costs.per_item.items()}
    seconds |= {f"{kind.value}: woken": cost for kind, cost in costs.wake.items()}
    seconds |= {f"runner: {message} sent": cost for message, cost in costs.sends.items()}
    seconds |= {event: getattr(costs, field) for event, field in COST_FIELDS.items()}
    seconds |= {f"step of {tokens:g} tokens": ms / 1e3 for tokens, ms in times.curve}
    seconds |= {"adapter in a step": times.adapter_ms / 1e3, "key in a step": times.key_ms / 1e3}
    seconds |= {"a message on its way": model.delay_s}
    busy_cores = sum(saturated.cpu.values()) / saturated.wall_s
    yield origin.line(f"{name}, saturated", "busy cores", busy_cores, "cores")
    yield origin.line(f"{name}, saturated", "requests", saturated.rate, "1/s")
    for event, cost in seconds.items():
        yield origin.line(f"{name}, cost", event, cost * 1e6, "us")


def compared(origin: Origin, case: str, model: Model, runs: Sequence[LiveRun]) -> Iterator[Line]:
    """Compare quantiles of simulated and live times, each the median over the runs."""
    yield origin.line(case, "of the machine, by others, at most", max(run.others for run in runs), "share")
    replays = [model.replay(run.trace()) for run in runs]
    live, simulated = [run.served() for run in runs], [replay.served for replay in replays]
    for name, value in TIMES.items():
        each = [[[ms for one in run if (ms := value(one)) is not None] for run in side] for side in (live, simulated)]
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
