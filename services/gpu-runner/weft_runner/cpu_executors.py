"""The cpu executor as `--executor cpu` makes it, and what executors of all kinds are made of. No torch here."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.domain.ids import RunnerId
from weft.domain.model.config import ModelSpec
from weft.domain.model.packed import int4_kv_group
from weft_kernels.cpu.errors import LevelUnusable, NativeUnavailable
from weft_kernels.cpu.library import load
from weft_runner.core.adapter_slots import MOST_SLOTS
from weft_runner.errors import ExecutorUnavailable, OutOfMemory, PolicyInvalid
from weft_runner.kv_pages import fitting_pages
from weft_runner.model.checkpoint import Files, LoadProgress, open_checkpoint
from weft_runner.model.cpu.executor import CpuExecutor
from weft_runner.model.cpu.offload import OffloadExecutor
from weft_runner.model.cpu.packed_weights import unsupported_reason
from weft_runner.model.executor import Executor
from weft_runner.model.memory_estimate import (
    REQUESTS_BYTES,
    MemoryEstimate,
    available_memory,
    check_memory,
    estimate_memory,
)
from weft_runner.model.partition import Partition, stage_of
from weft_runner.model.tiers.budget import OffloadBudget
from weft_runner.offload.machine import MachineRates
from weft_runner.offload.plan import OffloadPlan, plan_of
from weft_runner.parallel.grid import RankGrid
from weft_runner.parallel.worker_group import GatherRanks
from weft_runner.settings import CPU_PAGE, KV_PAGES, OffloadByHand, RunnerSettings

if TYPE_CHECKING:
    from weft_runner.parallel.process_group import TorchRanks


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The model to compute, and how many threads may (of each rank). `stopping`: asked while weights load.

    `gather`: where the ranks of a split model are on other hosts. `runner`: who it is, for others. `policy`: by which
    it offloads (None: as many weights stay as fit, or as a plan by hand says). `progress`: of this process's weights.
    """

    spec: ModelSpec
    files: Files
    threads: int
    stopping: Callable[[], bool] = lambda: False
    gather: GatherRanks | None = None
    runner: RunnerId | None = None
    policy: "OffloadPolicy | None" = None
    progress: LoadProgress | None = None


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """What a runner found at its start: each rank's machine and plan; no plans: as many weights stay as fit."""

    machines: Mapping[int, MachineRates]
    plans: Mapping[int, OffloadPlan]


def cpu_executor(settings: RunnerSettings, base: ModelSource) -> Executor:
    """Raises NativeUnavailable before any weight is read."""
    part = Partition(base.spec)
    if reason := native_unavailable(settings, [part]):
        raise NativeUnavailable(reason)
    if settings.offload.device_bytes:
        check_budgets(settings)
    else:
        check_memory_for(settings, base, settings.dtype)
    return cpu_part(settings, base, part, None)


def cpu_part(
    settings: RunnerSettings, base: ModelSource, part: Partition, ranks: "TorchRanks | None", rank: int = 0
) -> Executor:
    """`ranks`: with whom it computes each layer; `rank`: of the runner.

    Raises WeightsInvalid, StoppedAtStart; where weights are offloaded OutOfMemory, DiskUnusable.
    """
    library = load()
    if settings.offload.device_bytes:
        return OffloadExecutor(
            library,
            open_checkpoint(base.files, base.spec, base.stopping, base.progress),
            offload_budget_of(settings, base.policy, rank),
            dtype=settings.dtype,
            kv_dtype=settings.kv_dtype,
            top_share=settings.sparse_attention,
            threads=base.threads,
            pages=settings.kv_pages,
            page_tokens=settings.page_tokens,
            slots=most_slots(settings),
            part=part,
            stopping=base.stopping,
        )
    return CpuExecutor(
        library,
        open_checkpoint(base.files, base.spec, base.stopping, base.progress),
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        top_share=settings.sparse_attention,
        threads=base.threads,
        pages=settings.kv_pages,
        page_tokens=settings.page_tokens,
        slots=most_slots(settings),
        part=part,
        ranks=None if ranks is None else ranks.native_slots(library.native, slot_bytes(settings, part)),
    )


def native_unavailable(settings: RunnerSettings, parts: Sequence[Partition]) -> str:
    """Why the native executor cannot compute these parts; empty when it can."""
    if settings.page_tokens % CPU_PAGE:
        return f"a page of {settings.page_tokens} tokens is no multiple of {CPU_PAGE}"
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


def most_slots(settings: RunnerSettings) -> int:
    """Adapters that may be on the device: as many as its pages could hold, where no bound is set."""
    return settings.max_adapters or min(settings.kv_pages, MOST_SLOTS)


def offload_budget_of(settings: RunnerSettings, policy: OffloadPolicy | None, rank: int) -> OffloadBudget:
    """Raises PolicyInvalid."""
    plan, budget = None if policy is None else policy.plans.get(rank), settings.offload
    by_hand = settings.by_hand or OffloadByHand()
    if by_hand.plan is not None:
        plan = _read_plan(by_hand.plan, settings)
    batch_tokens = by_hand.batch_tokens if plan is None else plan.batch_tokens
    return OffloadBudget(
        device_bytes=budget.device_bytes,
        disk_bytes=budget.disk_bytes,
        path=offload_folder(settings),
        base=settings.base_digest,
        micro_batch=max(1, min(batch_tokens, settings.max_batch_tokens)),
        max_tokens=settings.max_batch_tokens,
        max_sequences=settings.max_sequences,
        max_rank=settings.max_rank,
        share=by_hand.weights_share,
        host_bytes=budget.host_bytes,
        kv_disk_pages=by_hand.kv_disk_pages,
        kv_host_pages=by_hand.kv_host_pages,
        in_flight=settings.hosts,
        plan=plan,
        machine=None if policy is None else policy.machines[rank],
    )


def offload_folder(settings: RunnerSettings) -> Path:
    """Where packed weights lie, and what was measured."""
    return settings.offload.path or settings.data_dir / "offload"


def _read_plan(path: Path, settings: RunnerSettings) -> OffloadPlan:
    """Raises PolicyInvalid."""
    try:
        plan = plan_of(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise PolicyInvalid(f"{path}: {error}") from error
    if (weights := plan.formats.weights) != settings.dtype:
        raise PolicyInvalid(f"{path} is of {weights} weights, not of --dtype {settings.dtype}")
    if (plan.formats.kv == "int4") != (settings.kv_dtype == "int4"):
        raise PolicyInvalid(f"{path} is of {plan.formats.kv} KV, not of --kv-dtype {settings.kv_dtype}")
    return plan


def check_budgets(settings: RunnerSettings) -> None:
    """Raises OutOfMemory: the ranks of this host have budgets that it has no memory for."""
    own = settings.offload.device_bytes + settings.offload.host_bytes
    _check_own(settings, "--offload device and host", own)


def check_host(settings: RunnerSettings) -> None:
    """The same of runners on GPUs, which have the rest. Raises OutOfMemory."""
    _check_own(settings, "--offload host", settings.offload.host_bytes)


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


def part_of(spec: ModelSpec, grid: RankGrid, rank: int) -> Partition:
    """Raises ExecutorUnavailable."""
    stage = stage_of(spec, grid.stage_of(rank), grid.stages)
    return replace(stage, rank=grid.tensor_rank_of(rank), size=grid.tensor)


def check_memory_for(
    settings: RunnerSettings, base: ModelSource, kind: str, grid: RankGrid | None = None, own: Sequence[Partition] = ()
) -> None:
    """Raises OutOfMemory. All ranks and stages compute in this machine's memory, or some with their `own` parts."""
    needed = _needs(settings, base.spec, kind, grid or RankGrid(), own)
    check_memory(replace(needed, requests=REQUESTS_BYTES), available_memory())


def container_pages(settings: RunnerSettings, spec: ModelSpec) -> int:
    """KV pages where the CPU computes: what --kv-memory-fraction of its container holds, and no more than is of use.

    Of use are pages for as many sequences as it takes, each of the model's context, and never fewer than KV_PAGES. A
    process without a container of its own has these. Raises ExecutorUnavailable, KvCacheTooSmall.
    """
    available = available_memory()
    if not available.own:
        return KV_PAGES
    grid = RankGrid(settings.pipeline_parallel, settings.tensor_parallel)
    parts = [part_of(spec, grid, rank) for rank in range(grid.size)]
    native = settings.executor != "reference" and not native_unavailable(settings, parts)
    own, kind = parts[: len(settings.ranks_here)] if settings.hosts > 1 else (), "reference"
    if native:
        kind = settings.dtype
    return fitting_pages(
        lambda pages: _needs(replace(settings, kv_pages=pages), spec, kind, grid, own),
        available,
        settings.kv_memory_fraction,
        context=spec.max_positions,
        page_tokens=settings.page_tokens,
        most=max(KV_PAGES, settings.max_sequences * -(-spec.max_positions // settings.page_tokens)),
        host_bytes=settings.host_mib << 20,
    )


def _needs(
    settings: RunnerSettings, spec: ModelSpec, kind: str, grid: RankGrid, own: Sequence[Partition]
) -> MemoryEstimate:
    sizes, int4_kv = {"kv_pages": settings.kv_pages, "page_tokens": settings.page_tokens}, settings.kv_dtype == "int4"
    if own:
        parts = [astuple(estimate_memory(part.local, kind, **sizes, int4_kv=int4_kv)) for part in own]
        return MemoryEstimate(*map(sum, zip(*parts, strict=True)))
    return estimate_memory(spec, kind, **sizes, ranks=grid.tensor, stages=grid.stages, int4_kv=int4_kv)
