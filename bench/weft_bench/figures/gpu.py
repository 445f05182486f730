"""The engine on this machine's GPU. Cases have shares of the time, and one that breaks off costs itself alone."""

import ctypes
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from weft_bench.cases import GPU_CASES, Gpu
from weft_bench.run import Run
from weft_stage.errors import BenchFailed, OutOfTime
from weft_stage.lines import Line

if TYPE_CHECKING:
    from weft_bench.drive.gpu import Bench

MISSING, NO_GPU = 2, 3  # exit codes
NEEDED = ("torch", "triton", "numpy", "safetensors", "psutil")  # a case says as it begins what else it needs
MODULES = {"exact": "gpu_exact", "steps": "gpu_steps", "streams": "gpu_streams", "stack": "gpu_streams",
           "operator": "gpu_steps"}  # fmt: skip


@dataclass(slots=True)
class Cases:
    """The cases of a run, one after the other. `missing`: cases that broke off, or did not begin."""

    names: Sequence[str]
    missing: list[str]

    def lines(self, bench: "Bench", ends: float) -> Iterator[Line]:
        """Yield the lines of every case. `ends`: by time.monotonic."""
        for number, case in enumerate(self.names):
            started, outcome = time.monotonic(), "done"
            try:
                bench.gpu.free()
                with tempfile.TemporaryDirectory(prefix="weft-gpu-") as folder:
                    bench.folder, bench.ends = Path(folder), share_end(self.names[number:], time.monotonic(), ends)
                    bench.check_time()
                    yield from getattr(import_module(f"weft_bench.figures.{MODULES[case]}"), case)(bench)
            except OutOfTime as error:
                outcome = f"incomplete: {error}"
            except Exception as error:  # noqa: BLE001 - the next case may work
                traceback.print_exc()
                outcome = f"broke off: {type(error).__name__}: {error}"
            bench.run.say(f"{case}: {time.monotonic() - started:.0f} s, {outcome}")
            if outcome != "done":
                self.missing.append(case)
                if not bench.gpu.works():
                    bench.run.say("the device is lost: the cases that follow did not begin")
                    self.missing += self.names[number + 1 :]
                    return


def figures(options: Gpu, run: Run) -> Iterator[Line]:
    """Measure the machine, then the cases. Exits with MISSING or NO_GPU; raises BenchFailed if a case is missing."""
    if not interpreted() and (reason := no_gpu()):
        refuse(reason, NO_GPU)
    if reason := missing(NEEDED):
        refuse(reason, MISSING)
    from weft_bench.drive.gpu import Bench

    ends = time.monotonic() + options.budget_s
    bench = Bench.made(options, run)
    yield from bench.machine.lines(bench.origin)
    cases = Cases(options.cases, [])
    yield from cases.lines(bench, ends)
    if cases.missing:
        raise BenchFailed(f"not measured: to measure the rest, add --cases {','.join(cases.missing)}")


def share_end(cases: Sequence[str], now: float, ends: float) -> float:
    """Return when the first of these cases must end, so that the others have their shares of the time that is left."""
    return (
        now + (ends - now) * GPU_CASES[cases[0]] / sum(GPU_CASES[case] for case in cases) if ends < math.inf else ends
    )


def refuse(reason: str, code: int) -> None:
    """Print why nothing is measured, and exit with this code."""
    print(f"error: {reason}", file=sys.stderr)
    raise SystemExit(code)


def no_gpu() -> str:
    """Return why the driver has no GPU, at once, where torch takes seconds. Empty if present."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no GPU: the driver's libcuda.so.1 is not here"
    count = ctypes.c_int()
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return "" if not code and count.value else f"the driver finds no GPU (code {code})"


def device_bytes() -> int:
    """Return all memory of the first GPU, by its driver."""
    driver, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t()
    code = driver.cuInit(0) or driver.cuDeviceTotalMem_v2(ctypes.byref(size), 0)
    assert not code, code
    return size.value


def missing(names: Sequence[str]) -> str:
    """Name the packages that this Python lacks; empty where it has them all."""
    absent = ", ".join(name for name in names if find_spec(name) is None)
    return absent and f"{sys.executable} has no {absent}: GPU_PYTHON names one that has"


def interpreted() -> bool:
    """Return whether Triton's interpreter computes, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
