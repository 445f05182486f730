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

from weft_bench.errors import NotCheckout
from weft_bench.peers.worker import Worker
from weft_operator.local.processes import CHILD

ENGINE_CASES = ("decode", "prefill")
CONTROL_CASES = ("reports", "decisions", "path", "request", "refused")
CASES = ENGINE_CASES + CONTROL_CASES
POPULARITIES = ("base", "Identical", "Uniform", "Skewed", "Distinct")
PACKAGES = ("weft/__init__.py", "*/weft_*/__init__.py", "*/*/weft_*/__init__.py")
SCRIPT = Path(__file__).with_name("turns_worker.py")
LEVEL_VARIABLE = "WEFT_CPU_LEVEL"  # as the kernels of every checkout read it
UNIT_S = 0.2  # of CPU, at least, of a measurement
MOST_REPEATS = 200  # of a case in a measurement
OLD, NEW = SIDES = ("old", "new")
PROMPT_TOKENS, DECODE_TOKENS = 128, 32  # as in the worker


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The engine of both sides. `threads` 0: as a runner chooses; `level` "": the best of this machine."""

    folder: Path  # of the random models
    dtype: str = "bf16"
    level: str = ""
    threads: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Amounts:
    """Rounds. With `target_percent` a case gets more, up to `max_rounds`, until its CPU interval is that narrow."""

    rounds: int = 20
    target_percent: float | None = None
    max_rounds: int = 200


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement. `work` is what the worker is asked for; it is the same on both sides."""

    name: str
    work: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds of one unit of work: on the clock, and of the processor."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Interval:
    """A geometric mean of ratios with its 95 % interval; (0, inf) with fewer than two ratios."""

    mean: float
    low: float
    high: float

    @property
    def percent(self) -> float:
        """Half of the interval's width in percent of the mean."""
        return 100 * (math.sqrt(self.high / self.low) - 1) if self.low else math.inf

    def __str__(self) -> str:
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


@dataclass(slots=True)
class Result:
    """The rounds of one case."""

    case: Case
    taken: dict[str, list[Taken]] = field(default_factory=lambda: {side: [] for side in SIDES})

    @property
    def rounds(self) -> int:
        return len(self.taken[NEW])

    @property
    def cpu(self) -> Interval:
        return interval([new.cpu_s / old.cpu_s for old, new in zip(self.taken[OLD], self.taken[NEW], strict=True)])

    @property
    def wall(self) -> Interval:
        return interval([new.wall_s / old.wall_s for old, new in zip(self.taken[OLD], self.taken[NEW], strict=True)])

    def median_ms(self, side: str) -> tuple[float, float]:
        """Return the median CPU and wall time of a unit of work."""
        taken = self.taken[side]
        return 1e3 * median(each.cpu_s for each in taken), 1e3 * median(each.wall_s for each in taken)


def interval(ratios: Sequence[float]) -> Interval:
    """Return the geometric mean of the ratios with its 95 % interval."""
    from scipy.stats import t  # here: half a second

    logs = [math.log(ratio) for ratio in ratios]
    mean, count = fmean(logs), len(logs)
    if count < 2:
        return Interval(math.exp(mean), 0.0, math.inf)
    half = float(t.ppf(0.975, count - 1)) * stdev(logs) / math.sqrt(count)
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def order(round_number: int) -> tuple[str, str]:
    """Return the order of the sides in a round: it alternates."""
    return (OLD, NEW) if round_number % 2 == 0 else (NEW, OLD)


def cases_of(
    names: Sequence[str], shapes: Sequence[str], rows: Sequence[int], adapters: Sequence[str], folder: Path
) -> list[Case]:
    """Return the cases. Models and adapters that are not in the folder yet are written."""
    engines = [name for name in names if name in ENGINE_CASES]
    made = [
        Case(
            f"{shape} {name}, {count} row{'s' * (count > 1)}, {popularity}",
            {"kind": name, "shape": shape, "adapters": _adapters(folder, shape, popularity, count)},
        )
        for shape in shapes * bool(engines)
        for count in rows
        for popularity in adapters
        for name in engines
    ]
    return made + [Case(name, {"kind": name}) for name in names if name in CONTROL_CASES]


def models_dir() -> Path:
    """Return the default folder of models."""
    from weft_bench.cpu_models import cache_dir

    return cache_dir()


def _adapters(folder: Path, shape: str, popularity: str, rows: int) -> list[str]:
    """Return the folder of each row's adapter; "" is the base."""
    from weft_bench.cpu_models import adapter  # here: torch
    from weft_bench.cpu_shapes import RANK, SHAPES, adapter_of_row

    numbers = adapter_of_row(popularity, rows)
    return ["" if n is None else str(adapter(folder, shape, SHAPES[shape], n, RANK)) for n in numbers]


def engines_of(cases: Sequence[Case], options: EngineOptions) -> dict[str, dict[str, Any]]:
    """Describe the engine of each shape to the worker: one engine runs all of the shape's cases."""
    from weft_bench.cpu_models import base_model
    from weft_bench.cpu_shapes import RANK, SHAPES
    from weft_bench.roofline import BF16_BYTES, lora_bytes

    engines: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(str(case.work["shape"]) for case in cases if "shape" in case.work):
        works = [case.work for case in cases if case.work.get("shape") == name]
        shape, rows = SHAPES[name], max(len(work["adapters"]) for work in works)
        slots = len({each for work in works for each in work["adapters"] if each})
        page_bytes = 2 * BF16_BYTES * shape.layers * shape.kv * 16
        engines[name] = {
            "base": str(base_model(options.folder, name, shape)), "rows": rows, "vocab": shape.vocab,
            "pages": rows * ((PROMPT_TOKENS + DECODE_TOKENS) // 16 + 2)
            + math.ceil(2 * slots * lora_bytes(shape, RANK) / page_bytes) + 2 * slots,
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


def python_path(folder: Path) -> str:
    """Return the PYTHONPATH of a checkout: each folder that has packages."""
    found = {init.parent.parent for pattern in PACKAGES for init in folder.glob(pattern)}
    return os.pathsep.join(str(each) for each in sorted(found))


def worker(side: str, folder: Path, work: Mapping[str, Any], level: str, scratch: Path) -> Worker:
    """Return one side's worker; it ends with this process, however that ends."""
    ends = [sys.executable, "-I", "-S", str(CHILD), str(os.getpid())]
    environment = {"PYTHONPATH": python_path(folder)} | ({LEVEL_VARIABLE: level} if level else {})
    (home := scratch / side).mkdir()
    told = {**work, "checkout": str(folder), "child": str(CHILD), "scratch": str(home)}
    # -P: no module of the script's folder stands in the way of another one
    return Worker(f"the {side} worker", [*ends, sys.executable, "-P", str(SCRIPT)], told, home / "log", environment)


def measure(
    old: Path, new: Path, cases: Sequence[Case], options: EngineOptions, amounts: Amounts,
    say: Callable[[str], None], advance: Callable[[int], None] = lambda _: None,
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
        workers = {
            side: stack.enter_context(worker(side, folders[side], work, options.level, Path(scratch))) for side in SIDES
        }
        for side in SIDES:
            say(f"{side}: {folders[side]} {commit(folders[side])} {workers[side].versions}".rstrip())
        yield from _rounds(workers, cases, options.seed, amounts, advance)


def _rounds(
    workers: Mapping[str, Worker], cases: Sequence[Case], seed: int, amounts: Amounts, advance: Callable[[int], None]
) -> Iterator[Result]:
    repeats = {case.name: _warm(workers, case, seed) for case in cases}
    open_results, number = [Result(case) for case in cases], 0
    while open_results:
        for result in open_results:
            for side in order(number):
                asked = _asked(result.case, seed, number, repeats[result.case.name])
                result.taken[side].append(_take(workers[side], asked))
            advance(1)
        number += 1
        done = [result for result in open_results if _is_done(result, amounts)]
        open_results = [result for result in open_results if result not in done]
        yield from done


def _is_done(result: Result, amounts: Amounts) -> bool:
    if result.rounds < amounts.rounds:
        return False
    target = amounts.target_percent
    return target is None or result.rounds >= amounts.max_rounds or result.cpu.percent <= target


def _warm(workers: Mapping[str, Worker], case: Case, seed: int) -> int:
    """Run a case on both sides once, and return how often it is repeated to last `UNIT_S` on the old one."""
    _take(workers[OLD], _asked(case, seed, -2, 1))
    answer = workers[OLD].ask(_asked(case, seed, -1, 1))
    repeats = min(MOST_REPEATS, math.ceil(UNIT_S / max(answer["cpu_s"], 1e-6)))
    _take(workers[NEW], _asked(case, seed, -2, 1))
    for side in SIDES:
        _take(workers[side], _asked(case, seed, -3, repeats))
    return repeats


def _asked(case: Case, seed: int, number: int, repeats: int) -> dict[str, Any]:
    """Both sides draw the same prompts from `seed`, and other ones in each round."""
    return {**case.work, "seed": f"{seed}, {case.name}, {number}", "repeats": repeats}


def _take(asked: Worker, work: Mapping[str, Any]) -> Taken:
    answer = asked.ask(work)
    return Taken(answer["wall_s"] / answer["units"], answer["cpu_s"] / answer["units"])


HEADER = (
    f"{'case':<34} {'rounds':>6}  {'CPU, new / old [95 %]':<25} {'wall, new / old [95 %]':<25}"
    f" {'CPU old, new':>20} {'wall old, new':>20}"
)


def row(result: Result) -> str:
    """Return the table's row of a case; times are medians in ms."""
    (old_cpu, old_wall), (new_cpu, new_wall) = result.median_ms(OLD), result.median_ms(NEW)
    return (
        f"{result.case.name:<34} {result.rounds:>6}  {result.cpu!s:<25} {result.wall!s:<25}"
        f" {f'{old_cpu:.4g}, {new_cpu:.4g} ms':>20} {f'{old_wall:.4g}, {new_wall:.4g} ms':>20}"
    )


def verdict(result: Result, amounts: Amounts) -> str:
    """Return what the interval says, in a sentence."""
    cpu, name = result.cpu, result.case.name
    said = "no difference is shown"
    if cpu.low > 1 or cpu.high < 1:
        said = f"new takes {abs(cpu.mean - 1):.1%} {'more' if cpu.mean > 1 else 'less'} CPU"
    width = f"the interval is +-{cpu.percent:.2f} % after {result.rounds} rounds"
    target = amounts.target_percent
    missed = f", wider than the target of {target:g} %" if target is not None and cpu.percent > target else ""
    return f"{name}: {said}; {width}{missed}"
