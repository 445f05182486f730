"""The report of `weft plan offload` on a runner's plans: for people, and everything as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from typing import Any

from weft_cli.output import table
from weft_cli.plan_offload import Change, Plans, Searches, hosts_of
from weft_runner.offload import (
    MAX_TIER_BYTES,
    MemoryTier,
    OffloadPlan,
    PassTime,
    PipelineTime,
    PolicySearch,
    Shares,
    pipeline_time,
    serving_limits,
)

WIDTH = 40  # of a bar
STREAMS = ("disk read", "host to device", "device to host", "disk write", "compute")  # of a `PassTime`, in its order
GIB = 1 << 30
STAGES = ("STAGE", "LAYERS", "BATCH", "PASSES", "WEIGHTS", "ACTIVATIONS", "KV", "PROMPTS", "A PASS WITHOUT", "BOUND BY")
MEMORY = ("MEMORY", "WEIGHTS", "RING", "KV", "ACTIVATIONS", "ADAPTERS", "WORKSPACE", "ALL", "BUDGET")


def pool_settings(searches: Searches, plans: Plans) -> dict[str, int]:
    """The values of the pool's `advanced` with which its runners do this. Adapters are in KV pages too."""
    limits = serving_limits({stage: (searches[stage], plan) for stage, plan in plans.items()})
    sizes = {"maxSequences": limits.sequences, "maxBatchTokens": limits.batch_tokens}
    return {"kvPages": limits.pages, **sizes}


def report(searches: Searches, plans: Plans, helping: Sequence[Change]) -> list[str]:
    """Make the lines for people: of one rank, or of a pipeline's stages together."""
    time = _time_of(searches, plans)
    return [
        *(_rank(searches[0], plans[0]) if len(plans) == 1 else _pipeline(searches, plans, time)),
        *_sparse(searches[0], plans[0]),
        "",
        "for the pool's spec:",
        f"  advanced: {_flow(pool_settings(searches, plans))}",
        "",
        *table(("WHAT WOULD HELP", "TOKENS/S", "GAIN"), [_helps(change, time.tokens_per_s) for change in helping]),
    ]


def as_json(searches: Searches, plans: Plans, helping: Sequence[Change]) -> dict[str, Any]:
    """Gather the contents of the report. One rank has `plan`, a pipeline `plans` by stage and `pipeline`."""
    first = searches[0]
    of_plans = {"plan": asdict(plans[0])} if len(plans) == 1 else {
        "plans": {str(stage): asdict(plan) for stage, plan in plans.items()},
        "pipeline": asdict(_time_of(searches, plans)),
    }  # fmt: skip
    return {
        **of_plans,
        "machine": asdict(first.machine),
        "work": asdict(first.work),
        "weightsBytes": _weights(searches),
        "pool": pool_settings(searches, plans),
        "helps": [{"what": change.subject, "tokens_per_s": change.tokens_per_s} for change in helping],
    }


def _time_of(searches: Searches, plans: Plans) -> PipelineTime:
    return pipeline_time([plans[stage] for stage in sorted(plans)], hosts_of(searches))


def _weights(searches: Searches) -> int:
    return sum(search.sizes.weights for search in searches.values())


# ---- one rank


def _rank(search: PolicySearch, plan: OffloadPlan) -> list[str]:
    policy, predicted, work = plan.policy, plan.predicted, search.work
    shares = [
        (name, *(f"{share:.0%}" for share in (tiers.device, tiers.host, tiers.disk)))
        for name, tiers in (("weights", policy.weights), ("activations", policy.activations), ("KV", policy.kv))
    ]
    return [
        f"{_gib(search.sizes.weights)} of weights ({plan.formats.weights}), "
        f"{_gib(plan.budgets.device_bytes)} of device memory",
        f"a block of {policy.block} sequences in device batches of {policy.batch}, prompts in {_passes(plan)}",
        "",
        *table(("SHARES", "DEVICE", "HOST", "DISK"), shares),
        "",
        *table(MEMORY, list(_used(plan))),
        "",
        *_bars(f"prompts, {work.prompt} tokens each", predicted.prompt),
        *_bars("a pass without prompts", predicted.token),
        "",
        f"a block of {work.prompt} + {work.output} tokens each: {_time(predicted.block_s)}, "
        f"{predicted.tokens_per_s:.3g} tokens/s",
        f"the linear program's bound: {_time(plan.relaxed_s)}; the {_bound(search, plan)}'s alone: "
        f"{_time(predicted.bound_s)} ({predicted.bound_s / predicted.block_s:.0%} reached)",
        f"one request alone: a token each {_time(predicted.token_1_s)}",
    ]


def _bound(search: PolicySearch, plan: OffloadPlan) -> str:
    """Name the bound of the plan: disk or compute, whichever takes longer."""
    predicted = plan.predicted
    disk_s = predicted.prompt.disk_read_s + (search.work.output - 1) * predicted.token.disk_read_s
    return "disk" if disk_s >= predicted.bound_s * (1 - 1e-9) else "compute"


def _used(plan: OffloadPlan) -> Iterator[tuple[str, ...]]:
    """Yield a row for each tier with content."""
    for tier in MemoryTier:
        used, budget = plan.usage[tier], plan.budgets.of(tier)
        if used.total or tier is MemoryTier.DEVICE:
            parts = (used.weights, used.ring, used.kv, used.activations, used.adapters, used.workspace, used.total)
            limit = "-" if budget >= MAX_TIER_BYTES else _gib(budget)
            yield str(tier), *(_gib(size) if size else "-" for size in parts), limit


def _bars(subject: str, time: PassTime) -> list[str]:
    """Draw a bar for each stream, as long as its part of the pass."""
    lines = [f"{subject}: {_time(time.pass_s)}"]
    for name, seconds in zip(STREAMS, astuple(time), strict=False):
        if seconds > 0:
            bar = "█" * max(1, round(WIDTH * seconds / time.pass_s))
            lines.append(f"  {name:<15}{bar:<{WIDTH}}  {_time(seconds)}")
    return lines


# ---- a pipeline


def _pipeline(searches: Searches, plans: Plans, time: PipelineTime) -> list[str]:
    """Make the lines of a pipeline. `time`: of all stages."""
    hosts, work, first = hosts_of(searches), searches[0].work, plans[0]
    placed = "one host, which take turns" if hosts == 1 else f"{hosts} hosts"
    lengths = f"of {work.prompt} + {work.output} tokens each"
    pace = f"a block {lengths}" if hosts == 1 else f"{hosts} blocks in flight, {lengths}, of which one ends every"
    return [
        f"{_gib(_weights(searches))} of weights ({first.formats.weights}) in {len(plans)} stages on {placed}; "
        f"{_gib(first.budgets.device_bytes)} of device memory each",
        f"blocks of {first.policy.block} sequences",
        "",
        *table(STAGES, [_stage(stage, searches[stage], plans[stage]) for stage in sorted(plans)]),
        "",
        *table(("STAGE", *MEMORY), [(str(stage), *row) for stage in sorted(plans) for row in _used(plans[stage])]),
        "",
        f"{pace}: {_time(time.block_s)}, {time.tokens_per_s:.3g} tokens/s",
        f"the linear programs' bound: {_time(time.relaxed_s)}; that of disk or compute alone: {_time(time.bound_s)} "
        f"({time.bound_s / time.block_s:.0%} reached)",
        f"one request alone: a token each {_time(time.token_1_s)}",
    ]


def _stage(stage: int, search: PolicySearch, plan: OffloadPlan) -> tuple[str, ...]:
    """Make a stage's row. Shares are those of device, host and disk."""
    policy, layers = plan.policy, search.layers or range(search.spec.layers)
    return (
        str(stage), f"{layers.start}-{layers.stop - 1}", str(policy.batch), str(plan.prompt_passes),
        *map(_shares, (policy.weights, policy.activations, policy.kv)), _time(plan.predicted.prompt.pass_s),
        _time(plan.predicted.token.pass_s), _bound(search, plan),
    )  # fmt: skip


def _shares(shares: Shares) -> str:
    return f"{shares.device:.0%} {shares.host:.0%} {shares.disk:.0%}"


# ---- words


def _sparse(search: PolicySearch, plan: OffloadPlan) -> list[str]:
    """Explain why sparse attention is off where it was asked for and does not pay."""
    machine = search.machine
    if not search.formats.sparse_attention or plan.formats.sparse_attention:
        return []
    if not machine.sparse_attention:
        return ["sparse attention is off: it was not measured on this machine (--measure)"]
    times = machine.attention / machine.sparse_attention
    return [f"sparse attention is off: it takes {times:.2f} times as long as attention to all keys"]


def _helps(change: Change, now: float) -> tuple[str, str, str]:
    if not change.tokens_per_s:
        return change.subject, "-", "does not fit"
    return change.subject, f"{change.tokens_per_s:.3g}", f"{change.tokens_per_s / now - 1:+.0%}"


def _flow(values: Mapping[str, int]) -> str:
    return "{" + ", ".join(f"{name}: {value}" for name, value in values.items()) + "}"


def _passes(plan: OffloadPlan) -> str:
    return "one pass" if plan.prompt_passes == 1 else f"{plan.prompt_passes} passes"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.1f} MiB"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
