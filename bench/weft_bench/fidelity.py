"""`weft bench fidelity`: the simulator's times beside those of the live CPU engine, for the same requests.

For each model: the engine alone is timed (what steps take), a live stack is measured with single requests and at
saturation (what each process's events cost here), and both go into `weft_sim`. Then requests arrive at 25, 50 and 80 %
of the saturating load (Poisson, each for the next adapter) and go through the stack several times; the simulator is
given the same requests at the same times. Nothing is fitted to the loads that are compared. `value` is simulated,
`baseline` live (median of the runs); `off by` is how far their ratio is from 1, `live spread` how far the runs are
from each other (largest less least, over the median). The client is on the same cores.
"""

import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from weft_bench.cpu_context import Bar, adapter_pages
from weft_bench.cpu_engine import Sizes, pages_of
from weft_bench.cpu_models import adapter, base_model, files
from weft_bench.cpu_shapes import RANK, SHAPES, prompts
from weft_bench.fidelity_costs import Model, calibrated
from weft_bench.fidelity_engine import measure
from weft_bench.fidelity_live import Bodies, Live, LiveRun
from weft_bench.lines import Line, Origin
from weft_bench.path import WORDS
from weft_bench.path_shape import NAMESPACE, write_manifests
from weft_bench.roofline import Shape, lora_bytes
from weft_bench.sse import Streamed
from weft_bench.stack import Stack, quickstart
from weft_sim.report import Served, quantile
from weft_sim.simulate import PoolDescription
from weft_sim.traces import poisson

MODELS = ("quickstart", "m135")
LOADS = (25, 50, 80)
QUICKSTART_SHAPE = Shape(hidden=128, layers=4, heads=4, kv_heads=2, inner=384, vocab=106)
STREAMS = 16  # that saturate
SOME_STREAMS = 4
ADAPTERS = 8
READY_S = 180.0
DISTURBED = 0.05  # of the machine, by other people's processes: such a run is made again, as often as there are runs
TARGETS = {50: 0.10, 90: 0.15}  # percentile -> how far the ratio may be from 1
SIZES = Sizes(rows=16, slots=ADAPTERS, context_tokens=256, batch_tokens=512, prefills=1, token_time_ms=100)


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is run."""

    runs: int = 5  # of each load
    seconds: float = 12.0  # of each of them
    singles: int = 30
    answers: int = 12  # one after the other


QUICK = Amounts(2, 4.0, 8, 4)


@dataclass(frozen=True)
class Case:
    """A model with its stack. `bodies`: so many requests, each for the next adapter."""

    name: str
    manifests: Path
    files: Mapping[str, Path]
    adapters: Sequence[Path]
    sizes: Sizes
    vocab: int
    pool: PoolDescription
    bodies: Callable[[random.Random, int], Bodies]


def figures(
    origin: Origin, names: Sequence[str], loads: Sequence[int], amounts: Amounts, seed: int, folder: Path, bar: Bar
) -> Iterator[Line]:
    """All lines of these models and loads. Raises BenchFailed."""
    for name in names:
        with case_of(name, folder) as case:
            yield from _figures(origin, case, loads, amounts, seed, bar)


@contextmanager
def case_of(name: str, folder: Path) -> Generator[Case]:
    """The quickstart as it is in the checkout, or a random model of one of the shapes."""
    with TemporaryDirectory(prefix="weft-bench-") as scratch:
        if name == "quickstart":
            yield _quickstart()
        else:
            yield _random(name, folder, Path(scratch))


def _quickstart() -> Case:
    found = sorted(path.parent for path in (quickstart() / "adapters").glob("*/adapter_config.json"))
    tenants = {"upper": "acme", "reverse-words": "acme", "initials": "globex", "digits": "globex"}
    names = [f"{tenants.get(path.name, 'initech')}/{path.name}" for path in found]
    pool = _pool(PoolDescription(total_pages=1024, max_sequences=32, adapters=len(found)))

    def bodies(rng: random.Random, count: int) -> Bodies:
        texts = [" ".join(rng.choices(WORDS, k=rng.randint(8, 16))) for _ in range(count)]
        return [
            (i % len(names), {"model": names[i % len(names)], "prompt": text, "temperature": 0, "max_tokens": 200})
            for i, text in enumerate(texts)
        ]

    sizes = replace(SIZES, adapter_pages=adapter_pages(QUICKSTART_SHAPE, 8 * lora_bytes(QUICKSTART_SHAPE, 32), 8))
    return Case(
        "quickstart", quickstart(), files(quickstart() / "model"), found, sizes, QUICKSTART_SHAPE.vocab, pool, bodies
    )


def _random(name: str, folder: Path, scratch: Path) -> Case:
    shape = SHAPES[name]
    base = base_model(folder, name, shape)
    adapters = [adapter(folder, name, shape, number, RANK) for number in range(ADAPTERS)]
    sizes = replace(SIZES, adapter_pages=adapter_pages(shape, ADAPTERS * lora_bytes(shape, RANK), ADAPTERS))
    manifests = write_manifests(scratch / "manifests", base, adapters, shape, sizes)

    def bodies(rng: random.Random, count: int) -> Bodies:
        found = list[tuple[int, dict[str, Any]]]()
        for i in range(count):
            (prompt,) = prompts(rng, 1, rng.randint(16, 96), shape.vocab)
            number = i % ADAPTERS
            body = {"model": f"{NAMESPACE}/{adapters[number].name}", "prompt": prompt, "temperature": 0}
            found.append((number, {**body, "max_tokens": rng.randint(16, 48)}))
        return found

    pool = _pool(PoolDescription(total_pages=pages_of(sizes), max_sequences=sizes.rows, adapters=ADAPTERS))
    return Case(name, manifests, files(base), adapters, sizes, shape.vocab, pool, bodies)


def _pool(sized: PoolDescription) -> PoolDescription:
    """On this machine, with everything on its cores."""
    from weft_kernels.cpu.threads import cpu_quota

    return replace(sized, cores=cpu_quota(), one_host=True, slots=ADAPTERS, token_time_ms=SIZES.token_time_ms)


def _figures(origin: Origin, case: Case, loads: Sequence[int], amounts: Amounts, seed: int, bar: Bar) -> Iterator[Line]:
    rng = random.Random(seed)
    with bar(f"{case.name}: steps of the engine alone", 1) as advanced:
        engine = measure(case.files, case.adapters, case.sizes, case.vocab, seed)
        advanced(1)
    pool = replace(case.pool, threads=engine.threads)
    origin = replace(origin, versions=f"{origin.versions}, {engine.executor}, seed {seed}")
    with TemporaryDirectory(prefix="weft-bench-") as data, Stack(case.manifests, Path(data)) as stack:
        stack.wait_for_models(timeout_s=READY_S)
        live = Live(stack)
        model, saturated = calibrate(case, live, Model(pool, engine), amounts, rng, bar)
        yield origin.line(f"{case.name}, saturated", "requests", saturated.rate, "1/s")
        yield origin.line(f"{case.name}, saturated", "busy cores", saturated.cores, "cores")
        yield from _cost_lines(origin, f"{case.name}, cost", model)
        for load in loads:
            arrivals = random.Random(f"{seed}/{load}")
            rate = saturated.rate * load / 100
            count = max(STREAMS, round(rate * amounts.seconds))
            at_s = [one.at_s for one in poisson(rate, count, [(1, 1)], iter([0] * count), arrivals)]
            with bar(f"{case.name}: {load} %", amounts.runs) as advanced:
                found = list[LiveRun]()
                left = amounts.runs  # that may be disturbed
                while len(found) < amounts.runs:
                    run = live.open(case.bodies(rng, count), at_s)
                    if run.others > DISTURBED and left:
                        left -= 1
                        continue
                    found.append(run)
                    advanced(1)
            simulated = [model.replay(run.trace()).served for run in found]
            others = max(run.others for run in found)
            yield origin.line(f"{case.name}, {load} %", "of the machine, by others, at most", others, "share")
            yield from compared(
                origin,
                f"{case.name}, {load} %",
                [[seen(answer) for answer in run.answers] for run in found],
                simulated,
            )
        live.cpu.close()


def calibrate(
    case: Case, live: Live, model: Model, amounts: Amounts, rng: random.Random, bar: Bar
) -> tuple[Model, LiveRun]:
    """The model with what events of this stack cost, and the run that saturated it."""
    with bar(f"{case.name}: what events cost", 5) as advanced:
        live.closed(case.bodies(rng, 6 * STREAMS), STREAMS)  # every adapter in its slot, every path warm
        live.rest(1.0)
        advanced(1)
        singles = [(number, {**body, "max_tokens": 1}) for number, body in case.bodies(rng, amounts.singles)]
        single = live.singly(singles)
        advanced(1)
        answers = live.singly(case.bodies(rng, amounts.answers))
        advanced(1)
        few = live.closed(case.bodies(rng, 3 * STREAMS), SOME_STREAMS)
        saturated = live.closed(case.bodies(rng, max(3 * STREAMS, int(few.rate * amounts.seconds))), STREAMS)
        advanced(1)
        model = calibrated(model, single, answers, [few, saturated])
        advanced(1)
    return model, saturated


def _cost_lines(origin: Origin, case: str, model: Model) -> Iterator[Line]:
    """What the simulator was told of this machine: `weft_sim.hosts.MEASURED` is such a table."""
    costs = model.costs
    found = {f"{kind.value}: {event}": seconds for (kind, event), seconds in costs.events.items()}
    found |= {f"{kind.value}: {event}, each sequence": seconds for (kind, event), seconds in costs.per_item.items()}
    found |= {f"{kind.value}: woken": seconds for kind, seconds in costs.wake.items()}
    found |= {f"runner: {message} sent": seconds for message, seconds in costs.sends.items()}
    found |= {
        "runner: lock from thread to thread": costs.switch,
        "supervisor: transaction": costs.commit,
        "supervisor: outcome": costs.outcome,
        "client: request": costs.client_request,
        "client: token": costs.client_token,
        "client: woken": costs.client_wake,
        "a message on its way": model.delay_s,
    }
    for name, seconds in found.items():
        yield origin.line(case, name, seconds * 1e6, "us")
    for tokens, ms in model.engine.times.curve:
        yield origin.line(case, f"step of {tokens:g} tokens", ms * 1e3, "us")
    yield origin.line(case, "adapter in a step", model.engine.times.adapter_ms * 1e3, "us")


def seen(answer: Streamed) -> Served:
    """A live answer in the simulator's terms."""
    between = (answer.end - answer.first) / (answer.tokens - 1) * 1e3 if answer.tokens > 1 else None
    return Served((answer.first - answer.start) * 1e3, between, (answer.end - answer.start) * 1e3, answer.tokens)


def compared(
    origin: Origin, case: str, live: Sequence[Sequence[Served]], simulated: Sequence[Sequence[Served]]
) -> Iterator[Line]:
    """Simulated beside live: of each quantile the median over the runs."""
    values: dict[str, Callable[[Served], float | None]] = {
        "TTFT": lambda one: one.ttft_ms,
        "time per token": lambda one: one.tpot_ms,
        "end to end": lambda one: one.e2e_ms,
    }
    for name, value in values.items():
        for percent, most in TARGETS.items():
            lived, replayed = (
                [_quantile([found for one in run if (found := value(one)) is not None], percent) for run in runs]
                for runs in (live, simulated)
            )
            ms, live_ms = median(replayed), median(lived)
            yield origin.line(case, f"{name} p{percent}", ms, "ms", baseline=live_ms)
            spread = (max(lived) - min(lived)) / live_ms
            yield origin.line(case, f"{name} p{percent}, live spread", spread, "share")
            yield origin.line(case, f"{name} p{percent}, off by", abs(ms / live_ms - 1), "share", target=f"<= {most:g}")


def _quantile(values: Sequence[float], percent: int) -> float:
    return quantile(values, percent / 100)
