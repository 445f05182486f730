"""`weft bench turns`: two checkouts measured in turn, as the ratio of their times with its 95 % interval.

Each checkout has a worker process that imports its code. One worker is stopped (SIGSTOP) while the other worker runs.
A round measures each case on both sides, one after the other; the order of the sides alternates. The ratio of a round
is new / old. Two processes of equal code differ by a few percent for as long as they live (addresses, pages), so both
workers are started again after `START_ROUNDS` rounds. Rounds of one start are not independent: their geometric mean is
one sample. The result is the geometric mean of all ratios. Its 95 % interval is Student's, of the samples' logarithms.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, geometric_mean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

from scipy.stats import t

from weft_bench.cases import Turns
from weft_bench.cpu_shapes import RANK, SHAPES, adapter_of_row
from weft_bench.drive.engine import PAGE_TOKENS, adapter_pages
from weft_bench.peers.worker import Worker, command
from weft_bench.roofline import lora_bytes
from weft_bench.run import Run
from weft_operator.local.processes import CHILD
from weft_stage.cpu_models import adapter, base_model, cache_dir
from weft_stage.errors import NotCheckout

CONTROL_CASES = {"reports": "cores", "decisions": "cores", "path": "cores", "request": "gateway", "refused": "gateway"}
PACKAGES = ("weft/__init__.py", "*/weft_*/__init__.py", "*/*/weft_*/__init__.py")
LEVEL_VARIABLE = "WEFT_CPU_LEVEL"  # as the kernels of every checkout read it
UNIT_S = 0.2  # of CPU, at least, of a measurement
START_ROUNDS = 2  # of a pair of workers: each side is first once
MAX_REPEATS = 200  # of a case in a measurement
PROMPT_TOKENS, DECODE_TOKENS = 128, 32  # as in the worker
OLD, NEW = SIDES = ("old", "new")
HEADER = (
    f"{'case':<34} {'rounds':>6}  {'CPU, new / old [95 %]':<25} {'wall, new / old [95 %]':<25}"
    f" {'CPU old, new':>20} {'wall old, new':>20}"
)


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
    def intervals(self) -> list[Interval]:
        """Return the ratios new / old of CPU and of wall time, with one sample for each start of the workers."""
        pairs = list(zip(self.taken[OLD], self.taken[NEW], strict=True))
        starts = [pairs[first : first + START_ROUNDS] for first in range(0, len(pairs), START_ROUNDS)]
        return [
            Interval.of([geometric_mean(new[metric] / old[metric] for old, new in start) for start in starts])
            for metric in range(2)
        ]

    def is_done(self, options: Turns) -> bool:
        if self.rounds < options.rounds:
            return False
        target = options.target_percent
        return target is None or self.rounds >= max_rounds(options) or self.intervals[0].percent <= target

    def row(self) -> str:
        """Return the table's row; times are medians."""
        texts = list[str]()
        for metric in range(2):
            old_ms, new_ms = (1e3 * median(each[metric] for each in self.taken[side]) for side in SIDES)
            texts.append(f"{old_ms:.4g}, {new_ms:.4g} ms")
        cpu, wall = self.intervals
        return f"{self.case.name:<34} {self.rounds:>6}  {cpu!s:<25} {wall!s:<25} {texts[0]:>20} {texts[1]:>20}"

    def verdict(self, options: Turns) -> str:
        """Return what the CPU interval says, in a sentence."""
        cpu, target = self.intervals[0], options.target_percent
        said = "no difference is shown"
        if math.isinf(cpu.high):
            return f"{self.case.name}: an interval needs at least {2 * START_ROUNDS} rounds, got {self.rounds}"
        if cpu.low > 1 or cpu.high < 1:
            said = f"new takes {abs(cpu.mean - 1):.1%} {'more' if cpu.mean > 1 else 'less'} CPU"
        missed = f", wider than the target of {target:g} %" if target is not None and cpu.percent > target else ""
        return f"{self.case.name}: {said}; the interval is +-{cpu.percent:.2f} % after {self.rounds} rounds{missed}"


def figures(options: Turns, run: Run) -> None:
    """Measure both checkouts, and print a row for each case as soon as it is over. Raises NotCheckout, PeerFailed."""
    folders = {OLD: checkout(options.old), NEW: checkout(options.new)}
    cases, results = cases_of(options), list[Result]()
    work = {
        "engines": engines_of(cases, options), "parts": sorted({case.work["on"] for case in cases}),
        "model": str(folders[NEW] / "examples/quickstart/model"),  # whose tokenizer both gateways have
    }  # fmt: skip
    with (
        TemporaryDirectory(prefix="weft-turns-") as scratch,
        run.progress("turns, rounds at most", len(cases) * max_rounds(options)) as advance,
    ):

        @contextmanager
        def start(number: int) -> Generator[dict[str, Worker]]:
            """Start both workers for the rounds from `number` on. The side that is started first alternates."""
            workers, sides = dict[str, Worker](), SIDES if number // START_ROUNDS % 2 == 0 else SIDES[::-1]
            with ExitStack() as stack:
                for side in sides:
                    (home := Path(scratch) / f"{side}-{number}").mkdir()
                    workers[side] = stack.enter_context(worker(side, folders[side], work, options.level or "", home))
                    if not number:
                        run.say(f"{side}: {folders[side]} {commit(folders[side])} {workers[side].versions}".rstrip())
                yield workers

        for result in rounds(start, cases, options, advance):
            print(("" if results else f"{HEADER}\n") + result.row(), flush=True)
            results.append(result)
    print("\n".join(result.verdict(options) for result in results), flush=True)


def max_rounds(options: Turns) -> int:
    """Return the number of rounds after which a case ends in any event: a multiple of `START_ROUNDS`."""
    limit = options.rounds if options.target_percent is None else options.max_rounds or 10 * options.rounds
    return math.ceil(limit / START_ROUNDS) * START_ROUNDS


def cases_of(options: Turns) -> list[Case]:
    """Return the cases. Adapters that are not in the folder of models yet are written."""
    made, models = list[Case](), options.models or cache_dir()
    engine_cases = [name for name in options.cases if name not in CONTROL_CASES]
    for shape in options.shapes if engine_cases else ():
        for count in options.rows:
            for popularity in options.adapters:
                numbers = adapter_of_row(popularity, count)
                used = ["" if n is None else str(adapter(models, shape, SHAPES[shape], n, RANK)) for n in numbers]
                label = f"{count} row{'s' * (count > 1)}, {popularity}"
                for name in engine_cases:
                    made.append(Case(f"{shape} {name}, {label}", {"kind": name, "on": shape, "adapters": used}))
    control_cases = [name for name in options.cases if name in CONTROL_CASES]
    return made + [Case(name, {"kind": name, "on": CONTROL_CASES[name]}) for name in control_cases]


def engines_of(cases: Sequence[Case], options: Turns) -> dict[str, dict[str, Any]]:
    """Describe the engine of each shape to the worker: one engine runs all of the shape's cases."""
    engines: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(str(case.work["on"]) for case in cases if "adapters" in case.work):
        rows_of_cases = [case.work["adapters"] for case in cases if case.work["on"] == name]
        shape, rows = SHAPES[name], max(len(adapters) for adapters in rows_of_cases)
        slots = len({each for adapters in rows_of_cases for each in adapters if each})
        row_pages = (PROMPT_TOKENS + DECODE_TOKENS) // PAGE_TOKENS + 2
        engines[name] = {
            "base": str(base_model(options.models or cache_dir(), name, shape)), "rows": rows, "vocab": shape.vocab,
            "pages": rows * row_pages + adapter_pages(shape, slots * lora_bytes(shape, RANK), slots),
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
            raise NotCheckout(f"expected a checkout of Weft, got {folder}: it has no {part}")
    return folder


def commit(folder: Path) -> str:
    """Return the commit of a checkout, marked where files differ from it; "" where git does not know."""
    words = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def worker(side: str, folder: Path, work: Mapping[str, Any], level: str, home: Path) -> Worker:
    """Return one side's worker, with each folder of the checkout that has packages on its path.

    It ends with this process, however that ends.
    """
    paths = {str(init.parent.parent) for pattern in PACKAGES for init in folder.glob(pattern)}
    environment = {"PYTHONPATH": os.pathsep.join(sorted(paths))} | ({LEVEL_VARIABLE: level} if level else {})
    side_work = {**work, "checkout": str(folder), "child": str(CHILD), "scratch": str(home)}
    ends = [sys.executable, "-I", "-S", str(CHILD), str(os.getpid())]
    words = [*ends, *command(sys.executable, "turns_worker")]
    return Worker(f"the {side} worker", words, side_work, home / "log", environment)


def rounds(
    start: Callable[[int], AbstractContextManager[Mapping[str, Worker]]],
    cases: Sequence[Case],
    options: Turns,
    advance: Callable[[int], None],
) -> Iterator[Result]:
    """Run rounds of all cases that are not done yet; yield each case that is done.

    `start` gives workers for the rounds from a number on. Each case warms up on both of them before its first round.
    """
    running, repeats, first = [Result(case) for case in cases], dict[str, int](), 0
    while running:
        with start(first) as workers:
            for name, case in ((result.case.name, result.case) for result in running):
                repeats[name] = _warm(workers, case, options.seed, repeats.get(name))
            for number in range(first, first + START_ROUNDS):
                for result in running:
                    for side in SIDES if number % 2 == 0 else reversed(SIDES):
                        ran = _ask(workers[side], result.case, options.seed, number, repeats[result.case.name])
                        result.taken[side].append((ran["cpu_s"] / ran["units"], ran["wall_s"] / ran["units"]))
                    advance(1)
        first += START_ROUNDS
        done = [result for result in running if result.is_done(options)]
        running = [result for result in running if result not in done]
        yield from done


def _warm(workers: Mapping[str, Worker], case: Case, seed: int, repeats: int | None) -> int:
    """Run a case on both sides. Return its repeats: unless given, as many as take `UNIT_S` on the old side."""
    for side in SIDES:
        _ask(workers[side], case, seed, -2, 1)
    if repeats is None:
        cpu_s = {side: _ask(workers[side], case, seed, -1, 1)["cpu_s"] for side in SIDES}[OLD]  # both do equal work
        repeats = min(MAX_REPEATS, math.ceil(UNIT_S / max(cpu_s, 1e-6)))
    for side in SIDES:
        _ask(workers[side], case, seed, -3, repeats)
    return repeats


def _ask(side: Worker, case: Case, seed: int, number: int, repeats: int) -> dict[str, Any]:
    """Ask for a round. Both sides draw the same prompts from its seed, and other prompts in each round."""
    return side.ask({**case.work, "seed": f"{seed}, {case.name}, {number}", "repeats": repeats})
