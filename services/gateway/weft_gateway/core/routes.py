"""The route table: what a name means, and for whom. A frozen value made of the scheduler's `Routes`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from weft.wire.v1 import scheduler_pb2 as pb


@dataclass(frozen=True, slots=True)
class Route:
    """A served model: an adapter on a pool, or the pool's base (digest "")."""

    model_name: str
    namespace: str
    pool: str  # "namespace/name"
    adapter_digest: str
    created_unix_s: int

    @property
    def is_base(self) -> bool:
        return not self.adapter_digest


@dataclass(frozen=True, slots=True)
class Pool:
    """What a gateway has to know of a pool."""

    name: str  # "namespace/name"
    base_digest: str
    base_model_name: str
    max_context_tokens: int  # 0 while no runner has told
    ready_runners: int
    shared_all: bool
    shared_namespaces: frozenset[str]
    hold_s: float = 0.0  # how long a request may wait for its first runner; 0: as this gateway is set

    def serves(self, namespace: str) -> bool:
        """May this namespace use the pool's base model?"""
        return self.shared_all or namespace == self.name.partition("/")[0] or namespace in self.shared_namespaces


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks: a namespace, and the public prefix of the key. `namespace` None sees everything (keys are off)."""

    namespace: str | None
    key_id: str = ""


ANY_NAMESPACE = Principal(None)


@dataclass(frozen=True, slots=True)
class RouteTable:
    """The complete table of one version."""

    version: int
    models: Mapping[str, Route]
    pools: Mapping[str, Pool]
    keys: Mapping[str, Principal] = field(default_factory=dict[str, Principal])  # by hex SHA-256 of the key
    keys_known: bool = False

    def find(self, model: str, caller: Principal) -> tuple[Route, Pool] | None:
        """The route of a name, if this caller may see it."""
        route = self.models.get(model)
        pool = self.pools.get(route.pool) if route else None
        if route is None or pool is None or not _visible(route, pool, caller):
            return None
        return route, pool

    def visible(self, caller: Principal) -> Iterator[tuple[Route, Pool]]:
        """Everything this caller may use, bases first, then by name."""
        for name in sorted(self.models, key=lambda name: (not self.models[name].is_base, name)):
            if found := self.find(name, caller):
                yield found


def table_of(message: pb.Routes) -> RouteTable:
    """The wire's table as a value."""
    return RouteTable(
        version=message.version,
        models={route.model_name: _route(route) for route in message.routes},
        pools={pool.pool: _pool(pool) for pool in message.pools},
        keys={key.key_hash: Principal(key.namespace, key.key_id) for key in message.keys},
        keys_known=message.keys_known,
    )


def _visible(route: Route, pool: Pool, caller: Principal) -> bool:
    if caller.namespace is None:
        return True
    return pool.serves(caller.namespace) if route.is_base else route.namespace == caller.namespace


def _route(route: pb.Route) -> Route:
    return Route(route.model_name, route.namespace, route.pool, route.adapter_digest, route.created_unix_s)


def _pool(pool: pb.PoolRoute) -> Pool:
    return Pool(
        name=pool.pool,
        base_digest=pool.base_digest,
        base_model_name=pool.base_model_name,
        max_context_tokens=pool.max_context_tokens,
        ready_runners=pool.ready_runners,
        shared_all=pool.shared_all,
        shared_namespaces=frozenset(pool.shared_namespaces),
        hold_s=float(pool.hold_s),
    )
