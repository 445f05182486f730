"""What the registry hears of pools and adapters, and gateways of routes: only what changed, gathered for a while."""

from itertools import islice

from weft_scheduler.core import scaling
from weft_scheduler.core.alarms import Alarm, Kind
from weft_scheduler.core.context import Context
from weft_scheduler.core.departures import tell_departures
from weft_scheduler.core.effects import AdapterStatus, PoolStatus, SendRoutes
from weft_scheduler.core.routes import pool_routes, routes
from weft_scheduler.core.state import Pool, Runner
from weft_scheduler.core.values import PoolSpec, RouteTable

MAX_ERRORS = 4


def reroute(ctx: Context, *, without_keys: bool = False) -> None:
    """A new table to every gateway, if it differs. Never before a complete registry snapshot.

    A restarted scheduler's first table waits a little for the keys: without them gateways would turn callers away.
    """
    state, told = ctx.state, ctx.told
    if not state.registry_known:
        return
    if told.table is None and not state.keys_known and not without_keys:
        ctx.alarms.set_earlier(Alarm(Kind.FIRST_TABLE), ctx.now + ctx.config.first_table_s)
        return
    told.routes = routes(state.pools.values())
    told.routed = frozenset(r.uid for r in told.routes)
    state.readiness.update(state.pools)
    send_table(ctx)
    arm(ctx)


def send_table(ctx: Context) -> None:
    """The present routes with the present facts of pools and keys."""
    state, last = ctx.state, ctx.told.table
    pools = pool_routes(state)
    content = (ctx.told.routes, pools, state.keys, state.keys_known)
    if last is not None and content == (last.routes, last.pools, last.keys, last.keys_known):
        return
    table = ctx.told.table = RouteTable(state.version(), *content)
    ctx.to_gateways(lambda gateway: SendRoutes(gateway, table))


def flush(ctx: Context) -> None:
    """Everything gathered; of adapters a bounded number, the rest next time."""
    state, told = ctx.state, ctx.told
    touched, readiness = sorted(state.touched | state.readiness), sorted(state.readiness)
    state.touched, state.readiness = set(), set()
    if not state.registry_known:
        return
    for name in touched:
        _tell_pool(ctx, name)
    for name in readiness:
        told.unsaid.update(dict.fromkeys(state.pools[name].adapters if name in state.pools else ()))
    _tell_adapters(ctx)
    tell_departures(ctx)
    if readiness and told.table is not None:
        send_table(ctx)


def arm(ctx: Context) -> None:
    """Let the gathering end at some time."""
    waiting = ctx.state.touched or ctx.state.readiness or ctx.told.unsaid or ctx.told.departures
    if waiting and Alarm(Kind.STATUS) not in ctx.alarms:
        ctx.alarms.set(Alarm(Kind.STATUS), ctx.now + ctx.config.status_s)


def _tell_pool(ctx: Context, name: str) -> None:
    pool = ctx.state.pools.get(name)
    if pool is not None:
        scaling.review(ctx, pool)
    if pool is None or pool.spec is None:
        ctx.told.pools.pop(name, None)
        return
    status = _pool_status(ctx, pool, pool.spec)
    if ctx.told.pools.get(name) != status:
        ctx.told.pools[name] = status
        ctx.emit(status)


def _pool_status(ctx: Context, pool: Pool, spec: PoolSpec) -> PoolStatus:
    return PoolStatus(
        pool=pool.name,
        ready_runners=sum(pool.ready_versions.values()),
        wanted_runners=pool.wanted_runners,
        running=pool.running,
        queued=len(pool.queue),
        victims=tuple(_called(ctx.state.runners[uuid]) for uuid in pool.victims),
        # Before the runners that there are have reported themselves nobody can say how many are too many.
        max_runners=spec.max_runners if ctx.state.settled else 0,
        total_pages=pool.totals.sum.total_pages,
        reserved_pages=pool.totals.sum.reserved_pages,
        demand_runners=scaling.demand(ctx, pool),
    )


def _called(runner: Runner) -> str:
    """What people call it; its uuid where it gave itself no name."""
    return (runner.spec.name if runner.spec else "") or runner.id.uuid


def _tell_adapters(ctx: Context) -> None:
    """The next batch of adapters whose status may differ."""
    told, failures = ctx.told, dict[str, dict[str, list[Runner]]]()
    for uid in list(islice(told.unsaid, ctx.config.status_batch)):
        del told.unsaid[uid]
        name = ctx.state.adapter_pool.get(uid)
        if name is None:
            continue
        pool = ctx.state.pools[name]
        if name not in failures:
            failures[name] = _load_failures(ctx, pool)
        status = _adapter_status(ctx, pool, uid, failures[name])
        if told.adapters.get(uid) != status:
            told.adapters[uid] = status
            ctx.emit(status)


def _adapter_status(ctx: Context, pool: Pool, uid: str, failures: dict[str, list[Runner]]) -> AdapterStatus:
    digest = pool.adapters[uid].digest
    failed = failures.get(digest, [])
    errors = tuple(f"{_called(runner)}: {runner.errors[digest]}" for runner in failed[:MAX_ERRORS])
    return AdapterStatus(uid, digest, uid in ctx.told.routed, _knowing(pool, digest, failed), errors)


def _knowing(pool: Pool, digest: str, failed: list[Runner]) -> int:
    """Ready runners that know the digest, those Ready with a list of its version or a later one, and can load it."""
    since = pool.desired.since.get(digest)
    if since is None:
        return 0
    knowing = sum(count for version, count in pool.ready_versions.items() if version >= since)
    return knowing - sum(runner.ready_version is not None and runner.ready_version >= since for runner in failed)


def _load_failures(ctx: Context, pool: Pool) -> dict[str, list[Runner]]:
    """Digest -> who could not load it, by uuid."""
    failures: dict[str, list[Runner]] = {}
    for uuid in sorted(pool.runners):
        runner = ctx.state.runners[uuid]
        for digest in runner.errors:
            failures.setdefault(digest, []).append(runner)
    return failures
