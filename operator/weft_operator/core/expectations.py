"""What the planner takes as done once an action has been carried out. Shared by every shell and by the tests."""

from weft_operator.core.acceptance import canary_from_status, resolution_from_status
from weft_operator.core.actions import (
    Action,
    ApplyChild,
    ForgetSource,
    PublishAdapter,
    PublishPool,
    Resolve,
    RetainBlobs,
    SetPodDeletionCost,
    UnpublishAdapter,
    UnpublishPool,
)
from weft_operator.core.artifacts import started
from weft_operator.core.canary import canary_uid
from weft_operator.core.drift import spec_hash
from weft_operator.core.replicas import object_revision
from weft_operator.core.resources import Ref
from weft_operator.core.state import (
    AdapterRegistration,
    AdapterReport,
    ApplyFailure,
    DesiredState,
    ObservedState,
    PoolReport,
)


def expect(action: Action, observed: ObservedState, now: float) -> None:
    """Note what was ordered from the depot and published to the scheduler. Runners and objects are observed instead."""
    match action:
        case Resolve(uid=uid, request=request):
            observed.resolutions[uid] = started(observed.resolutions.get(uid), request, now)
        case ForgetSource(uid=uid):
            observed.resolutions.pop(uid, None)
        case PublishPool(ref=ref, entry=entry):
            _pool_left(ref, observed, now, except_for=entry.base_digest)
            observed.pools[ref] = entry
            observed.published_at[ref] = now
        case UnpublishPool(ref=ref):
            _pool_left(ref, observed, now)
            observed.published_at.pop(ref, None)
            observed.pool_reports[str(ref)] = PoolReport(0)
        case PublishAdapter(ref=ref, entry=entry):
            _adapter_left(ref, observed, now, after=entry if entry.digest else None)
            observed.adapters[ref] = entry
        case UnpublishAdapter(ref=ref, uid=uid, unload=unload):
            _adapter_left(ref, observed, now)
            if unload:
                observed.unloads.setdefault(uid, False)
        case ApplyChild(pool=pool, child=child):
            observed.refused.get(pool, {}).pop(child.key, None)
            if live := observed.children.get(pool, {}).get(child.key):
                observed.applied[child.key] = (spec_hash(child.manifest), object_revision(live))
        case SetPodDeletionCost(uid=uid, cost=cost):
            observed.deletion_costs[uid] = (cost, now)
        case RetainBlobs(digests=digests):
            observed.retention.forget(now)
            observed.retention.last_sent = digests
        case _:
            return


def apply_failed(action: ApplyChild, reason: str, message: str, observed: ObservedState, now: float) -> None:
    """Note why a child could not be applied."""
    rejection = ApplyFailure(spec_hash(action.child.manifest), now, reason, message)
    observed.refused.setdefault(action.pool, {})[action.child.key] = rejection


def recall(desired: DesiredState, observed: ObservedState, now: float) -> None:
    """Take over what the statuses of objects tell of the time before this process. Pools first: adapters need bases."""
    for resource in (*desired.pools.values(), *desired.adapters.values()):
        if known := resolution_from_status(resource, desired, observed, now):
            observed.resolutions.setdefault(resource.meta.uid, known)
    for adapter in desired.adapters.values():
        if adapter.canary and (known := canary_from_status(adapter, desired, observed, now)):
            observed.resolutions.setdefault(canary_uid(adapter.meta.uid), known)


def forget(uid: str, ref: Ref, observed: ObservedState) -> None:
    """An object is gone for good: what was known of it goes. What is still published is withdrawn by the next plan."""
    observed.resolutions.pop(uid, None)
    observed.resolutions.pop(canary_uid(uid), None)
    observed.adapter_reports.pop(uid, None)
    observed.unloads.pop(uid, None)
    if ref.kind == "ServingPool":
        observed.pool_reports.pop(str(ref), None)
        observed.refused.pop(ref, None)


def _pool_left(ref: Ref, observed: ObservedState, now: float, except_for: str = "") -> None:
    before = observed.pools.pop(ref, None)
    if before is not None and before.base_digest != except_for:
        observed.retention.left(before.base_digest, now, before.drain_s)


def _adapter_left(ref: Ref, observed: ObservedState, now: float, after: AdapterRegistration | None = None) -> None:
    """An adapter is published no more as it was. `after`: as it is now."""
    before = observed.adapters.pop(ref, None)
    if before is None:
        return
    if after is None or before.uid != after.uid:
        observed.adapter_reports.pop(before.uid, None)
        if after is None:  # withdrawn, and the object may live on: it is not routed any more
            observed.adapter_reports[before.uid] = AdapterReport("", False)
    for digest in before.digests - (after.digests if after else set[str]()):
        observed.retention.left(digest, now, before.drain_s)
