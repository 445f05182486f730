"""The route table: served names from the registry, facts of pools from the runners. Names conflict: the older wins."""

from collections.abc import Iterable

from weft_scheduler.core.state import Pool, State
from weft_scheduler.core.values import BASE, PoolRoute, PoolSpec, Route


def routes(pools: Iterable[Pool]) -> tuple[Route, ...]:
    """One route a name, by name: bases of pools whose digest is known, and their adapters with a digest."""
    winners: dict[str, Route] = {}
    for route in _claims(pools):
        other = winners.setdefault(route.model_name, route)
        if _age(route) < _age(other):
            winners[route.model_name] = route
    return tuple(winners[name] for name in sorted(winners))


def pool_routes(state: State) -> tuple[PoolRoute, ...]:
    """What gateways need to know of each pool, by name."""
    return tuple(
        PoolRoute(pool.spec, pool.max_context_tokens or pool.spec.max_context_tokens, sum(pool.ready_versions.values()))
        for _, pool in sorted(state.pools.items())
        if pool.spec is not None and pool.spec.base_digest
    )


def _claims(pools: Iterable[Pool]) -> Iterable[Route]:
    for pool in pools:
        if pool.spec is None or not pool.spec.base_digest:
            continue
        if pool.spec.base_model_name:
            yield _base(pool.spec)
        yield from pool.routes.values()


def _base(spec: PoolSpec) -> Route:
    namespace = spec.name.partition("/")[0]
    return Route(spec.base_model_name, namespace, spec.name, BASE, 0, f"pool:{spec.name}", spec.created_unix_s)


def _age(route: Route) -> tuple[int, str]:
    """Older first; at the same second the smaller uid, so that every scheduler says the same."""
    return route.created_unix_s, route.uid
