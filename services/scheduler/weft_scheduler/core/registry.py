"""What the registry wants: pools and adapters, digests that come and go."""

from dataclasses import replace

from weft_scheduler.core import placement, queueing
from weft_scheduler.core.admission import DEFAULTS
from weft_scheduler.core.alarms import Alarm, Kind
from weft_scheduler.core.cluster import tell_desired
from weft_scheduler.core.context import Context
from weft_scheduler.core.departures import depart
from weft_scheduler.core.effects import Ignored, RejectReason
from weft_scheduler.core.events import RegistryChange
from weft_scheduler.core.lives import reject
from weft_scheduler.core.requests import retire_unknown
from weft_scheduler.core.reservation import POLICIES
from weft_scheduler.core.state import Pool
from weft_scheduler.core.values import BASE, PoolSpec


def registry_up(ctx: Context) -> None:
    """Somebody new wants every status once; its snapshot follows."""
    ctx.told.clear_statuses()
    for pool in ctx.state.pools.values():
        ctx.touch(pool.name)
        ctx.state.readiness.add(pool.name)


def change(ctx: Context, event: RegistryChange) -> None:
    """Take a snapshot or a change over. A change without a snapshot before it says too little."""
    state = ctx.state
    if not event.snapshot and not state.registry_known:
        ctx.emit(Ignored("registry", "", "a change before the first snapshot"))
        return
    for uid in event.removed_adapters:
        depart(ctx, uid)
    touched = _clear(ctx) if event.snapshot else _remove(ctx, event)
    for name in touched:
        state.pools[name].sweep = True
    for spec in event.pools:
        state.pool(spec.name).spec = _implemented(ctx, spec)
        touched.add(spec.name)
    for adapter in event.adapters:
        touched |= _drop_adapter(ctx, adapter.uid)
        ctx.told.departures.pop(adapter.uid, None)
        state.pool(adapter.pool).put_adapter(adapter)
        state.adapter_pool[adapter.uid] = adapter.pool
        touched.add(adapter.pool)
    state.registry_known, state.reroute = True, True
    for name in sorted(touched):
        _settle_pool(ctx, state.pool(name))


def retire_due(ctx: Context, pool: Pool) -> None:
    """Retired digests whose time has come: their streams end, the list shrinks."""
    for digest in pool.desired.forget(pool.live, ctx.now):
        for request in [ctx.state.requests[r] for r in sorted(pool.requests)]:
            if request.digest == digest:
                reject(ctx, request, RejectReason.UNKNOWN_ADAPTER, f"{digest} was deleted or replaced")
    pool.desired.forget(pool.live, ctx.now)
    publish(ctx, pool)


def publish(ctx: Context, pool: Pool) -> None:
    """A new version of the pool's list where it differs, and the orders that follow."""
    adapters, pinned = pool.desired.adapters(), pool.desired.pinned
    if not pool.desired.list.version or adapters != pool.desired.list.adapters:
        pool.desired.publish(ctx.state.version(), adapters)
        ctx.state.readiness.add(pool.name)
        for uuid in sorted(pool.runners):
            tell_desired(ctx, ctx.state.runners[uuid])
            if pool.desired.pinned != pinned:
                ctx.reindex(ctx.state.runners[uuid])  # pinned adapters take slots
    deadline = pool.desired.next_deadline(pool.live)
    if deadline is not None:
        ctx.alarms.set(Alarm(Kind.RETIRE, pool.name), deadline)


def _settle_pool(ctx: Context, pool: Pool) -> None:
    """Bring requests and runners in line with what the pool is now."""
    ctx.look_at(pool.name)
    ctx.state.readiness.add(pool.name)
    if pool.spec is None:
        for request_id in sorted(pool.requests):
            request = ctx.state.requests[request_id]
            reject(ctx, request, RejectReason.UNKNOWN_POOL, f"pool {pool.name} does not exist")
    grace_s, drain_s = ctx.config.route_grace_s, pool.drain_s(ctx.config)
    pool.desired.register(pool.wanted.values(), ctx.now, grace_s, drain_s)
    for digest in sorted(pool.live):
        if not pool.desired.knows(digest) and digest != BASE:
            retire_unknown(ctx, pool, digest)
    publish(ctx, pool)


def _clear(ctx: Context) -> set[str]:
    """Forget everything the registry said before. Returns every pool's name."""
    for pool in ctx.state.pools.values():
        pool.spec = None
        pool.drop_adapters()
    ctx.state.adapter_pool.clear()
    ctx.told.clear_statuses()
    return set(ctx.state.pools)


def _remove(ctx: Context, event: RegistryChange) -> set[str]:
    touched: set[str] = set()
    for name in event.removed_pools:
        if name in ctx.state.pools:
            ctx.state.pools[name].spec = None
            touched.add(name)
    for uid in event.removed_adapters:
        touched |= _drop_adapter(ctx, uid)
    return touched


def _drop_adapter(ctx: Context, uid: str) -> set[str]:
    """Take an adapter out of whichever pool has it."""
    name = ctx.state.adapter_pool.pop(uid, None)
    if name is None:
        return set()
    ctx.state.pool(name).drop_adapter(uid)
    ctx.told.adapters.pop(uid, None)
    return {name}


def _implemented(ctx: Context, spec: PoolSpec) -> PoolSpec:
    """The edge refuses unknown policies; one that comes through is served by the default, and said."""
    for name, policies in (("placement", placement.POLICIES), ("queue", queueing.POLICIES), ("reservation", POLICIES)):
        if getattr(spec, name) not in policies:
            default = getattr(DEFAULTS, name)
            ctx.emit(Ignored("registry", spec.name, f"{name} {getattr(spec, name)!r} is unknown: {default} serves"))
            spec = replace(spec, **{name: default})
    return spec
