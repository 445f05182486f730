# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
"""The host's part of a step where no GPU is: launches through a libcuda that does nothing.

    python -m weft_bench.gpu_host [--model 8B] [--runs 15]

CPU time of one process: of eager steps, whose launches are all counted but products of the library, and of writing a
captured step's tables (its replay is one call). Kernels are compiled the first time, for an H100. `null_cuda.c` is made
with `cc`. Run it on an otherwise idle core.
"""

import argparse
import ctypes
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

SOURCE, LIBRARY = Path(__file__).with_name("null_cuda.c"), "libcuda.so.1"
SMS, CAPABILITY = 132, 90
ROWS, CONTEXT, PAGE_TOKENS, RANK, GRAPH_TOKENS = 32, 512, 16, 16, 1024
# tokens of a prompt, rows in decode
STEPS = ((0, 32), (64, 31), (512, 0), (2048, 0))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and return the exit code."""
    from weft_bench.cpu_shapes import DEVICE_SHAPES as SHAPES

    parser = argparse.ArgumentParser(prog="python -m weft_bench.gpu_host", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="8B", help="(8B)")
    parser.add_argument("--runs", type=int, default=15, help="of each step, after one that compiles (15)")
    values = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="weft-gpu-host-") as folder:
        launches = no_gpu(Path(folder))
        for name, run in steps(values.model):
            run()
            before = launches.value
            seconds = [cpu_s(run) for _ in range(values.runs)]
            count = (launches.value - before) // values.runs
            told = f"{name}: {median(seconds) * 1e3:.2f} ms, at least {min(seconds) * 1e3:.2f}, {count} launches"
            print(told, flush=True)
    return 0


def cpu_s(run: Callable[[], object]) -> float:
    """Return the CPU seconds of this process that a run takes."""
    began = time.process_time()
    run()
    return time.process_time() - began


def no_gpu(folder: Path) -> Any:
    """Make Triton launch through a driver that only counts launches. Has to come before torch is imported."""
    assert "triton" not in sys.modules, "it has its driver already"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O2", f"-Wl,-soname,{LIBRARY}", "-o", folder / LIBRARY, SOURCE], check=True
    )
    os.environ.update(TRITON_LIBCUDA_PATH=str(folder), TRITON_INTERPRET="0")
    cuda = ctypes.CDLL(str(folder / LIBRARY), mode=ctypes.RTLD_GLOBAL)
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    from weft_kernels.triton.ahead import AbsentGpu

    class NullGpu(AbsentGpu):
        """Device 0, as code for it is loaded and launched."""

        def __init__(self) -> None:
            super().__init__(CAPABILITY)
            self.utils, self.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher

        def get_current_device(self) -> int:
            return 0

    driver.set_active(NullGpu())
    return ctypes.c_int.in_dll(cuda, "launches")


def executor_of(spec: Any, *, pages: int, rows: int, tokens: int, graphs: bool) -> Any:
    """Make an executor on meta tensors: as many slots as rows, steps of `tokens` tokens captured."""
    from weft_runner.model.cuda.absent import AbsentExecutor
    from weft_runner.model.cuda.executor import Sizes

    return AbsentExecutor(
        spec, Sizes(pages, PAGE_TOKENS, rows, RANK, rows, spec.max_positions, graphs, tokens=tokens), SMS
    )


def steps(model: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each step's name, with what runs it."""
    import numpy as np
    import torch

    from weft_bench.cpu_shapes import DEVICE_SHAPES as SHAPES
    from weft_runner.model.cuda import executor as executors
    from weft_runner.model.cuda import ops
    from weft_stage.gpu_models import StepOf, random_tokens, spec_of, step_of

    def product(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor | None = None) -> torch.Tensor:
        return torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)

    ops.DeviceContext.linear = lambda _, x, weight, bias: product(x, weight, bias)
    executors.interpreted_product = product
    spec = spec_of(SHAPES[model], max(prompt for prompt, _ in STEPS))
    row_pages = -(-(CONTEXT + 1) // PAGE_TOKENS)
    most = max(-(-prompt // PAGE_TOKENS) + rows * row_pages for prompt, rows in STEPS)
    made = {
        graphs: executor_of(spec, pages=most, rows=ROWS, tokens=GRAPH_TOKENS, graphs=graphs) for graphs in (False, True)
    }
    for slot in range(ROWS):
        made[False].adapters._widths[slot] = np.full((spec.layers, 4), 3 * RANK, np.int32)
    graphs = made[True]._graphs
    assert graphs is not None

    def place(step: Any) -> None:
        graphs._written = None, None  # as for another step than the one before
        with torch.inference_mode():
            assert graphs.place(step) is not None

    rng = random.Random(0)
    for prompt, rows in STEPS:
        tokens = [*([(prompt, 0)] if prompt else []), *([(1, CONTEXT)] * rows)]
        said = " and ".join([*([f"prompt of {prompt}"] if prompt else []), *([f"{rows} rows"] if rows else [])])
        for adapted in (False, True):
            pages, parts = iter(range(most)), list[StepOf]()
            for slot, (n, at) in enumerate(tokens):
                own = list(islice(pages, -(-(at + n) // PAGE_TOKENS)))
                parts.append(StepOf(random_tokens(rng, n, spec.vocab_size), at, own, slot if adapted else None))
            step = step_of(parts, PAGE_TOKENS)
            name = f"{model}, {said}, {'adapters' if adapted else 'base'}"
            yield f"{name}, eager", partial(made[False].run, step)
            if prompt <= GRAPH_TOKENS:
                yield f"{name}, captured: its tables", partial(place, step)


if __name__ == "__main__":
    sys.exit(main())
