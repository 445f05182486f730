"""What executors are made of: the model, the parts of it that ranks have, and how it is offloaded."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from weft.domain.ids import RunnerId
from weft.domain.model.spec import ModelSpec
from weft_runner.errors import PolicyInvalid
from weft_runner.model.checkpoint import Files, LoadProgress
from weft_runner.model.partition import Partition, RankGrid, check_divisible
from weft_runner.model.tiers.budget import OffloadBudget, formats_of
from weft_runner.offload.plan import OffloadPlan, OffloadPolicy, plan_of
from weft_runner.offload.policy import Formats
from weft_runner.parallel.worker_group import GatherRanks
from weft_runner.settings import OffloadByHand, RunnerSettings


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
    policy: OffloadPolicy | None = None
    progress: LoadProgress | None = None


def parts_of(settings: RunnerSettings, spec: ModelSpec, *, even_heads: bool = False) -> list[Partition]:
    """Split a model over the runner's ranks, in their order. Raises ExecutorUnavailable."""
    grid = RankGrid(settings.pipeline_parallel, settings.tensor_parallel)
    check_divisible(spec, grid.tensor, even_heads=even_heads)
    return [grid.part_of(spec, rank) for rank in range(grid.size)]


# ---- models that are offloaded


def offload_folder(settings: RunnerSettings) -> Path:
    """Name the folder of packed weights, and of what was measured."""
    return settings.offload.path or settings.data_dir / "offload"


def offload_formats(settings: RunnerSettings) -> Formats:
    """Name the formats of the executor that `settings` name."""
    found = formats_of(settings.dtype, settings.kv_dtype, "cuda" if settings.executor == "cuda" else "cpu")
    return replace(found, sparse_attention=settings.sparse_attention > 0.0)


def offload_budget(settings: RunnerSettings, policy: OffloadPolicy | None, rank: int) -> OffloadBudget:
    """Give a rank its budget, and what to do with it. Raises PolicyInvalid."""
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


def _read_plan(path: Path, settings: RunnerSettings) -> OffloadPlan:
    """Read a plan that was made by hand. Raises PolicyInvalid."""
    try:
        plan = plan_of(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise PolicyInvalid(f"{path}: {error}") from error
    if (weights := plan.formats.weights) != settings.dtype:
        raise PolicyInvalid(f"{path} is of {weights} weights, not of --dtype {settings.dtype}")
    if (plan.formats.kv == "int4") != (settings.kv_dtype == "int4"):
        raise PolicyInvalid(f"{path} is of {plan.formats.kv} KV, not of --kv-dtype {settings.kv_dtype}")
    return plan
