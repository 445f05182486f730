"""The handlers of what a registry sends: pools and adapters as they should be, digests that come and go.

A change costs what it carries: of a hundred thousand adapters one more touches its own entries.
"""

from collections.abc import Iterable
from dataclasses import replace

from weft.domain.ids import BASE
from weft.domain.machine import Close, Peer
from weft.domain.request import RejectReason
from weft.domain.routes import AdapterSpec, PoolSpec, RegistryChange, RegistryHello, Unserved
from weft_scheduler.core import canaries
from weft_scheduler.core.effects import Stale
from weft_scheduler.core.pool.pool import DEFAULTS, POLICIES, Pool
from weft_scheduler.core.published_state import PendingDeletion, Registry
from weft_scheduler.core.request_lifecycle import reject
from weft_scheduler.core.requests import drain_unknown
from weft_scheduler.core.runner_reports import push_desired, resync_all
from weft_scheduler.core.state import State
from weft_scheduler.core.status import publish_routes
from weft_scheduler.core.timers import Timer, TimerKind


def on_connected(state: State, peer: Peer, hello: object) -> None:
    """Let a new registry get every status once. Its snapshot follows, or nothing, if it only listens."""
    term = hello.term if isinstance(hello, RegistryHello) else None
    state.published.put_registry(Registry(peer, term))
    if term is not None and not _leads(state, peer, term):
        return
    state.published.clear()
    state.published.mark_adapters(state.registry.adapter_pool)
    for name in state.pools:
        state.mark_dirty(name)


def on_closed(state: State, name: str) -> None:
    state.published.forget_registry(name)


def on_change(state: State, peer: Peer, change: RegistryChange) -> None:
    """Take a snapshot or a change over. A change without a snapshot before it is not enough."""
    if peer.name not in state.published.registries or not _leads(state, peer, change.term):
        return
    if not change.snapshot and not state.registry.is_known:
        state.emit(Stale("registry", "", "a change before the first snapshot"))
        return
    for uid in change.removed_adapters:
        _delete(state, uid)
    touched: dict[str, None] = {}
    if change.snapshot:
        state.published.clear()
        touched |= dict.fromkeys(state.pools)
        named = {adapter.uid for adapter in change.adapters}
        uids = [*state.registry.adapter_pool, *state.routes.unserved]
        _drop_adapters(state, [uid for uid in uids if uid not in named], touched)
        removed = state.pools.keys() - {spec.name for spec in change.pools}
    else:
        removed = state.pools.keys() & {*change.removed_pools}
    for name in sorted(removed):
        touched[name] = None
        _set_spec(state, state.pools[name], None)
    for spec in change.pools:
        touched[spec.name] = None
        _set_spec(state, state.pool(spec.name), _implemented(state, spec))
    _drop_adapters(state, change.removed_adapters, touched)
    for adapter in change.adapters:
        _put_adapter(state, adapter, touched)
    first = state.registry.know()
    for name in sorted(touched):
        _settle(state, state.pool(name), snapshot=change.snapshot)
    if first:
        resync_all(state)
    publish_routes(state)


def on_adapter_drain(state: State, timer: Timer) -> None:
    """End a draining digest after its grace or its deadline: its streams end, and runners remove it."""
    pool, digest = state.pools.get(timer.name), timer.adapter
    draining = pool.adapters.draining.get(digest) if pool is not None else None
    if pool is None or draining is None:
        return
    if pool.waiting.requests.get(digest) and state.now < draining.deadline:
        state.timers.set(timer, draining.deadline)
        return
    for request_id in sorted(pool.waiting.requests.get(digest, ())):
        message = f"{digest} was deleted or replaced"
        reject(state, state.requests[request_id], RejectReason.UNKNOWN_ADAPTER, message)
    state.timers.clear(timer)
    pool.adapters.drained(digest)
    state.registry.desired_changed[pool.name] = None


def _leads(state: State, peer: Peer, term: int) -> bool:
    """Return whether this registry has the highest term. Streams of lower terms are closed."""
    published = state.published
    published.put_registry(Registry(peer, max(term, published.registries[peer.name].term or 0)))
    published.advance_term(term)
    leads = term >= published.registry_term
    speaking = [r for r in published.registries.values() if r.term is not None]
    over = [r for r in speaking if (r.term or 0) < published.registry_term or (r.peer == peer and not leads)]
    for registry in over:
        published.forget_registry(registry.peer.name)
        reason = f"term {registry.term} is over: another registry leads with {published.registry_term}"
        state.emit(Close(registry.peer, reason))
    return leads


def _delete(state: State, uid: str) -> None:
    """Begin the deletion of an adapter: the registry waits for the final status."""
    name = state.registry.adapter_pool.get(uid)
    if name is not None:
        spec = state.pools[name].adapters.by_uid[uid]
        digests = tuple(content.digest for content in spec.contents)
        state.published.begin_deletion(uid, PendingDeletion(name, digests, spec.model_name))
    else:
        state.published.begin_deletion(uid, state.published.deletions.get(uid, PendingDeletion()))


def _set_spec(state: State, pool: Pool, spec: PoolSpec | None) -> None:
    """Declare a pool, and let its names be routed or not."""
    if pool.spec == spec:
        return
    served, base = pool.is_served, pool.base_route()
    pool.declare(spec)
    state.routes.pool_changed(pool.name)
    if base is not None:
        state.routes.withdraw(base.model_name, base.uid)
    if (base := pool.base_route()) is not None:
        state.routes.claim(base)
    if served != pool.is_served:
        for adapter in pool.adapters.by_uid.values():
            _route(state, pool, adapter)


def _put_adapter(state: State, adapter: AdapterSpec, touched: dict[str, None]) -> None:
    state.published.finish_deletion(adapter.uid)
    if not adapter.digest:
        _drop_adapters(state, (adapter.uid,), touched)
        refusal = adapter.reason, adapter.message
        state.routes.explain(Unserved(adapter.uid, adapter.namespace, adapter.model_name, adapter.pool, *refusal))
        return
    pool = state.pool(adapter.pool)
    state.published.mark_adapters((adapter.uid,))
    touched[adapter.pool] = None
    if pool.adapters.by_uid.get(adapter.uid) == adapter:
        return
    counted = state.registry.canaries.get(adapter.uid)
    _drop_adapters(state, (adapter.uid,), touched)
    canaries.declare(state, adapter, counted)
    pool.adapters.put(adapter)
    state.registry.adapter_pool[adapter.uid] = adapter.pool
    _route(state, pool, adapter)


def _drop_adapters(state: State, uids: Iterable[str], touched: dict[str, None]) -> None:
    """Take adapters out of their pools."""
    for uid in uids:
        state.routes.forget_unserved(uid)
        name = state.registry.adapter_pool.pop(uid, None)
        if name is not None:
            pool = state.pool(name)
            state.routes.withdraw(pool.adapters.by_uid[uid].model_name, uid)
            pool.adapters.drop(uid)
            canaries.forget(state, uid)
            state.published.forget_adapter(uid)
            touched[name] = None


def _route(state: State, pool: Pool, adapter: AdapterSpec) -> None:
    """Let an adapter claim its name while its pool is served."""
    if not pool.is_served:
        state.routes.withdraw(adapter.model_name, adapter.uid)
        return
    state.routes.claim(adapter.route)


def _settle(state: State, pool: Pool, *, snapshot: bool) -> None:
    """Bring requests and runners in line with the pool's present spec."""
    state.mark_schedulable(pool.name)
    if pool.spec is None:
        for request_id in pool.waiting.request_ids():
            request = state.requests[request_id]
            reject(state, request, RejectReason.UNKNOWN_POOL, f"pool {pool.name} does not exist")
    for digest in pool.adapters.settle(state.now, state.config.route_grace_s, pool.drain_s(state.config)):
        draining = pool.adapters.draining.get(digest)
        if draining is not None:
            state.timers.set(Timer(TimerKind.ADAPTER_DRAIN, pool.name, digest), draining.grace_until)
        if digest in pool.waiting.queued_by_adapter or len(pool.waiting.batch.queue):
            pool.waiting.recheck()  # its rank may be another
    if snapshot:
        for digest in sorted(pool.waiting.requests):
            if digest != BASE and not pool.adapters.knows(digest):
                drain_unknown(state, pool, digest)
    state.registry.desired_changed[pool.name] = None


def publish_desired(state: State) -> None:
    """Send the changes of desired adapters at the end of an event: one change for each pool, to all its runners."""
    while state.registry.desired_changed and state.registry.is_known:
        name, _ = state.registry.desired_changed.popitem()
        pool = state.pools.get(name)
        if pool is None:
            continue
        base_version, pinned = pool.adapters.version, pool.adapters.pinned
        change = pool.adapters.publish(state.numbers.version)
        if change is None:
            continue
        for adapter in change.adapters:
            state.published.mark_adapters(pool.adapters.by_digest.get(adapter.digest, ()))
        for runner in pool.fleet.runners.values():
            push_desired(state, pool, runner, change, base_version)
            if pool.adapters.pinned != pinned:
                state.update_runner(runner)  # pinned adapters take slots


def _implemented(state: State, spec: PoolSpec) -> PoolSpec:
    """Return a spec with known policies. The edge refuses unknown policies; here they are replaced and reported."""
    for name, policies in POLICIES.items():
        if getattr(spec, name) not in policies:
            default = getattr(DEFAULTS, name)
            reason = f"{name} {getattr(spec, name)!r} is unknown: {default} serves"
            state.emit(Stale("registry", spec.name, reason))
            spec = replace(spec, **{name: default})
    return spec
