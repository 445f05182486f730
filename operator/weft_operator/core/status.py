"""Views -> what is published of an object to the scheduler, and what its status says. Pure."""

from typing import Any

from weft.domain.adapter import AdapterVersion
from weft.domain.model.config import is_bare
from weft.domain.routes import PoolSpec
from weft_operator.core.acceptance import AdapterView, PoolView
from weft_operator.core.artifacts import VerifiedArtifact
from weft_operator.core.children import selector
from weft_operator.core.conditions import (
    Condition,
    adapter_conditions,
    merged,
    pool_conditions,
    ready_runners,
    timestamp,
)
from weft_operator.core.resources import Malformed, Object
from weft_operator.core.scaling import phase_groups
from weft_operator.core.state import AdapterRegistration


def pool_entry(view: PoolView) -> PoolSpec | None:
    """What the scheduler should know of this pool; None: nothing."""
    if view.serving is None:
        return None
    pool = view.pool
    own, scaling = pool.meta.ref.namespace, pool.autoscaling
    return PoolSpec(
        name=str(pool.meta.ref),
        base_digest=view.serving.digest,
        base_model_name=pool.model_name,
        shared_all=pool.allowed == "All",
        shared_namespaces=tuple(sorted({own, *(pool.allowed_names if pool.allowed == "List" else ())})),
        max_queue=pool.max_queue,
        max_migrations=pool.max_moves,
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
        min_runners=view.bounds.min,
        max_runners=view.bounds.max,
        idle_s=scaling.idle_s if scaling else 0.0,
        hold_s=round(scaling.wake_s) if scaling else 0,
        drain_s=pool.drain_s,
        max_context_tokens=max_context_tokens(view),
        tool_call_parser=pool.tool_call_parser,
        embeds_only=is_bare(view.serving.verdict.get("architecture") or ""),
    )


def max_context_tokens(view: PoolView) -> int:
    """Prompt and answer together: the model's positions, or what one runner's pages hold; 0: not known.

    Published before any runner reports it, so that a request for a pool at zero gets an answer of the right length.
    """
    pages, model = view.pool.kv_pages, _model_context_tokens(view)
    return min(model, pages * view.pool.page_tokens) if pages else model


def _model_context_tokens(view: PoolView) -> int:
    """Of the base model alone: what its status keeps, since the pages of a runner may change meanwhile."""
    verdict = view.serving.verdict if view.serving else {}
    return int(verdict.get("maxContext") or verdict.get("maxContextTokens") or 0)


def pool_status(view: PoolView, now: float, *, pods: bool) -> dict[str, Any]:
    """The pool's status as it should be stored. `pods`: its runners are pods, which a selector finds."""
    generation = view.pool.meta.generation
    before = view.pool.status.get("conditions", ())
    status = {
        "observedGeneration": generation,
        "baseDigest": view.serving.digest if view.serving else None,
        "architecture": view.serving.verdict.get("architecture") if view.serving else None,
        "maxContextTokens": _model_context_tokens(view) or None,
        "kvCache": _kv_cache(view),
        "desiredReplicas": view.wanted,
        "replicas": len(view.runners),
        "readyReplicas": ready_runners(view),
        "selector": selector(view.pool.meta.ref) if pods else None,
        "lastScale": _last_scale(view, now),
        "slo": _slo(view),
        "phases": _phases(view),
        "adapters": {"total": view.adapters_total, "ready": view.adapters_ready},
        "conditions": merged(before, pool_conditions(view), generation, now),
    }
    return {name: value for name, value in status.items() if value is not None}


def _kv_cache(view: PoolView) -> dict[str, int] | None:
    """What the scheduler reports; what was stored while it has not reported, as after a restart."""
    if view.report is None or not view.report.kv_pages:
        return view.pool.status.get("kvCache")
    return {"pages": view.report.kv_pages}


def _slo(view: PoolView) -> dict[str, int] | None:
    """What the scheduler reports; what was stored while it has not reported, as after a restart."""
    if view.pool.slo is None:
        return None
    if view.report is None or view.report.slo is None:
        return view.pool.status.get("slo")
    attained, ttft, token_time = view.report.slo
    return {"attainedPercent": attained, "ttftPercent": ttft, "tokenTimePercent": token_time}


def _phases(view: PoolView) -> dict[str, Any] | None:
    """What the scheduler reports; what was stored while it has not reported, as after a restart."""
    if view.pool.phases == "unified":
        return None
    if view.report is None or view.report.roles is None:
        return view.pool.status.get("phases")
    prompt, token, mixed, why = view.report.roles
    wanted = {"wanted": view.report.wanted._asdict()} if view.report.wanted is not None else {}
    return {"prompt": prompt, "token": token, "mixed": mixed, "message": why, **wanted}


def _last_scale(view: PoolView, now: float) -> dict[str, Any] | None:
    """When the number of wanted runners last changed, and by whom."""
    before, status = view.pool.status.get("desiredReplicas"), view.pool.status
    if before is None or before == view.wanted:
        return status.get("lastScale")
    reason = "Replicas" if view.pool.autoscaling is None else "Demand" if view.wanted > before else "Idle"
    return {"time": timestamp(now), "from": before, "to": view.wanted, "reason": reason}


def adapter_entry(view: AdapterView) -> AdapterRegistration:
    """What the scheduler should know of this adapter: the content that serves, or why none does."""
    adapter, verdict = view.adapter, view.serving.verdict if view.serving else {}
    why = None if view.serving else next(c for c in adapter_conditions(view) if c.type == "Ready")
    return AdapterRegistration(
        uid=adapter.meta.uid,
        namespace=adapter.meta.ref.namespace,
        name=adapter.meta.ref.name,
        model_name=adapter.model_name,
        pool=str(view.serving.pool if view.serving else adapter.pool),
        digest=view.serving.digest if view.serving else "",
        rank=int(verdict.get("rank") or 0),
        size_bytes=int(verdict.get("sizeBytes") or 0),
        pinned=adapter.pinned,
        created_unix_s=int(adapter.meta.created),
        drain_s=view.drain_s,
        tier=adapter.tier,
        reason=why.reason if why else "",
        message=why.message if why else "",
        version=(view.serving.version or "") if view.serving else "",
        versions=_canary_version(view)
        + tuple(
            AdapterVersion(v["digest"], int(v.get("rank") or 0), int(v.get("sizeBytes") or 0), v.get("name") or "")
            for v in (_earlier_versions(view, view.serving) if view.serving else ())
        ),
    )


def _canary_version(view: AdapterView) -> tuple[AdapterVersion, ...]:
    canary, serving = view.canary, view.serving
    if canary is None or canary.content is None or canary.phase != "Progressing":
        return ()
    if serving is None or serving.digest == canary.content.digest:
        return ()
    verdict = canary.content.verdict
    rank, size = int(verdict.get("rank") or 0), int(verdict.get("sizeBytes") or 0)
    name = canary.name if canary.name != serving.version else ""
    return (AdapterVersion(canary.content.digest, rank, size, name, canary.canary.weight),)


def _earlier_versions(view: AdapterView, serving: VerifiedArtifact) -> list[Object]:
    """The contents of the stored status that a request may still pin, the newest first, at most the history limit.

    Those of another base, of a larger rank than the pool takes now, and the one that serves are not among them.
    """
    most = view.request.max_rank if view.request else None
    canary = {version.digest: version.name for version in _canary_version(view)}
    named = {serving.version, *canary.values()}
    kept: list[Object] = [
        version if version.get("name") not in named else {k: v for k, v in version.items() if k != "name"}
        for version in _stored_versions(view)
        if version["digest"] != serving.digest
        and version["digest"] not in canary
        and version.get("baseDigest") == serving.base_digest
        and (most is None or int(version.get("rank") or 0) <= most)
    ]
    return kept[: view.adapter.history_limit]


def _stored_versions(view: AdapterView) -> list[Object]:
    """Of the stored status, without those that lack a field: another version of the operator may have written them."""
    stored: list[Object] = view.adapter.status.get("versions") or []
    return [version for version in stored if {"digest", "publishTime"} <= version.keys()]


def _versions(view: AdapterView, now: float) -> list[Object] | None:
    """The content that serves and the earlier ones; while none serves, what was stored."""
    serving = view.serving
    if serving is None:
        return view.adapter.status.get("versions")
    published = {version["digest"]: version["publishTime"] for version in _stored_versions(view)}
    current = {
        "digest": serving.digest,
        "name": serving.version,
        "rank": serving.verdict.get("rank"),
        "sizeBytes": serving.verdict.get("sizeBytes"),
        "baseDigest": serving.base_digest,
        "publishTime": published.get(serving.digest) or timestamp(now),
    }
    return [{k: v for k, v in current.items() if v is not None}, *_earlier_versions(view, serving)]


def _canary_status(view: AdapterView) -> dict[str, Any] | None:
    canary = view.canary
    if canary is None:
        return view.adapter.status.get("canary") if view.canary_kept else None
    content, counts = canary.content, canary.counts
    status: dict[str, Any] = {"phase": canary.phase}
    if content is not None:
        status |= {
            "digest": content.digest,
            "name": content.version,
            "rank": content.verdict.get("rank"),
            "sizeBytes": content.verdict.get("sizeBytes"),
            "baseDigest": content.base_digest,
            "startTime": timestamp(canary.started_at),
            "updateTime": timestamp(canary.updated_at),
            "requests": counts.requests,
            "failedRequests": counts.failed,
            "stableRequests": counts.stable_requests,
            "stableFailedRequests": counts.stable_failed,
        }
    return {name: value for name, value in status.items() if value is not None}


def adapter_status(view: AdapterView, now: float) -> dict[str, Any]:
    """The adapter's status as it should be stored: the content that serves, and the conditions."""
    adapter, serving = view.adapter, view.serving
    generation = adapter.meta.generation
    verdict = serving.verdict if serving else {}
    reported = ("rank", "alpha", "targetModules", "sizeBytes", "dtype")
    unavailable = view.report.unavailable_runners if view.report else adapter.status.get("unavailableRunners", 0)
    status = {
        "observedGeneration": generation,
        "digest": serving.digest if serving else None,
        "pool": str(serving.pool) if serving else None,
        "baseDigest": serving.base_digest if serving else None,
        **{name: verdict.get(name) for name in reported},
        "modelName": adapter.model_name,
        "unavailableRunners": unavailable if serving else 0,
        "versions": _versions(view, now),
        "canary": _canary_status(view),
        "conditions": merged(adapter.status.get("conditions", ()), adapter_conditions(view), generation, now),
    }
    return {name: value for name, value in status.items() if value is not None}


def malformed_status(broken: Malformed, now: float) -> dict[str, Any]:
    """The stored status, with Accepted False: nothing else is known anew."""
    before: list[Object] = list(broken.status.get("conditions", ()))
    accepted = merged(
        before, [Condition("Accepted", "False", "InvalidSpec", broken.message)], broken.meta.generation, now
    )
    return {**broken.status, "conditions": accepted + [c for c in before if c["type"] != "Accepted"]}
