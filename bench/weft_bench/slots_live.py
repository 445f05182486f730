"""Live: no bound and 8 slots on the CPU engine

The same requests as in a saturated cell of the grid, all at once, through `weft up` with one runner of m135 from cold,
its 768 pages and 64 sequences, and 32 or 128 adapters of rank 16: once with no bound, once with
`advanced.maxAdapters: 8`. Loads are as fast as this machine's. Client, control plane and engine share its cores.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from weft_bench.cpu_context import Bar
from weft_bench.cpu_engine import Sizes
from weft_bench.cpu_shapes import RANK, SHAPES, prompts
from weft_bench.fidelity import seen
from weft_bench.fidelity_live import Bodies, Live, LiveRun
from weft_bench.path_shape import NAMESPACE, write_manifests
from weft_bench.slots import LONGEST, POOL, SATURATED, SHORTEST, TOKENS, TTFT, UNBOUNDED, named
from weft_sim.report import quantile
from weft_stage.cpu_models import adapter, base_model
from weft_stage.errors import BenchFailed
from weft_stage.lines import Line, Origin
from weft_stage.shapes import Shape
from weft_stage.stack import Stack

MODEL = "m135"
ADAPTERS, BOUND = (32, 128), 8
REQUESTS, QUICK_REQUESTS, QUICK_ADAPTERS = 160, 32, 12
RATIO = f"no bound / at most {BOUND}"
READY_S = 300.0
PATIENT = {"WEFT_GATEWAY__HOLD_SECONDS": "3600"}


def figures(origin: Origin, folder: Path, known: Iterable[Line], *, seed: int, quick: bool, bar: Bar) -> Iterator[Line]:
    """The lines of every run that is not known. `folder`: of models."""
    there = {line.key: line.value for line in known if line.machine == origin.machine}
    shape, counts = SHAPES[MODEL], (QUICK_ADAPTERS,) if quick else ADAPTERS
    base = base_model(folder, MODEL, shape)
    with bar("slots, live", 2 * len(counts)) as advance:
        for count in counts:
            work = bodies(random.Random(f"slots {seed}"), count, QUICK_REQUESTS if quick else REQUESTS, shape.vocab)
            cell = f"live, {count} adapters, {len(work)} requests, load {SATURATED}, seed {seed}"
            rates = dict[int, float]()
            for bound in (UNBOUNDED, BOUND):
                case = f"{cell}, {named(bound)}"
                rate = there.get((case, TOKENS, origin.machine))
                if rate is None:
                    adapters = [adapter(folder, MODEL, shape, number, RANK) for number in range(count)]
                    run = measure(base, adapters, shape, bound, work)
                    rate = run.tokens / run.wall_s
                    ttft = quantile([seen(answer).ttft_ms for answer in run.answers], 0.5) / 1e3
                    yield origin.line(case, TTFT, ttft, "s")
                    yield origin.line(case, "of the machine, by others", 100 * run.others, "%")
                    yield origin.line(case, TOKENS, rate, "tokens/s")
                rates[bound] = rate
                advance(1)
            yield origin.line(cell, RATIO, rates[UNBOUNDED] / rates[BOUND], "x")


def about() -> str:
    """What the page says of it."""
    return f"### {(__doc__ or '').strip()}"


def bodies(chance: random.Random, adapters: int, count: int, vocab: int) -> Bodies:
    """Requests as a cell of the grid has them."""
    found = list[tuple[int, dict[str, Any]]]()
    for _ in range(count):
        prompt_tokens, tokens = chance.randint(SHORTEST, LONGEST), chance.randint(SHORTEST, LONGEST)
        number = chance.randrange(adapters)
        (prompt,) = prompts(chance, 1, prompt_tokens, vocab)
        body = {"model": f"{NAMESPACE}/r{RANK}-{number}", "prompt": prompt, "temperature": 0, "max_tokens": tokens}
        found.append((number, body))
    return found


def measure(base: Path, adapters: Sequence[Path], shape: Shape, bound: int, work: Bodies) -> LiveRun:
    """One stack from cold, to the last answer. Raises BenchFailed."""
    sizes = Sizes(rows=POOL.max_sequences, slots=bound or len(adapters), prefills=POOL.max_prefills)
    with TemporaryDirectory(prefix="weft-bench-") as scratch:
        manifests = write_manifests(Path(scratch) / "manifests", base, adapters, shape, sizes)
        resize(manifests / "bench.yaml", bound)
        with Stack(manifests, Path(scratch) / "data", environment=PATIENT) as stack:
            stack.wait_for_models(timeout_s=READY_S)
            live = Live(stack)
            live.rest(1.0)
            run = live.open(work, [0.0] * len(work))
            live.cpu.close()
    if any(
        answer.tokens != body["max_tokens"] and not answer.stopped
        for answer, (_, body) in zip(run.answers, work, strict=True)
    ):
        raise BenchFailed("an answer has not all of its tokens")
    return run


def resize(path: Path, bound: int) -> None:
    """The grid's memory, and its bound or none."""
    objects = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    for one in objects:
        if one["kind"] == "ServingPool":
            one["spec"]["lora"] = {"maxRank": RANK}
            sizes = {"kvPages": POOL.total_pages, "maxAdapters": None if bound == UNBOUNDED else bound}
            one["spec"]["advanced"] = {
                name: value for name, value in (one["spec"]["advanced"] | sizes).items() if value is not None
            }
    path.write_text(yaml.safe_dump_all(objects), encoding="utf-8")
