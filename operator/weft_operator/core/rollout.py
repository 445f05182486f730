"""The pace of replacing runners after a new template: how many at a time, in which group, in which pool. Pure.

`spec.rollout` bounds a pool. Its groups are replaced one after another, so the bounds hold for the whole pool. A change
of the installation's part of all runners (a new image, a new operator) is made pool by pool. Pools in order come first,
and the next pool waits until the changed pools are in order. A change of the pool's part waits for no other pool.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft_operator.core.children import DEFAULTS_HASH, GROUP_LABEL, SHAPE_HASH, Revision, defaults_hash, template_hash
from weft_operator.core.resources import Object, PoolObject, Ref, unix_s
from weft_operator.core.runner_defaults import RunnerDefaults
from weft_operator.core.scaling import rollout_limits
from weft_operator.core.state import Child, ClusterState, ObjectKey, ObservedState, Pod

OUTSIDE, REPLACING = "the installation's part of the runners has changed", "runners are being replaced"
PROGRESS_S = 600  # the default of a Deployment
RETRY_S = 2.0  # before a pool looks again whether an earlier pool is in order


@dataclass(frozen=True, slots=True)
class Held:
    """The waiting replacements. `reason` explains them, or a running replacement of the pool."""

    children: frozenset[ObjectKey] = frozenset()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Part:
    """The runners of a live object (a group's Deployment, or a runner's StatefulSet), with their next step."""

    key: ObjectKey
    name: str
    pending: bool  # it has another template than it should have
    from_outside: bool  # the change is not in the pool's spec
    replicas: int
    current: int  # pods of the object's present template
    ready: int  # of all its pods
    current_ready: int
    outdated: int

    @property
    def in_order(self) -> bool:
        return self.current_ready >= self.replicas and not self.outdated


def hold(
    pool: PoolObject,
    intended: Sequence[Child],
    owned: Mapping[ObjectKey, Object],
    state: ClusterState,
    revision: Revision,
) -> Held:
    """Decide the Deployments that keep their template for now."""
    pods = state.observed.pods.get(pool.meta.ref, {}).values()
    deployments = [child for child in intended if child.key in owned and child.kind == "Deployment"]
    parts = [_part(child.key, owned[child.key], child.manifest, pods, revision) for child in deployments]
    pending = [part for part in parts if part.pending and part.replicas]
    unsettled = next((part for part in parts if not part.pending and not part.in_order), None)
    first = min(pending, key=lambda part: part.in_order, default=None)
    surges = rollout_limits(pool, sum(part.replicas for part in parts))[1] > 0
    # the rest serve no requests, and take no additional room
    counting = [part for part in pending if part.ready or surges]
    waiting_groups = {part.key: f"group {part.name} waits" for part in counting if part is not first}
    reason = _progress(parts)
    if first in counting and unsettled is not None:
        assert first is not None
        waiting_groups[first.key] = f"group {first.name} waits"
    if waiting_groups:
        blocking = unsettled or first
        assert blocking is not None
        ready = f"with {blocking.ready} of {blocking.replicas} runners ready"
        reason = f"{waiting_groups[min(waiting_groups)]} for group {blocking.name}, {ready}"
    if first is not None and first.from_outside and (turn := await_turn(pool, state, revision)):
        outside = {part.key for part in pending if part.from_outside}
        return Held(frozenset(waiting_groups.keys() | outside), f"{OUTSIDE}: {turn}")
    return Held(frozenset(waiting_groups), reason)


def is_replacing(live: Object, pods: Iterable[Pod], now: float) -> bool:
    """Whether a Deployment replaces its pods and makes progress. If so, a smaller size waits until it is done.

    The Deployment controller shrinks the ReplicaSets of both templates one after another. If a write fails in between,
    the remaining ReplicaSet has the new size and a note of the old size. The controller takes the note for a scaling in
    progress, and replaces no pod any more (`isScalingEvent` and `scale` in Kubernetes' pkg/controller/deployment). A
    Deployment past its progress deadline may be stuck in this state; a new size ends it.
    """
    status, name = live.get("status") or {}, (live["metadata"].get("labels") or {}).get(GROUP_LABEL, "")
    for condition in status.get("conditions") or ():
        if condition["type"] == "Progressing":
            at, deadline_s = condition.get("lastUpdateTime"), live["spec"].get("progressDeadlineSeconds") or PROGRESS_S
            if condition["status"] == "False" or (at and now >= unix_s(at) + deadline_s):
                return False
    made = template_hash(live)
    outdated = any(pod.group == name and pod.state != "Leaving" and pod.template != made for pod in pods)
    return outdated or status.get("updatedReplicas", 0) < status.get("replicas", 0)


def await_turn(pool: PoolObject, state: ClusterState, revision: Revision) -> str:
    """Explain why a pool with a change from outside waits; empty: it is its turn."""
    ref, max_pools = pool.meta.ref, revision.pools_at_a_time
    if not max_pools:
        return ""
    waiting, changing = list[tuple[bool, Ref]](), list[Ref]()
    for other_pool in state.desired.pools.values():
        if state.desired.is_held(other_pool) or other_pool.meta.deleting:
            continue
        parts = _live_parts(other_pool.meta.ref, state.observed, revision)
        begun = any(not part.pending and not part.in_order for part in parts)
        if other_pool.spec.parallelism.pods_per_runner > 1:  # a missing runner is on its way to be replaced
            begun = begun or len(parts) < int(other_pool.status.get("desiredReplicas", 0))
        if begun and other_pool.meta.ref == ref:
            return ""
        if begun:
            changing.append(other_pool.meta.ref)
        elif other_pool.meta.ref == ref or any(part.pending and part.replicas for part in parts):
            waiting.append((not all(part.in_order for part in parts), other_pool.meta.ref))
    free = max(0, max_pools - len(changing))
    if any(ref == waiting_ref for _, waiting_ref in sorted(waiting)[:free]):
        return ""
    first_ref = min(changing) if changing else min(waiting)[1]
    return f"waits until the runners of ServingPool {first_ref} are ready"


def is_behind(pool: PoolObject, observed: ObservedState, defaults: RunnerDefaults) -> bool:
    """Whether some of the pool's runners lack the installation's present part."""
    defaults_digest, live = defaults_hash(defaults), observed.children.get(pool.meta.ref, {})
    return any(_annotation(obj, DEFAULTS_HASH) != defaults_digest for obj in _runner_objects(live).values())


def from_outside(live: Object, revision: Revision) -> bool:
    """Whether the pool's part of a runner's object is up to date: then every difference comes from outside.

    An older operator did not note the pool's part.
    """
    return _annotation(live, SHAPE_HASH) in ("", revision.shape)


def _live_parts(pool: Ref, observed: ObservedState, revision: Revision) -> list[_Part]:
    """Read the parts from the notes at the live objects: the pool is not rendered."""
    pods, parts = observed.pods.get(pool, {}).values(), list[_Part]()
    for key, live in _runner_objects(observed.children.get(pool, {})).items():
        parts.append(_part_of(key, live, pods, pending=_annotation(live, DEFAULTS_HASH) != revision.defaults))
    return parts


def _runner_objects(live: Mapping[ObjectKey, Object]) -> dict[ObjectKey, Object]:
    staying = {key: obj for key, obj in live.items() if obj["metadata"].get("deletionTimestamp") is None}
    return {key: obj for key, obj in staying.items() if key.kind in ("Deployment", "StatefulSet")}


def _part(key: ObjectKey, live: Object, intended: Object, pods: Iterable[Pod], revision: Revision) -> _Part:
    pending = template_hash(live) != template_hash(intended)
    return _part_of(key, live, pods, pending=pending, outside=pending and from_outside(live, revision))


def _part_of(key: ObjectKey, live: Object, pods: Iterable[Pod], *, pending: bool, outside: bool = False) -> _Part:
    of_set = key.kind != "Deployment"
    name = str((live["metadata"].get("labels") or {}).get(GROUP_LABEL, ""))
    mine = [pod for pod in pods if (pod.runner == key.name if of_set else pod.group == name)]
    staying, made = [pod for pod in mine if pod.state != "Leaving"], template_hash(live)
    current, ready = (
        [pod for pod in staying if pod.template == made],
        [pod for pod in staying if pod.state == "Ready"],
    )
    ready_pods, outdated = sum(pod.state == "Ready" for pod in current), len(staying) - len(current)
    replicas = int(live["spec"]["replicas"])
    return _Part(key, name, pending, outside, replicas, len(current), len(ready), ready_pods, outdated)


def _progress(parts: Sequence[_Part]) -> str:
    new = {part.key: 0 if part.pending else part.current for part in parts}
    if not any(new[part.key] < part.replicas and (part.pending or part.ready) for part in parts):
        return ""
    current, replicas = sum(new.values()), sum(part.replicas for part in parts)
    return f"{REPLACING}: {current} of {replicas} are of the new template"


def _annotation(obj: Object, name: str) -> str:
    return str((obj["metadata"].get("annotations") or {}).get(name, ""))
