"""A model that does not fit: passes of the offloading executor on a part of the device, the rest in pinned memory.

A pass copies the weights that do not stay. Its bound is the longer of two times: that of those bytes at the rate of a
copy alone, and that of what the pass reads and computes on the device.
"""

import random
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from weft.domain.model.spec import ModelSpec
from weft.domain.model.tensors import model_tensors
from weft_bench.cpu_shapes import RANK
from weft_bench.drive.engine import PAGE_TOKENS
from weft_bench.drive.gpu import Bench
from weft_bench.roofline import decode_work, prefill_work
from weft_runner.model import Array, Checkpoint, Partition
from weft_runner.model.cuda.device import CopyStream, PinnedMemory
from weft_runner.model.cuda.executor import Sizes
from weft_runner.model.cuda.offload import OffloadCudaExecutor, activation_split, kv_split, work_bytes
from weft_runner.model.host_tensors import array_of
from weft_runner.model.tiers.budget import OffloadBudget
from weft_runner.offload import Budgets
from weft_stage.gpu_device import Gpu
from weft_stage.gpu_models import Numbers, StepOf, random_tokens, spec_of, step_of
from weft_stage.lines import Line

SLACK = 2 << 30  # of a device, for two layers on their way, what torch's allocator rounds up and libraries work on
HOST_BYTES = 1 << 40
COPY_BYTES, COPIES = 256 << 20, 5
GIB = 1 << 30


def beside_weights(part: Partition, dtype: str, sizes: Sizes, budget: OffloadBudget) -> Budgets:
    """Return what device and host need for all but weights, by a budget without a plan. Raises PolicyInvalid."""
    split, activations = kv_split(part, dtype, sizes, budget), activation_split(part, sizes, budget)
    work = work_bytes(part, dtype, sizes, split, activations)
    device = split.memory_bytes + activations.memory_bytes + work
    return Budgets(device, split.host_bytes + activations.host_bytes)


class RandomCheckpoint(Checkpoint):
    """A model that no file has: a tensor is made on the device when it is read, the same each time."""

    def __init__(self, spec: ModelSpec, gpu: Gpu) -> None:
        super().__init__(spec, {}, lambda: False, lambda _: None)
        self._gpu, self._shapes = gpu, dict(model_tensors(spec))

    def tensor(self, name: str) -> Array:
        numbers, shape = Numbers(self._gpu.device, self._gpu.dtype, seed=zlib.crc32(name.encode())), self._shapes[name]
        made = numbers.norm(*shape).to(self._gpu.dtype) if len(shape) == 1 else numbers.matrix(*shape)
        return array_of(made.cpu())

    def release(self, *names: str) -> None:
        """Do nothing: no tensor is kept."""


def offload(bench: Bench) -> Iterator[Line]:
    """Measure decode steps of each number of rows, then a prompt. The device has no such limit afterwards."""
    amounts, rates, tokens = bench.amounts, bench.machine.rates, bench.amounts.offload_context
    rate, name = copy_rate(bench.gpu), f"{amounts.model}, {amounts.offload_bytes >> 30} GiB of the device"
    yield bench.line(name, "copy from pinned memory", rate / 1e9, "GB/s")
    # The folder is on a disk, which /tmp may not be: rows of the embedding are read past the page cache.
    with tempfile.TemporaryDirectory(prefix=".gpu-bench-", dir=Path.cwd()) as folder, ExitStack() as ends:
        ends.callback(bench.gpu.lift_limit)
        started = time.perf_counter()
        executor = _executor(bench, Path(folder))
        ends.callback(executor.close)
        share = executor.figures.resident_bytes / (bench.gpu.dtype.itemsize * amounts.shape.weights)
        yield bench.line(name, "made", time.perf_counter() - started, "s")
        yield bench.line(name, "weights that stay", share, "share")
        for rows in (*amounts.offload_rows, 0):  # 0: a prompt
            bench.check_time()
            rng, pages, vocab = random.Random(0), -(-(tokens + 1) // PAGE_TOKENS), amounts.shape.vocab
            parts = [
                StepOf(random_tokens(rng, 1, vocab), tokens, range(row * pages, (row + 1) * pages), None)
                for row in range(rows)
            ] or [StepOf(random_tokens(rng, tokens, vocab), 0, range(-(-tokens // PAGE_TOKENS)), None)]
            step = step_of(parts, PAGE_TOKENS)
            assert bool(executor.run(step).isfinite().all()), name  # compiles
            copied = executor.figures.stream.copied_bytes
            took_s = median(bench.timer.clock(lambda step=step: executor.run(step), amounts.clocked)[1].seconds)
            copied = (executor.figures.stream.copied_bytes - copied) / amounts.clocked
            work = decode_work(amounts.shape, rows, tokens) if rows else prefill_work(amounts.shape, tokens)
            bound_s = max(work.bound_s(rates), copied / rate)
            case = f"{name}, " + (f"batch {rows}, context {tokens}" if rows else f"prompt of {tokens}")
            yield bench.line(
                case, "pass p50", took_s * 1e3, "ms", baseline=bound_s * 1e3, bound_fraction=bound_s / took_s
            )
            yield bench.line(case, "copied to the device", copied / GIB, "GiB")
            if rows:
                yield bench.line(case, "output tokens", rows / took_s, "tokens/s")


def _executor(bench: Bench, folder: Path) -> OffloadCudaExecutor:
    """Make an executor with room for these rows. Weights get the rest of the device's bytes."""
    amounts, gpu = bench.amounts, bench.gpu
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
    return OffloadCudaExecutor(gpu, RandomCheckpoint(spec, gpu), budget, sizes, dtype=dtype)


def copy_rate(gpu: Gpu) -> float:
    """Return the bytes a second of a copy from pinned memory, with nothing beside it."""
    n_bytes = COPY_BYTES if gpu.is_real else 1 << 16
    host, stream = PinnedMemory(n_bytes, gpu.device), CopyStream(gpu.device)
    device = torch.empty(n_bytes, dtype=torch.uint8, device=gpu.device)
    with ExitStack() as ends:
        ends.callback(host.close)
        times = list[float]()
        for _ in range(COPIES):
            began = time.perf_counter()
            stream.copy([(device, host.tensor)], None)
            gpu.sync()
            times.append(time.perf_counter() - began)
        return n_bytes / min(times)
