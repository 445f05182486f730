"""`weft bench turns`: two checkouts measured in turn, as the ratio of their times with its 95 % interval.

One worker process a checkout imports that checkout's code and stays loaded. One worker is stopped (SIGSTOP) while the
other one runs. A round measures each case on both sides, one after the other; the order of the sides alternates.
The ratio of a round is new / old. The result is the geometric mean of the ratios; its interval is Student's, of the
mean of their logarithms.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

from scipy.stats import t

from weft_bench.cases import Turns
from weft_bench.cpu_shapes import BASE, POPULARITIES, RANK, SHAPES, adapter_of_row
from weft_bench.peers.worker import Worker
from weft_bench.roofline import BF16_BYTES, lora_bytes
from weft_bench.run import Run
from weft_operator.local.processes import CHILD
from weft_stage.cpu_models import adapter, base_model, cache_dir
from weft_stage.errors import NotCheckout

ENGINE_CASES = ("decode", "prefill")
CONTROL_CASES = {"reports": "cores", "decisions": "cores", "path": "cores", "request": "gateway", "refused": "gateway"}
CASES = (*ENGINE_CASES, *CONTROL_CASES)
ADAPTERS = (BASE, *POPULARITIES)
PACKAGES = ("weft/__init__.py", "*/weft_*/__init__.py", "*/*/weft_*/__init__.py")
SCRIPT = Path(__file__).with_name("turns_worker.py")
LEVEL_VARIABLE = "WEFT_CPU_LEVEL"  # as the kernels of every checkout read it
UNIT_S = 0.2  # of CPU, at least, of a measurement
MAX_REPEATS = 200  # of a case in a measurement
PROMPT_TOKENS, DECODE_TOKENS, PAGE_TOKENS = 128, 32, 16  # as in the worker
OLD, NEW = SIDES = ("old", "new")
HEADER = (
    f"{'case':<34} {'rounds':>6}  {'CPU, new / old [95 %]':<25} {'wall, new / old [95 %]':<25}"
    f" {'CPU old, new':>20} {'wall old, new':>20}"
)


@dataclass(frozen=True, slots=True)
class Options:
    """The engine of both sides, and the rounds. `threads` 0: as a runner chooses; `level` "": the best one here.

    With `target_percent` a case gets more rounds, up to `max_rounds`, until its CPU interval is that narrow.
    """

    models: Path  # the folder of random models
    dtype: str = "bf16"
    level: str = ""
    threads: int = 0
    seed: int = 0
    rounds: int = 20
    target_percent: float | None = None
    max_rounds: int = 200


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement. `work` is what both workers are asked for, with the part of them that does it (`on`)."""

    name: str
    work: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Interval:
    """A geometric mean of ratios with its 95 % interval; 0 to infinity with fewer than two ratios."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> "Interval":
        logs = [math.log(ratio) for ratio in ratios]
        mean, count = fmean(logs), len(logs)
        if count < 2:
            return cls(math.exp(mean), 0.0, math.inf)
        half = float(t.ppf(0.975, count - 1)) * stdev(logs) / math.sqrt(count)
        return cls(math.exp(mean), math.exp(mean - half), math.exp(mean + half))

    @property
    def percent(self) -> float:
        """Half of the interval's width in percent of the mean."""
        return 100 * (math.sqrt(self.high / self.low) - 1) if self.low else math.inf

    def __str__(self) -> str:
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


@dataclass(slots=True)
class Result:
    """The rounds of a case: by side, CPU and wall seconds of a unit of work."""

    case: Case
    taken: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {side: [] for side in SIDES})

    @property
    def rounds(self) -> int:
        return len(self.taken[NEW])

    @property
    def intervals(self) -> tuple[Interval, Interval]:
        """Return the ratios new / old of CPU and of wall time."""
        pairs = list(zip(self.taken[OLD], self.taken[NEW], strict=True))
        return Interval.of([new[0] / old[0] for old, new in pairs]), Interval.of(
            [new[1] / old[1] for old, new in pairs]
        )

    def is_done(self, options: Options) -> bool:
        if self.rounds < options.rounds:
            return False
        target = options.target_percent
        return target is None or self.rounds >= options.max_rounds or self.intervals[0].percent <= target

    def row(self) -> str:
        """Return the table's row; times are medians."""
        texts = list[str]()
        for metric in range(2):
            old_ms, new_ms = (1e3 * median(each[metric] for each in self.taken[side]) for side in SIDES)
            texts.append(f"{old_ms:.4g}, {new_ms:.4g} ms")
        cpu, wall = self.intervals
        return f"{self.case.name:<34} {self.rounds:>6}  {cpu!s:<25} {wall!s:<25} {texts[0]:>20} {texts[1]:>20}"

    def verdict(self, options: Options) -> str:
        """Return what the CPU interval says, in a sentence."""
        cpu, target = self.intervals[0], options.target_percent
        said = "no difference is shown"
        if cpu.low > 1 or cpu.high < 1:
            said = f"new takes {abs(cpu.mean - 1):.1%} {'more' if cpu.mean > 1 else 'less'} CPU"
        missed = f", wider than the target of {target:g} %" if target is not None and cpu.percent > target else ""
        return f"{self.case.name}: {said}; the interval is +-{cpu.percent:.2f} % after {self.rounds} rounds{missed}"


def order(round_number: int) -> tuple[str, str]:
    """Return the order of the sides in a round: it alternates."""
    return (OLD, NEW) if round_number % 2 == 0 else (NEW, OLD)


def cases_of(
    names: Sequence[str], shapes: Sequence[str], rows: Sequence[int], popularities: Sequence[str], models: Path
) -> list[Case]:
    """Return the cases. Adapters that are not in the folder of models yet are written."""
    made = list[Case]()
    for shape in shapes if set(names) & set(ENGINE_CASES) else ():
        for count in rows:
            for popularity in popularities:
                numbers = adapter_of_row(popularity, count)
                used = ["" if n is None else str(adapter(models, shape, SHAPES[shape], n, RANK)) for n in numbers]
                label = f"{count} row{'s' * (count > 1)}, {popularity}"
                made += [
                    Case(f"{shape} {name}, {label}", {"kind": name, "on": shape, "adapters": used})
                    for name in names
                    if name in ENGINE_CASES
                ]
    return made + [Case(name, {"kind": name, "on": CONTROL_CASES[name]}) for name in names if name in CONTROL_CASES]


def engines_of(cases: Sequence[Case], options: Options) -> dict[str, dict[str, Any]]:
    """Describe the engine of each shape to the worker: one engine runs all of the shape's cases."""
    engines: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(str(case.work["on"]) for case in cases if "adapters" in case.work):
        rows_of_cases = [case.work["adapters"] for case in cases if case.work["on"] == name]
        shape, rows = SHAPES[name], max(len(adapters) for adapters in rows_of_cases)
        slots = len({each for adapters in rows_of_cases for each in adapters if each})
        page_bytes = 2 * BF16_BYTES * shape.layers * shape.kv * PAGE_TOKENS
        adapter_pages = math.ceil(2 * slots * lora_bytes(shape, RANK) / page_bytes) + 2 * slots
        engines[name] = {
            "base": str(base_model(options.models, name, shape)), "rows": rows, "vocab": shape.vocab,
            "pages": rows * ((PROMPT_TOKENS + DECODE_TOKENS) // PAGE_TOKENS + 2) + adapter_pages,
            "flags": {
                "executor": "cpu", "dtype": options.dtype, "threads": options.threads, "max-adapters": max(slots, 1),
                "max-rank": RANK, "max-batch-tokens": max(1024, rows * PROMPT_TOKENS),
            },
        }  # fmt: skip
    return engines


def checkout(path: Path) -> Path:
    """Return the folder of a checkout. Raises NotCheckout."""
    folder = path.resolve()
    for part in (PACKAGES[0], "kernels/weft_kernels/__init__.py", "pyproject.toml"):
        if not (folder / part).is_file():
            raise NotCheckout(f"expected a checkout of Weft, got {path}: it has no {part}")
    return folder


def commit(folder: Path) -> str:
    """Return the commit of a checkout, marked where files differ from it; "" where git does not know."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def worker(side: str, folder: Path, work: Mapping[str, Any], level: str, scratch: Path) -> Worker:
    """Return one side's worker, with each folder of the checkout that has packages on its path.

    It ends with this process, however that ends.
    """
    paths = {str(init.parent.parent) for pattern in PACKAGES for init in folder.glob(pattern)}
    environment = {"PYTHONPATH": os.pathsep.join(sorted(paths))} | ({LEVEL_VARIABLE: level} if level else {})
    (home := scratch / side).mkdir()
    told = {**work, "checkout": str(folder), "child": str(CHILD), "scratch": str(home)}
    ends = [sys.executable, "-I", "-S", str(CHILD), str(os.getpid())]
    # -P: beside the script lie modules with names of the standard library's
    return Worker(f"the {side} worker", [*ends, sys.executable, "-P", str(SCRIPT)], told, home / "log", environment)


def figures(options: Turns, run: Run) -> None:
    """Measure both checkouts, and print a row for each case as soon as it is over. Raises NotCheckout, PeerFailed."""
    settings = Options(
        options.models or cache_dir(), options.dtype, options.level or "", options.threads, options.seed,
        options.rounds, options.target_percent, max(options.rounds, options.max_rounds or 10 * options.rounds),
    )  # fmt: skip
    chosen = cases_of(options.cases, options.shapes, options.rows, options.adapters, settings.models)
    results = list[Result]()
    with run.progress("turns, rounds", len(chosen) * options.rounds) as advance:
        for result in measure(options.old, options.new, chosen, settings, run.say, advance):
            print(("" if results else f"{HEADER}\n") + result.row(), flush=True)
            results.append(result)
    print("\n".join(result.verdict(settings) for result in results), flush=True)


def measure(
    old: Path, new: Path, cases: Sequence[Case], options: Options, say: Callable[[str], None],
    advance: Callable[[int], None] = lambda _: None,
) -> Iterator[Result]:  # fmt: skip
    """Measure all cases in turn and yield each once its rounds are done. `advance` hears of each round of a case.

    Raises NotCheckout, PeerFailed when a worker ends or does not answer.
    """
    folders = {OLD: checkout(old), NEW: checkout(new)}
    work = {
        "engines": engines_of(cases, options), "kinds": sorted({case.work["kind"] for case in cases}),
        "model": str(folders[NEW] / "examples/quickstart/model"),  # whose tokenizer both gateways have
    }  # fmt: skip
    with TemporaryDirectory(prefix="weft-turns-") as scratch, ExitStack() as stack:
        workers = dict[str, Worker]()
        for side, folder in folders.items():
            workers[side] = stack.enter_context(worker(side, folder, work, options.level, Path(scratch)))
            say(f"{side}: {folder} {commit(folder)} {workers[side].versions}".rstrip())
        yield from rounds(workers, cases, options, advance)


def rounds(
    workers: Mapping[str, Worker], cases: Sequence[Case], options: Options, advance: Callable[[int], None]
) -> Iterator[Result]:
    """Run rounds of all cases that are not done yet, after a first one that warms up."""
    repeats = {case.name: _warm(workers, case, options.seed) for case in cases}
    running, number = [Result(case) for case in cases], 0
    while running:
        for result in running:
            for side in order(number):
                answer = workers[side].ask(_asked(result.case, options.seed, number, repeats[result.case.name]))
                units = answer["units"]
                result.taken[side].append((answer["cpu_s"] / units, answer["wall_s"] / units))
            advance(1)
        number += 1
        done = [result for result in running if result.is_done(options)]
        running = [result for result in running if result not in done]
        yield from done


def _warm(workers: Mapping[str, Worker], case: Case, seed: int) -> int:
    """Run a case on both sides, and return how often it is repeated to take `UNIT_S` on the old one."""
    for side in SIDES:
        workers[side].ask(_asked(case, seed, -2, 1))
    cpu_s = workers[OLD].ask(_asked(case, seed, -1, 1))["cpu_s"]
    repeats = min(MAX_REPEATS, math.ceil(UNIT_S / max(cpu_s, 1e-6)))
    for side in SIDES:
        workers[side].ask(_asked(case, seed, -3, repeats))
    return repeats


def _asked(case: Case, seed: int, number: int, repeats: int) -> dict[str, Any]:
    """Return a round's order. Both sides draw the same prompts from its seed, and other ones in each round."""
    return {**case.work, "seed": f"{seed}, {case.name}, {number}", "repeats": repeats}
