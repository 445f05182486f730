"""Facts -> what the scheduler is told of an object, and what its status says. Pure."""

from typing import Any

from weft.domain.adapter import AdapterVersion
from weft.domain.model.config import is_bare
from weft.domain.routes import PoolSpec
from weft_operator.capacity import phase_groups
from weft_operator.children import selector
from weft_operator.conditions import adapter_conditions, merged, pool_conditions, ready_runners, timestamp
from weft_operator.judge import AdapterFacts, PoolFacts
from weft_operator.observe import AdapterEntry
from weft_operator.resolution import Good
from weft_operator.resources import Object


def pool_entry(facts: PoolFacts) -> PoolSpec | None:
    """What the scheduler should know of this pool; None: nothing."""
    if facts.serving is None:
        return None
    pool = facts.pool
    own, scaling = pool.meta.ref.namespace, pool.autoscaling
    return PoolSpec(
        name=str(pool.meta.ref),
        base_digest=facts.serving.digest,
        base_model_name=pool.model_name,
        shared_all=pool.allowed == "All",
        shared_namespaces=tuple(sorted({own, *(pool.allowed_names if pool.allowed == "List" else ())})),
        max_queue=pool.max_queue,
        max_migrations=pool.max_moves,
        placement=pool.placement,
        queue=pool.queue,
        aging_s=pool.aging_s,
        starvation_bound=pool.starvation_bound,
        fair=pool.fair,
        tenant_weights=pool.tenant_weights,
        slo_ttft_s=pool.slo.ttft_ms / 1000 if pool.slo else 0.0,
        slo_token_time_s=pool.slo.token_time_ms / 1000 if pool.slo else 0.0,
        slo_reject=pool.slo is not None and pool.slo.reject,
        reservation=pool.reservation,
        consolidation=pool.consolidation,
        consolidation_s=pool.consolidation_s,
        prefetch=pool.prefetch,
        phases=pool.phases,
        min_prompt=pool.min_prompt,
        min_token=pool.min_token,
        kv_across_classes=pool.kv_across_classes,
        groups=phase_groups(pool),
        created_unix_s=int(pool.meta.created),
        min_runners=facts.bounds.min,
        max_runners=facts.bounds.max,
        idle_s=scaling.idle_s if scaling else 0.0,
        hold_s=round(scaling.wake_s) if scaling else 0,
        drain_s=pool.drain_s,
        max_context_tokens=max_context_tokens(facts),
        tool_call_parser=pool.tool_call_parser,
        embeds_only=is_bare(facts.serving.verdict.get("architecture") or ""),
    )


def max_context_tokens(facts: PoolFacts) -> int:
    """Prompt and answer together: the model's positions, or what one runner's pages hold; 0: not known.

    Said before any runner says it, so that a request for a pool at zero gets an answer of the right length.
    """
    pages, model = facts.pool.kv_pages, _model_context_tokens(facts)
    return min(model, pages * facts.pool.page_tokens) if pages else model


def _model_context_tokens(facts: PoolFacts) -> int:
    """Of the base model alone: what its status keeps, since the pages of a runner may change meanwhile."""
    verdict = facts.serving.verdict if facts.serving else {}
    return int(verdict.get("maxContext") or verdict.get("maxContextTokens") or 0)


def pool_status(facts: PoolFacts, now: float, *, pods: bool) -> dict[str, Any]:
    """The pool's status as it should be stored. `pods`: its runners are pods, which a selector finds."""
    generation = facts.pool.meta.generation
    before = facts.pool.status.get("conditions", ())
    status = {
        "observedGeneration": generation,
        "baseDigest": facts.serving.digest if facts.serving else None,
        "architecture": facts.serving.verdict.get("architecture") if facts.serving else None,
        "maxContextTokens": _model_context_tokens(facts) or None,
        "desiredReplicas": facts.wanted,
        "replicas": len(facts.runners),
        "readyReplicas": ready_runners(facts),
        "selector": selector(facts.pool.meta.ref) if pods else None,
        "lastScale": _last_scale(facts, now),
        "slo": _slo(facts),
        "phases": _phases(facts),
        "adapters": {"total": facts.adapters_total, "ready": facts.adapters_ready},
        "conditions": merged(before, pool_conditions(facts), generation, now),
    }
    return {name: value for name, value in status.items() if value is not None}


def _slo(facts: PoolFacts) -> dict[str, int] | None:
    """What the scheduler reports; what was stored while it has not reported, as after a restart."""
    if facts.pool.slo is None:
        return None
    if facts.report is None or facts.report.slo is None:
        return facts.pool.status.get("slo")
    attained, ttft, token_time = facts.report.slo
    return {"attainedPercent": attained, "ttftPercent": ttft, "tokenTimePercent": token_time}


def _phases(facts: PoolFacts) -> dict[str, Any] | None:
    """What the scheduler reports; what was stored while it has not reported, as after a restart."""
    if facts.pool.phases == "unified":
        return None
    if facts.report is None or facts.report.roles is None:
        return facts.pool.status.get("phases")
    prompt, token, mixed, why = facts.report.roles
    wanted = {"wanted": facts.report.wanted._asdict()} if facts.report.wanted is not None else {}
    return {"prompt": prompt, "token": token, "mixed": mixed, "message": why, **wanted}


def _last_scale(facts: PoolFacts, now: float) -> dict[str, Any] | None:
    """When the number of wanted runners last changed, and by whom."""
    before, status = facts.pool.status.get("desiredReplicas"), facts.pool.status
    if before is None or before == facts.wanted:
        return status.get("lastScale")
    reason = "Replicas" if facts.pool.autoscaling is None else "Demand" if facts.wanted > before else "Idle"
    return {"time": timestamp(now), "from": before, "to": facts.wanted, "reason": reason}


def adapter_entry(facts: AdapterFacts) -> AdapterEntry:
    """What the scheduler should know of this adapter: the content that serves, or why none does."""
    adapter, verdict = facts.adapter, facts.serving.verdict if facts.serving else {}
    why = None if facts.serving else next(c for c in adapter_conditions(facts) if c.type == "Ready")
    return AdapterEntry(
        uid=adapter.meta.uid,
        namespace=adapter.meta.ref.namespace,
        name=adapter.meta.ref.name,
        model_name=adapter.model_name,
        pool=str(adapter.pool),
        digest=facts.serving.digest if facts.serving else "",
        rank=int(verdict.get("rank") or 0),
        size_bytes=int(verdict.get("sizeBytes") or 0),
        pinned=adapter.pinned,
        created_unix_s=int(adapter.meta.created),
        drain_s=facts.drain_s,
        tier=adapter.tier,
        reason=why.reason if why else "",
        message=why.message if why else "",
        version=(facts.serving.version or "") if facts.serving else "",
        versions=tuple(
            AdapterVersion(v["digest"], int(v.get("rank") or 0), int(v.get("sizeBytes") or 0), v.get("name") or "")
            for v in (_earlier_versions(facts, facts.serving) if facts.serving else ())
        ),
    )


def _earlier_versions(facts: AdapterFacts, serving: Good) -> list[Object]:
    """The contents of the stored status that a request may still pin, the newest first, at most the history limit.

    Those of another base, of a larger rank than the pool takes now, and the one that serves are not among them.
    """
    most = facts.request.max_rank if facts.request else None
    kept: list[Object] = [
        version if version.get("name") != serving.version else {k: v for k, v in version.items() if k != "name"}
        for version in _stored_versions(facts)
        if version["digest"] != serving.digest
        and version.get("baseDigest") == serving.base_digest
        and (most is None or int(version.get("rank") or 0) <= most)
    ]
    return kept[: facts.adapter.history_limit]


def _stored_versions(facts: AdapterFacts) -> list[Object]:
    """Of the stored status, without those that lack a field: another version of the operator may have written them."""
    stored: list[Object] = facts.adapter.status.get("versions") or []
    return [version for version in stored if {"digest", "publishTime"} <= version.keys()]


def _versions(facts: AdapterFacts, now: float) -> list[Object] | None:
    """The content that serves and the earlier ones; while none serves, what was stored."""
    serving = facts.serving
    if serving is None:
        return facts.adapter.status.get("versions")
    published = {version["digest"]: version["publishTime"] for version in _stored_versions(facts)}
    current = {
        "digest": serving.digest,
        "name": serving.version,
        "rank": serving.verdict.get("rank"),
        "sizeBytes": serving.verdict.get("sizeBytes"),
        "baseDigest": serving.base_digest,
        "publishTime": published.get(serving.digest) or timestamp(now),
    }
    return [{k: v for k, v in current.items() if v is not None}, *_earlier_versions(facts, serving)]


def adapter_status(facts: AdapterFacts, now: float) -> dict[str, Any]:
    """The adapter's status as it should be stored: the content that serves, and the conditions."""
    adapter, serving = facts.adapter, facts.serving
    generation = adapter.meta.generation
    verdict = serving.verdict if serving else {}
    told = ("rank", "alpha", "targetModules", "sizeBytes", "dtype")
    unavailable = facts.report.unavailable_runners if facts.report else adapter.status.get("unavailableRunners", 0)
    status = {
        "observedGeneration": generation,
        "digest": serving.digest if serving else None,
        "pool": str(serving.pool) if serving else None,
        "baseDigest": serving.base_digest if serving else None,
        **{name: verdict.get(name) for name in told},
        "modelName": adapter.model_name,
        "unavailableRunners": unavailable if serving else 0,
        "versions": _versions(facts, now),
        "conditions": merged(adapter.status.get("conditions", ()), adapter_conditions(facts), generation, now),
    }
    return {name: value for name, value in status.items() if value is not None}
