"""Proof that the watches are alive: a slow, cheap list of everything, compared with what the watches have reported.

An object that a watch did not tell of within a grace is fed in here and counted. Once is an accident (kopf does not
tell of objects that went away while a watch was interrupted for long); again and again is a dead watch, and then
liveness fails: a process without events should be started anew. A list carries metadata only.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from weft.telemetry.logs import kv
from weft_operator.core.resources import Object
from weft_operator.errors import KubernetesError
from weft_operator.kubernetes.cache import ObjectCache
from weft_operator.kubernetes.client import (
    BY_KIND,
    CHILDREN,
    OWN,
    PODS,
    SELECTOR,
    Api,
    ObjectKey,
    Resource,
    key_of,
    version_of,
)

log = logging.getLogger(__name__)

LATE_IN_A_ROW = 3
PERIODS_WITHOUT_LIST = 5


@dataclass(frozen=True, slots=True)
class WatchScope:
    """What one watch covers."""

    resource: Resource
    namespace: str | None = None
    selector: str = ""

    def covers(self, obj: Object) -> bool:
        return self.namespace in (None, obj["metadata"]["namespace"])


def watch_scopes(pool_namespaces: Iterable[str]) -> list[WatchScope]:
    """Everything that the operator watches, what owns before what is owned."""
    owned = [WatchScope(r, namespace, SELECTOR) for namespace in pool_namespaces for r in (*CHILDREN, PODS)]
    return [*(WatchScope(resource) for resource in reversed(OWN)), *owned]


@dataclass(frozen=True, slots=True)
class Identity:
    """Which object, and which state of it. No version: an API server whose versions are no numbers."""

    uid: str
    version: int | None


@dataclass(frozen=True, slots=True)
class Difference:
    """What a list knows better than the cache."""

    late: tuple[ObjectKey, ...]  # there, and unknown or known as it was
    gone: tuple[tuple[ObjectKey, str], ...]  # known, and not there (key and uid)

    def __bool__(self) -> bool:
        return bool(self.late or self.gone)


def compare(listed: Mapping[ObjectKey, Identity], known: Mapping[ObjectKey, Identity], list_version: int) -> Difference:
    """A list of one version against what is known now, which may be newer than the list."""
    late = tuple(key for key, there in listed.items() if _older(known.get(key), there))
    gone = tuple(
        (key, mine.uid)
        for key, mine in known.items()
        if key not in listed and mine.version is not None and mine.version <= list_version
    )
    return Difference(late, gone)


def _older(mine: Identity | None, there: Identity) -> bool:
    if mine is None:
        return True
    if mine.version is None or there.version is None:
        return mine.uid != there.uid
    return mine.version < there.version


@dataclass(slots=True)
class WatchHealth:
    """What the audits have found so far. Times are the clock of `now`; pure."""

    period_s: float
    succeeded_at: float
    late_in_a_row: dict[WatchScope, int] = field(default_factory=dict[WatchScope, int])

    def found(self, scope: WatchScope, late: int) -> None:
        """A watch was late with so many objects."""
        self.late_in_a_row[scope] = self.late_in_a_row.get(scope, 0) + 1 if late else 0

    def trouble(self, now: float) -> str | None:
        """Why this process should be started anew; None: it should not."""
        silent_s = now - self.succeeded_at
        if silent_s > PERIODS_WITHOUT_LIST * self.period_s:
            return f"the API server could not be listed for {silent_s:.0f} s"
        dead = [scope for scope, times in self.late_in_a_row.items() if times >= LATE_IN_A_ROW]
        if dead:
            return f"the watch of {dead[0].resource.plural} was late {LATE_IN_A_ROW} times in a row"
        return None


class Resync:
    """Lists for one cache. `on_late` gets the number of objects of a resource that a watch missed."""

    def __init__(
        self,
        api: Api,
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

    async def load(self) -> None:
        """The first, whole list: afterwards the cache is complete. Raises KubernetesError."""
        for scope in self._scopes:
            async for page in self._api.pages(scope.resource, scope.namespace, selector=scope.selector):
                for obj in page.items:
                    self._cache.put(obj)
        self.watch_health.succeeded_at = self._clock()

    async def catch_up(self) -> None:
        """Take in at once what the watches have not reported yet. Raises KubernetesError.

        Afterwards the cache has every write that was carried out before this was called.
        """
        for scope in self._scopes:
            listed, version = await self._listed(scope)
            await self._take_in(compare(listed, self._known(scope), version))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            await self.once()

    async def once(self) -> None:
        """One list of everything."""
        try:
            for scope in self._scopes:
                await self._resync(scope)
            self.watch_health.succeeded_at = self._clock()
            self._on_done()
        except KubernetesError as error:
            log.warning("resync failed", extra=kv(error=str(error)))

    async def _resync(self, scope: WatchScope) -> None:
        listed, version = await self._listed(scope)
        if compare(listed, self._known(scope), version):
            await asyncio.sleep(self._grace_s)  # it may just be on its way
        difference = compare(listed, self._known(scope), version)
        missed = await self._take_in(difference)
        self.watch_health.found(scope, missed)
        if missed:
            self._on_late(scope.resource.plural, missed)
            log.warning("a watch was late", extra=kv(resource=scope.resource.plural, objects=missed))

    async def _take_in(self, difference: Difference) -> int:
        """How much of it was news."""
        news = sum([await self._feed(key) for key in difference.late])
        return news + sum(self._cache.drop(key, uid) for key, uid in difference.gone)

    async def _listed(self, scope: WatchScope) -> tuple[dict[ObjectKey, Identity], int]:
        listed: dict[ObjectKey, Identity] = {}
        version = 0
        async for page in self._api.pages(scope.resource, scope.namespace, selector=scope.selector, metadata_only=True):
            version = page.version
            listed |= {key_of(obj): _identity(obj) for obj in page.items}
        return listed, version

    def _known(self, scope: WatchScope) -> dict[ObjectKey, Identity]:
        objects = self._cache.of_kind(scope.resource.kind)
        return {key_of(obj): _identity(obj) for obj in objects if scope.covers(obj)}

    async def _feed(self, key: ObjectKey) -> bool:
        """Was it news? An object that went away since the list was made is not: the next list tells."""
        obj = await self._api.get(BY_KIND[key.kind], key.namespace, key.name)
        return obj is not None and self._cache.put(obj)


def _identity(obj: Object) -> Identity:
    return Identity(str(obj["metadata"]["uid"]), version_of(obj))
