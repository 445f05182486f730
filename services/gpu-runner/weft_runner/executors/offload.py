"""What executors that offload are given: budgets, the folder on disk, the policy or the plan that is followed."""

import json
from dataclasses import replace
from pathlib import Path

from weft_runner.errors import PolicyInvalid
from weft_runner.executors.source import OffloadPolicy
from weft_runner.model.tiers.budget import OffloadBudget, formats_of
from weft_runner.offload.plan import OffloadPlan, plan_of
from weft_runner.offload.policy import Formats
from weft_runner.settings import OffloadByHand, RunnerSettings


def offload_folder(settings: RunnerSettings) -> Path:
    """Name the folder of packed weights, and of what was measured."""
    return settings.offload.path or settings.data_dir / "offload"


def offload_formats(settings: RunnerSettings) -> Formats:
    """Name the formats of the executor that `settings` name."""
    executor = "cuda" if settings.executor == "cuda" else "cpu"
    return replace(
        formats_of(settings.dtype, settings.kv_dtype, executor), sparse_attention=settings.sparse_attention > 0.0
    )


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
