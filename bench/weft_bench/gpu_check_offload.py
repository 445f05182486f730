"""A model of which most lies in pinned memory and on a disk, KV and activations in the former, beside it on the device.

Products have other sizes where a step is computed in device batches and where the head comes in pieces; so logits are
compared as near, and a mistake of copies and events shows as numbers that are far off. Steps follow each other at once,
so that groups are copied over ones that were read just before.
"""

import random
import tempfile
from dataclasses import replace
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
from weft_runner.model.cuda.offload import OffloadCudaExecutor, beside_weights
from weft_runner.model.partition import Partition
from weft_runner.model.tiers.budget import OffloadBudget
from weft_runner.model.weights import load_weights

SHAPE, TINY_SHAPE = Shape(2048, 8, 32, 8, 5632, 32_000), Shape(64, 3, 2, 1, 112, 203)
SLACK = 1 << 30  # of a device, for what torch's allocator rounds up and libraries work on
PAGES, TOKENS = 64, 64
# Of the weights on the device, at most; pages on the host, of 4 pages a row, so that a part has one row or two; and
# tokens of the 64 of a step whose activations are there, where device batches have 16.
SHARES = ((0.0, 0, 0), (0.3, 0, 64), (1.0, 64, 0), (0.3, 55, 48))
STEPS, TINY_STEPS = 24, 2


def checks(context: CheckContext) -> Checks:
    for dtype in ("bf16", "int4") if context.gpu.is_real else ("fp32",):
        for share, host_pages, host_rows in SHARES:
            what = f"{share:.0%} of the weights on the device, on the host {host_pages} of {PAGES} KV pages"
            rows = f"activations of {host_rows} of {TOKENS} tokens"
            yield f"{dtype}, {what} and {rows}", partial(_near, context, dtype, share, host_pages, host_rows)


def _near(context: CheckContext, dtype: str, share: float, host_pages: int, host_rows: int) -> None:
    """A prompt, then decode rows. Raises Differs."""
    shape = TINY_SHAPE if context.tiny else SHAPE
    (steps,) = context.of((STEPS,), (TINY_STEPS,))
    sizes = Sizes(PAGES, PAGE_TOKENS, 1, 16, 4, 64, graphs=False, tokens=TOKENS)
    try:
        with tempfile.TemporaryDirectory(prefix="weft-offload-", dir=Path.cwd()) as folder:  # /tmp may be no disk
            of = files(base_model(Path(folder), "base", shape))
            spec = read_spec(of["config.json"])
            checkpoint = open_checkpoint(of, spec)
            whole_bytes = sum(path.stat().st_size for path in of.values())
            budget = OffloadBudget(
                0, 1 << 40, Path(folder) / "disk", "sha256:" + "0" * 64, 16 if host_rows else TOKENS, TOKENS, 4, 16,
                share, kv_host_pages=host_pages, activation_host_tokens=host_rows,
            )  # fmt: skip
            beside = beside_weights(Partition(spec), dtype, sizes, budget)
            budget = replace(
                budget, device_bytes=beside.device_bytes + whole_bytes + (SLACK if context.gpu.is_real else 0),
                host_bytes=whole_bytes * 3 // 4 + beside.host_bytes,
            )  # fmt: skip
            offloaded = OffloadCudaExecutor(context.gpu, checkpoint, budget, sizes, dtype=dtype)
            try:
                _play(offloaded, _whole(context, of, dtype, sizes), steps, FP32 if dtype == "fp32" else BF16)
                assert bool(host_rows) == bool(offloaded.figures.activations.read_bytes), offloaded.figures
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
