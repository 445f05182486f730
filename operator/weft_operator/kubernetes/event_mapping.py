"""From the objects of the cache to the planner's observations: adapters and pools, children by owner, pods as runners.

The message of a pod that does not run stays the same while its reason does: it becomes part of a status.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from weft.domain.text import sanitize
from weft_operator.core.children import GROUP_LABEL, POOL_LABEL, RUNNER_LABEL, template_hash
from weft_operator.core.resources import Object, Ref
from weft_operator.core.state import ObjectKey, Pod, RunnerState
from weft_operator.kubernetes.cache import ObjectCache
from weft_operator.kubernetes.client import CHILDREN, OWN, PODS, key_of

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
        """Pass on what pools own, and every change from now on. Adapters and pools were loaded before."""
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
            self._pass_on(before, key, None)
        if pool is not None:
            self._pools[key] = pool
            self._pass_on(pool, key, obj)

    def _pass_on(self, pool: Ref, key: ObjectKey, obj: Object | None) -> None:
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


DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LAST_WORDS_MAX = 300
# The kubelet waits before it tries again, for longer each time: nothing of it will be ready soon.
STUCK = frozenset(
    (
        "CrashLoopBackOff",
        "ImagePullBackOff",
        "ErrImagePull",
        "ErrImageNeverPull",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    )
)


def pool_of(obj: Object) -> Ref | None:
    """The pool whose label an object carries; None: it has none."""
    metadata = obj["metadata"]
    name = (metadata.get("labels") or {}).get(POOL_LABEL)
    return Ref("ServingPool", metadata["namespace"], name) if name else None


def observed_pod(obj: Object) -> Pod:
    """A pod of a pool, as the API server gives it."""
    metadata = obj["metadata"]
    state, message = _state(obj)
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        group=(metadata.get("labels") or {}).get(GROUP_LABEL, ""),
        runner=(metadata.get("labels") or {}).get(RUNNER_LABEL, ""),
        state=state,
        template=template_hash(obj),
        message=message,
        cost=_cost((metadata.get("annotations") or {}).get(DELETION_COST)),
    )


def _state(obj: Object) -> tuple[RunnerState, str]:
    status: Any = obj.get("status") or {}
    if obj["metadata"].get("deletionTimestamp") or status.get("phase") in ("Failed", "Succeeded"):
        return "Leaving", ""  # also an evicted pod: its ReplicaSet has made another one
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    if conditions.get("Ready", {}).get("status") == "True":
        return "Ready", ""
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return "Unschedulable", _words(scheduled.get("message"))
    return next(_stuck(status), ("Starting", ""))


def _stuck(status: Any) -> Iterator[tuple[RunnerState, str]]:
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason")
        if reason in STUCK:
            yield "CrashLoop", _why(container, reason, waiting)


def _why(container: Any, reason: str, waiting: Any) -> str:
    """`runner: CrashLoopBackOff: exit code 2: no such file`: with the container's termination message, if any."""
    ended = (container.get("lastState") or {}).get("terminated")
    if not ended:
        return ": ".join(part for part in (container["name"], reason, _words(waiting.get("message"))) if part)
    said = _words(ended.get("message")) or str(ended.get("reason") or "")
    return ": ".join(part for part in (container["name"], reason, f"exit code {ended.get('exitCode')}", said) if part)


def _words(text: Any) -> str:
    """The end of what was said counts: that is where errors are."""
    return sanitize(" ".join(str(text or "").split())[-LAST_WORDS_MAX:])


def _cost(text: Any) -> int | None:
    try:
        return int(text)
    except (TypeError, ValueError):
        return None
