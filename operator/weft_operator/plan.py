"""plan(desired, observed, now) -> actions. Pure, level-based, the same for every backend.

It looks at what should be and what is, never at what happened, so it may run at any time and any number of times: what
it orders is only the difference. Nothing changes, nothing is ordered; no status is written that says what is already
stored. `plan_one` plans a single object: what happens to one never depends on whether another one is in order.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from weft_operator import capacity
from weft_operator.actions import (
    Action,
    EnsureRunner,
    PublishAdapter,
    PublishPool,
    RemoveFinalizer,
    RemoveRunner,
    Resolve,
    Retain,
    SetStatus,
    WithdrawAdapter,
    WithdrawPool,
)
from weft_operator.derive import adapter_entry, adapter_status, pool_entry, pool_status
from weft_operator.judge import PoolFacts, adapter_facts, pool_facts
from weft_operator.observe import AdapterEntry, Desired, Observed, PoolEntry
from weft_operator.resolution import Request, Resolution
from weft_operator.resources import FINALIZER, Adapter, Object, Pool, Ref


@dataclass(frozen=True, slots=True)
class Policy:
    """What differs between backends."""

    resolve_period_s: float = 2.0  # an edit of a source is noticed within this, while objects are few
    resolves_per_s: float = 50.0  # the most for all objects together, so that rest costs the same with 10,000 of them
    default_replicas: int = 1
    longest_drain_s: float = 300.0  # the least time after a start before anything is dropped from the depot


def plan(desired: Desired, observed: Observed, now: float, policy: Policy) -> list[Action]:
    """Everything: each object, what is left of objects that are gone, and the depot's list."""
    refs = {*desired.refs(), *observed.pools, *observed.adapters, *observed.runners}
    ordered = sorted(refs, key=lambda ref: (ref.kind == "LoRAAdapter", ref))
    actions = [action for ref in ordered for action in plan_one(ref, desired, observed, now, policy)]
    return actions + plan_retention(desired, observed, now, policy)


def plan_one(ref: Ref, desired: Desired, observed: Observed, now: float, policy: Policy) -> list[Action]:
    """One object, present or gone."""
    if ref.kind == "ServingPool":
        pool = desired.pools.get(ref)
        return _plan_pool(pool, desired, observed, now, policy) if pool else _pool_gone(ref, observed)
    adapter = desired.adapters.get(ref)
    return _plan_adapter(adapter, desired, observed, now, policy) if adapter else _adapter_gone(ref, observed)


def plan_retention(desired: Desired, observed: Observed, now: float, policy: Policy) -> list[Action]:
    """The depot's list, when it has to change. Silent at first: what drained before a restart is not known."""
    ledger = observed.retention
    if now < ledger.started_at + longest_drain_s(desired, policy):
        return []
    wanted = ledger.wanted(live_digests(desired, observed), now)
    return [] if wanted == ledger.told else [Retain(wanted)]


def live_digests(desired: Desired, observed: Observed) -> set[str]:
    """Every digest that serves, may serve, or is told in a status."""
    entries = {entry.digest for entry in observed.adapters.values()}
    bases = {entry.base_digest for entry in observed.pools.values()}
    goods = {r.good.digest for r in observed.resolutions.values() if r.good}
    told = {str(r.status.get("digest") or r.status.get("baseDigest") or "") for r in _resources(desired)}
    return (entries | bases | goods | told) - {""}


def longest_drain_s(desired: Desired, policy: Policy) -> float:
    return max([policy.longest_drain_s, *(pool.drain_s for pool in desired.pools.values())])


def resolve_period_s(desired: Desired, policy: Policy) -> float:
    """How often each source is asked for: the period stretches with the number of objects, their sum does not grow."""
    return max(policy.resolve_period_s, (len(desired.pools) + len(desired.adapters)) / policy.resolves_per_s)


def wake_at(ref: Ref, desired: Desired, observed: Observed, now: float, policy: Policy) -> float | None:
    """When this object, just planned, has to be planned again though nothing happens; None: never.

    A source that is due already and was not asked for is one that the object's state does not let be asked for.
    """
    resource = desired.get(ref)
    resolution = observed.resolutions.get(resource.meta.uid) if resource and not resource.meta.deleting else None
    due = resolution.due_at(resolve_period_s(desired, policy)) if resolution and not resolution.running else now
    return due if now < due < float("inf") else None


# ------------------------------------------------------------------------------------------------ pools


def _plan_pool(pool: Pool, desired: Desired, observed: Observed, now: float, policy: Policy) -> list[Action]:
    if pool.meta.deleting:
        return [*_pool_gone(pool.meta.ref, observed), *_finalized(pool, pool.meta.ref not in observed.pools)]
    facts = pool_facts(pool, desired, observed, capacity.wanted_runners(pool, policy.default_replicas))
    return [
        *_resolve(pool, facts.request, facts.resolution, now, resolve_period_s(desired, policy)),
        *_publish_pool(pool.meta.ref, pool_entry(facts), observed),
        *_runners(facts, observed),
        *_set_status(pool, pool_status(facts, now)),
    ]


def _publish_pool(ref: Ref, entry: PoolEntry | None, observed: Observed) -> list[Action]:
    published = observed.pools.get(ref)
    if entry == published:
        return []
    return [PublishPool(ref, entry)] if entry else [WithdrawPool(ref)]


def _runners(facts: PoolFacts, observed: Observed) -> list[Action]:
    """Runners follow the base's digest; a pool that is refused or has no base keeps none."""
    ref = facts.pool.meta.ref
    present = observed.runners.get(ref, {})
    if facts.serving is None:
        return [RemoveRunner(ref, index) for index in capacity.to_stop(0, present)]
    launch = capacity.launch(facts.pool, facts.serving.digest)
    starts = [EnsureRunner(ref, index, launch) for index in capacity.to_start(launch, facts.wanted, present)]
    return [*starts, *(RemoveRunner(ref, index) for index in capacity.to_stop(facts.wanted, present))]


def _pool_gone(ref: Ref, observed: Observed) -> list[Action]:
    withdraw: list[Action] = [WithdrawPool(ref)] if ref in observed.pools else []
    return [*withdraw, *(RemoveRunner(ref, index) for index in capacity.to_stop(0, observed.runners.get(ref, {})))]


# --------------------------------------------------------------------------------------------- adapters


def _plan_adapter(adapter: Adapter, desired: Desired, observed: Observed, now: float, policy: Policy) -> list[Action]:
    ref = adapter.meta.ref
    facts = adapter_facts(adapter, desired, observed)
    if adapter.meta.deleting:
        status = _set_status(adapter, adapter_status(facts, now))
        gone = _adapter_gone(ref, observed)
        return [*gone, *(_finalized(adapter, not gone) or status)]
    return [
        *_resolve(adapter, facts.request, facts.resolution, now, resolve_period_s(desired, policy)),
        *_publish_adapter(ref, adapter_entry(facts), observed),
        *_set_status(adapter, adapter_status(facts, now)),
    ]


def _publish_adapter(ref: Ref, entry: AdapterEntry | None, observed: Observed) -> list[Action]:
    published = observed.adapters.get(ref)
    if entry == published:
        return []
    return [PublishAdapter(ref, entry)] if entry else [WithdrawAdapter(ref)]


def _adapter_gone(ref: Ref, observed: Observed) -> list[Action]:
    return [WithdrawAdapter(ref)] if ref in observed.adapters else []


# ----------------------------------------------------------------------------------------------- shared


def _resolve(
    resource: Pool | Adapter, request: Request | None, known: Resolution | None, now: float, period_s: float
) -> list[Action]:
    if request is None:
        return []
    same = known is not None and known.request == request
    if known is not None and same and (known.running or now < known.due_at(period_s)):
        return []
    return [Resolve(resource.meta.ref, resource.meta.uid, request)]


def _set_status(resource: Pool | Adapter, status: Object) -> list[Action]:
    if status == resource.status:
        return []
    meta = resource.meta
    return [SetStatus(meta.ref, meta.uid, meta.resource_version, status)]


def _finalized(resource: Pool | Adapter, let_go: bool) -> list[Action]:
    meta = resource.meta
    if not let_go or FINALIZER not in meta.finalizers:
        return []
    return [RemoveFinalizer(meta.ref, meta.uid, meta.resource_version, FINALIZER)]


def _resources(desired: Desired) -> Iterable[Pool | Adapter]:
    return (*desired.pools.values(), *desired.adapters.values())
