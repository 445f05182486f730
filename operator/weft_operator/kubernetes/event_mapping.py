"""From the cache to the planner: objects as they are, what pools own by its owner, pods as runners."""

from collections.abc import Iterable
from typing import Protocol

from weft_operator.core.resources import Object, Ref
from weft_operator.core.state import ObjectKey, Pod
from weft_operator.kubernetes.cache import ObjectCache
from weft_operator.kubernetes.pods import observed_pod, pool_of
from weft_operator.kubernetes.resources import CHILDREN, OWN, PODS, key_of

OWN_KINDS = frozenset(resource.kind for resource in OWN)
CHILD_KINDS = frozenset(resource.kind for resource in CHILDREN)


class EventHandler(Protocol):
    """What follows the cluster."""

    def on_object(self, obj: Object, *, gone: bool = False) -> None: ...

    def on_child(self, pool: Ref, key: ObjectKey, obj: Object | None) -> None: ...

    def on_pod(self, pool: Ref, name: str, pod: Pod | None) -> None: ...


class EventMapper:
    """Passes the changes of one cache to one planner. What changes its pool leaves the one before."""

    def __init__(self, planner: EventHandler) -> None:
        self._planner = planner
        self._pools: dict[ObjectKey, Ref] = {}

    def connect(self, cache: ObjectCache) -> None:
        """Tell of what pools own, and of every change from now on. Objects themselves were loaded before."""
        for obj in _owned(cache):
            self.on_event(obj, False)
        cache.listen(self.on_event)

    def on_event(self, obj: Object, gone: bool) -> None:
        """One change."""
        if obj["kind"] in OWN_KINDS:
            self._planner.on_object(obj, gone=gone)
            return
        key = key_of(obj)
        pool = None if gone else (pool_of(obj) if key.kind == PODS.kind else owner_of(obj))
        before = self._pools.pop(key, None)
        if before is not None and before != pool:
            self._tell(before, key, None)
        if pool is not None:
            self._pools[key] = pool
            self._tell(pool, key, obj)

    def _tell(self, pool: Ref, key: ObjectKey, obj: Object | None) -> None:
        if key.kind == PODS.kind:
            self._planner.on_pod(pool, key.name, None if obj is None else observed_pod(obj))
        else:
            self._planner.on_child(pool, key, obj)


def owner_of(obj: Object) -> Ref | None:
    """The pool that an object says it is controlled by; None: it is somebody else's, whatever its labels say."""
    metadata = obj["metadata"]
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("controller") and owner.get("kind") == "ServingPool":
            return Ref("ServingPool", metadata["namespace"], owner["name"])
    return None


def _owned(cache: ObjectCache) -> Iterable[Object]:
    return (obj for kind in (*sorted(CHILD_KINDS), PODS.kind) for obj in cache.of_kind(kind))
