"""One captured decode step of two layers of an 8B, for ncu: which bound each kernel meets.

    ncu --set full --graph-profiling node --profile-from-start off python -m weft_bench.gpu_layers ROWS POPULARITY

PYTHONPATH as for `make gpu-bench`. Two layers: each kernel runs many times under ncu, and a third would say the same.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from weft_bench.gpu_amounts import SHAPES, Batch
from weft_bench.gpu_steps import Loaded
from weft_stage.gpu_device import find

LAYERS, CONTEXT, WARM_UPS = 2, 512, 3


def main(argv: Sequence[str]) -> int:
    rows, popularity = int(argv[0]), argv[1]
    gpu = find()
    shape, context = (SHAPES["8B"], CONTEXT) if gpu.is_real else (SHAPES["tiny"], 20)
    loaded = Loaded.of(gpu, replace(shape, layers=LAYERS), [(rows, context + 1)])
    step = loaded.decode(Batch(rows, popularity), context)
    for _ in range(WARM_UPS):
        loaded.executor.run(step)
    gpu.sync()
    if gpu.is_real:
        torch.cuda.profiler.start()
    loaded.executor.run(step)
    gpu.sync()
    if gpu.is_real:
        torch.cuda.profiler.stop()
    print(f"ran a step of {rows} rows, {popularity}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
