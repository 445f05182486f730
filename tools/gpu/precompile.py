# pyright: reportPrivateUsage=false
"""Compile what evidence.py launches for sm_90, on a machine without a GPU: it fills $TRITON_CACHE_DIR.

    TRITON_CACHE_DIR=DIR python tools/gpu/precompile.py [MODEL ...]     (8B 1B)

The cache's key is Triton itself, the kernels' source, the target and the options, and its index has absolute paths. Use
the Triton, the Python, the checkout and the folder of the machine that will run them.
"""

import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # it has no compiler

import numpy as np
import torch

from weft_bench.cpu_shapes import DEVICE_SHAPES
from weft_kernels.triton import ahead
from weft_runner.model.cuda.absent import AbsentExecutor
from weft_runner.model.cuda.executor import Sizes
from weft_stage.gpu_models import StepOf, random_tokens, spec_of, step_of

CAPABILITY, SMS = 90, 132  # of an H100 and an H200
PAGES, PAGE_TOKENS, RANK = 2048, 16, 16
CONTEXT = 1024
# (rows, slots, tokens of a captured prompt) of the executors that evidence.py makes.
EXECUTORS = {
    "8B": ((32, 32, 1), (256, 256, 1), (4, 3, 468), (256, 64, 2048)),
    "1B": ((256, 8, 2048),),
    "tiny": ((2, 2, 8),),
}
PROMPTS = {"8B": (64, 128, 512, 1800), "1B": (128, 512), "tiny": (8,)}
BESIDE = 31  # rows in decode beside a prompt, at most


def main(names: Sequence[str]) -> int:
    """Return the exit code."""
    began, cache = time.perf_counter(), Path(os.environ["TRITON_CACHE_DIR"])
    for name in names or ("8B", "1B"):
        for rows, slots, tokens in EXECUTORS[name]:
            compile_for(name, rows, slots, tokens)
            entries = len(list(cache.iterdir()))
            print(f"{name}, {rows} rows: {entries} entries, {time.perf_counter() - began:.0f} s", flush=True)
    return 0


def compile_for(name: str, rows: int, slots: int, tokens: int) -> None:
    """Compile the captured forwards, and steps of a prompt beside rows in decode, with adapters and without."""
    spec, rng = spec_of(DEVICE_SHAPES[name], CONTEXT), random.Random(0)
    sizes = Sizes(PAGES, PAGE_TOKENS, slots, RANK, rows, CONTEXT, graphs=True, tokens=tokens)
    with ahead.compiling(CAPABILITY), torch.inference_mode():
        executor = AbsentExecutor(spec, sizes, SMS)
        for _, forward in executor.forwards():
            forward()
        executor.warm_up(max(tokens, *PROMPTS[name]))
        for slot in range(slots):  # as if an adapter of the largest rank were there
            executor.adapters._widths[slot] = np.full((spec.layers, 4), 3 * RANK, np.int32)
        for prompt in PROMPTS[name]:
            for adapted in (False, True):
                pages = range(-(-prompt // PAGE_TOKENS))
                parts = [StepOf(random_tokens(rng, prompt, spec.vocab_size), 0, pages, 0 if adapted else None)]
                beside = range(min(rows - 1, BESIDE))
                parts += [StepOf([1], 15, [1000 + i], i % slots if adapted else None) for i in beside]
                executor.run(step_of(parts, PAGE_TOKENS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
