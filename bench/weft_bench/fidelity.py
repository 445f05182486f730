"""`weft bench fidelity`: the simulator's times beside those of the live CPU engine, for the same requests.

For each model: the engine alone is timed (what steps take), a live stack is measured with single requests and at
saturation (what each process's events cost here), and both go into `weft_sim`. `m135 Unified` and `m135 Split` have two
runners of one thread each; their steps are also timed beside the same in another process, since the two share the
machine's memory. Then requests arrive at 25, 50 and 80 % of the saturating load (Poisson, each for the next adapter)
and go through the stack several times; the simulator is given the same requests at the same times. Nothing is fitted to
the loads that are compared. `value` is simulated, `baseline` live (median of the runs); `off by` is how far their ratio
is from 1, `live spread` how far the runs are from each other (largest less least, over the median). The client is on
the same cores.
"""

import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from weft.domain.machine import Kind
from weft_bench.cpu_context import Bar, adapter_pages
from weft_bench.cpu_engine import PAGE_TOKENS, Sizes, pages_of
from weft_bench.cpu_shapes import RANK, SHAPES, prompts
from weft_bench.fidelity_costs import Model, calibrated
from weft_bench.fidelity_engine import EngineCosts, measure, measure_beside
from weft_bench.fidelity_live import Bodies, Live, LiveRun
from weft_bench.path_shape import NAMESPACE, write_manifests
from weft_bench.roofline import lora_bytes
from weft_sim.executor_model import StepTimes
from weft_sim.hosts import Costs
from weft_sim.report import Served, quantile
from weft_sim.simulate import PoolDescription
from weft_sim.traces import poisson
from weft_stage.cpu_models import adapter, base_model, files
from weft_stage.lines import Line, Origin
from weft_stage.shapes import Shape
from weft_stage.sse import Streamed
from weft_stage.stack import UP, WORDS, Stack, quickstart

MODELS = ("quickstart", "m135", "m135 Unified", "m135 Split")
LOADS = (25, 50, 80)
QUICKSTART_SHAPE = Shape(hidden=128, layers=4, heads=4, kv_heads=2, inner=384, vocab=106)
STREAMS = 16  # that saturate
SOME_STREAMS = 4
ADAPTERS = 8
READY_S = 180.0
DISTURBED = 0.05  # of the machine, by other people's processes: such a run is made again, as often as there are runs
TARGETS = {50: 0.05, 90: 0.10}  # percentile -> how far the ratio may be from 1
SIZES = Sizes(rows=16, slots=ADAPTERS, context_tokens=256, batch_tokens=512, prefills=1, token_time_ms=100)


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is run."""

    runs: int = 5  # of each load
    seconds: float = 12.0  # of each of them
    singles: int = 30
    answers: int = 12  # one after the other


QUICK = Amounts(2, 4.0, 8, 4)
THREAD_RUNNERS = ("weft_stage.runner_up", "weft_stage.thread_runner", "--")  # of one thread each
EACH, WOKEN, SENT = ", each sequence", ": woken", " sent"
BESIDE, THREADS = "step beside another's, of alone", "threads of a step"
OTHER_COSTS = {
    "runner: lock from thread to thread": "switch",
    "supervisor: transaction": "commit",
    "supervisor: outcome": "outcome",
    "client: request": "client_request",
    "client: token": "client_token",
    "client: woken": "client_wake",
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

    @contextmanager
    def stack(self) -> Generator[Stack]:
        """The stack, once its models are served."""
        up = THREAD_RUNNERS if self.pool.runners > 1 else UP
        with TemporaryDirectory(prefix="weft-bench-") as data, Stack(self.manifests, Path(data), up=up) as stack:
            stack.wait_for_models(timeout_s=READY_S)
            yield stack

    def engine(self, seed: int) -> EngineCosts:
        """What steps take."""
        of = measure_beside if self.pool.runners > 1 else measure
        return of(self.files, self.adapters, self.sizes, self.vocab, seed)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What is measured. `known`: lines that are there, whose cells are not measured again; after `deadline` (on the
    monotonic clock) none begins.
    """

    amounts: Amounts
    seed: int
    known: Sequence[Line] = ()
    deadline: float = inf

    def missing(self, case: str) -> bool:
        """True where nothing is known of a case and there is time to measure it."""
        return monotonic() < self.deadline and all(line.case != case for line in self.known)


def figures(
    origin: Origin, names: Sequence[str], loads: Sequence[int], wanted: Measurement, folder: Path, bar: Bar
) -> Iterator[Line]:
    """Measure these models and loads: one cell calibrates, one each is a load. Raises BenchFailed."""
    for name in names:
        cells = [f"{name}, {load} %" for load in loads]
        if wanted.missing(f"{name}, cost") or any(map(wanted.missing, cells)):
            with case_of(name, folder) as case:
                yield from _figures(origin, case, loads, wanted, bar)


@contextmanager
def case_of(name: str, folder: Path) -> Generator[Case]:
    """Prepare the quickstart as it is in the checkout, or a random model of one of the shapes."""
    with TemporaryDirectory(prefix="weft-bench-") as scratch:
        if name == "quickstart":
            yield _quickstart()
        else:
            shape, _, mode = name.partition(" ")
            yield _random(shape, mode, folder, Path(scratch))


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


def _random(name: str, mode: str, folder: Path, scratch: Path) -> Case:
    """Prepare a random model. `mode`: of two runners; empty: one runner of all cores."""
    shape = SHAPES[name]
    base = base_model(folder, name, shape)
    adapters = [adapter(folder, name, shape, number, RANK) for number in range(ADAPTERS)]
    sizes = replace(
        SIZES,
        adapter_pages=adapter_pages(shape, ADAPTERS * lora_bytes(shape, RANK), ADAPTERS),
        threads=1 if mode else 0,
    )
    spec = {"replicas": 2, "phases": {"mode": mode}} if mode else {}
    manifests = write_manifests(scratch / "manifests", base, adapters, shape, sizes, spec)

    def bodies(rng: random.Random, count: int) -> Bodies:
        found = list[tuple[int, dict[str, Any]]]()
        for i in range(count):
            (prompt,) = prompts(rng, 1, rng.randint(16, 96), shape.vocab)
            number = i % ADAPTERS
            body = {"model": f"{NAMESPACE}/{adapters[number].name}", "prompt": prompt, "temperature": 0}
            found.append((number, {**body, "max_tokens": rng.randint(16, 48)}))
        return found

    pool = _pool(PoolDescription(total_pages=pages_of(sizes), max_sequences=sizes.rows, adapters=ADAPTERS))
    made = Case(name, manifests, files(base), adapters, sizes, shape.vocab, pool, bodies)
    if not mode:
        return made
    two = replace(pool, runners=2, phases=mode.lower(), page_kib=PAGE_TOKENS * 4 * shape.layers * shape.kv / 1024)
    return replace(made, name=f"{name} {mode}", pool=two)


def _pool(sized: PoolDescription) -> PoolDescription:
    """Return the pool as it is on this machine, with everything on its cores."""
    from weft_kernels.cpu.threads import cpu_quota

    return replace(sized, cores=cpu_quota(), one_host=True, slots=ADAPTERS, token_time_ms=SIZES.token_time_ms)


def _figures(
    origin: Origin, case: Case, loads: Sequence[int], wanted: Measurement, bar: Bar
) -> Iterator[Line]:  # fmt: skip
    rng, amounts, engine = random.Random(wanted.seed), wanted.amounts, None
    if wanted.missing(f"{case.name}, cost"):
        with bar(f"{case.name}: steps of the engine alone", 1) as advanced:
            engine = case.engine(wanted.seed)
            advanced(1)
        origin = replace(origin, versions=f"{origin.versions}, {engine.executor}, seed {wanted.seed}")
    with case.stack() as stack:
        live = Live(stack)
        if engine is not None:
            pool = replace(case.pool, threads=engine.threads)
            model, saturated = calibrate(case, live, Model(pool, engine), amounts, rng, bar)
            rate = saturated.rate
            yield origin.line(f"{case.name}, saturated", "busy cores", saturated.cores, "cores")
            yield from calibration_lines(origin, case.name, model, rate)
        else:
            model, rate = calibration_of(case, wanted.known)
            live.closed(case.bodies(rng, 6 * STREAMS), STREAMS)  # every adapter in its slot, every path warm
        for load in loads:
            if wanted.missing(f"{case.name}, {load} %"):
                yield from _at_load(origin, case, live, model, load, rate, wanted, bar)
        live.cpu.close()


def _at_load(
    origin: Origin, case: Case, live: Live, model: Model, load: int, saturated: float, wanted: Measurement, bar: Bar
) -> Iterator[Line]:
    arrivals, amounts = random.Random(f"{wanted.seed}/{load}"), wanted.amounts
    rate = saturated * load / 100
    count = max(STREAMS, round(rate * amounts.seconds))
    at_s = [one.at_s for one in poisson(rate, count, [(1, 1)], iter([0] * count), arrivals)]
    with bar(f"{case.name}: {load} %", amounts.runs) as advanced:
        found = list[LiveRun]()
        left = amounts.runs  # that may be disturbed
        while len(found) < amounts.runs:
            run = live.open(case.bodies(arrivals, count), at_s)
            if run.others > DISTURBED and left:
                left -= 1
                continue
            found.append(run)
            advanced(1)
    name = f"{case.name}, {load} %"
    yield origin.line(name, "of the machine, by others, at most", max(run.others for run in found), "share")
    replays = [model.replay(run.trace()) for run in found]
    yield from compared(
        origin, name, [[seen(answer) for answer in run.answers] for run in found], [one.served for one in replays]
    )
    gaps_ms = [[1e3 * gap for one in run.answers for gap in one.gaps()] for run in found]
    yield from beside(origin, name, "TBT", gaps_ms, [[1e3 * gap for gap in one.gaps_s] for one in replays])


def calibrate(
    case: Case, live: Live, model: Model, amounts: Amounts, rng: random.Random, bar: Bar
) -> tuple[Model, LiveRun]:
    """Return the model with what events of this stack cost, and the run that saturated it."""
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


def calibration_lines(origin: Origin, name: str, model: Model, rate: float) -> Iterator[Line]:
    """Yield what `calibration_of` reads. `rate`: requests a second that saturate the stack."""
    yield origin.line(f"{name}, saturated", "requests", rate, "1/s")
    yield origin.line(f"{name}, saturated", BESIDE, model.engine.beside, "x")
    yield origin.line(f"{name}, saturated", THREADS, model.engine.threads, "")
    for event, seconds in cost_values(model).items():
        yield origin.line(f"{name}, cost", event, seconds * 1e6, "us")


def cost_values(model: Model) -> dict[str, float]:
    """Return seconds of what the simulator takes from this machine, by name; `weft_sim.hosts.MEASURED` is the like."""
    costs, times = model.costs, model.engine.times
    found = {f"{kind.value}: {event}": seconds for (kind, event), seconds in costs.events.items()}
    found |= {f"{kind.value}: {event}{EACH}": seconds for (kind, event), seconds in costs.per_item.items()}
    found |= {f"{kind.value}{WOKEN}": seconds for kind, seconds in costs.wake.items()}
    found |= {f"runner: {message}{SENT}": seconds for message, seconds in costs.sends.items()}
    found |= {name: getattr(costs, field) for name, field in OTHER_COSTS.items()}
    found |= {"a message on its way": model.delay_s}
    found |= {f"step of {tokens:g} tokens": ms / 1e3 for tokens, ms in times.curve}
    return found | {"adapter in a step": times.adapter_ms / 1e3, "key in a step": times.key_ms / 1e3}


def calibration_of(case: Case, lines: Sequence[Line]) -> tuple[Model, float]:
    """Return what an earlier run's lines say: the calibrated model, and the requests a second that saturate it."""
    saturated = {line.metric: line.value or 0.0 for line in lines if line.case == f"{case.name}, saturated"}
    values = {line.metric: (line.value or 0.0) / 1e6 for line in lines if line.case == f"{case.name}, cost"}
    events, per_item = dict[tuple[Kind, str], float](), dict[tuple[Kind, str], float]()
    wake, sends, curve = dict[Kind, float](), dict[str, float](), list[tuple[float, float]]()
    for name, seconds in values.items():
        of, _, event = name.partition(": ")
        if name in OTHER_COSTS:
            continue
        if name.startswith("step of "):
            curve.append((float(name.split()[2]), seconds * 1e3))
        elif name.endswith(WOKEN):
            wake[Kind(of.removesuffix(WOKEN))] = seconds
        elif name.endswith(SENT):
            sends[event.removesuffix(SENT)] = seconds
        elif name.endswith(EACH):
            per_item[Kind(of), event.removesuffix(EACH)] = seconds
        elif event:
            events[Kind(of), event] = seconds
    others = {field: values[name] for name, field in OTHER_COSTS.items()}
    times = StepTimes(
        0.0, 0.0, 0.0, values["key in a step"] * 1e3, values["adapter in a step"] * 1e3, tuple(sorted(curve))
    )
    threads = round(saturated[THREADS])
    engine = EngineCosts(times, 0.0, 0.0, 0.0, threads, "", saturated[BESIDE])
    costs = Costs(events, per_item, wake=wake, sends=sends, **others)
    model = Model(replace(case.pool, threads=threads), engine, costs, values["a message on its way"])
    return model, saturated["requests"]


def seen(answer: Streamed) -> Served:
    """Return a live answer in the simulator's terms."""
    between = (answer.end - answer.first) / (answer.tokens - 1) * 1e3 if answer.tokens > 1 else None
    return Served((answer.first - answer.start) * 1e3, between, (answer.end - answer.start) * 1e3, answer.tokens)


def compared(
    origin: Origin, case: str, live: Sequence[Sequence[Served]], simulated: Sequence[Sequence[Served]]
) -> Iterator[Line]:
    """Compare simulated and live times: of each quantile the median over the runs."""
    values: dict[str, Callable[[Served], float | None]] = {
        "TTFT": lambda one: one.ttft_ms,
        "time per token": lambda one: one.tpot_ms,
        "end to end": lambda one: one.e2e_ms,
    }
    for name, value in values.items():
        lived, replayed = (
            [[found for one in run if (found := value(one)) is not None] for run in runs] for runs in (live, simulated)
        )
        yield from beside(origin, case, name, lived, replayed)


def beside(
    origin: Origin, case: str, name: str, live_ms: Sequence[Sequence[float]], simulated_ms: Sequence[Sequence[float]]
) -> Iterator[Line]:
    """Compare the quantiles of one time `name`, each given by runs."""
    for percent, most in TARGETS.items():
        lived, replayed = ([quantile(values, percent / 100) for values in runs] for runs in (live_ms, simulated_ms))
        ms, live = median(replayed), median(lived)
        yield origin.line(case, f"{name} p{percent}", ms, "ms", baseline=live)
        yield origin.line(case, f"{name} p{percent}, live spread", (max(lived) - min(lived)) / live, "share")
        yield origin.line(case, f"{name} p{percent}, off by", abs(ms / live - 1), "share", target=f"<= {most:g}")
