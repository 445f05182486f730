"""Reconciliation: `reconcile(ref, state, now) -> actions`. Pure, level-based, the same for every backend.

It compares the desired and the present state, never past events, and orders only the difference. So it may run at any
time and any number of times. Without a difference it orders nothing, and it writes no status equal to the stored
status. `reconcile` plans a single object: its plan never depends on the health of other objects.

The actions of an object have a fixed order: actions inside this process (asking the depot, publishing), actions of the
backend, the status, Events.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from weft.artifacts.depot_api import REMOTE, ResolveRequest
from weft.domain.routes import AdapterSpec, PoolSpec
from weft_operator.core import scaling
from weft_operator.core.acceptance import AdapterView, PoolFacts, adapter_view, pool_view
from weft_operator.core.actions import (
    Action,
    AddFinalizer,
    ForgetSource,
    PublishAdapter,
    PublishPool,
    RecordEvent,
    RemoveFinalizer,
    Resolve,
    RetainBlobs,
    SetStatus,
    UnpublishAdapter,
    UnpublishPool,
)
from weft_operator.core.artifacts import Resolution, served_digests
from weft_operator.core.canary import COUNTS_S, as_adapter, canary_uid
from weft_operator.core.chat_templates import TemplateView, template_uid
from weft_operator.core.registration import adapter_entry, pool_entry
from weft_operator.core.replicas import (
    deadlines,
    grace_elapsed,
    plan_children,
    plan_processes,
    plan_teardown,
    present_runners,
)
from weft_operator.core.resources import FINALIZER, AdapterObject, Malformed, Object, PoolObject, Ref, holds
from weft_operator.core.rollout import RETRY_S, is_behind
from weft_operator.core.state import ClusterState, DesiredState
from weft_operator.core.status import STEPS, adapter_status, events_for, malformed_status, pool_status

PROGRESS_S, MAX_PROGRESS_S = 3.0, 10.0  # how long a status with only intermediate steps waits before it is written
CONFIG_MAP_S = 20.0  # between two reads of a chat template there
UNLOAD_GRACE_S = 30.0  # beyond the pool's drain time, before a deleted adapter is let go of anyway


def reconcile_all(state: ClusterState, now: float) -> list[Action]:
    """Plan everything: each object, remains of deleted objects, and the depot's list."""
    ordered = sorted(known_refs(state), key=lambda ref: (ref.kind == "LoRAAdapter", ref))
    actions = [action for ref in ordered for action in reconcile(ref, state, now)]
    return actions + plan_retention(state, now)


def known_refs(state: ClusterState) -> set[Ref]:
    """List every present object, and every object with remaining state."""
    observed, expected = state.observed, state.expectations
    return {*state.desired.refs(), *expected.pools, *expected.adapters, *observed.runners, *observed.children}


def reconcile(ref: Ref, state: ClusterState, now: float) -> list[Action]:
    """Plan an object, present or deleted."""
    if broken := state.desired.malformed.get(ref):
        return _plan_malformed(broken, state, now)
    if ref.kind == "ServingPool":
        pool = state.desired.pools.get(ref)
        return _plan_pool(pool, state, now) if pool else _pool_gone(ref, state)
    adapter = state.desired.adapters.get(ref)
    return _plan_adapter(adapter, state, now) if adapter else _adapter_gone(ref, state)


def plan_retention(state: ClusterState, now: float) -> list[Action]:
    """Plan the depot's list, if it has to change. Nothing is sent at first: after a restart, old drains are unknown."""
    ledger = state.expectations.retention
    if now < ledger.started_at + longest_drain_s(state.desired):
        return []
    digests = ledger.retained_digests(live_digests(state), now)
    return [] if digests == ledger.last_sent else [RetainBlobs(digests)]


def live_digests(state: ClusterState) -> set[str]:
    """List every digest that serves, may serve, or is in a status."""
    entries = {digest for entry in state.expectations.adapters.values() for digest in served_digests(entry)}
    bases = {
        digest for entry in state.expectations.pools.values() for digest in (entry.base_digest, entry.chat_template)
    }
    goods = {r.verified.digest for r in state.observed.resolutions.values() if r.verified}
    in_statuses = {str(r.status.get("digest") or r.status.get("baseDigest") or "") for r in _resources(state.desired)}
    templates = {
        str((r.status.get("suppliedChatTemplate") or {}).get("digest") or "") for r in _resources(state.desired)
    }
    canaries = {str((a.status.get("canary") or {}).get("digest") or "") for a in state.desired.adapters.values()}
    versions = {
        str(v["digest"]) for adapter in state.desired.adapters.values() for v in adapter.status.get("versions", ())
    }
    return (entries | bases | goods | in_statuses | templates | canaries | versions) - {""}


def longest_drain_s(desired: DesiredState) -> float:
    return max([desired.policy.longest_drain_s, *(pool.spec.drain_seconds for pool in desired.pools.values())])


def resolve_period_s(desired: DesiredState, uri: str = "") -> float:
    """Return the seconds between two requests of a source. They grow with the number of objects: the load does not."""
    least_s = desired.policy.remote_period_s if uri.startswith(REMOTE) else desired.policy.resolve_period_s
    return max(least_s, _round_s(desired))


def poll_s(desired: DesiredState) -> float:
    """The seconds between two looks at a remote source in order; longer with more objects."""
    return max(desired.policy.poll_s, _round_s(desired))


def progress_s(desired: DesiredState) -> float:
    """Return the time of steps before a status shows them: longer for many objects, but bounded."""
    return min(max(PROGRESS_S, _round_s(desired)), MAX_PROGRESS_S)


def _round_s(desired: DesiredState) -> float:
    """Return the least time to ask for every source once."""
    return (len(desired.pools) + len(desired.adapters)) / desired.policy.resolves_per_s


def requeue_at(ref: Ref, state: ClusterState, now: float) -> float | None:
    """Return the next time to plan this object without any event; None: never. The object was just planned.

    An overdue source was skipped because the object's state forbids resolving it now; it sets no deadline.
    """
    resource = state.desired.get(ref)
    if resource is None:
        return None
    times, defaults = deadlines(ref, state) if isinstance(resource, PoolObject) else [], state.desired.policy.defaults
    is_held = isinstance(resource, PoolObject) and state.desired.is_held(resource)
    if isinstance(resource, PoolObject) and defaults and not is_held and is_behind(resource, state.observed, defaults):
        times.append(now + RETRY_S)
    if resource.meta.deleting:
        times.append(_unload_deadline(resource, state.desired))
    elif (resolution := state.observed.resolutions.get(resource.meta.uid)) and not resolution.running:
        times.append(resolution.due_at(resolve_period_s(state.desired, resolution.request.uri), poll_s(state.desired)))
    template = state.observed.resolutions.get(template_uid(resource.meta.uid))
    if template and not template.running:
        times.append(_due_at(template, state))
    if isinstance(resource, AdapterObject) and not holds(resource, "Ready"):
        resolution = state.observed.resolutions.get(resource.meta.uid)
        if resolution and resolution.started_at is not None:
            times.append(resolution.started_at + progress_s(state.desired))
    if isinstance(resource, AdapterObject) and resource.spec.canary is not None:
        times += _canary_deadlines(resource, state, now)
    return min((time for time in times if now < time < inf), default=None)


def _canary_deadlines(adapter: AdapterObject, state: ClusterState, now: float) -> list[float]:
    canary = adapter_view(adapter, state, now).canary
    if canary is None:
        return []
    times = [canary.due_at] if canary.due_at is not None else []
    reported = state.observed.adapter_reports.get(adapter.meta.uid)
    if reported is not None and reported.canary not in (None, canary.counts):
        times.append(canary.updated_at + COUNTS_S)
    if canary.resolution is not None and not canary.resolution.running:
        period_s = resolve_period_s(state.desired, canary.canary.source.uri)
        times.append(canary.resolution.due_at(period_s, poll_s(state.desired)))
    return times


# ------------------------------------------------------------------------------------------------ pools


def _plan_pool(pool: PoolObject, state: ClusterState, now: float) -> list[Action]:
    ref = pool.meta.ref
    if pool.meta.deleting:
        return _pool_gone(ref, state)
    bounds = scaling.bounds(pool, state.desired.policy.default_replicas)
    wanted_runners = scaling.target(bounds, state.observed.pool_reports.get(str(ref)), present_runners(pool, state))
    view = pool_view(pool, state, bounds, wanted_runners, now)
    entry = pool_entry(view)
    runners, reason = ([], "") if state.desired.is_held(pool) else _runners(view, entry, state, now)
    view = replace(view, rollout=reason)
    return [
        *_resolve(pool, view.request, view.resolution, now, state.desired),
        *_resolve_template(pool, view.template, state, now),
        *_publish_pool(ref, entry, state),
        *runners,
        *_set_status(pool, pool_status(view, now, pods=state.desired.policy.defaults is not None)),
    ]


def _publish_pool(ref: Ref, entry: PoolSpec | None, state: ClusterState) -> list[Action]:
    published = state.expectations.pools.get(ref)
    if entry == published:
        return []
    return [PublishPool(ref, entry)] if entry else [UnpublishPool(ref)]


def _runners(view: PoolFacts, entry: PoolSpec | None, state: ClusterState, now: float) -> tuple[list[Action], str]:
    """Plan the runners. Return the actions, and the awaited step.

    The runners follow the base's digest. A pool that is refused or without a base keeps no runner. While the base is
    still unknown, the present runners stay: this process may have just started.
    """
    pool, ref = view.pool, view.pool.meta.ref
    if view.serving is None:
        return (plan_teardown(ref, state) if _is_decided(view) else []), ""
    digest, waited = view.serving.digest, entry == state.expectations.pools.get(ref) and grace_elapsed(ref, state, now)
    if state.desired.policy.defaults is None:
        return plan_processes(pool, digest, view.wanted_runners, view.bounds, state, waited=waited), ""
    return plan_children(
        pool, digest, view.wanted_runners, view.bounds, state, state.desired.policy.defaults, now, waited=waited
    )


def _is_decided(view: PoolFacts) -> bool:
    """Whether a missing base is final: the pool is rejected, or its base has an answer."""
    return view.rejection is not None or (view.resolution is not None and view.resolution.answer.finished)


def _pool_gone(ref: Ref, state: ClusterState) -> list[Action]:
    withdraw: list[Action] = [UnpublishPool(ref)] if ref in state.expectations.pools else []
    return [*withdraw, *plan_teardown(ref, state)]


# --------------------------------------------------------------------------------------------- adapters


def _plan_adapter(adapter: AdapterObject, state: ClusterState, now: float) -> list[Action]:
    view = adapter_view(adapter, state, now)
    if adapter.meta.deleting:
        return _unload(view, state, now)
    ref, entry, status = adapter.meta.ref, adapter_entry(view), adapter_status(view, now)
    resolve = _resolve(adapter, view.request, view.resolution, now, state.desired)
    resolve += _resolve_canary(view, state, now)
    resolve += _resolve_template(adapter, view.template, state, now)
    if (
        state.desired.policy.defaults is not None
        and view.request is not None
        and FINALIZER not in adapter.meta.finalizers
    ):
        return [*resolve, AddFinalizer(ref, adapter.meta.uid, adapter.meta.resource_version, FINALIZER)]
    write = [] if _is_passing(status, resolve, view.resolution, now, state.desired) else _set_status(adapter, status)
    return [*resolve, *_publish_adapter(ref, entry, state), *write]


def _resolve_canary(view: AdapterView, state: ClusterState, now: float) -> list[Action]:
    adapter, canary = view.adapter, view.canary
    if canary is not None:
        source = as_adapter(adapter, canary.canary)
        return _resolve(source, canary.request, canary.resolution, now, state.desired)
    uid = canary_uid(adapter.meta.uid)
    return [ForgetSource(uid)] if adapter.spec.canary is None and uid in state.observed.resolutions else []


def _resolve_template(
    resource: PoolObject | AdapterObject, template: TemplateView | None, state: ClusterState, now: float
) -> list[Action]:
    uid, resolution = template_uid(resource.meta.uid), state.observed.resolutions.get(template_uid(resource.meta.uid))
    if not resource.chat_template.is_supplied:
        return [ForgetSource(uid)] if resolution else []
    request = template.request if template else None
    if request is None or (
        resolution and resolution.request == request and (resolution.running or now < _due_at(resolution, state))
    ):
        return []
    return [Resolve(resource.meta.ref, uid, request)]


def _due_at(template: Resolution, state: ClusterState) -> float:
    """Return the time to read a spec's chat template again. An edited ConfigMap is seen within a minute."""
    period_s = resolve_period_s(state.desired, template.request.uri)
    return template.due_at(period_s, max(CONFIG_MAP_S, _round_s(state.desired)))


def _is_passing(
    status: Object, resolve: Sequence[Action], resolution: Resolution | None, now: float, desired: DesiredState,
) -> bool:  # fmt: skip
    """Whether a status shows only steps that have just begun: most are over before anybody reads it.

    From apply to Ready an adapter costs three writes: its finalizer, its status, an Event.
    """
    steps = [c["reason"] in STEPS for c in status["conditions"] if c["status"] != "True"]
    if not steps or not all(steps):
        return False
    began = resolution.started_at if resolution else None
    return bool(resolve) or (began is not None and now < began + progress_s(desired))


def _publish_adapter(ref: Ref, entry: AdapterSpec, state: ClusterState) -> list[Action]:
    return [PublishAdapter(ref, entry)] if entry != state.expectations.adapters.get(ref) else []


def _adapter_gone(ref: Ref, state: ClusterState) -> list[Action]:
    published = state.expectations.adapters.get(ref)
    return [UnpublishAdapter(ref, published.uid)] if published else []


def _unload(view: AdapterView, state: ClusterState, now: float) -> list[Action]:
    """Plan the end of a deleted adapter: it leaves the route table and every runner, in bounded time; then its
    finalizer is removed."""
    adapter, meta = view.adapter, view.adapter.meta
    if FINALIZER not in meta.finalizers:  # not ours to keep; the object may stay for somebody else
        return [*_adapter_gone(meta.ref, state), *_set_status(adapter, adapter_status(view, now))]
    if meta.uid in state.observed.unloaded:
        return _finalized(adapter)
    if now >= (deadline := _unload_deadline(adapter, state.desired)):
        waited_s = deadline - (meta.deleted or deadline)
        message = f"the scheduler did not confirm within {waited_s:.0f} s: a runner may still hold it; it goes anyway"
        forced = RecordEvent(meta.ref, meta.uid, "Warning", "UnloadTimeout", message)
        return [*_adapter_gone(meta.ref, state), *_finalized(adapter), forced]
    ask = [] if meta.uid in state.expectations.unloading else [UnpublishAdapter(meta.ref, meta.uid, unload=True)]
    return [*ask, *_set_status(adapter, adapter_status(view, now))]


def _unload_deadline(resource: PoolObject | AdapterObject, desired: DesiredState) -> float:
    pool = desired.pools.get(resource.pool) if isinstance(resource, AdapterObject) else None
    return (resource.meta.deleted or 0.0) + (pool.spec.drain_seconds if pool else 0.0) + UNLOAD_GRACE_S


# -------------------------------------------------------------------------------------------- malformed


def _plan_malformed(broken: Malformed, state: ClusterState, now: float) -> list[Action]:
    """Plan a malformed object. Its served state stays; a condition explains why its spec is not followed."""
    meta = broken.meta
    if meta.deleting:
        return [*_pool_gone(meta.ref, state), *_adapter_gone(meta.ref, state), *_finalized(broken)]
    status = malformed_status(broken, now)
    return [] if status == broken.status else [SetStatus(meta.ref, meta.uid, meta.resource_version, status)]


# ----------------------------------------------------------------------------------------------- shared


def _resolve(
    resource: PoolObject | AdapterObject, request: ResolveRequest | None, resolution: Resolution | None, now: float,
    desired: DesiredState,
) -> list[Action]:  # fmt: skip
    if request is None:
        return []
    if resolution is not None and resolution.request == request:
        period_s = resolve_period_s(desired, request.uri)
        if resolution.running or now < resolution.due_at(period_s, poll_s(desired)):
            return []
    return [Resolve(resource.meta.ref, resource.meta.uid, request)]


def _set_status(resource: PoolObject | AdapterObject, status: Object) -> list[Action]:
    if status == resource.status:
        return []
    meta = resource.meta
    return [SetStatus(meta.ref, meta.uid, meta.resource_version, status), *events_for(resource, status)]


def _finalized(resource: PoolObject | AdapterObject | Malformed) -> list[Action]:
    meta = resource.meta
    if FINALIZER not in meta.finalizers:
        return []
    return [RemoveFinalizer(meta.ref, meta.uid, meta.resource_version, FINALIZER)]


def _resources(desired: DesiredState) -> Iterable[PoolObject | AdapterObject]:
    return (*desired.pools.values(), *desired.adapters.values())
