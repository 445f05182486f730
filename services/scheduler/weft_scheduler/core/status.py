"""The statuses for registries and the routes for gateways: only what changed is sent, gathered for a while."""

from weft.domain.routes import AdapterStatus, PoolSpec, PoolStatus, RoleCounts
from weft.domain.runner import RunnerRole
from weft_scheduler.core.pool.pool import Pool
from weft_scheduler.core.published_state import PendingDeletion
from weft_scheduler.core.state import State
from weft_scheduler.core.timers import Timer, TimerKind

MAX_ERRORS = 4


def on_status_due(state: State, _: Timer) -> None:
    """Publish everything that was gathered; of adapters a bounded number, the rest next time."""
    published = state.published
    pools = published.take_pools()
    if not state.registry.is_known:
        return
    for name in pools:
        _publish_pool(state, name)
    publish_routes(state)
    for uid in published.take_adapters(state.config.status_batch):
        _publish_adapter(state, uid)
    for uid, deletion in list(published.deletions.items()):
        if _is_gone(state, uid, deletion):
            published.finish_deletion(uid)
            _send(state, AdapterStatus(next(iter(deletion.digests), ""), routed=False, removed=True, uid=uid))
    if published.dirty:
        state.schedule_publish()


def publish_routes(state: State, *, without_keys: bool = False) -> None:
    """Send the change of the route table to every gateway. Never before a complete registry snapshot.

    A restarted scheduler's first table waits a little for the keys: without them gateways would reject every client.
    """
    if not state.registry.is_known:
        return
    if not (state.routes.published or state.routes.keys_known or without_keys):
        state.timers.set_earlier(Timer(TimerKind.FIRST_ROUTES), state.now + state.config.first_routes_s)
        return

    def route_of(name: str) -> object:
        pool = state.pools.get(name)
        return pool.route() if pool is not None else None

    change, uids = state.routes.publish(state.numbers.version, route_of)  # pyright: ignore[reportArgumentType]
    state.published.mark_adapters(uid for uid in uids if uid in state.registry.adapter_pool)
    if change is not None:
        for gateway in state.gateways.values():
            state.send(gateway.peer, change)
    routes_applied(state)
    if state.published.dirty:
        state.schedule_publish()


def on_first_routes(state: State, _: Timer) -> None:
    """Publish the first table without the keys."""
    publish_routes(state, without_keys=True)


def on_slo_status(state: State, timer: Timer) -> None:
    """Let a pool's attainment, or its roles, be published again."""
    state.mark_dirty(timer.name)


def routes_applied(state: State) -> None:
    """Publish statuses valid for every later request of a client.

    An adapter's status waits until every gateway has applied the adapter's route: after Ready none serves older
    content, after a deletion none serves any.
    """
    versions = [gateway.applied_routes for gateway in state.gateways.values() if gateway.applied_routes is not None]
    if done := state.routes.applied(min(versions, default=None)):
        state.published.mark_adapters(uid for uid in done if uid in state.registry.adapter_pool)
        state.schedule_publish()


def _publish_pool(state: State, name: str) -> None:
    pool = state.pools.get(name)
    if pool is None or pool.spec is None:
        state.published.pools.pop(name, None)
        return
    status = _pool_status(state, pool, pool.spec)
    if state.published.pools.get(name) != status:
        state.published.pools[name] = status
        _send(state, status)


def _pool_status(state: State, pool: Pool, spec: PoolSpec) -> PoolStatus:
    attainment, next_s = pool.scaling.service_level.published(state.now, state.config.slo_status_s)
    if next_s > state.now and attainment != pool.scaling.service_level.attainment.percents():
        state.timers.set(Timer(TimerKind.SLO_STATUS, pool.name), next_s)
    roles = None
    if spec.split:
        of_role = pool.fleet.runners_of_roles()
        counts = RoleCounts(of_role[RunnerRole.PROMPT], of_role[RunnerRole.TOKEN], of_role[RunnerRole.MIXED])
        roles, others_s = pool.scaling.published_roles(counts, state.now, state.config.slo_status_s)
        if others_s > state.now:
            state.timers.set_earlier(Timer(TimerKind.SLO_STATUS, pool.name), others_s)
    return PoolStatus(
        pool=pool.name,
        ready_runners=pool.fleet.ready.count,
        wanted_runners=pool.scaling.autoscaler.wanted_runners,
        victims=tuple(state.runners[uuid].name for uuid in pool.scaling.autoscaler.victims),
        # Until the runners that there are have reported themselves, how many are too many is not known.
        observed_generation=spec.generation if state.settled else 0,
        slo=attainment,
        roles=roles,
        wanted=pool.scaling.autoscaler.target if spec.split and spec.groups else None,
        kv_pages=pool.fleet.ready.min_pages,
    )


def _publish_adapter(state: State, uid: str) -> None:
    name = state.registry.adapter_pool.get(uid)
    if name is None or not state.routes.is_applied(uid):
        return
    pool = state.pools[name]
    spec = pool.adapters.by_uid[uid]
    failures = pool.fleet.load_failures.get(spec.digest, {})
    errors = [f"{state.runners[uuid].name}: {failures[uuid]}" for uuid in sorted(failures)[:MAX_ERRORS]]
    unavailable = _unavailable_runners(pool, spec.digest)
    status = AdapterStatus(
        uid=uid,
        digest=spec.digest,
        routed=state.routes.is_routed(spec.model_name, uid),
        unavailable_runners=unavailable,
        load_errors=tuple(sorted(errors)),
        load_failed=bool(errors) and unavailable == pool.fleet.ready.count,
        canary=state.registry.canaries[uid][1] if uid in state.registry.canaries else None,
        observed_generation=spec.generation,
    )
    if state.published.adapters.get(uid) != status:
        state.published.adapters[uid] = status
        _send(state, status)


def _unavailable_runners(pool: Pool, digest: str) -> int:
    """Return how many Ready runners do not serve a digest: they failed to load it, or have to hold it and do not."""
    held_since = pool.adapters.held_since.get(digest, 0)
    count = sum(runners for version, runners in pool.fleet.ready.versions.items() if version < held_since)
    for uuid in pool.fleet.load_failures.get(digest, ()):
        version = pool.fleet.runners[uuid].ready_version if uuid in pool.fleet.runners else None
        count += version is not None and version >= held_since
    return count


def _is_gone(state: State, uid: str, deletion: PendingDeletion) -> bool:
    """Return whether a removed adapter is served no more and on no Ready runner.

    A uid that is not known here has gone already, or went with an earlier scheduler: the final status is sent for it,
    too, so that a registry that waits is always answered.
    """
    pool = state.pools.get(deletion.pool)
    if deletion.model_name and state.routes.is_routed(deletion.model_name, uid):
        return False
    if not state.routes.is_applied(uid):
        return False
    if pool is None:
        return True  # no runner is there
    deleted_digests = [
        digest for digest in deletion.digests if not pool.adapters.registered(digest)
    ]  # digests of no other adapter
    if any(digest in pool.adapters.draining for digest in deleted_digests):
        return False  # streams may still use it
    return not deleted_digests or all(version >= pool.adapters.removed_version for version in pool.fleet.ready.versions)


def _send(state: State, status: PoolStatus | AdapterStatus) -> None:
    for registry in state.published.registries.values():
        state.send(registry.peer, status)
