"""A model that does not fit: passes of the offloading executor on a part of the device, the rest in pinned memory.

A pass copies what does not stay. Its bound is the longer of those bytes at the rate of a copy from pinned memory alone,
measured just before, and of what the pass reads and computes on the device.
"""

import random
import tempfile
import time
import zlib
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median

import torch

from weft.domain.model.spec import ModelSpec
from weft.domain.model.tensors import model_tensors
from weft_bench.cpu_shapes import RANK
from weft_bench.gpu_context import Context
from weft_bench.roofline import decode_work, prefill_work
from weft_runner.model import Array, Checkpoint, Partition, StepInput
from weft_runner.model.cuda.device import CopyStream, PinnedMemory
from weft_runner.model.cuda.executor import Sizes
from weft_runner.model.cuda.offload import OffloadCudaExecutor, activation_split, kv_split, work_bytes
from weft_runner.model.host_tensors import array_of
from weft_runner.model.tiers.budget import OffloadBudget
from weft_runner.offload import Budgets
from weft_stage.gpu_device import Gpu
from weft_stage.gpu_models import Numbers, StepOf, random_tokens, spec_of, step_of

PAGE_TOKENS = 16
SLACK = 2 << 30  # of a device, for two layers on their way, what torch's allocator rounds up and libraries work on
HOST_BYTES = 1 << 40  # what there is: the model takes what does not stay on the device
COPY_BYTES = 256 << 20
GIB = 1 << 30


def beside_weights(part: Partition, dtype: str, sizes: Sizes, budget: OffloadBudget) -> Budgets:
    """What the device and the host need for all but weights, by a budget without a plan. Raises PolicyInvalid."""
    split, activations = kv_split(part, dtype, sizes, budget), activation_split(part, sizes, budget)
    work = work_bytes(part, dtype, sizes, split, activations)
    device = split.memory_bytes + activations.memory_bytes + work
    return Budgets(device, split.host_bytes + activations.host_bytes)


class RandomCheckpoint(Checkpoint):
    """A model that no file has: a tensor is made on the device when it is asked for, the same one each time."""

    def __init__(self, spec: ModelSpec, gpu: Gpu) -> None:
        super().__init__(spec, {}, lambda: False, lambda _: None)
        self._gpu, self._shapes = gpu, dict(model_tensors(spec))

    def tensor(self, name: str) -> Array:
        numbers = Numbers(self._gpu.device, self._gpu.dtype, seed=zlib.crc32(name.encode()))
        shape = self._shapes[name]
        made = numbers.norm(*shape).to(self._gpu.dtype) if len(shape) == 1 else numbers.matrix(*shape)
        return array_of(made.cpu())

    def release(self, *names: str) -> None:
        """Do nothing: no tensor is kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Offloaded:
    """An executor with room for these rows, of which the weights have what is left of the device's bytes."""

    executor: OffloadCudaExecutor
    weight_bytes: int

    @classmethod
    def of(cls, context: Context, folder: Path) -> "Offloaded":
        amounts, gpu = context.amounts, context.gpu
        rows, tokens = max(amounts.offload_rows), amounts.offload_context + 1
        spec, dtype = spec_of(amounts.shape, tokens), "bf16" if gpu.is_real else "fp32"
        pages = rows * -(-tokens // PAGE_TOKENS)
        sizes = Sizes(pages, PAGE_TOKENS, 1, RANK, rows, tokens, graphs=False, tokens=max(tokens, rows))
        budget = OffloadBudget(
            0, 1 << 40, folder, f"sha256:{'0' * 64}", micro_batch=sizes.tokens, max_tokens=sizes.tokens,
            max_sequences=rows, max_rank=RANK, host_bytes=HOST_BYTES,
        )  # fmt: skip
        weights = gpu.dtype.itemsize * amounts.shape.weights
        beside = beside_weights(Partition(spec), dtype, sizes, budget).device_bytes
        device = amounts.offload_bytes or beside + SLACK + weights // 2
        share = min(1.0, max(0.0, (device - beside - SLACK) / weights))
        budget = replace(budget, device_bytes=device, share=share)
        return cls(OffloadCudaExecutor(gpu, RandomCheckpoint(spec, gpu), budget, sizes, dtype=dtype), weights)

    def decode(self, rows: int, context: int) -> StepInput:
        """Make a step of `rows` rows of one token, each behind `context` tokens."""
        rng, pages, each = random.Random(0), iter(range(1 << 30)), -(-(context + 1) // PAGE_TOKENS)
        vocab = self.executor.spec.vocab_size
        parts = [StepOf(random_tokens(rng, 1, vocab), context, [*islice(pages, each)], None) for _ in range(rows)]
        return step_of(parts, PAGE_TOKENS)

    def prompt(self, tokens: int) -> StepInput:
        """Make a step of one prompt from its start."""
        made = random_tokens(random.Random(0), tokens, self.executor.spec.vocab_size)
        return step_of([StepOf(made, 0, range(-(-tokens // PAGE_TOKENS)), None)], PAGE_TOKENS)


def measure(context: Context) -> None:
    """Measure decode steps of each number of rows, then a prompt. The device has no such limit afterwards."""
    amounts, rates = context.amounts, context.machine.rates
    copied_s = seconds_of_a_byte(context.gpu)
    name = amounts.offload_name()
    context.report(name, "copy from pinned memory", 1e-9 / copied_s, "GB/s")
    # On a disk, which /tmp may not be: rows of the embedding are read past the page cache.
    with tempfile.TemporaryDirectory(prefix=".gpu-bench-", dir=Path.cwd()) as folder:
        started = time.perf_counter()
        try:
            made = Offloaded.of(context, Path(folder))
            try:
                stay = made.executor.figures.resident_bytes
                context.report(name, "made", time.perf_counter() - started, "s")
                context.report(name, "weights that stay", stay / made.weight_bytes, "share")
                for rows in amounts.offload_rows:
                    work_s = decode_work(amounts.shape, rows, amounts.offload_context).bound_s(rates)
                    of_rows = f"{name}, batch {rows}, context {amounts.offload_context}"
                    took_s = _pass(context, made, of_rows, made.decode(rows, amounts.offload_context), work_s, copied_s)
                    context.report(of_rows, "output tokens", rows / took_s, "tokens/s")
                tokens = amounts.offload_context
                work_s = prefill_work(amounts.shape, tokens).bound_s(rates)
                _pass(context, made, f"{name}, prompt of {tokens}", made.prompt(tokens), work_s, copied_s)
            finally:
                made.executor.close()
        finally:
            context.gpu.lift_limit()


def _pass(context: Context, made: Offloaded, name: str, step: StepInput, work_s: float, copied_s: float) -> float:
    """Give the seconds of a pass, beside their bound."""
    context.check_time()
    executor, times = made.executor, list[float]()
    logits = executor.run(step)  # compiles
    assert bool(logits.isfinite().all()), name
    before = executor.figures.stream.copied_bytes
    for _ in range(context.amounts.clocked):
        began = time.perf_counter()
        executor.run(step)
        times.append(time.perf_counter() - began)
    copied = (executor.figures.stream.copied_bytes - before) / len(times)
    took_s, bound_s = median(times), max(work_s, copied * copied_s)
    context.report(name, "pass p50", took_s * 1e3, "ms", baseline=bound_s * 1e3, bound_fraction=bound_s / took_s)
    context.report(name, "copied to the device", copied / GIB, "GiB")
    return took_s


def seconds_of_a_byte(gpu: Gpu) -> float:
    """Measure a copy from pinned memory, with nothing beside it."""
    n_bytes = COPY_BYTES if gpu.is_real else 1 << 16
    host, stream = PinnedMemory(n_bytes, gpu.device), CopyStream(gpu.device)
    device = torch.empty(n_bytes, dtype=torch.uint8, device=gpu.device)
    try:
        times = list[float]()
        for _ in range(5):
            began = time.perf_counter()
            stream.copy([(device, host.tensor)], None)
            gpu.sync()
            times.append(time.perf_counter() - began)
        return min(times) / n_bytes
    finally:
        host.close()
