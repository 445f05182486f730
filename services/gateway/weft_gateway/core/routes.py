"""The served models, built from the scheduler's changes, and their permitted callers.

The cost of a change is its size. Adapters are indexed by namespace, so a tenant's models are listed without reading
further models.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft.domain.adapter import AdapterVersion
from weft.domain.ids import BASE
from weft.domain.limits import LimitRule
from weft.domain.routes import KeyScope, PoolRoute, Route, RouteBook, Routes, Unserved, limits_entry
from weft_gateway.core.directory import Directory, Key, NamePage, matches, page_of

DIGEST_PREFIX = "sha256:"
MIN_PIN_HEX = 12  # of a digest's 64 digits: as shown in status messages
NAMED_MAX = 10  # versions named in an error


class UnknownVersion(Exception):
    """A pin of an unserved content of a permitted model. The message names the served versions."""

    def __init__(self, model: str, pin: str, versions: tuple[AdapterVersion, ...]) -> None:
        served = [f"{v.name} ({v.digest})" if v.name else v.digest for v in versions[:NAMED_MAX]]
        rest = f" and {len(versions) - NAMED_MAX} more" if len(versions) > NAMED_MAX else ""
        super().__init__(f"The model {model!r} has no served version {pin[:80]!r}. Served: {', '.join(served)}{rest}.")


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller: a namespace, and the public prefix of the key.

    `namespace` None sees everything: keys are off, or the key is the platform's. `tenant` is then "", else the
    namespace.
    """

    namespace: str | None
    key_id: str = ""
    scope: KeyScope = KeyScope.INFERENCE
    models: tuple[str, ...] = ()  # names, or patterns with * and ?; empty: every model of the namespace
    limits: tuple[LimitRule, ...] = ()
    tenant: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tenant", self.namespace or "")

    def may_use(self, model: str) -> bool:
        """Whether the key's models include the name."""
        return not self.models or matches(self.models, model)


ANY_NAMESPACE = Principal(None)


@dataclass(slots=True)
class RouteIndex(RouteBook):
    """The route table of a gateway. `is_known`: a scheduler has sent a table. `limited`: a key has, or had, limits."""

    is_known: bool = False
    limited: bool = False
    _bases: dict[str, Route] = field(default_factory=dict[str, Route])  # by model name
    _adapters: dict[str, dict[str, Route]] = field(default_factory=dict[str, dict[str, Route]])  # by namespace, by name
    _unserved: dict[str, dict[str, Unserved]] = field(default_factory=dict[str, dict[str, Unserved]])  # namespace, uid
    _by_digest: dict[str, str] = field(default_factory=dict[str, str])  # a model name by digest
    _names: Directory = field(default_factory=Directory)
    _unserved_names: Directory = field(default_factory=Directory)

    def take(self, change: Routes) -> list[str]:
        """Apply a change. Return the sorted names of the pools with changed rows.

        Raises RoutesGap, which changes nothing.
        """
        routes, pools, unserved = self.apply(change)
        for route in routes.values():
            models = self._models_of(route)
            del models[route.model_name]
            if self._by_digest.get(route.digest) == route.model_name:
                del self._by_digest[route.digest]
            if not models and models is not self._bases:
                del self._adapters[route.namespace]
        for route in change.routes:
            self._models_of(route)[route.model_name] = route
            if route.digest != BASE:
                self._by_digest[route.digest] = route.model_name
        self._names.change(_keys(routes.values()), _keys(change.routes))
        self._take_unserved(unserved, change)
        self.is_known |= not change.more
        self.limited |= any(key.limits for key in change.keys)
        names = {*pools, *(pool.name for pool in change.pools)}
        return sorted(name for name in names if pools.get(name) != self.pools.get(name))

    def find(self, model: str, principal: Principal) -> tuple[Route, PoolRoute] | None:
        """Return the route of a model, if the caller may use it. `model@pin`: the route of a pinned content, if it is
        served.

        A pin is the name of a version, a digest, or at least the first 12 hex digits of a digest. Raises
        UnknownVersion.
        """
        name, at, pin = model.partition("@")
        route = self.routes.get(name)
        pool = self.pools.get(route.pool) if route else None
        if route is None or pool is None or not principal.may_use(name):
            return None
        namespace = principal.namespace
        if namespace is not None:
            allowed = route.namespace == namespace if route.digest != BASE else _may_use_base(pool, namespace)
            if not allowed:
                return None
        return (_pinned(route, pool, pin) if at else route), pool

    def visible(self, principal: Principal) -> Iterator[tuple[Route, PoolRoute]]:
        """Yield everything the caller may use, bases first, then by name. The table may change during the reading."""
        for name in (*sorted(self._bases), *[name for name, _ in self._served(principal)]):
            if located := self.find(name, principal):
                yield located

    def adapters(self, principal: Principal, search: str, skip: int, limit: int) -> tuple[list[Route], NamePage]:
        """Return a page of the caller's served adapters, by name."""
        page = page_of(self._served(principal), search, skip, limit)
        return [self.routes[name] for name, _ in page.keys], page

    def unserved_adapters(
        self, principal: Principal, search: str, skip: int, limit: int
    ) -> tuple[list[Unserved], NamePage]:
        """Return a page of the caller's unserved adapters, by name."""
        page = page_of(self._failed(principal), search, skip, limit)
        return [self.unserved[uid] for _, uid in page.keys], page

    def _served(self, principal: Principal) -> Sequence[Key]:
        namespace = principal.namespace
        return self._names.keys(namespace, principal.models, lambda: _names(self._adapters, namespace))

    def _failed(self, principal: Principal) -> Sequence[Key]:
        namespace = principal.namespace
        return self._unserved_names.keys(namespace, principal.models, lambda: _names(self._unserved, namespace))

    def name_of(self, digest: str) -> str | None:
        """Return the model name of an adapter by its digest."""
        return self._by_digest.get(digest)

    def counts(self, principal: Principal) -> tuple[int, int]:
        """Count the caller's served and unserved adapters."""
        if principal.models:
            return len(self._served(principal)), len(self._failed(principal))
        namespace = principal.namespace
        if namespace is None:
            return len(self.routes) - len(self._bases), len(self.unserved)
        return len(self._adapters.get(namespace, ())), len(self._unserved.get(namespace, ()))

    def bases(self, principal: Principal) -> list[tuple[Route, PoolRoute]]:
        """Return the bases for the caller, by name."""
        return [entry for name in sorted(self._bases) if (entry := self.find(name, principal))]

    def principal_of(self, key_hash: str, now_unix_ms: int) -> Principal | None:
        """Return the caller of an API key by its hash (hex SHA-256), unless the key has expired."""
        key = self.keys.get(key_hash)
        if key is None or (key.expires_unix_ms and key.expires_unix_ms <= now_unix_ms):
            return None
        namespace = None if key.scope is KeyScope.PLATFORM else key.namespace
        return Principal(namespace, key.key_id, key.scope, key.models, key.limits)

    def limits_of(self, namespace: str) -> tuple[LimitRule, ...]:
        """Return a namespace's limits for any of its keys. They have a separate entry, distinct from every key's
        hash."""
        entry = self.keys.get(limits_entry(namespace))
        return entry.limits if entry else ()

    def _take_unserved(self, left: dict[str, Unserved], change: Routes) -> None:
        for unserved in left.values():
            of_namespace = self._unserved[unserved.namespace]
            del of_namespace[unserved.uid]
            if not of_namespace:
                del self._unserved[unserved.namespace]
        for unserved in change.unserved:
            self._unserved.setdefault(unserved.namespace, {})[unserved.uid] = unserved
        removed, added = (
            [(entry.namespace, _key(entry)) for entry in group] for group in (left.values(), change.unserved)
        )
        self._unserved_names.change(removed, added)

    def _models_of(self, route: Route) -> dict[str, Route]:
        """Return the part of the index with the route."""
        return self._bases if route.digest == BASE else self._adapters.setdefault(route.namespace, {})


def versions_of(route: Route, pool: PoolRoute) -> tuple[AdapterVersion, ...]:
    """Return every served content of a model, the present content first."""
    if route.digest == BASE:
        return (AdapterVersion(pool.base_digest, 0),)
    present = AdapterVersion(
        route.digest, route.rank, name=route.version, eos_token_ids=route.eos_token_ids,
        own_chat_template=route.own_chat_template,
    )  # fmt: skip
    return (present, *route.versions)


def _pinned(route: Route, pool: PoolRoute, pin: str) -> Route:
    """Return the route to a pinned content. Raises UnknownVersion."""
    versions = versions_of(route, pool)
    if pin.startswith(DIGEST_PREFIX) and len(pin) >= len(DIGEST_PREFIX) + MIN_PIN_HEX:
        matches = [version for version in versions if version.digest.startswith(pin)]
    else:
        matches = [version for version in versions if version.name == pin != ""]
    if len(matches) != 1:
        raise UnknownVersion(route.model_name, pin, versions)
    if route.digest in (BASE, matches[0].digest):
        return route
    return _to_version(route, matches[0])


def route_of_draw(route: Route, key: str) -> Route:
    """Return the route of a request without a pin to an adapter with a canary.

    The key (the request's user, or its id) decides: equal keys have the same content while the weight stays. A larger
    weight moves no key away from the canary.
    """
    canary = next((version for version in route.versions if version.weight), None)
    if canary is None or zlib.crc32(f"{route.uid} {key}".encode()) % 100 >= canary.weight:
        return route
    return _to_version(route, canary)


def _to_version(route: Route, version: AdapterVersion) -> Route:
    return replace(
        route, digest=version.digest, rank=version.rank, version=version.name, versions=(),
        eos_token_ids=version.eos_token_ids, own_chat_template=version.own_chat_template,
    )  # fmt: skip


def _may_use_base(pool: PoolRoute, namespace: str) -> bool:
    return pool.shared_all or namespace == pool.name.partition("/")[0] or namespace in pool.shared_namespaces


def _key(served: Route | Unserved) -> Key:
    return served.model_name, served.uid


def _keys(routes: Iterable[Route]) -> list[tuple[str, Key]]:
    """Return the keys of adapters; bases are few, and listed separately."""
    return [(route.namespace, _key(route)) for route in routes if route.digest != BASE]


def _names(
    tables: Mapping[str, Mapping[str, Route]] | Mapping[str, Mapping[str, Unserved]], namespace: str | None
) -> Iterator[Key]:
    for entries in tables.values() if namespace is None else (tables.get(namespace, {}),):
        yield from map(_key, entries.values())
