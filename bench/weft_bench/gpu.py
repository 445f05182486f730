"""`make gpu-bench`: the engine on a GPU, straight from a checkout, with torch, Triton and numpy, and nothing installed.

PYTHONPATH=kernels:services/gpu-runner:bench:. python -m weft_bench.gpu [CASE ...]
"""

import argparse
import ctypes
import importlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weft_bench.errors import BenchFailed
from weft_bench.gpu_amounts import SHAPES, TINY, Amounts
from weft_bench.gpu_page import DOCS, raw_path, write_page
from weft_bench.lines import Line, append
from weft_bench.machine import without_folders

# Cases, each `measure` of a module gpu_CASE, and the most seconds of each: what matters most comes first.
CASES = {
    "decode": 150.0, "operator": 90.0, "prefill": 60.0, "attention": 40.0, "slots": 100.0, "textgen": 220.0,
    "peft": 100.0,
}  # fmt: skip
BUDGET_S = 480.0
NO_GPU = 3
_ABOUT = """How fast the engine is on this machine's GPU, beside what the GPU was measured to give.

Each case has a process of its own, so that one which hangs or crashes costs itself alone, and each figure is written as
it is measured: cases that are named are measured again or at last. `make gpu-check` shows that results are right."""
_EXAMPLES = """examples:
  make gpu-bench                                  all figures, into docs/benchmarks
  make gpu-bench GPU_FLAGS="decode prefill"       these cases
  make gpu-bench GPU_FLAGS="--model 1B operator"  a smaller model
  make gpu-bench GPU_FLAGS='--out "$OUT"'         page and raw lines, old and new, elsewhere
  make gpu-bench GPU_FLAGS=--page                 the page anew from the raw lines; needs no GPU
"""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line. `docs` None: figures are printed and kept nowhere."""

    cases: Sequence[str]
    amounts: Amounts
    docs: Path | None
    budget_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0; 1 where a case broke off; 2 for a wrong command; 3 without a GPU."""
    words = list(sys.argv[1:] if argv is None else argv)
    values = _parser().parse_args(words)
    options = _options(values)
    flags = [word for word in words if word not in CASES and word != "--here"]
    if values.page:
        print(write_page(options.docs or DOCS))
        return 0
    if not interpreted() and (reason := no_gpu()):
        print(f"error: {reason}", file=sys.stderr)
        return NO_GPU
    if values.here:
        return here(options, " ".join(flags))
    return apart(options, flags)


def apart(options: Options, flags: Sequence[str]) -> int:
    """The cases one after the other, each in a process of its own, then the page."""
    docs, ends, outcomes = options.docs, time.monotonic() + options.budget_s, dict[str, str]()
    if docs is not None and not raw_path(docs).exists() and raw_path(DOCS).exists():
        raw_path(docs).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(raw_path(DOCS), raw_path(docs))  # what comes back from another machine is whole
    for case in options.cases:
        left_s = min(CASES[case], ends - time.monotonic())
        started = time.monotonic()
        outcomes[case] = _run(case, flags, left_s) if left_s > 0 else "not begun: no time was left"
        print(f"{case}: {time.monotonic() - started:.0f} s, {outcomes[case]}", flush=True)
    if docs is not None:
        print(f"page: {write_page(docs)}")
    broken = [case for case, outcome in outcomes.items() if outcome != "done"]
    if broken:
        print(f"to measure what is missing: make gpu-bench GPU_FLAGS={shlex.quote(' '.join([*flags, *broken]))}")
    return 1 if broken else 0


def here(options: Options, flags: str) -> int:
    """The cases in this process."""
    command = "make gpu-bench" + (f" GPU_FLAGS={shlex.quote(without_folders(flags))}" if flags else "")
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as folder:
        try:
            measure(options.cases, options.amounts, lambda line: _keep(line, options.docs), command, Path(folder))
        except BenchFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


def measure(cases: Sequence[str], amounts: Amounts, send: Callable[[Line], None], command: str, folder: Path) -> None:
    """What the machine gives, then the cases. Raises BenchFailed."""
    from weft_bench.gpu_context import Context
    from weft_bench.gpu_device import find, origin
    from weft_bench.gpu_machine import TINY_SIZES, Sizes, measured
    from weft_bench.gpu_timing import timer

    gpu = find()
    origin_ = origin(gpu, command)
    times = timer(gpu.device)
    machine = measured(gpu, times, Sizes() if gpu.is_real else TINY_SIZES)
    for line in machine.lines(gpu, origin_):
        send(line)
    gpu.free()
    for case in cases:
        module = importlib.import_module(f"weft_bench.gpu_{case}")
        module.measure(Context(amounts, gpu, times, machine, origin_, send, folder))
        gpu.free()


def no_gpu() -> str:
    """Why there is no GPU, by its driver: at once, where torch takes seconds. Empty where there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no GPU: the driver's libcuda.so.1 is not here"
    count = ctypes.c_int()
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return "" if not code and count.value else f"the driver finds no GPU (code {code})"


def interpreted() -> bool:
    """Triton's interpreter computes, on the CPU: tests run tiny cases so."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def _run(case: str, flags: Sequence[str], seconds: float) -> str:
    """What became of it."""
    command = [sys.executable, "-m", "weft_bench.gpu", *flags, "--here", case]
    try:
        code = subprocess.run(command, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"ended after {seconds:.0f} s"
    return "done" if code == 0 else f"broke off with exit code {code}"


def _keep(line: Line, docs: Path | None) -> None:
    if docs is not None:
        append(raw_path(docs), [line])
    value = "not measured" if line.value is None else f"{line.value:.4g} {line.unit}".rstrip()
    parts = [f"{line.case}: {line.metric}: {value}"]
    parts += [f"baseline {line.baseline:.4g}"] if line.baseline is not None else []
    parts += [f"{line.bound_fraction:.0%} of bound"] if line.bound_fraction is not None else []
    parts += [f"target {line.target}: {'met' if line.met else 'missed'}"] if line.target is not None else []
    print(f"  {', '.join(parts)}", flush=True)


def _options(values: argparse.Namespace) -> Options:
    """Under the interpreter all is tiny, and kept only where --out says."""
    amounts = TINY if interpreted() else Amounts(texts=values.texts)
    if values.model and not interpreted():
        amounts = replace(amounts, model=values.model, text_model=values.model)
    docs = values.out or (None if interpreted() else DOCS)
    return Options(values.cases or tuple(CASES), amounts, docs, values.budget_s)


def _case(text: str) -> str:
    if text not in CASES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(CASES)}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m weft_bench.gpu", description=_ABOUT, epilog=_EXAMPLES, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add, texts = parser.add_argument, Amounts().texts
    add("cases", nargs="*", type=_case, metavar="CASE", help=f"{', '.join(CASES)} (all, in this order)")
    add("--model", choices=[name for name in SHAPES if name != "tiny"], help="of all cases (8B; text generation: 7B)")
    add("--texts", type=int, default=texts, metavar="N", help=f"requests of text generation ({texts}; Punica: 1000)")
    add("--budget-s", type=float, default=BUDGET_S, metavar="S", help=f"seconds of all cases ({BUDGET_S:.0f})")
    add("--out", type=Path, metavar="DIR", help=f"where page and raw lines go ({DOCS})")
    add("--here", action="store_true", help="in this process: one that crashes takes the others along")
    add("--page", action="store_true", help="write the page again from the raw lines; needs no GPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
