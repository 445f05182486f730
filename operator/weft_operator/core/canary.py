"""The course of an adapter's canary: decided from its source, the outcome of requests, and earlier decisions.

A canary is resolved as if its source were the adapter's source, under a uid derived from the adapter's uid. Its status
stores the decisions about a content, so a restart decides nothing anew. A new content of its source starts from the
beginning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from weft.api.fields import duration_s
from weft.api.loraadapter import Canary
from weft.artifacts.depot_api import OperationStatus, ResolveRequest
from weft.domain.routes import CanaryCounts
from weft_operator.core.artifacts import Resolution, VerifiedArtifact, from_status
from weft_operator.core.chat_templates import SUFFIX as TEMPLATE_SUFFIX
from weft_operator.core.resources import AdapterObject, Ref

Phase = Literal["Pending", "Failed", "Progressing", "Promoted", "RolledBack"]
DECIDED: tuple[Phase, ...] = ("Promoted", "RolledBack")
SUFFIX = "/canary"
COUNTS_S = 30.0  # between two writes of nothing but counts


@dataclass(frozen=True, slots=True)
class CanaryView:
    """A canary and its known facts. `content`: of the canary, once fetched. Times are the clock of `now`."""

    canary: Canary
    request: ResolveRequest
    resolution: Resolution | None
    content: VerifiedArtifact | None
    phase: Phase
    started_at: float
    updated_at: float  # of the counts
    counts: CanaryCounts
    reason: str
    message: str

    @property
    def name(self) -> str:
        return (self.content.version or "") if self.content else ""

    @property
    def due_at(self) -> float | None:
        """The time at which it may be promoted without any event."""
        promotion = self.canary.promote_after
        return (
            self.started_at + duration_s(promotion) if self.phase == "Progressing" and promotion is not None else None
        )


def canary_uid(uid: str) -> str:
    """Return the uid for resolving a canary's source."""
    return uid + SUFFIX


def owner_uid(uid: str) -> str:
    """Return the object's uid for the uid of its source, canary or chat template."""
    return uid.removesuffix(SUFFIX).removesuffix(TEMPLATE_SUFFIX)


def as_adapter(adapter: AdapterObject, canary: Canary) -> AdapterObject:
    """The adapter as it would be with the canary's source."""
    return replace(
        adapter,
        meta=replace(adapter.meta, uid=canary_uid(adapter.meta.uid)),
        spec=adapter.spec.model_copy(update={"source": canary.source, "version": canary.version, "canary": None}),
    )


def canary_view(
    adapter: AdapterObject, canary: Canary, request: ResolveRequest, resolution: Resolution | None,
    stable: VerifiedArtifact | None, counts: CanaryCounts | None, now: float,
) -> CanaryView:  # fmt: skip
    """Gather the facts of a canary. `stable`: the stable content; `counts`: reported by the scheduler."""
    stored: Mapping[str, Any] = adapter.status.get("canary") or {}
    content = resolution.verified if resolution else None
    if content and (content.pool, content.base_digest) != (adapter.pool, request.base_digest):
        content = None
    is_same_content = content is not None and _key(stored) == (content.digest, content.base_digest)
    previous: Phase = stored["phase"] if is_same_content and stored.get("phase") in get_args(Phase) else "Pending"
    started_at = _time(stored.get("startTime"), now) if is_same_content else now
    canary_counts = (
        counts
        if content and counts and counts.digest == content.digest
        else _stored_counts(stored, is_same_content=is_same_content)
    )
    phase, reason, message = _phase(
        canary, request, resolution, content, stable, previous, canary_counts, started_at, now
    )
    updated_at = _time(stored.get("updateTime"), now) if is_same_content else now
    if phase == previous and now < updated_at + COUNTS_S:
        canary_counts = _stored_counts(stored, is_same_content=is_same_content)
    elif canary_counts != _stored_counts(stored, is_same_content=is_same_content):
        updated_at = now
    return CanaryView(
        canary, request, resolution, content, phase, started_at, updated_at, canary_counts, reason, message
    )


def _phase(
    canary: Canary, request: ResolveRequest, resolution: Resolution | None, content: VerifiedArtifact | None,
    stable: VerifiedArtifact | None, previous: Phase, counts: CanaryCounts, started_at: float, now: float,
) -> tuple[Phase, str, str]:  # fmt: skip
    """Decide the phase, and a condition's reason and message."""
    if content is None:
        answer = resolution.answer if resolution and resolution.request == request else OperationStatus()
        if answer.state == "Failed":
            return "Failed", answer.reason, answer.message
        return "Pending", "Resolving", f"reading {request.uri}"
    if previous == "Promoted":
        return "Promoted", "Promoted", "it answers every request without a pin"
    failures = (
        f"{counts.failed} of {counts.requests} requests failed, "
        f"against {counts.stable_failed} of {counts.stable_requests} of the stable content"
    )
    if previous == "RolledBack":
        return "RolledBack", "RolledBack", failures
    if stable is None or (stable.pool, stable.base_digest) != (content.pool, content.base_digest):
        return "Pending", "Resolving", "waiting until the adapter is served by its pool"
    if content.digest == stable.digest:
        return "Progressing", "SameContent", "spec.source has the same content"
    if counts.requests >= canary.min_requests:
        excess = _percent(counts.failed, counts.requests) - _percent(counts.stable_failed, counts.stable_requests)
        if excess > canary.max_error_percent:
            return "RolledBack", "RolledBack", failures
        if canary.promote_after is not None and now >= started_at + duration_s(canary.promote_after):
            return "Promoted", "Promoted", "it answers every request without a pin"
    return "Progressing", "Progressing", f"it answers {canary.weight} % of the requests without a pin"


def promoted_content(adapter: AdapterObject) -> str | None:
    """Return the digest of the promoted and serving canary, by the stored status."""
    stored: Mapping[str, Any] = adapter.status.get("canary") or {}
    digest = stored.get("digest")
    return digest if stored.get("phase") == "Promoted" and digest == adapter.status.get("digest") else None


def resolution_of_canary(adapter: AdapterObject, request: ResolveRequest, now: float) -> Resolution | None:
    """Restore the resolution of the canary's source from the stored status, for a controller at its start."""
    stored: Mapping[str, Any] = adapter.status.get("canary") or {}
    pool = adapter.status.get("pool")
    if not stored.get("digest") or not pool:
        return None
    status = {
        **stored,
        "pool": pool,
        "observedGeneration": adapter.status.get("observedGeneration"),
        "versions": [{"digest": stored["digest"], "name": stored.get("name")}],
        "conditions": [{"type": "Fetched", "status": "True"}],
    }
    namespace, _, name = str(pool).partition("/")
    return from_status(request, status, adapter.meta.generation, Ref("ServingPool", namespace, name), now)


def _stored_counts(stored: Mapping[str, Any], *, is_same_content: bool) -> CanaryCounts:
    names = ("requests", "failedRequests", "stableRequests", "stableFailedRequests")
    return CanaryCounts(
        str(stored.get("digest") or ""), *(int(stored.get(n) or 0) if is_same_content else 0 for n in names)
    )


def _key(stored: Mapping[str, Any]) -> tuple[Any, Any]:
    return stored.get("digest"), stored.get("baseDigest")


def _percent(failed: int, total: int) -> float:
    return 100 * failed / total if total else 0.0


def _time(text: str | None, otherwise: float) -> float:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp() if text else otherwise
