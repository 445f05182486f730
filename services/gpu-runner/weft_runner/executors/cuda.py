"""The kind `cuda`: Triton kernels on a GPU, or under Triton's interpreter. Each rank has a GPU of its own."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from weft.domain.model.spec import ModelSpec
from weft_runner.core.adapters.slots import MAX_SLOTS
from weft_runner.errors import OutOfMemory
from weft_runner.executors.memory import (
    WITHOUT_GPU,
    StepLimits,
    check_budgets,
    fitting_pages,
    gpu_step_limits,
    host_mib,
)
from weft_runner.executors.source import ModelSource, offload_budget, offload_folder, offload_formats, parts_of
from weft_runner.gpu_driver import NO_GPU
from weft_runner.memory_estimate import MemoryEstimate, available_memory, device_workspace, estimate_memory, page_bytes
from weft_runner.memory_estimate import check_memory as check_needs
from weft_runner.model.checkpoint import open_checkpoint
from weft_runner.model.cuda.device import DTYPES, Gpu, GpuUnavailable, find_gpu
from weft_runner.model.cuda.device import unsupported_reason as unsupported_on_gpu
from weft_runner.model.executor import Executor
from weft_runner.model.operator_threads import MAX_OPERATOR_THREADS, set_operator_threads
from weft_runner.model.partition import Partition
from weft_runner.model.tensor_parallel import SingleProcessGroup
from weft_runner.model.tiers.kept_rates import kept_rates, rates_identity
from weft_runner.model.weights import load_weights
from weft_runner.offload.machine import MachineRates
from weft_runner.parallel.process_group import TorchRanks
from weft_runner.settings import HOST_MIB, KV_PAGES, RunnerSettings

if TYPE_CHECKING:
    from weft_runner.model.cuda.executor import Sizes


def refusal(settings: RunnerSettings, spec: ModelSpec) -> str:
    if settings.executor == "auto" and not torch.cuda.is_available():
        return NO_GPU
    try:
        _devices(settings, spec)
    except GpuUnavailable as error:
        return str(error)
    return ""


def limits(settings: RunnerSettings, spec: ModelSpec) -> tuple[StepLimits, int]:
    """Choose them by the memory of the least of this host's GPUs."""
    devices = _devices(settings, spec)
    if not devices[0][0].is_real:
        return WITHOUT_GPU, HOST_MIB
    found = [_limits_of(settings, gpu, part) for gpu, part in devices]
    runners = torch.cuda.device_count() // len(devices)  # for which this process sees GPUs
    return StepLimits(*map(min, zip(*found, strict=True))), host_mib(available_memory(), runners)


def kv_pages(settings: RunnerSettings, spec: ModelSpec) -> int:
    """Choose the pages that --kv-memory-fraction of the least of this host's GPUs holds."""
    return min(_pages_of(settings, gpu, part) for gpu, part in _devices(settings, spec))


def check_memory(settings: RunnerSettings, spec: ModelSpec) -> None:
    """Compare needs with each GPU's memory; what an offloaded model takes of it is compared as its executor is made."""
    if settings.offload.device_bytes:
        check_budgets(settings, settings.offload.host_bytes, "host")
        return
    for gpu, part in _devices(settings, spec):
        check_needs(_needs(settings, gpu, part), gpu.available if gpu.is_real else available_memory())


def measure(settings: RunnerSettings, spec: ModelSpec, threads: int) -> MachineRates:
    del threads
    from weft_runner.model.cuda.machine_rates import measure_gpu_rates
    from weft_runner.model.cuda.matrix_packer import DevicePacker

    folder, formats, gpu = offload_folder(settings), offload_formats(settings), find_gpu()
    kernels = f"{gpu.name} {DevicePacker.version} torch {torch.__version__}"
    identity = rates_identity(kernels, settings.base_digest, formats, 0)
    most = settings.offload.device_bytes // 4
    return kept_rates(folder, identity, lambda: measure_gpu_rates(folder, spec, [formats.weights], gpu, most))


def make(settings: RunnerSettings, base: ModelSource, part: Partition, ranks: TorchRanks | None = None) -> Executor:
    from weft_kernels.triton import int4  # not where torch comes without Triton
    from weft_runner.model.cuda.executor import CudaExecutor

    rank, group = (0, SingleProcessGroup()) if ranks is None else (ranks.rank, ranks.tensor)
    if ranks is None:
        set_operator_threads(min(base.threads, MAX_OPERATOR_THREADS))
    found = find_gpu(settings.gpu_of(rank))
    sizes = _sizes(settings, found, part)
    if settings.offload.device_bytes:
        from weft_runner.model.cuda.offload import OffloadCudaExecutor

        checkpoint = open_checkpoint(base.files, base.spec, base.stopping, base.progress)
        budget = offload_budget(settings, base.policy, rank)
        sizes = replace(sizes, slots=settings.max_adapters or settings.max_sequences)
        with _named_shortage(settings):
            return OffloadCudaExecutor(
                found, checkpoint, budget, sizes, dtype=settings.dtype, part=part, stopping=base.stopping
            )
    dtype, pack = DTYPES[settings.dtype], int4.pack if settings.dtype == "int4" else None
    weights = load_weights(
        base.files, base.spec, dtype, base.stopping, part=part, device=found.device, pack=pack, progress=base.progress
    )
    with _named_shortage(settings):
        return CudaExecutor(base.spec, weights, sizes, group, part)


def _devices(settings: RunnerSettings, spec: ModelSpec) -> list[tuple[Gpu, Partition]]:
    """Find a GPU for each rank of this host, whose kernels compute its part; other hosts see to theirs.

    Raises GpuUnavailable, ExecutorUnavailable.
    """
    parts = parts_of(settings, spec, even_heads=True)[: len(settings.ranks_here)]
    devices = [(find_gpu(rank), part) for rank, part in enumerate(parts)]
    for _, part in devices:
        if reason := unsupported_on_gpu(part, settings.dtype, settings.page_tokens, settings.max_rank):
            raise GpuUnavailable(reason)
    return devices


def _limits_of(settings: RunnerSettings, found: Gpu, part: Partition) -> StepLimits:
    kind, memory = f"cuda {settings.dtype}", found.available
    weights = estimate_memory(part.local, kind, kv_pages=0, page_tokens=settings.page_tokens).total
    beside = int((1 - settings.kv_memory_fraction) * memory.of_bytes)
    works_on = partial(
        device_workspace, part.local, kind, rows=0, context=0, page_tokens=settings.page_tokens, recorded=()
    )
    left = memory.n_bytes - beside - weights
    return gpu_step_limits(left, page_bytes(part.local, kind, 1), lambda tokens: works_on(tokens=tokens))


def _pages_of(settings: RunnerSettings, found: Gpu, part: Partition) -> int:
    """Count the KV pages in the share of a GPU's memory. Raises KvCacheTooSmall."""
    if not found.is_real:
        return KV_PAGES
    return fitting_pages(
        lambda pages: _needs(replace(settings, kv_pages=pages), found, part), found.available,
        settings.kv_memory_fraction, context=part.whole.max_positions, page_tokens=settings.page_tokens,
    )  # fmt: skip


def _needs(settings: RunnerSettings, found: Gpu, part: Partition) -> MemoryEstimate:
    from weft_runner.model.cuda.adapters import layout_of  # not where torch comes without Triton
    from weft_runner.model.cuda.cuda_graphs import graph_rows

    kind, pages, context = f"cuda {settings.dtype}", settings.kv_pages, _context(settings, part.whole)
    recorded = graph_rows(settings.max_sequences, settings.max_batch_tokens) if found.is_real else ()
    beside = device_workspace(
        part.local, kind, rows=settings.max_sequences, tokens=settings.max_batch_tokens, context=context,
        page_tokens=settings.page_tokens, recorded=recorded,
    )  # fmt: skip
    beside += _slots(settings, part) * layout_of(part, settings.max_rank).entry_bytes
    return estimate_memory(part.local, kind, kv_pages=pages, page_tokens=settings.page_tokens, workspace_bytes=beside)


def _sizes(settings: RunnerSettings, found: Gpu, part: Partition) -> "Sizes":
    from weft_runner.model.cuda.executor import Sizes  # not where torch comes without Triton

    return Sizes(
        pages=settings.kv_pages,
        page_tokens=settings.page_tokens,
        slots=_slots(settings, part),
        max_rank=settings.max_rank,
        rows=settings.max_sequences,
        context=_context(settings, part.whole),
        graphs=found.is_real,
        tokens=settings.max_batch_tokens,
    )


@contextmanager
def _named_shortage(settings: RunnerSettings) -> Generator[None]:
    """Name the flags that help where a GPU's memory does not suffice. Raises OutOfMemory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"the weights fit, and what steps work on does not: ask for fewer --kv-pages ({settings.kv_pages}), "
            f"--max-sequences ({settings.max_sequences}) or --max-batch-tokens ({settings.max_batch_tokens}): {error}"
        ) from error


def _slots(settings: RunnerSettings, part: Partition) -> int:
    """Bound the adapters on the device, where each takes an entry in tables: never fewer than a batch may need."""
    from weft_runner.model.cuda.adapters import slots_beside  # not where torch comes without Triton

    element_bytes = DTYPES[settings.dtype].itemsize
    beside = slots_beside(part, settings.kv_pages, settings.page_tokens, settings.max_rank, element_bytes)
    return settings.max_adapters or min(MAX_SLOTS, max(settings.max_sequences, beside))


def _context(settings: RunnerSettings, spec: ModelSpec) -> int:
    """Bound the tokens of a sequence."""
    return min(spec.max_positions, settings.kv_pages * settings.page_tokens)
