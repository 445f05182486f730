"""`make gpu-bench`: the engine on a GPU, straight from a checkout, with torch, Triton and numpy, and nothing installed.

The Makefile has the PYTHONPATH, and says what cases need besides. Each case is `measure` of a module `gpu_CASE`.
"""

import argparse
import ctypes
import importlib
import math
import os
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from weft_bench.gpu_amounts import SHAPES, TINY, Amounts
from weft_bench.gpu_page import DOCS, raw_path, write_page
from weft_stage.errors import OutOfTime
from weft_stage.lines import Line, append
from weft_stage.machine import without_folders

# Cases, each `measure` of a module gpu_CASE: what a run that is cut should leave comes first.
# With its share of the time that is left where it begins: what a case leaves is the others'.
CASES = {
    "exact": 60, "steps": 110, "streams": 190, "stack": 100, "operator": 25, "attention": 15, "offload": 60,
    "slots": 50, "textgen": 50, "peft": 40,
}  # fmt: skip
BUDGET_S = 540.0
MISSING, NO_GPU = 2, 3
NEEDED = ("torch", "triton", "numpy", "safetensors", "psutil")  # what a case needs besides it says as it begins
_ABOUT = """How fast the engine is on this machine's GPU, beside what the GPU was measured to give.

Each figure is written as it is measured, what matters most first; a case that breaks off costs itself alone, unless the
device is lost with it. Cases that are named are measured again or at last. `make gpu-check` shows that results are
right."""
_EXAMPLES = """examples:
  make gpu-bench                                  all figures, into docs/benchmarks
  make gpu-bench GPU_FLAGS="exact steps"          these cases
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
    """The exit code: 0; 1 where a case broke off; 2 for a wrong command or a missing package; 3 without a GPU."""
    words = list(sys.argv[1:] if argv is None else argv)
    values = _parser().parse_args(words)
    options = _options(values)
    flags = [word for word in words if word not in CASES]
    if values.page:
        print(write_page(options.docs or DOCS))
        return 0
    if not interpreted() and (reason := no_gpu()):
        print(f"error: {reason}", file=sys.stderr)
        return NO_GPU
    if said := missing(NEEDED):
        print(f"error: {said}", file=sys.stderr)
        return MISSING
    return run(options, flags)


def run(options: Options, flags: Sequence[str]) -> int:
    """The cases one after the other, then the page."""
    docs, words = options.docs, without_folders(" ".join(flags))
    if docs is not None and not raw_path(docs).exists() and raw_path(DOCS).exists():
        raw_path(docs).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(raw_path(DOCS), raw_path(docs))  # what comes back from another machine is whole
    command = "make gpu-bench" + (f" GPU_FLAGS={shlex.quote(words)}" if words else "")
    try:
        with tempfile.TemporaryDirectory(prefix="weft-gpu-") as folder:
            broken = measure(
                options.cases, options.amounts, lambda line: _keep(line, docs), command, Path(folder),
                time.monotonic() + options.budget_s,
            )  # fmt: skip
    finally:
        if docs is not None:
            print(f"page: {write_page(docs)}")
    if broken:
        print(f"to measure what is missing: make gpu-bench GPU_FLAGS={shlex.quote(' '.join([*flags, *broken]))}")
    return 1 if broken else 0


def measure(
    cases: Sequence[str], amounts: Amounts, send: Callable[[Line], None], command: str, folder: Path,
    ends: float = math.inf,
) -> list[str]:  # fmt: skip
    """What the machine gives, then the cases; those that broke off or were not begun. `ends`: by time.monotonic."""
    from weft_bench.gpu_context import Context
    from weft_bench.gpu_machine import TINY_SIZES, Sizes, measured
    from weft_bench.gpu_timing import timer
    from weft_stage.gpu_device import find, origin

    gpu = find()
    origin_, times, broken = origin(gpu, command), timer(gpu.device), list[str]()
    machine = measured(gpu, times, Sizes() if gpu.is_real else TINY_SIZES)
    for line in machine.lines(gpu, origin_):
        send(line)
    for number, case in enumerate(cases):
        started = time.monotonic()
        outcome = "done"
        try:
            gpu.free()
            with tempfile.TemporaryDirectory(dir=folder) as of_case:
                limit = share_end(cases[number:], time.monotonic(), ends)
                context = Context(amounts, gpu, times, machine, origin_, send, Path(of_case), limit)
                context.check_time()
                importlib.import_module(f"weft_bench.gpu_{case}").measure(context)
        except OutOfTime as error:
            outcome = f"not whole: {error}"
        except Exception as error:  # noqa: BLE001 - the next case may work
            traceback.print_exc()
            outcome = f"broke off: {type(error).__name__}: {error}"
        print(f"{case}: {time.monotonic() - started:.0f} s, {outcome}", flush=True)
        if outcome != "done":
            broken.append(case)
            if not gpu.works():
                print("the device is lost: what follows was not begun", flush=True)
                return [*broken, *cases[number + 1 :]]
    return broken


def share_end(cases: Sequence[str], now: float, ends: float) -> float:
    """When the first of these cases has to be done, so that the others have their shares of what is left."""
    return now + (ends - now) * CASES[cases[0]] / sum(CASES[case] for case in cases)


def no_gpu() -> str:
    """Why there is no GPU, by its driver: at once, where torch takes seconds. Empty where there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no GPU: the driver's libcuda.so.1 is not here"
    count = ctypes.c_int()
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return "" if not code and count.value else f"the driver finds no GPU (code {code})"


def device_bytes() -> int:
    """All memory of the first GPU, by its driver."""
    driver, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t()
    code = driver.cuInit(0) or driver.cuDeviceTotalMem_v2(ctypes.byref(size), 0)
    assert not code, code
    return size.value


def missing(names: Sequence[str]) -> str:
    """Name the packages that this Python does not have; empty where it has them all."""
    absent = ", ".join(name for name in names if find_spec(name) is None)
    return absent and f"{sys.executable} has no {absent}: GPU_PYTHON names one that has"


def interpreted() -> bool:
    """Triton's interpreter computes, on the CPU: tests run tiny cases so."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


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
        amounts = replace(amounts, model=values.model, text_model=values.model, stack_model=values.model)
    docs = values.out or (None if interpreted() else DOCS)
    return Options(values.cases or [*CASES], amounts, docs, values.budget_s)


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
    add(
        "--model",
        choices=[name for name in SHAPES if name != "tiny"],
        help="of all cases (8B; over HTTP 1B, text generation 7B)",
    )
    add("--texts", type=int, default=texts, metavar="N", help=f"requests of text generation ({texts}; Punica: 1000)")
    add("--budget-s", type=float, default=BUDGET_S, metavar="S", help=f"seconds of all cases ({BUDGET_S:.0f})")
    add("--out", type=Path, metavar="DIR", help=f"where page and raw lines go ({DOCS})")
    add("--page", action="store_true", help="write the page again from the raw lines; needs no GPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
