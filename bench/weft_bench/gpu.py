"""`make gpu-bench` and `make gpu-check`: straight from a checkout, with torch, Triton and numpy, and nothing installed.

PYTHONPATH=kernels:services/gpu-runner:bench:. python -m weft_bench.gpu check|bench|page
"""

import argparse
import ctypes
import os
import shlex
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from weft_bench.errors import BenchFailed, NotReady
from weft_bench.gpu_amounts import SHAPES, TINY, Amounts
from weft_bench.gpu_keeper import DOCS, Keeper, Table
from weft_bench.gpu_messages import BENCH, CHECK, COMPILE, OPERATORS, Ended, Job, shares
from weft_bench.gpu_page import write_page
from weft_bench.gpu_plan import CASES, Plan
from weft_bench.gpu_supervise import Clock, Process, side_by_side, supervise
from weft_bench.machine import without_folders

GROUPS = {  # of checks, each in so many shares: compiling takes most of the time
    "graphs": 1, "executor": 4, "lora": 3, "attention": 4, "fused": 4, "sampling": 1, "loading": 1, "int4": 2,
    "offload": 1, "engine": 1,
}  # fmt: skip
LIMITS_S = {  # of each case
    "decode": 150.0, "operator": 120.0, "prefill": 50.0, "attention": 40.0, "slots": 100.0, "textgen": 220.0,
    "peft": 100.0, "flashinfer": 120.0, "int4": 90.0,
}  # fmt: skip
CHECK_S, COMPILE_S = 300.0, 120.0
TINY_S = 3600.0  # of each case, and to start: the interpreter takes its time, and a processor may be busy
COMPILERS = 12  # processes that compile ahead, and shares of what each case needs
assert LIMITS_S.keys() == CASES.keys()

_ABOUT = """The engine's kernels and steps on a GPU: are they right (check), how fast are they (bench).

Every case runs in a process that is replaced when it hangs or dies; figures are written as they come. Without a GPU
`--tiny` runs the same code on Triton's interpreter, with tiny shapes: it shows that everything works, and its figures
are kept nowhere."""
_EXAMPLES = """examples:
  make gpu-check                                             is everything right? a table, exit code 1 if not
  make gpu-bench                                             all figures, into docs/benchmarks
  python -m weft_bench.gpu bench --cases decode,prefill      some of them
  python -m weft_bench.gpu bench --shape 1B --budget-s 200   a smaller model, in less time
  python -m weft_bench.gpu bench --out "$OUT"                page and raw lines, old and new, elsewhere
  python -m weft_bench.gpu check --tiny                      the same code, tiny; on this machine's CPU if need be
  python -m weft_bench.gpu page                              the page anew from the raw lines
"""


@dataclass(frozen=True, slots=True)
class Asked:
    """The command line. `out` None: the repository's pages, but nowhere for what is tiny."""

    what: str
    cases: tuple[str, ...] = ()
    budget_s: float = 480.0
    tiny: bool = False
    out: Path | None = None
    shape: str = ""
    texts: int = Amounts().texts
    compile: bool = True
    jobs: int = 8

    @property
    def plan(self) -> Plan:
        if self.tiny:
            return Plan(TINY, "tiny", "tiny")
        amounts = Amounts(texts=self.texts)
        return Plan(amounts, self.shape, self.shape) if self.shape else Plan(amounts)

    @property
    def docs(self) -> Path | None:
        return self.out or (None if self.tiny else DOCS)

    def clock(self) -> Clock:
        most = {CHECK: CHECK_S, BENCH: COMPILE_S}[self.what]
        if self.tiny:
            return Clock(self.budget_s, lambda _: TINY_S, start_s=TINY_S)
        return Clock(self.budget_s, lambda name: LIMITS_S.get(name, most))


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0; 1 where a check failed or a case broke off; 2 for a wrong command."""
    words = list(sys.argv[1:] if argv is None else argv)
    asked = _asked(_parser().parse_args(words))
    if asked.what == "page":
        print(write_page(asked.out or DOCS))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no worker outlives this process
    command = shlex.join(["python", "-m", "weft_bench.gpu", *map(without_folders, words)])
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as folder:
        job = Job(asked.what, asked.tiny, command, Path(folder), asked.plan)
        try:
            if not asked.tiny and (reason := no_gpu()):
                raise NotReady(f"{reason}; `--tiny` shows without one that everything works")
            return check(job, asked) if asked.what == CHECK else bench(job, asked)
        except BenchFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1


def check(job: Job, asked: Asked) -> int:
    """Groups of checks, several processes at a time: compiling takes most of it."""
    names = deque(name for group in asked.cases for name in shares(group, 1 if asked.tiny else GROUPS[group]))
    clock, table = asked.clock(), Table()
    runs = [supervise(names, partial(Process, job), clock) for _ in range(min(asked.jobs, len(names)))]
    for message in side_by_side(runs):
        table.take(message)
    return table.told(names)


def bench(job: Job, asked: Asked) -> int:
    """Measure the cases that were asked for. A line is in its file as soon as it is measured."""
    names, clock, keeper = deque(asked.cases), asked.clock(), Keeper(job.plan, asked.docs)
    if asked.compile:
        compile_ahead(job, asked, clock)
    try:
        for message in supervise(names, partial(Process, job), clock):
            keeper.take(message)
    finally:
        keeper.close(names)
    return keeper.told()


def compile_ahead(job: Job, asked: Asked, clock: Clock) -> None:
    """What these cases will launch, in several processes. A failure is told, and met again where it is measured."""
    names = deque(shares_of(asked))
    job = replace(job, kind=COMPILE)
    runs = [supervise(names, partial(Process, job), clock) for _ in range(min(len(names), COMPILERS))]
    for message in side_by_side(runs):
        if isinstance(message, Ended):
            print(f"compiled ahead: {message.name}: {message.seconds:.1f} s {message.error}".rstrip(), flush=True)


def shares_of(asked: Asked) -> list[str]:
    """What has to be compiled, in shares: shapes of the cases' models, and the operators."""
    cases, plan = {*asked.cases}, asked.plan
    wanted = [plan.shape] if cases & {"decode", "prefill", "slots", "peft", "int4"} else []
    wanted += [plan.text_shape] if "textgen" in cases else []
    wanted += [OPERATORS] if "operator" in cases else []
    count = 1 if asked.tiny else COMPILERS
    return [name for what in dict.fromkeys(wanted) for name in shares(what, count)]


def no_gpu() -> str:
    """Why there is no GPU, by its driver: at once, where torch takes seconds. Empty where there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no GPU: the driver's libcuda.so.1 is not here"
    count = ctypes.c_int()
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return "" if not code and count.value else f"the driver finds no GPU (code {code})"


# ---- the command line


def _asked(values: argparse.Namespace) -> Asked:
    """What was not said is as `Asked` has it. Where Triton is told to interpret, everything is tiny."""
    fields: dict[str, Any] = {name: value for name, value in vars(values).items() if value is not None}
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        fields["tiny"] = True
    return Asked(**fields)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m weft_bench.gpu", description=_ABOUT, epilog=_EXAMPLES, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="what", required=True, metavar="check|bench|page")
    checks = commands.add_parser(CHECK, help="kernels and executor against plain torch: a table of passes and failures")
    _add_common(checks, tuple(GROUPS), "groups")
    checks.add_argument("--jobs", type=int, metavar="N", help="processes at a time (8)")
    _add_bench(commands.add_parser(BENCH, help="figures, each beside what the device gives"))
    page = commands.add_parser("page", help="write the page again from the raw lines; needs no GPU")
    page.add_argument("--out", type=Path, metavar="DIR", help=f"where page and raw lines are ({DOCS})")
    return parser


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, tuple(CASES), "cases")
    add, shapes = parser.add_argument, [name for name in SHAPES if name != "tiny"]
    add("--shape", choices=shapes, help="model of all cases (8B; of text generation 7B)")
    texts = Amounts().texts
    add("--texts", type=int, metavar="N", help=f"requests of text generation; Punica has 1000 ({texts})")
    add("--out", type=Path, metavar="DIR", help=f"where page and raw lines go ({DOCS}; if tiny, nowhere)")
    told = "nothing is compiled ahead: it is in Triton's cache, or may take its time"
    add("--no-compile", dest="compile", action="store_false", help=told)


def _add_common(parser: argparse.ArgumentParser, known: Sequence[str], what: str) -> None:
    add = parser.add_argument
    told = f"{what}: {', '.join(known)} (all, in this order)"
    add("--cases", type=partial(_among, known), default=tuple(known), metavar="A,B", help=told)
    add("--budget-s", type=float, metavar="S", help="seconds; nothing is begun that they leave no time for (480)")
    add("--tiny", action="store_true", help="tiny shapes; without a GPU, on Triton's interpreter")


def _among(known: Collection[str], text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words or not {*words} <= {*known}:
        raise argparse.ArgumentTypeError(f"{text!r}: choose among {', '.join(known)}")
    return words


if __name__ == "__main__":
    sys.exit(main())
