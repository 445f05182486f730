"""The mapping of cached objects to the planner's observations: adapters, pools, children by owner, runner pods.

The message of a failing pod stays the same while its reason does, because it becomes part of a status.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from weft.domain.text import sanitize
from weft_operator.core.children import GROUP_LABEL, POOL_LABEL, RUNNER_LABEL, template_hash
from weft_operator.core.resources import Object, Ref
from weft_operator.core.state import ObjectKey, Pod, RunnerState
from weft_operator.kubernetes.cache import ObjectCache
from weft_operator.kubernetes.client import CHILDREN, NODES, OWN, PODS, key_of

OWN_KINDS = frozenset(resource.kind for resource in OWN)
CHILD_KINDS = frozenset(resource.kind for resource in CHILDREN)


class EventHandler(Protocol):
    """A follower of the cluster's changes."""

    def on_object(self, obj: Object, *, deleted: bool = False) -> None: ...

    def on_child(self, pool: Ref, key: ObjectKey, obj: Object | None) -> None: ...

    def on_pod(self, pool: Ref, name: str, pod: Pod | None) -> None: ...

    def on_node(self, name: str, *, unschedulable: bool) -> None: ...


class EventMapper:
    """The mapper from a cache to a planner. An object with a changed pool leaves its old pool."""

    def __init__(self, planner: EventHandler) -> None:
        self._planner = planner
        self._pools: dict[ObjectKey, Ref] = {}

    def connect(self, cache: ObjectCache) -> None:
        """Pass on children of pools, and every later change. Adapters and pools were loaded before."""
        for obj in _owned(cache):
            self.on_event(obj, False)
        cache.listen(self.on_event)

    def on_event(self, obj: Object, deleted: bool) -> None:
        """Pass on one change."""
        if obj["kind"] in OWN_KINDS:
            self._planner.on_object(obj, deleted=deleted)
            return
        key = key_of(obj)
        if key.kind == NODES.kind:
            self._planner.on_node(key.name, unschedulable=not deleted and is_unschedulable(obj))
            return
        pool = None if deleted else (pool_of(obj) if key.kind == PODS.kind else owner_of(obj))
        previous = self._pools.pop(key, None)
        if previous is not None and previous != pool:
            self._pass_on(previous, key, None)
        if pool is not None:
            self._pools[key] = pool
            self._pass_on(pool, key, obj)

    def _pass_on(self, pool: Ref, key: ObjectKey, obj: Object | None) -> None:
        if key.kind == PODS.kind:
            self._planner.on_pod(pool, key.name, None if obj is None else observed_pod(obj))
        else:
            self._planner.on_child(pool, key, obj)


def owner_of(obj: Object) -> Ref | None:
    """Return the pool in the controller reference of an object; None for a foreign object, even with our labels."""
    metadata = obj["metadata"]
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("controller") and owner.get("kind") == "ServingPool":
            return Ref("ServingPool", metadata["namespace"], owner["name"])
    return None


def _owned(cache: ObjectCache) -> Iterable[Object]:
    return (obj for kind in (NODES.kind, *sorted(CHILD_KINDS), PODS.kind) for obj in cache.of_kind(kind))


# Taints that announce the loss of a node: from kubectl, the cluster autoscaler, Karpenter, and cloud interruption
# notices.
LEAVING_TAINTS = frozenset(
    (
        "node.kubernetes.io/unschedulable",
        "node.kubernetes.io/out-of-service",
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/scheduled-maintenance",
        "cloud.google.com/impending-node-termination",
    )
)


def is_unschedulable(node: Object) -> bool:
    """Return whether a node takes no new pods, and will soon lose its pods."""
    spec = node["spec"]
    taints = [taint["key"] for taint in spec.get("taints") or () if taint["effect"] != "PreferNoSchedule"]
    return bool(spec.get("unschedulable")) or not LEAVING_TAINTS.isdisjoint(taints)


def _drained_from(pod: Object) -> str:
    """Return the node whose drain a pod leaves; "" if the pod tolerates the drain: its successor could land there."""
    spec = pod.get("spec") or {}
    tolerated = {toleration.get("key") for toleration in spec.get("tolerations") or ()}
    return "" if tolerated & {None, "", *LEAVING_TAINTS} else spec.get("nodeName") or ""


DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
MAX_LAST_WORDS_CHARS = 300
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
    """Return the pool in the label of an object; None: it has no label."""
    metadata = obj["metadata"]
    name = (metadata.get("labels") or {}).get(POOL_LABEL)
    return Ref("ServingPool", metadata["namespace"], name) if name else None


def observed_pod(obj: Object) -> Pod:
    """Read a pod of a pool, as the API server gives it."""
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
        node=_drained_from(obj),
    )


def _state(obj: Object) -> tuple[RunnerState, str]:
    status: Any = obj.get("status") or {}
    if obj["metadata"].get("deletionTimestamp") or status.get("phase") in ("Failed", "Succeeded"):
        return "Leaving", ""  # also an evicted pod: its ReplicaSet has made a new pod
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
            yield "CrashLoop", _waiting_reason(container, reason, waiting)


def _waiting_reason(container: Any, reason: str, waiting: Any) -> str:
    """Explain why a container does not run: `runner: CrashLoopBackOff: exit code 2: no such file`."""
    ended = (container.get("lastState") or {}).get("terminated")
    if not ended:
        return ": ".join(part for part in (container["name"], reason, _words(waiting.get("message"))) if part)
    text = _words(ended.get("message")) or str(ended.get("reason") or "")
    return ": ".join(part for part in (container["name"], reason, f"exit code {ended.get('exitCode')}", text) if part)


def _words(text: Any) -> str:
    """Shorten a text to its end, because the error stands there."""
    return sanitize(" ".join(str(text or "").split())[-MAX_LAST_WORDS_CHARS:])


def _cost(text: Any) -> int | None:
    try:
        return int(text)
    except (TypeError, ValueError):
        return None
