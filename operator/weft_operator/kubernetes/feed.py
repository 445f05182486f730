"""From the mirror to the planner: objects as they are, what pools own by its owner, pods as runners."""

from collections.abc import Iterable
from typing import Protocol

from weft_operator.kubernetes.mirror import Mirror
from weft_operator.kubernetes.pods import observed_pod, pool_of
from weft_operator.kubernetes.resources import CHILDREN, OWN, PODS, Key, key_of
from weft_operator.observe import ChildKey, Pod
from weft_operator.resources import Object, Ref

OWN_KINDS = frozenset(resource.kind for resource in OWN)
CHILD_KINDS = frozenset(resource.kind for resource in CHILDREN)


class Planner(Protocol):
    """What hears of the cluster."""

    def on_object(self, obj: Object, *, gone: bool = False) -> None: ...

    def on_child(self, pool: Ref, key: ChildKey, obj: Object | None) -> None: ...

    def on_pod(self, pool: Ref, name: str, pod: Pod | None) -> None: ...


class Feed:
    """Tells one planner of one mirror. What changes its pool leaves the one before."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._pools: dict[Key, Ref] = {}

    def connect(self, mirror: Mirror) -> None:
        """Tell of what pools own, and of every change from now on. Objects themselves were loaded before."""
        for obj in _owned(mirror):
            self.hear(obj, False)
        mirror.listen(self.hear)

    def hear(self, obj: Object, gone: bool) -> None:
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

    def _tell(self, pool: Ref, key: Key, obj: Object | None) -> None:
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


def _owned(mirror: Mirror) -> Iterable[Object]:
    return (obj for kind in (*sorted(CHILD_KINDS), PODS.kind) for obj in mirror.of_kind(kind))
