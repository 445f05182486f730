"""The served models as the scheduler's changes gave them, and who may use them.

A change costs what it carries. Adapters are indexed by namespace: what one tenant may use is listed without reading the
models of others.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from weft.domain.ids import BASE
from weft.domain.limits import LimitRule
from weft.domain.routes import KeyScope, PoolRoute, Route, RouteBook, Routes, limits_entry


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller: a namespace, and the public prefix of the key.

    `namespace` None sees everything: keys are off, or the key is the platform's.
    """

    namespace: str | None
    key_id: str = ""
    scope: KeyScope = KeyScope.INFERENCE
    models: tuple[str, ...] = ()  # names, or patterns with * and ?; none: every model of the namespace
    limits: tuple[LimitRule, ...] = ()

    def may_use(self, model: str) -> bool:
        """Whether the key's models have this name among them."""
        return not self.models or any(fnmatchcase(model, pattern) for pattern in self.models)


ANY_NAMESPACE = Principal(None)


@dataclass(slots=True)
class RouteIndex(RouteBook):
    """The one table of a gateway. `known`: a table has come from a scheduler. `limited`: a key has, or had, limits."""

    known: bool = False
    limited: bool = False
    _bases: dict[str, Route] = field(default_factory=dict[str, Route])  # by model name
    _adapters: dict[str, dict[str, Route]] = field(default_factory=dict[str, dict[str, Route]])  # by namespace, by name

    def take(self, change: Routes) -> list[str]:
        """Apply a change. Returns the names of the pools whose rows changed, in order.

        Raises RoutesGap, which changes nothing.
        """
        routes, pools = self.apply(change)
        for route in routes.values():
            models = self._models_of(route)
            del models[route.model_name]
            if not models and models is not self._bases:
                del self._adapters[route.namespace]
        for route in change.routes:
            self._models_of(route)[route.model_name] = route
        self.known |= not change.more
        self.limited |= any(key.limits for key in change.keys)
        names = {*pools, *(pool.pool for pool in change.pools)}
        return sorted(name for name in names if pools.get(name) != self.pools.get(name))

    def find(self, model: str, principal: Principal) -> tuple[Route, PoolRoute] | None:
        """The route of a model, if this caller may use it."""
        route = self.routes.get(model)
        pool = self.pools.get(route.pool) if route else None
        if route is None or pool is None or not principal.may_use(model):
            return None
        namespace = principal.namespace
        if namespace is not None:
            allowed = route.namespace == namespace if route.adapter != BASE else _may_use_base(pool, namespace)
            if not allowed:
                return None
        return route, pool

    def visible(self, principal: Principal) -> Iterator[tuple[Route, PoolRoute]]:
        """Everything this caller may use, bases first, then by name."""
        if principal.namespace is None:
            adapters = {name: route for models in self._adapters.values() for name, route in models.items()}
        else:
            adapters = self._adapters.get(principal.namespace, {})
        for models in (self._bases, adapters):
            for name in sorted(models):
                if found := self.find(name, principal):
                    yield found

    def principal_of(self, key_hash: str, now_unix_ms: int) -> Principal | None:
        """The caller whose API key has this hash (hex SHA-256), if it has not expired."""
        key = self.keys.get(key_hash)
        if key is None or (key.expires_unix_ms and key.expires_unix_ms <= now_unix_ms):
            return None
        namespace = None if key.scope is KeyScope.PLATFORM else key.namespace
        return Principal(namespace, key.key_id, key.scope, key.models, key.limits)

    def limits_of(self, namespace: str) -> tuple[LimitRule, ...]:
        """A namespace's limits, whatever its keys are: they have an entry of their own, which no key's hash can be."""
        entry = self.keys.get(limits_entry(namespace))
        return entry.limits if entry else ()

    def _models_of(self, route: Route) -> dict[str, Route]:
        """The part of the index that lists the route."""
        return self._bases if route.adapter == BASE else self._adapters.setdefault(route.namespace, {})


def _may_use_base(pool: PoolRoute, namespace: str) -> bool:
    return pool.shared_all or namespace == pool.pool.partition("/")[0] or namespace in pool.shared_namespaces
