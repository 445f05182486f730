"""What computes: the cuda executor where there is a GPU, else the native CPU executor, else the reference executor.

The last one serves every model; `auto` takes the first that can serve this one and logs why the others cannot.
"""

import json
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weft.domain.ids import RunnerId
from weft.domain.model.config import ModelSpec
from weft.domain.model.packed import int4_kv_group
from weft.telemetry.logs import kv
from weft_kernels.cpu.errors import LevelUnusable, NativeUnavailable
from weft_kernels.cpu.library import load
from weft_runner.core.adapter_slots import MOST_SLOTS
from weft_runner.errors import ExecutorUnavailable, OutOfMemory, PolicyInvalid
from weft_runner.model.checkpoint import open_checkpoint
from weft_runner.model.cpu.executor import CpuExecutor
from weft_runner.model.cpu.offload import OffloadExecutor
from weft_runner.model.cpu.packed_weights import unsupported_reason
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
)
from weft_runner.model.partition import Partition, check_divisible, stage_of
from weft_runner.model.reference.adapters import TorchAdapterStore
from weft_runner.model.reference.executor import ReferenceExecutor
from weft_runner.model.tensor_parallel import ProcessGroup, SingleProcessGroup
from weft_runner.model.tiers.budget import OffloadBudget
from weft_runner.model.weights import Files, load_weights
from weft_runner.offload.machine import MachineRates
from weft_runner.offload.plan import OffloadPlan, plan_of
from weft_runner.parallel.executor import TensorParallelExecutor
from weft_runner.parallel.grid import RankGrid
from weft_runner.parallel.pipeline import OffloadedPipeline, PipelineParallelExecutor
from weft_runner.parallel.process_group import TorchRanks
from weft_runner.parallel.worker_group import OFFLOADED_PATIENCE_S, PATIENCE_S, GatherRanks, launch_ranks
from weft_runner.settings import CPU_PAGE, RunnerSettings

if TYPE_CHECKING:
    from weft_runner.model.cuda.executor import Sizes

log = logging.getLogger(__name__)
COST = "fp32 in torch, one operator after the other: twice the bytes a token, and several times the time"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The model to compute, and how many threads may (of each rank). `stopping`: asked while weights load.

    `gather`: where the ranks of a split model are on other hosts. `runner`: who it is, for others. `policy`: by which
    it offloads (None: as many weights stay as fit, or as --offload-plan says).
    """

    spec: ModelSpec
    files: Files
    threads: int
    stopping: Callable[[], bool] = lambda: False
    gather: GatherRanks | None = None
    runner: RunnerId | None = None
    policy: "OffloadPolicy | None" = None


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """What a runner found at its start: each rank's machine and plan; no plans: as many weights stay as fit."""

    machines: Mapping[int, MachineRates]
    plans: Mapping[int, OffloadPlan]


def make_executor(settings: RunnerSettings, base: ModelSource) -> Executor:
    """The executor that `--executor` names. Raises ExecutorUnavailable, WeightsInvalid, OutOfMemory, StoppedAtStart."""
    if settings.attention == "flashinfer":
        settings = replace(settings, executor="cuda")  # an attention of GPUs needs one
    settings = _only_cpu(settings)
    if settings.tensor_parallel > 1 or settings.pipeline_parallel > 1:
        return _split(settings, base)
    if settings.executor == "reference":
        return _reference(settings, base)
    if settings.executor == "cuda" or (settings.executor == "auto" and torch.cuda.is_available()):
        try:
            return _cuda(settings, base)
        except GpuUnavailable as error:
            if settings.executor == "cuda":
                raise ExecutorUnavailable(f"--executor cuda: {error}") from error
            log.warning("the GPU cannot serve: the CPU does", extra=kv(reason=error))
    try:
        return _cpu(settings, base)
    except NativeUnavailable as error:
        if settings.executor == "cpu":
            raise ExecutorUnavailable(f"--executor cpu: {error.reason}") from error
        log.warning("the native CPU executor cannot serve: reference does", extra=kv(reason=error.reason, cost=COST))
        return _reference(settings, base)


def _split(settings: RunnerSettings, base: ModelSource) -> Executor:
    """`auto`: on GPUs wherever there is one; too few of them is an error. Else the native executor, or reference.

    Raises ExecutorUnavailable, ExecutorLost, OutOfMemory, and what `make_partition` raises on any rank.
    """
    spec, grid = base.spec, RankGrid(settings.pipeline_parallel, settings.tensor_parallel)
    if settings.executor == "auto":
        settings = replace(
            settings, executor="cuda" if torch.cuda.is_available() else _split_on_cpu(settings, spec, grid)
        )
    check_divisible(spec, grid.tensor, even_heads=settings.executor == "cuda")
    parts, device = [_part_of(spec, grid, rank) for rank in range(grid.size)], "cpu"
    if settings.executor == "cuda":
        device = _check_gpus(settings, parts)
        if settings.offload_device_bytes:
            _check_host(settings)
    else:
        kind = settings.dtype if settings.executor == "cpu" else "reference"
        if settings.offload_device_bytes:
            _check_budgets(settings)
        else:
            own = parts[: len(settings.ranks_here)] if settings.ranks_listen else ()
            _check_memory(settings, base, kind, grid, own)
    if settings.executor == "cpu" and (why := _native_unavailable(settings, parts)):
        raise ExecutorUnavailable(f"--executor cpu: {why}")
    files = {name: path.absolute() for name, path in base.files.items()}
    start = {"settings": settings, "spec": spec, "files": files, "threads": base.threads, "device": device,
             "runner": base.runner, "policy": base.policy}  # fmt: skip
    own = partial(make_partition, settings, base)
    gather = base.gather if settings.ranks_listen else None
    patience_s = OFFLOADED_PATIENCE_S if settings.offload_device_bytes else PATIENCE_S
    ranks = launch_ranks(grid, start, own, base.stopping, patience_s=patience_s, gather=gather)
    if settings.offload_device_bytes:
        executor = OffloadedPipeline(spec, ranks, settings.hosts)
    else:
        executor = PipelineParallelExecutor(spec, ranks) if grid.stages > 1 else TensorParallelExecutor(spec, ranks)
    log.info("the model is split", extra=kv(layers=[len(part.layers) for part in parts], others=executor.workers))
    return executor


def _split_on_cpu(settings: RunnerSettings, spec: ModelSpec, grid: RankGrid) -> str:
    """Raises ExecutorUnavailable."""
    check_divisible(spec, grid.tensor, even_heads=False)
    why = _native_unavailable(settings, [_part_of(spec, grid, rank) for rank in range(grid.size)])
    if why:
        log.warning("the native CPU executor cannot split the model: reference does", extra=kv(reason=why, cost=COST))
    return "reference" if why else "cpu"


def _native_unavailable(settings: RunnerSettings, parts: Sequence[Partition]) -> str:
    """Why the native executor cannot compute these parts; empty when it can."""
    if settings.page_tokens % CPU_PAGE:
        return f"--page-tokens {settings.page_tokens} is no multiple of {CPU_PAGE}"
    if reason := next(filter(None, map(unsupported_reason, parts)), ""):
        return reason
    if settings.kv_dtype == "int4" and not int4_kv_group(head_dim := parts[0].local.head_dim):
        return f"--kv-dtype int4 has groups of 64 or 32 numbers of a head, and head_dim is {head_dim}"
    try:
        load()
    except LevelUnusable as error:
        raise ExecutorUnavailable(f"$WEFT_CPU_LEVEL: {error}") from error
    except NativeUnavailable as error:
        return error.reason
    return ""


def _cuda(settings: RunnerSettings, base: ModelSource) -> Executor:
    """Raises GpuUnavailable before any weight is read, OutOfMemory."""
    found = find_gpu()
    _check_gpu(settings, found, Partition(base.spec))
    if settings.offload_device_bytes:
        _check_host(settings)
    return _cuda_part(settings, base, found, Partition(base.spec), SingleProcessGroup())


def offload_gpu(settings: RunnerSettings, spec: ModelSpec) -> Gpu | None:
    """The first GPU of a runner that offloads; None: the CPU computes. Raises ExecutorUnavailable."""
    settings = _only_cpu(settings)
    if settings.executor == "cuda" or (settings.executor == "auto" and torch.cuda.is_available()):
        try:
            found, grid = find_gpu(), RankGrid(settings.pipeline_parallel, settings.tensor_parallel)
            for rank in range(grid.size):
                _check_gpu(settings, found, _part_of(spec, grid, rank))
            return found
        except GpuUnavailable as error:
            if settings.executor == "cuda":
                raise ExecutorUnavailable(f"--executor cuda: {error}") from error
    return None


def _only_cpu(settings: RunnerSettings) -> RunnerSettings:
    """Where only the cpu executor has what is asked for: KV on a disk or in int4, sparse attention."""
    if settings.offload_kv_disk_pages or settings.kv_dtype == "int4" or settings.sparse_attention:
        return replace(settings, executor="cpu")
    return settings


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


def _check_gpu(settings: RunnerSettings, found: Gpu, part: Partition) -> None:
    """Raises GpuUnavailable, OutOfMemory."""
    reason = unsupported_on_gpu(part, settings.dtype, settings.page_tokens, settings.max_rank)
    library = settings.attention == "flashinfer"
    if library:
        reason = reason or flashinfer.unsupported_reason(part.local.head_dim, settings.dtype, real=found.is_real)
    if reason:
        raise GpuUnavailable(reason)
    if settings.offload_device_bytes:
        return  # its budgets are compared with what there is as it is made
    from weft_runner.model.cuda.adapters import layout_of  # not where torch comes without Triton
    from weft_runner.model.cuda.cuda_graphs import sizes

    kind, pages, context = f"cuda {settings.dtype}", settings.kv_pages, _context(settings, part.whole)
    beside = device_workspace(
        part.local, kind, rows=settings.max_sequences, tokens=settings.max_batch_tokens, context=context,
        page_tokens=settings.page_tokens, recorded=sizes(settings.max_sequences) if found.is_real else (),
    )  # fmt: skip
    beside += _cuda_slots(settings, part) * layout_of(part, settings.max_rank).entry_bytes
    beside += flashinfer.workspace_bytes(part.local.windows) if library else 0
    needed = estimate_memory(part.local, kind, kv_pages=pages, page_tokens=settings.page_tokens, workspace_bytes=beside)
    check_memory(needed, found.available if found.is_real else available_memory())


def _cuda_part(
    settings: RunnerSettings, base: ModelSource, found: Gpu, part: Partition, group: ProcessGroup, rank: int = 0
) -> Executor:
    """`rank`: of the runner. Raises WeightsInvalid, OutOfMemory, and where weights are offloaded what that raises."""
    from weft_kernels.triton import int4  # not where torch comes without Triton
    from weft_runner.model.cuda.executor import CudaExecutor

    if settings.offload_device_bytes:
        return _cuda_offload(settings, base, found, part, rank)
    dtype, pack = DTYPES[settings.dtype], int4.pack if settings.dtype == "int4" else None
    weights = load_weights(base.files, base.spec, dtype, base.stopping, part=part, device=found.device, pack=pack)
    with _named_shortage(settings):
        return CudaExecutor(base.spec, weights, _cuda_sizes(settings, found, part), group, part)


def _cuda_offload(settings: RunnerSettings, base: ModelSource, found: Gpu, part: Partition, rank: int) -> Executor:
    """Raises WeightsInvalid, OutOfMemory, NoPolicyFits, PolicyInvalid, DiskUnusable, StoppedAtStart."""
    from weft_runner.model.cuda.offload import OffloadCudaExecutor  # not where torch comes without Triton

    checkpoint = open_checkpoint(base.files, base.spec, base.stopping)
    budget = _offload_budget(settings, base.policy, rank)
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


def _slots(settings: RunnerSettings) -> int:
    """Adapters that may be on the device: as many as its pages could hold, where no bound is set."""
    return settings.max_adapters or min(settings.kv_pages, MOST_SLOTS)


def _cuda_slots(settings: RunnerSettings, part: Partition) -> int:
    """The same, where each takes an entry in tables: never fewer than a batch may need."""
    from weft_runner.model.cuda.adapters import slots_beside  # not where torch comes without Triton

    element_bytes = DTYPES[settings.dtype].itemsize
    beside = slots_beside(part, settings.kv_pages, settings.page_tokens, settings.max_rank, element_bytes)
    return settings.max_adapters or min(MOST_SLOTS, max(settings.max_sequences, beside))


def _context(settings: RunnerSettings, spec: ModelSpec) -> int:
    """Most tokens of a sequence."""
    return min(spec.max_positions, settings.kv_pages * settings.page_tokens)


def _cpu(settings: RunnerSettings, base: ModelSource) -> Executor:
    """Raises NativeUnavailable before any weight is read."""
    part = Partition(base.spec)
    if reason := _native_unavailable(settings, [part]):
        raise NativeUnavailable(reason)
    if settings.offload_device_bytes:
        _check_budgets(settings)
    else:
        _check_memory(settings, base, settings.dtype)
    return _cpu_part(settings, base, part, None)


def _cpu_part(
    settings: RunnerSettings, base: ModelSource, part: Partition, ranks: TorchRanks | None, rank: int = 0
) -> Executor:
    """`ranks`: with whom it computes each layer; `rank`: of the runner.

    Raises WeightsInvalid, StoppedAtStart; where weights are offloaded OutOfMemory, DiskUnusable.
    """
    library = load()
    if settings.offload_device_bytes:
        return OffloadExecutor(
            library,
            open_checkpoint(base.files, base.spec, base.stopping),
            _offload_budget(settings, base.policy, rank),
            dtype=settings.dtype,
            kv_dtype=settings.kv_dtype,
            top_share=settings.sparse_attention,
            threads=base.threads,
            pages=settings.kv_pages,
            page_tokens=settings.page_tokens,
            slots=_slots(settings),
            part=part,
            stopping=base.stopping,
        )
    return CpuExecutor(
        library,
        open_checkpoint(base.files, base.spec, base.stopping),
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        top_share=settings.sparse_attention,
        threads=base.threads,
        pages=settings.kv_pages,
        page_tokens=settings.page_tokens,
        slots=_slots(settings),
        part=part,
        ranks=None if ranks is None else ranks.native_slots(library.native, slot_bytes(settings, part)),
    )


def _offload_budget(settings: RunnerSettings, policy: OffloadPolicy | None, rank: int) -> OffloadBudget:
    """Raises PolicyInvalid."""
    plan = None if policy is None else policy.plans.get(rank)
    if settings.offload_plan is not None:
        plan = _read_plan(settings.offload_plan, settings)
    batch_tokens = settings.offload_batch_tokens if plan is None else plan.batch_tokens
    return OffloadBudget(
        device_bytes=settings.offload_device_bytes,
        disk_bytes=settings.offload_disk_bytes,
        path=offload_folder(settings),
        base=settings.base_digest,
        micro_batch=max(1, min(batch_tokens, settings.max_batch_tokens)),
        max_tokens=settings.max_batch_tokens,
        max_sequences=settings.max_sequences,
        max_rank=settings.max_rank,
        share=settings.offload_weights_share,
        host_bytes=settings.offload_host_bytes,
        kv_disk_pages=settings.offload_kv_disk_pages,
        kv_host_pages=settings.offload_kv_host_pages,
        in_flight=settings.hosts,
        plan=plan,
        machine=None if policy is None else policy.machines[rank],
    )


def offload_folder(settings: RunnerSettings) -> Path:
    """Where packed weights lie, and what was measured."""
    return settings.offload_disk_path or settings.data_dir / "offload"


def _read_plan(path: Path, settings: RunnerSettings) -> OffloadPlan:
    """Raises PolicyInvalid."""
    try:
        plan = plan_of(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise PolicyInvalid(f"--offload-plan {path}: {error}") from error
    if (weights := plan.formats.weights) != settings.dtype:
        raise PolicyInvalid(f"--offload-plan {path} is of {weights} weights, not of --dtype {settings.dtype}")
    if (plan.formats.kv == "int4") != (settings.kv_dtype == "int4"):
        raise PolicyInvalid(f"--offload-plan {path} is of {plan.formats.kv} KV, not of --kv-dtype {settings.kv_dtype}")
    return plan


def _check_budgets(settings: RunnerSettings) -> None:
    """Raises OutOfMemory: the ranks of this host have budgets that it has no memory for."""
    own = settings.offload_device_bytes + settings.offload_host_bytes
    _check_own(settings, "--offload-device-bytes and --offload-host-bytes", own)


def _check_host(settings: RunnerSettings) -> None:
    """The same of runners on GPUs, which have the rest. Raises OutOfMemory."""
    _check_own(settings, "--offload-host-bytes", settings.offload_host_bytes)


def _check_own(settings: RunnerSettings, what: str, own: int) -> None:
    available = available_memory()
    if (needed := own * len(settings.ranks_here)) > available.n_bytes:
        raise OutOfMemory(
            f"{what} of {len(settings.ranks_here)} ranks here are {needed}, "
            f"and {available.limit} has {available.n_bytes} left: give it more memory, or ask for less"
        )


def slot_bytes(settings: RunnerSettings, part: Partition) -> int:
    """The largest that a tensor rank gives the others in a step: rows of partial sums or of adapters, or logits."""
    stacked = 3 * (settings.max_rank + settings.max_rank % 2)
    rows = settings.max_batch_tokens * max(part.whole.hidden_size, stacked)
    return -(-4 * max(rows, settings.max_sequences * part.whole.vocab_size // part.size) // 64) * 64


def _reference(settings: RunnerSettings, base: ModelSource) -> Executor:
    _check_memory(settings, base, "reference")
    return _reference_part(settings, base, Partition(base.spec), SingleProcessGroup())


def make_partition(settings: RunnerSettings, base: ModelSource, ranks: TorchRanks) -> Executor:
    """A rank's part of the executor that `--executor` names. See `model.partition`.

    Raises WeightsInvalid, StoppedAtStart.
    """
    part = _part_of(base.spec, ranks.grid, ranks.rank)
    if settings.executor == "cuda":
        return _cuda_part(settings, base, find_gpu(local_gpu(settings, ranks.rank)), part, ranks.tensor, ranks.rank)
    if settings.executor == "cpu":
        return _cpu_part(settings, base, part, ranks if part.size > 1 else None, ranks.rank)
    return _reference_part(settings, base, part, ranks.tensor)


def local_gpu(settings: RunnerSettings, rank: int) -> int:
    """The number of a rank's GPU on its host."""
    return rank % len(settings.ranks_here)


def _part_of(spec: ModelSpec, grid: RankGrid, rank: int) -> Partition:
    """Raises ExecutorUnavailable."""
    stage = stage_of(spec, grid.stage_of(rank), grid.stages)
    return replace(stage, rank=grid.tensor_rank_of(rank), size=grid.tensor)


def _reference_part(
    settings: RunnerSettings, base: ModelSource, part: Partition, group: ProcessGroup
) -> ReferenceExecutor:
    weights = load_weights(base.files, base.spec, stopping=base.stopping, part=part)
    kv_cache = KvCache(part.local, settings.kv_pages, settings.page_tokens)
    adapters = TorchAdapterStore(base.spec, _slots(settings), part)
    return ReferenceExecutor(part.local, weights, kv_cache, adapters, group)


def _check_memory(
    settings: RunnerSettings, base: ModelSource, kind: str, grid: RankGrid | None = None, own: Sequence[Partition] = ()
) -> None:
    """Raises OutOfMemory. All ranks and stages compute in this machine's memory, or some with their `own` parts."""
    sizes, grid = {"kv_pages": settings.kv_pages, "page_tokens": settings.page_tokens}, grid or RankGrid()
    int4_kv = settings.kv_dtype == "int4"
    whole = estimate_memory(base.spec, kind, **sizes, ranks=grid.tensor, stages=grid.stages, int4_kv=int4_kv)
    parts = [astuple(estimate_memory(part.local, kind, **sizes, int4_kv=int4_kv)) for part in own]
    check_memory(MemoryEstimate(*map(sum, zip(*parts, strict=True))) if parts else whole, available_memory())
