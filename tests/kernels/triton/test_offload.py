"""A model of which most lies in pinned memory and on a disk, KV and activations in the former, beside it on the device.

Products have other sizes where a step is computed in device batches and where the head comes in pieces; so logits are
compared as near, and a mistake of copies and events shows as numbers that are far off. Steps follow each other at once,
so that groups are copied over ones that were read just before.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from harness.device_models import PAGE_TOKENS, beside_weights
from harness.on_device import BF16, FP32, INTERPRETED, TOLERANCES, assert_near, sized
from weft_kernels.triton import int4
from weft_runner.model import Partition, open_checkpoint, read_spec
from weft_runner.model.cuda.device import DTYPES
from weft_runner.model.cuda.executor import CudaExecutor, Sizes
from weft_runner.model.cuda.offload import OffloadCudaExecutor
from weft_runner.model.tiers.budget import OffloadBudget
from weft_runner.model.weights import load_weights
from weft_stage.cpu_models import base_model, files
from weft_stage.gpu_device import Gpu
from weft_stage.gpu_models import StepOf, random_tokens, step_of
from weft_stage.shapes import Shape

pytestmark = pytest.mark.gpu

SHAPE = sized(gpu=Shape(2048, 8, 32, 8, 5632, 32_000), interpreted=Shape(64, 3, 2, 1, 112, 203))
SLACK = 1 << 30  # of a device, for what torch's allocator rounds up and libraries work on
PAGES, TOKENS = 64, 64
# Of the weights on the device, at most; pages on the host, of 4 pages a row, so that a part has one row or two; and
# tokens of the 64 of a step whose activations are there, where device batches have 16.
SHARES = ((0.0, 0, 0), (0.3, 0, 64), (1.0, 64, 0), (0.3, 55, 48))
STEPS = sized(gpu=24, interpreted=2)


@pytest.mark.numeric
@pytest.mark.slow
@pytest.mark.parametrize(("share", "host_pages", "host_rows"), SHARES)
@pytest.mark.parametrize("dtype", sized(gpu=("bf16", "int4"), interpreted=("fp32",)))
def test_logits_are_near_those_of_the_model_whole(
    gpu: Gpu, tmp_path: Path, dtype: str, share: float, host_pages: int, host_rows: int
) -> None:
    """A prompt, then decode rows."""
    sizes = Sizes(PAGES, PAGE_TOKENS, 1, 16, 4, 64, graphs=False, tokens=TOKENS)
    of = files(base_model(tmp_path, "base", SHAPE))
    spec = read_spec(of["config.json"])
    checkpoint = open_checkpoint(of, spec)
    whole_bytes = sum(path.stat().st_size for path in of.values())
    budget = OffloadBudget(
        0, 1 << 40, tmp_path / "disk", "sha256:" + "0" * 64, 16 if host_rows else TOKENS, TOKENS, 4, 16, share,
        kv_host_pages=host_pages, activation_host_tokens=host_rows,
    )  # fmt: skip
    beside = beside_weights(Partition(spec), dtype, sizes, budget)
    budget = replace(
        budget, device_bytes=beside.device_bytes + whole_bytes + (0 if INTERPRETED else SLACK),
        host_bytes=whole_bytes * 3 // 4 + beside.host_bytes,
    )  # fmt: skip
    try:
        offloaded = OffloadCudaExecutor(gpu, checkpoint, budget, sizes, dtype=dtype)
        try:
            play(offloaded, whole(gpu, of, dtype, sizes), TOLERANCES[FP32 if dtype == "fp32" else BF16].logits)
            assert bool(host_rows) == bool(offloaded.figures.activations.read_bytes), offloaded.figures
        finally:
            offloaded.close()
    finally:
        gpu.lift_limit()
        gpu.free()


def whole(gpu: Gpu, of: dict[str, Path], dtype: str, sizes: Sizes) -> CudaExecutor:
    gpu.lift_limit()
    spec, pack = read_spec(of["config.json"]), int4.pack if dtype == "int4" else None
    return CudaExecutor(spec, load_weights(of, spec, DTYPES[dtype], device=gpu.device, pack=pack), sizes)


def play(one: CudaExecutor, other: CudaExecutor, relative: float) -> None:
    rng, vocab = random.Random(0), one.spec.vocab_size
    for position in range(STEPS):
        count, at = (20, 0) if position == 0 else (1, 19 + position)
        step = step_of(
            [StepOf(random_tokens(rng, count, vocab), at, range(4 * row, 4 * row + 4), None) for row in range(3)],
            PAGE_TOKENS,
        )
        assert_near(one.run(step).clone(), other.run(step).clone(), relative)
