"""Changes of the state after an action has been carried out. Shared by every shell and by the tests."""

from weft.domain.routes import AdapterSpec, AdapterStatus, PoolSpec, PoolStatus
from weft_operator.core.acceptance import canary_from_status, resolution_from_status, supplied_template_from_status
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
from weft_operator.core.artifacts import served_digests, started
from weft_operator.core.canary import canary_uid
from weft_operator.core.chat_templates import template_uid
from weft_operator.core.drift import spec_hash
from weft_operator.core.replicas import object_revision
from weft_operator.core.resources import Object, Ref
from weft_operator.core.state import ApplyFailure, Child, ClusterState, ForeignObject


def expect(action: Action, state: ClusterState, now: float) -> None:
    """Record the expected effects of an action. Runners and objects are observed instead."""
    expected, observed = state.expectations, state.observed
    match action:
        case Resolve(uid=uid, request=request):
            observed.resolutions[uid] = started(observed.resolutions.get(uid), request, now)
        case ForgetSource(uid=uid):
            observed.resolutions.pop(uid, None)
        case PublishPool(ref=ref, entry=entry):
            _pool_left(ref, state, now, current=entry)
            expected.pools[ref] = entry
            expected.published_at[ref] = now
        case UnpublishPool(ref=ref):
            _pool_left(ref, state, now)
            expected.published_at.pop(ref, None)
            if state.desired.meta(ref) is None:  # deleted: nothing reads its report
                observed.pool_reports.pop(str(ref), None)
            else:
                observed.pool_reports[str(ref)] = PoolStatus(0)
        case PublishAdapter(ref=ref, entry=entry):
            _adapter_left(ref, state, now, current=entry if entry.digest else None)
            expected.adapters[ref] = entry
        case UnpublishAdapter(ref=ref, uid=uid, unload=unload):
            _adapter_left(ref, state, now)
            if unload:
                expected.unloading.add(uid)
        case ApplyChild(pool=pool, child=child):
            expected.apply_failures.get(pool, {}).pop(child.key, None)
            observed.foreign.get(pool, {}).pop(child.key, None)
            if live := observed.children.get(pool, {}).get(child.key):
                expected.applied[child.key] = (spec_hash(child.manifest), object_revision(live))
        case SetPodDeletionCost(uid=uid, cost=cost):
            expected.deletion_costs[uid] = (cost, now)
        case RetainBlobs(digests=digests):
            expected.retention.forget(now)
            expected.retention.last_sent = digests
        case _:
            return


def apply_failed(pool: Ref, child: Child, message: str, state: ClusterState, now: float) -> None:
    """Note that the API server has refused a child, or a dry run of it."""
    failure = ApplyFailure(spec_hash(child.manifest), now, message)
    state.expectations.apply_failures.setdefault(pool, {})[child.key] = failure


def found_foreign(action: ApplyChild, obj: Object | None, state: ClusterState, now: float) -> None:
    """Note that an unreported object has the name of a child; None: it has changed, or is gone."""
    foreign = state.observed.foreign.setdefault(action.pool, {})
    if obj is None:
        foreign.pop(action.child.key, None)
    else:
        foreign[action.child.key] = ForeignObject(obj, now)


def restore_resolutions(state: ClusterState, now: float) -> None:
    """Restore resolutions from the statuses of objects, at a start. Pools first: adapters need their bases."""
    desired, resolutions = state.desired, state.observed.resolutions
    for resource in (*desired.pools.values(), *desired.adapters.values()):
        if resolution := resolution_from_status(resource, state, now):
            resolutions.setdefault(resource.meta.uid, resolution)
    for adapter in desired.adapters.values():
        if adapter.spec.canary and (resolution := canary_from_status(adapter, state, now)):
            resolutions.setdefault(canary_uid(adapter.meta.uid), resolution)
    for resource in (*desired.pools.values(), *desired.adapters.values()):
        if resolution := supplied_template_from_status(resource, state, now):
            resolutions.setdefault(template_uid(resource.meta.uid), resolution)


def forget(uid: str, ref: Ref, state: ClusterState) -> None:
    """Drop the state of a deleted object. The next plan unpublishes its remaining entries."""
    for resolved in (uid, canary_uid(uid), template_uid(uid)):
        state.observed.resolutions.pop(resolved, None)
    state.observed.adapter_reports.pop(uid, None)
    state.observed.unloaded.discard(uid)
    state.expectations.unloading.discard(uid)
    if ref.kind == "ServingPool":
        state.observed.pool_reports.pop(str(ref), None)
        state.expectations.apply_failures.pop(ref, None)
        state.observed.foreign.pop(ref, None)


def _pool_left(ref: Ref, state: ClusterState, now: float, current: PoolSpec | None = None) -> None:
    """Note that a pool's published entry has changed. Without a new entry, streams of its adapters drain, too."""
    previous = state.expectations.pools.pop(ref, None)
    if previous is None:
        return
    stays = {current.base_digest, current.chat_template} if current else set[str]()
    unused = {previous.base_digest, previous.chat_template} - stays - {""}
    if current is None:
        unused.update(*(served_digests(e) for e in state.expectations.adapters.values() if e.pool == previous.name))
    for digest in unused:
        state.expectations.retention.left(digest, now, previous.drain_s)


def _adapter_left(ref: Ref, state: ClusterState, now: float, current: AdapterSpec | None = None) -> None:
    """Note that an adapter's published entry has changed. `current`: its present entry."""
    previous = state.expectations.adapters.pop(ref, None)
    if previous is None:
        return
    if current is None or previous.uid != current.uid:
        state.observed.adapter_reports.pop(previous.uid, None)
        if current is None:  # unpublished, and the object may live on: it is not routed any more
            state.observed.adapter_reports[previous.uid] = AdapterStatus("", False)
    pool = state.expectations.pools.get(Ref("ServingPool", *previous.pool.split("/", 1)))
    for digest in served_digests(previous) - (served_digests(current) if current else set[str]()):
        state.expectations.retention.left(digest, now, pool.drain_s if pool else 0.0)
