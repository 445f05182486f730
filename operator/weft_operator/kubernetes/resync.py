"""Proof that the watches are alive: a slow, cheap list of everything, compared with the reports of the watches.

An object unreported after a grace is read here, taken in and counted. A single miss is an accident: kopf does not
report objects deleted during a long interruption of a watch. Repeated misses mean a dead watch. Then liveness fails,
because a process without events should be started again. A list carries metadata only.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from weft.telemetry.logs import kv
from weft_operator.core.children import MANAGED_BY, MANAGER
from weft_operator.core.resources import Object, resource_version
from weft_operator.errors import KubernetesError
from weft_operator.kubernetes.cache import ObjectCache
from weft_operator.kubernetes.client import (
    BY_KIND,
    CHILDREN,
    NODES,
    PODS,
    SELECTOR,
    WATCHED,
    KubeApi,
    ObjectKey,
    ResourceKind,
    key_of,
)

log = logging.getLogger(__name__)

LATE_IN_A_ROW = 3
PERIODS_WITHOUT_LIST = 5
MAX_READS = 3  # of an object whose watch reports changes meanwhile


@dataclass(frozen=True, slots=True)
class WatchScope:
    """The objects of a watch, by resource and namespace."""

    resource: ResourceKind
    namespace: str | None = None
    selector: str = ""

    def covers(self, obj: Object) -> bool:
        return self.namespace in (None, obj["metadata"].get("namespace"))


def watch_scopes(pool_namespaces: Iterable[str], *, nodes: bool) -> list[WatchScope]:
    """List the operator's watches, owners before children. `nodes`: also nodes of the cluster."""
    owned = [WatchScope(r, namespace, SELECTOR) for namespace in pool_namespaces for r in (*CHILDREN, PODS)]
    return [*(WatchScope(resource) for resource in (*reversed(WATCHED), *([NODES] if nodes else []))), *owned]


Identities = Mapping[ObjectKey, tuple[str, str | None]]  # uid and version of each object


def missed(listed: Identities, previous: Identities, now: Identities) -> list[ObjectKey]:
    """Find the differences between a list and the earlier cache, without later reports of watches."""
    differing = [key for key in (*previous, *(listed.keys() - previous.keys())) if listed.get(key) != previous.get(key)]
    return [key for key in differing if now.get(key) == previous.get(key)]


async def read_again(api: KubeApi, cache: ObjectCache, key: ObjectKey) -> tuple[Object | None, bool]:
    """Read an object, and take it in unless a watch goes on meanwhile. Returns the object, and whether it was news."""
    for _ in range(MAX_READS):
        previous = cache.find(key)
        there = await api.get(BY_KIND[key.kind], key.namespace, key.name)
        if cache.find(key) is not previous:
            continue
        return there, cache.read(key, there, in_sight=there is None or is_in_sight(there))
    return there, False  # pyright: ignore[reportPossiblyUnboundVariable] (MAX_READS is above 0)


def is_in_sight(obj: Object) -> bool:
    """Return whether a watch reports an object like this."""
    is_watched = any(obj["kind"] == resource.kind for resource in (*WATCHED, NODES))
    return is_watched or (obj["metadata"].get("labels") or {}).get(MANAGED_BY) == MANAGER


@dataclass(slots=True)
class WatchHealth:
    """The findings of the audits so far. Times are the clock of `now`; pure."""

    period_s: float
    succeeded_at: float
    late_in_a_row: dict[WatchScope, int] = field(default_factory=dict[WatchScope, int])

    def report_late(self, scope: WatchScope, late: int) -> None:
        """Record the number of late objects of a watch; 0: the watch was in time."""
        self.late_in_a_row[scope] = self.late_in_a_row.get(scope, 0) + 1 if late else 0

    def trouble(self, now: float) -> str | None:
        """Explain why this process should be started anew; None: it should not."""
        silent_s = now - self.succeeded_at
        if silent_s > PERIODS_WITHOUT_LIST * self.period_s:
            return f"the API server could not be listed for {silent_s:.0f} s"
        dead = [scope for scope, times in self.late_in_a_row.items() if times >= LATE_IN_A_ROW]
        if dead:
            return f"the watch of {dead[0].resource.plural} was late {LATE_IN_A_ROW} times in a row"
        return None


class CacheAudit:
    """An audit of a cache by lists. `on_late` gets the number of missed objects of a resource."""

    def __init__(
        self,
        api: KubeApi,
        cache: ObjectCache,
        covered: Sequence[WatchScope],
        *,
        period_s: float,
        grace_s: float,
        on_late: Callable[[str, int], None],
        on_done: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._cache, self._scopes = api, cache, covered
        self._period_s, self._grace_s, self._clock = period_s, grace_s, clock
        self._on_late, self._on_done = on_late, on_done
        self.watch_health = WatchHealth(period_s, clock())
        self._doubts, self._doubtful = asyncio.Queue[ObjectKey](), set[ObjectKey]()
        cache.on_doubt = self._doubt

    async def load(self) -> None:
        """Load the first, whole list: afterwards the cache is complete. Raises KubernetesError."""
        for scope in self._scopes:
            async for page in self._api.pages(scope.resource, scope.namespace, selector=scope.selector):
                for obj in page:
                    self._cache.put(obj)
        self.watch_health.succeeded_at = self._clock()

    async def catch_up(self) -> None:
        """Take in the changes still unreported by the watches.

        Afterwards the cache has every write completed before this call. Raises KubernetesError.
        """
        for scope in self._scopes:
            await self._missed(scope, grace_s=0.0)

    async def run(self) -> None:
        """Audit until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            await self.once()

    async def once(self) -> None:
        """List everything once."""
        try:
            for scope in self._scopes:
                await self._resync(scope)
            self.watch_health.succeeded_at = self._clock()
            self._on_done()
        except KubernetesError as error:
            log.warning("resync failed", extra=kv(error=str(error)))

    async def settle_doubts(self) -> None:
        """Read the doubted objects of the cache. Runs until cancelled."""
        while True:
            key = await self._doubts.get()
            self._doubtful.discard(key)
            try:
                await read_again(self._api, self._cache, key)
            except KubernetesError as error:  # the next list finds it
                log.warning("an object cannot be read", extra=kv(kind=key.kind, name=key.name, error=str(error)))

    def _doubt(self, key: ObjectKey) -> None:
        if key not in self._doubtful:
            self._doubtful.add(key)
            self._doubts.put_nowait(key)

    async def _resync(self, scope: WatchScope) -> None:
        missed = await self._missed(scope, self._grace_s)
        self.watch_health.report_late(scope, missed)
        if missed:
            self._on_late(scope.resource.plural, missed)
            log.warning("a watch was late", extra=kv(resource=scope.resource.plural, objects=missed))

    async def _missed(self, scope: WatchScope, grace_s: float) -> int:
        """Count the objects missed by a watch. They are read, and taken in."""
        previous, listed = self._cached(scope), dict[ObjectKey, tuple[str, str | None]]()
        async for page in self._api.pages(scope.resource, scope.namespace, selector=scope.selector, metadata_only=True):
            listed |= {key_of(obj): _identity(obj) for obj in page}
        if missed(listed, previous, self._cached(scope)):
            await asyncio.sleep(grace_s)  # it may just be on its way
        keys = missed(listed, previous, self._cached(scope))
        return sum([(await read_again(self._api, self._cache, key))[1] for key in keys])

    def _cached(self, scope: WatchScope) -> Identities:
        objects = self._cache.of_kind(scope.resource.kind)
        return {key_of(obj): _identity(obj) for obj in objects if scope.covers(obj)}


def _identity(obj: Object) -> tuple[str, str | None]:
    return str(obj["metadata"]["uid"]), resource_version(obj)
