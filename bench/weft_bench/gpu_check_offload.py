"""A model of which most lies in pinned memory and on a disk, beside the same one whole on the device.

Every launch has the same sizes in both but the head's products, which come in pieces; so logits are compared as near,
and a mistake of copies and events shows as numbers that are far off. Steps follow each other at once, so that groups
are copied over ones that were read just before.
"""

import random
import tempfile
from functools import partial
from pathlib import Path

from weft_bench.cpu_models import base_model, files
from weft_bench.gpu_check import CheckContext, Checks, assert_near
from weft_bench.gpu_check_models import BF16, FP32, PAGE_TOKENS
from weft_bench.gpu_models import StepOf, random_tokens, step_of
from weft_bench.roofline import Shape
from weft_kernels.triton import int4
from weft_runner.model.checkpoint import open_checkpoint, read_spec
from weft_runner.model.cuda.device import DTYPES
from weft_runner.model.cuda.executor import CudaExecutor, Sizes
from weft_runner.model.cuda.offload import OffloadCudaExecutor, beside_bytes
from weft_runner.model.partition import Partition
from weft_runner.model.tiers.budget import OffloadBudget
from weft_runner.model.weights import load_weights

SHAPE, TINY_SHAPE = Shape(2048, 8, 32, 8, 5632, 32_000), Shape(64, 3, 2, 1, 112, 203)
SLACK = 1 << 30  # of a device, for what torch's allocator rounds up and libraries work on
SHARES = (0.0, 0.3)  # of the weights on the device, at most
STEPS, TINY_STEPS = 24, 2


def checks(context: CheckContext) -> Checks:
    for dtype in ("bf16", "int4") if context.gpu.is_real else ("fp32",):
        for share in SHARES:
            yield f"{dtype}, {share:.0%} of the weights on the device", partial(_near, context, dtype, share)


def _near(context: CheckContext, dtype: str, share: float) -> None:
    """A prompt, then decode rows. Raises Differs."""
    shape = TINY_SHAPE if context.tiny else SHAPE
    (steps,) = context.of((STEPS,), (TINY_STEPS,))
    sizes = Sizes(64, PAGE_TOKENS, 1, 16, 4, 256, graphs=False, tokens=64)
    try:
        with tempfile.TemporaryDirectory(prefix="weft-offload-", dir=Path.cwd()) as folder:  # /tmp may be no disk
            of = files(base_model(Path(folder), "base", shape))
            spec = read_spec(of["config.json"])
            checkpoint = open_checkpoint(of, spec)
            whole_bytes = sum(path.stat().st_size for path in of.values())
            device = beside_bytes(Partition(spec), dtype, sizes) + whole_bytes + (SLACK if context.gpu.is_real else 0)
            budget = OffloadBudget(
                device, 1 << 40, Path(folder) / "disk", "sha256:" + "0" * 64, 64, 64, 4, 16, share, whole_bytes * 3 // 4
            )
            offloaded = OffloadCudaExecutor(context.gpu, checkpoint, budget, sizes, dtype=dtype)
            try:
                _play(offloaded, _whole(context, of, dtype, sizes), steps, FP32 if dtype == "fp32" else BF16)
            finally:
                offloaded.close()
    finally:
        context.gpu.unlimited()
        context.gpu.free()


def _whole(context: CheckContext, of: dict[str, Path], dtype: str, sizes: Sizes) -> CudaExecutor:
    context.gpu.unlimited()
    spec, pack = read_spec(of["config.json"]), int4.pack if dtype == "int4" else None
    return CudaExecutor(spec, load_weights(of, spec, DTYPES[dtype], device=context.device, pack=pack), sizes)


def _play(one: CudaExecutor, other: CudaExecutor, steps: int, relative: float) -> None:
    rng, vocab = random.Random(0), one.spec.vocab_size
    for position in range(steps):
        count, at = (20, 0) if position == 0 else (1, 19 + position)
        step = step_of(
            [StepOf(random_tokens(rng, count, vocab), at, range(4 * row, 4 * row + 4), None) for row in range(3)],
            PAGE_TOKENS,
        )
        assert_near(one.run(step).clone(), other.run(step).clone(), relative)
