"""Executors that compute with torch, and all splits: their ranks meet, and exchange tensors, through torch's groups."""

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from weft.domain.model.config import ModelSpec
from weft.telemetry.logs import kv
from weft_runner.core.adapter_slots import MOST_SLOTS
from weft_runner.cpu_executors import (
    ModelSource,
    check_budgets,
    check_host,
    check_memory_for,
    cpu_part,
    most_slots,
    native_unavailable,
    offload_budget_of,
    part_of,
)
from weft_runner.errors import ExecutorUnavailable, OutOfMemory
from weft_runner.kv_pages import fitting_pages
from weft_runner.model.checkpoint import open_checkpoint
from weft_runner.model.cuda import flashinfer
from weft_runner.model.cuda.device import DTYPES, Gpu, GpuUnavailable, find_gpu
from weft_runner.model.cuda.device import unsupported_reason as unsupported_on_gpu
from weft_runner.model.executor import Executor
from weft_runner.model.kv_cache import KvCache
from weft_runner.model.memory_estimate import (
    MemoryEstimate,
    available_memory,
    check_memory,
    device_workspace,
    estimate_memory,
    page_bytes,
)
from weft_runner.model.partition import Partition, check_divisible
from weft_runner.model.reference.adapters import TorchAdapterStore
from weft_runner.model.reference.executor import ReferenceExecutor
from weft_runner.model.tensor_parallel import ProcessGroup, SingleProcessGroup
from weft_runner.model.weights import load_weights
from weft_runner.parallel.executor import TensorParallelExecutor
from weft_runner.parallel.grid import RankGrid
from weft_runner.parallel.pipeline import OffloadedPipeline, PipelineParallelExecutor
from weft_runner.parallel.process_group import TorchRanks
from weft_runner.parallel.worker_group import OFFLOADED_PATIENCE_S, PATIENCE_S, launch_ranks
from weft_runner.settings import KV_PAGES, RunnerSettings
from weft_runner.step_limits import StepLimits, gpu_step_limits, host_mib

if TYPE_CHECKING:
    from weft_runner.model.cuda.executor import Sizes

log = logging.getLogger(__name__)
MOST_OPERATOR_THREADS = 4  # of the reference executor's operators: they do not gain from more
COST = "fp32 in torch, one operator after the other: twice the bytes a token, and several times the time"


def sees_gpu() -> bool:
    """torch does."""
    return torch.cuda.is_available()


def _limit_operators(base: ModelSource) -> None:
    torch.set_num_threads(min(base.threads, MOST_OPERATOR_THREADS))


def split_executor(settings: RunnerSettings, base: ModelSource) -> Executor:
    """`auto`: on GPUs wherever there is one; too few of them is an error. Else the native executor, or reference.

    Raises ExecutorUnavailable, ExecutorLost, OutOfMemory, and what `make_partition` raises on any rank.
    """
    _limit_operators(base)
    spec, grid = base.spec, RankGrid(settings.pipeline_parallel, settings.tensor_parallel)
    if settings.executor == "auto":
        settings = replace(
            settings, executor="cuda" if torch.cuda.is_available() else _split_on_cpu(settings, spec, grid)
        )
    check_divisible(spec, grid.tensor, even_heads=settings.executor == "cuda")
    parts, device = [part_of(spec, grid, rank) for rank in range(grid.size)], "cpu"
    if settings.executor == "cuda":
        device = _check_gpus(settings, parts)
        if settings.offload.device_bytes:
            check_host(settings)
    else:
        kind = settings.dtype if settings.executor == "cpu" else "reference"
        if settings.offload.device_bytes:
            check_budgets(settings)
        else:
            own = parts[: len(settings.ranks_here)] if settings.hosts > 1 else ()
            check_memory_for(settings, base, kind, grid, own)
    if settings.executor == "cpu" and (why := native_unavailable(settings, parts)):
        raise ExecutorUnavailable(f"--executor cpu: {why}")
    files = {name: path.absolute() for name, path in base.files.items()}
    start = {"settings": settings, "spec": spec, "files": files, "threads": base.threads, "device": device,
             "runner": base.runner, "policy": base.policy}  # fmt: skip
    own = partial(make_partition, settings, base)
    gather = base.gather if settings.hosts > 1 else None
    patience_s = OFFLOADED_PATIENCE_S if settings.offload.device_bytes else PATIENCE_S
    ranks = launch_ranks(grid, start, own, base.stopping, patience_s=patience_s, gather=gather)
    if settings.offload.device_bytes:
        executor = OffloadedPipeline(spec, ranks, settings.hosts)
    else:
        executor = PipelineParallelExecutor(spec, ranks) if grid.stages > 1 else TensorParallelExecutor(spec, ranks)
    log.info("the model is split", extra=kv(layers=[len(part.layers) for part in parts], others=executor.workers))
    return executor


def _split_on_cpu(settings: RunnerSettings, spec: ModelSpec, grid: RankGrid) -> str:
    """Raises ExecutorUnavailable."""
    check_divisible(spec, grid.tensor, even_heads=False)
    why = native_unavailable(settings, [part_of(spec, grid, rank) for rank in range(grid.size)])
    if why:
        log.warning("the native CPU executor cannot split the model: reference does", extra=kv(reason=why, cost=COST))
    return "reference" if why else "cpu"


def cuda_executor(settings: RunnerSettings, base: ModelSource) -> Executor:
    """Raises GpuUnavailable before any weight is read, OutOfMemory."""
    _limit_operators(base)
    found = find_gpu()
    _check_gpu(settings, found, Partition(base.spec))
    if settings.offload.device_bytes:
        check_host(settings)
    return _cuda_part(settings, base, found, Partition(base.spec), SingleProcessGroup())


def _check_gpus(settings: RunnerSettings, parts: Sequence[Partition]) -> str:
    """One for each part; what kind of device they are. Raises ExecutorUnavailable, OutOfMemory."""
    try:
        parts = parts[: len(settings.ranks_here)]  # other hosts see to theirs
        found = [find_gpu(rank) for rank in range(len(parts))]
        for one, part in zip(found, parts, strict=True):
            _check_gpu(settings, one, part)
    except GpuUnavailable as error:
        split = {"tensor-parallel": settings.tensor_parallel, "pipeline-parallel": settings.pipeline_parallel}
        how = " ".join(f"--{name} {parts}" for name, parts in split.items() if parts > 1)
        raise ExecutorUnavailable(f"--executor cuda {how}: {error}") from error
    return found[0].device.type


def gpu_pages(settings: RunnerSettings, spec: ModelSpec) -> int:
    """KV pages where GPUs compute: what --kv-memory-fraction of each of this host's GPUs holds, the least of them.

    Raises GpuUnavailable, ExecutorUnavailable, KvCacheTooSmall.
    """
    grid = RankGrid(settings.pipeline_parallel, settings.tensor_parallel)
    check_divisible(spec, grid.tensor, even_heads=True)
    parts = [part_of(spec, grid, rank) for rank in range(len(settings.ranks_here))]
    return min(_pages_of(settings, find_gpu(rank), part) for rank, part in enumerate(parts))


def gpu_limits(settings: RunnerSettings, spec: ModelSpec) -> tuple[StepLimits, int] | None:
    """Most sequences and tokens of a step by the memory of this host's GPUs, the least of them, and MiB of the host's.

    None where Triton's interpreter plays the GPU. Raises GpuUnavailable, ExecutorUnavailable.
    """
    grid = RankGrid(settings.pipeline_parallel, settings.tensor_parallel)
    check_divisible(spec, grid.tensor, even_heads=True)
    parts = [part_of(spec, grid, rank) for rank in range(len(settings.ranks_here))]
    gpus = [find_gpu(rank) for rank in range(len(parts))]
    if not gpus[0].is_real:
        return None
    limits = [_limits_of(settings, found, part) for found, part in zip(gpus, parts, strict=True)]
    return StepLimits(*map(min, zip(*limits, strict=True))), host_mib(available_memory(), _runners_here(settings))


def _runners_here(settings: RunnerSettings) -> int:
    """How many runners the GPUs that this process sees are enough for."""
    return torch.cuda.device_count() // len(settings.ranks_here)


def _limits_of(settings: RunnerSettings, found: Gpu, part: Partition) -> StepLimits:
    """Raises GpuUnavailable."""
    _check_kernels(settings, found, part)
    kind, memory = f"cuda {settings.dtype}", found.available
    weights = estimate_memory(part.local, kind, kv_pages=0, page_tokens=settings.page_tokens).total
    beside = int((1 - settings.kv_memory_fraction) * memory.of_bytes)
    works_on = partial(
        device_workspace, part.local, kind, rows=0, context=0, page_tokens=settings.page_tokens, recorded=()
    )
    left = memory.n_bytes - beside - weights
    return gpu_step_limits(left, page_bytes(part.local, kind, 1), lambda tokens: works_on(tokens=tokens))


def _pages_of(settings: RunnerSettings, found: Gpu, part: Partition) -> int:
    _check_kernels(settings, found, part)
    if not found.is_real:
        return KV_PAGES
    return fitting_pages(
        lambda pages: _gpu_needs(replace(settings, kv_pages=pages), found, part), found.available,
        settings.kv_memory_fraction, context=part.whole.max_positions, page_tokens=settings.page_tokens,
    )  # fmt: skip


def _check_gpu(settings: RunnerSettings, found: Gpu, part: Partition) -> None:
    """Raises GpuUnavailable, OutOfMemory."""
    _check_kernels(settings, found, part)
    if settings.offload.device_bytes:
        return  # its budgets are compared with what there is as it is made
    check_memory(_gpu_needs(settings, found, part), found.available if found.is_real else available_memory())


def _check_kernels(settings: RunnerSettings, found: Gpu, part: Partition) -> None:
    """Raises GpuUnavailable."""
    reason = unsupported_on_gpu(part, settings.dtype, settings.page_tokens, settings.max_rank)
    if settings.attention == "flashinfer":
        reason = reason or flashinfer.unsupported_reason(part.local.head_dim, settings.dtype, real=found.is_real)
    if reason:
        raise GpuUnavailable(reason)


def _gpu_needs(settings: RunnerSettings, found: Gpu, part: Partition) -> MemoryEstimate:
    from weft_runner.model.cuda.adapters import layout_of  # not where torch comes without Triton
    from weft_runner.model.cuda.cuda_graphs import graph_rows

    kind, pages, context = f"cuda {settings.dtype}", settings.kv_pages, _context(settings, part.whole)
    recorded = graph_rows(settings.max_sequences, settings.max_batch_tokens) if found.is_real else ()
    beside = device_workspace(
        part.local, kind, rows=settings.max_sequences, tokens=settings.max_batch_tokens, context=context,
        page_tokens=settings.page_tokens, recorded=recorded,
    )  # fmt: skip
    beside += _cuda_slots(settings, part) * layout_of(part, settings.max_rank).entry_bytes
    beside += flashinfer.workspace_bytes(part.local.windows) if settings.attention == "flashinfer" else 0
    return estimate_memory(part.local, kind, kv_pages=pages, page_tokens=settings.page_tokens, workspace_bytes=beside)


def _cuda_part(
    settings: RunnerSettings, base: ModelSource, found: Gpu, part: Partition, group: ProcessGroup, rank: int = 0
) -> Executor:
    """`rank`: of the runner. Raises WeightsInvalid, OutOfMemory, and where weights are offloaded what that raises."""
    from weft_kernels.triton import int4  # not where torch comes without Triton
    from weft_runner.model.cuda.executor import CudaExecutor

    if settings.offload.device_bytes:
        return _cuda_offload(settings, base, found, part, rank)
    dtype, pack = DTYPES[settings.dtype], int4.pack if settings.dtype == "int4" else None
    weights = load_weights(
        base.files, base.spec, dtype, base.stopping, part=part, device=found.device, pack=pack, progress=base.progress
    )
    with _named_shortage(settings):
        return CudaExecutor(base.spec, weights, _cuda_sizes(settings, found, part), group, part)


def _cuda_offload(settings: RunnerSettings, base: ModelSource, found: Gpu, part: Partition, rank: int) -> Executor:
    """Raises WeightsInvalid, OutOfMemory, NoPolicyFits, PolicyInvalid, DiskUnusable, StoppedAtStart."""
    from weft_runner.model.cuda.offload import OffloadCudaExecutor  # not where torch comes without Triton

    checkpoint = open_checkpoint(base.files, base.spec, base.stopping, base.progress)
    budget = offload_budget_of(settings, base.policy, rank)
    sizes = replace(_cuda_sizes(settings, found, part), slots=settings.max_adapters or settings.max_sequences)
    with _named_shortage(settings):
        return OffloadCudaExecutor(
            found, checkpoint, budget, sizes, dtype=settings.dtype, part=part, stopping=base.stopping
        )


def _cuda_sizes(settings: RunnerSettings, found: Gpu, part: Partition) -> "Sizes":
    from weft_runner.model.cuda.executor import Sizes  # not where torch comes without Triton

    return Sizes(
        pages=settings.kv_pages,
        page_tokens=settings.page_tokens,
        slots=_cuda_slots(settings, part),
        max_rank=settings.max_rank,
        rows=settings.max_sequences,
        context=_context(settings, part.whole),
        graphs=found.is_real,
        tokens=settings.max_batch_tokens,
        flashinfer=settings.attention == "flashinfer",
    )


@contextmanager
def _named_shortage(settings: RunnerSettings) -> Generator[None]:
    """Raises OutOfMemory for a GPU's."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"the weights fit, and what steps work on does not: ask for fewer --kv-pages ({settings.kv_pages}), "
            f"--max-sequences ({settings.max_sequences}) or --max-batch-tokens ({settings.max_batch_tokens}): {error}"
        ) from error


def _cuda_slots(settings: RunnerSettings, part: Partition) -> int:
    """The same, where each takes an entry in tables: never fewer than a batch may need."""
    from weft_runner.model.cuda.adapters import slots_beside  # not where torch comes without Triton

    element_bytes = DTYPES[settings.dtype].itemsize
    beside = slots_beside(part, settings.kv_pages, settings.page_tokens, settings.max_rank, element_bytes)
    return settings.max_adapters or min(MOST_SLOTS, max(settings.max_sequences, beside))


def _context(settings: RunnerSettings, spec: ModelSpec) -> int:
    """Most tokens of a sequence."""
    return min(spec.max_positions, settings.kv_pages * settings.page_tokens)


def reference_executor(settings: RunnerSettings, base: ModelSource) -> Executor:
    _limit_operators(base)
    check_memory_for(settings, base, "reference")
    return _reference_part(settings, base, Partition(base.spec), SingleProcessGroup())


def make_partition(settings: RunnerSettings, base: ModelSource, ranks: TorchRanks) -> Executor:
    """A rank's part of the executor that `--executor` names. See `model.partition`.

    Raises WeightsInvalid, StoppedAtStart.
    """
    part = part_of(base.spec, ranks.grid, ranks.rank)
    if settings.executor == "cuda":
        return _cuda_part(settings, base, find_gpu(local_gpu(settings, ranks.rank)), part, ranks.tensor, ranks.rank)
    if settings.executor == "cpu":
        return cpu_part(settings, base, part, ranks if part.size > 1 else None, ranks.rank)
    return _reference_part(settings, base, part, ranks.tensor)


def local_gpu(settings: RunnerSettings, rank: int) -> int:
    """The number of a rank's GPU on its host."""
    return rank % len(settings.ranks_here)


def _reference_part(
    settings: RunnerSettings, base: ModelSource, part: Partition, group: ProcessGroup
) -> ReferenceExecutor:
    weights = load_weights(base.files, base.spec, stopping=base.stopping, part=part, progress=base.progress)
    kv_cache = KvCache(part.local, settings.kv_pages, settings.page_tokens)
    adapters = TorchAdapterStore(base.spec, most_slots(settings), part)
    return ReferenceExecutor(part.local, weights, kv_cache, adapters, group)


def check_offload_gpu(settings: RunnerSettings, spec: ModelSpec) -> Gpu:
    """The first GPU of a runner that offloads, once all are found to serve. Raises GpuUnavailable."""
    found, grid = find_gpu(), RankGrid(settings.pipeline_parallel, settings.tensor_parallel)
    for rank in range(grid.size):
        _check_gpu(settings, found, part_of(spec, grid, rank))
    return found
