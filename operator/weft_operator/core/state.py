"""The state that `reconcile` compares: desired state, observed state, and expected effects of its writes.

`DesiredState` holds the objects, indexed so that planning an object costs O(1) among 100,000. `ObservedState` holds the
reports of depot, cluster and scheduler. `Expectations` hold the entries published, applied and unpublished by this
process: facts without a report, or not reported yet. All are plain memory with one owner. Every change of the objects
returns the objects to plan again.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal, TypeVar

from weft.api.servingpool import Memory, ModelCache
from weft.domain.routes import AdapterSpec, AdapterStatus, PoolSpec, PoolStatus
from weft_operator.core.artifacts import Resolution, Retention
from weft_operator.core.resources import AdapterObject, Malformed, Meta, Object, PoolObject, Ref, holds
from weft_operator.core.runner_defaults import RunnerDefaults

APPLY_RETRY_S = 15.0  # before a refused intent is tried again unchanged, and a foreign object read again

RunnerState = Literal["Starting", "Ready", "CrashLoop", "Unschedulable", "Leaving"]


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """The configuration of a started runner. A runner with an outdated configuration is replaced."""

    pool: Ref
    base_digest: str
    flags: tuple[tuple[str, str | int | float], ...]  # wherever it runs
    memory: Memory = field(default_factory=Memory)
    model_cache: ModelCache | None = None
    phase: str = "Any"  # of its group


@dataclass(frozen=True, slots=True)
class RunnerProcess:
    """A runner as a process of this machine. `name` is its name at the scheduler."""

    launch: RunnerConfig
    state: RunnerState
    message: str = ""  # of a crash loop: the end of its log
    name: str = ""


@dataclass(frozen=True, slots=True)
class Pod:
    """A runner's pod. `runner`: the common StatefulSet of a runner with several pods.

    `cost` is its pod-deletion-cost as it was read; None: it has none.
    """

    name: str
    uid: str
    group: str
    state: RunnerState
    message: str = ""  # why it does not run, for people
    cost: int | None = None
    runner: str = ""
    template: str = ""  # a hash of its template
    node: str = ""  # a node to leave when it becomes unschedulable


def runner_pods(pods: Iterable[Pod]) -> list[Pod]:
    """Make a Pod for each runner. For several pods it is the first pod, in the joint state."""
    runners, several = list[Pod](), dict[str, list[Pod]]()
    for pod in pods:
        if pod.runner:
            several.setdefault(pod.runner, []).append(pod)
        else:
            runners.append(pod)
    return runners + [_together(runner, members) for runner, members in several.items()]


def _together(runner: str, pods: list[Pod]) -> Pod:
    """Join the pods of a runner. It is Ready or leaving with its last pod, and takes the reason of a failing pod."""
    by_state = {pod.state: pod for pod in sorted(pods, key=lambda pod: pod.name, reverse=True)}
    stuck = by_state.get("CrashLoop") or by_state.get("Unschedulable")
    state = stuck.state if stuck else pods[0].state if len(by_state) == 1 else "Starting"
    return Pod(f"{runner}-0", pods[0].uid, pods[0].group, state, stuck.message if stuck else "", runner=runner)


@dataclass(frozen=True, slots=True, order=True)
class ObjectKey:
    """The key of a pool's child in a cluster."""

    kind: str
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Child:
    """A child of a pool as it should be: a complete intent for server-side apply."""

    kind: str
    namespace: str
    name: str
    manifest: dict[str, Any]

    @property
    def key(self) -> ObjectKey:
        return ObjectKey(self.kind, self.namespace, self.name)


@dataclass(frozen=True, slots=True)
class ApplyFailure:
    """A refusal by the API server of an intent (by its hash): when, and why."""

    intent: str
    at: float
    message: str

    @property
    def again_at(self) -> float:
        """The time of the next attempt with the same intent."""
        return self.at + APPLY_RETRY_S


@dataclass(frozen=True, slots=True)
class SharedFolders:
    """The folders allowed for pools in modelCache: of nodes, and of claims as NAMESPACE/NAME."""

    host_paths: frozenset[str] = frozenset()
    claims: frozenset[str] = frozenset()

    def refusal(self, pool: PoolObject) -> str:
        """Explain why this pool may not use its named folder; empty when it may."""
        cache = pool.spec.model_cache
        if cache and cache.host_path:
            value, listed, name = "hostPaths", self.host_paths, cache.host_path.path
        elif cache and (claim := cache.persistent_volume_claim):
            value, listed, name = "claims", self.claims, f"{pool.meta.ref.namespace}/{claim.claim_name}"
        else:
            return ""
        expected = f"expected an entry of the chart's operator.modelCache.{value}, got {name}"
        return "" if name in listed else f"{expected}; ask the platform to list it, or use emptyDir"


@dataclass(frozen=True, slots=True)
class OperatorPolicy:
    """The installation's policy for every object, independent of its spec."""

    resolve_period_s: float = 2.0  # an edit of a source is noticed within this, while objects are few
    remote_period_s: float = 60.0  # before a failed remote source is asked again; doubles
    poll_s: float = inf  # how often a remote source in order is asked for a new content
    resolves_per_s: float = 50.0  # at most for all objects together: the same load for 10,000 objects
    default_replicas: int = 1
    longest_drain_s: float = 300.0  # the least time after a start before anything is dropped from the depot
    defaults: RunnerDefaults | None = None  # of runners in pods; None: runners are processes of this machine
    pool_namespaces: frozenset[str] | None = None  # namespaces with served pools; None: all
    shared_folders: SharedFolders | None = None  # None: any, since runners are processes of the machine's owner


class DesiredState:
    """The objects, by reference, by pool and by served name, and the installation's policy."""

    def __init__(self, policy: OperatorPolicy | None = None) -> None:
        self.policy = policy or OperatorPolicy()
        self.pools: dict[Ref, PoolObject] = {}
        self.adapters: dict[Ref, AdapterObject] = {}
        self.malformed: dict[Ref, Malformed] = {}  # their earlier readable versions stay in the tables above
        self.by_uid: dict[str, Ref] = {}
        self._by_pool: dict[Ref, set[Ref]] = {}
        self._pinned: dict[Ref, set[Ref]] = {}  # of _by_pool
        self._ready: dict[Ref, set[Ref]] = {}  # of _by_pool: Ready by their stored status
        self._by_name: dict[str, set[Ref]] = {}

    def put(self, resource: PoolObject | AdapterObject | Malformed) -> set[Ref]:
        """Take in a new or changed object. Returns every object to plan again."""
        ref = resource.meta.ref
        if isinstance(resource, Malformed):
            self.add(resource)
            return {ref}
        previous = self.get(ref)
        if previous is not None and _same_spec(previous, resource):
            self.add(resource)
            if isinstance(resource, PoolObject) or holds(resource, "Ready") == holds(previous, "Ready"):
                return {ref}
            return {ref, resource.pool} if resource.pool in self.pools else {ref}
        affected = self.drop(ref) | {ref}
        self.add(resource)
        return affected | self._neighbours(resource)

    def add(self, resource: PoolObject | AdapterObject | Malformed) -> None:
        """Take in a new or changed object, without the list of its neighbours. Costs the same with 10,000."""
        ref = resource.meta.ref
        if isinstance(resource, Malformed):
            self.malformed[ref] = resource
            return
        self.malformed.pop(ref, None)
        self._remove(ref)
        self.by_uid[resource.meta.uid] = ref
        if isinstance(resource, PoolObject):
            self.pools[ref] = resource
        else:
            self.adapters[ref] = resource
            for index in self._pool_indexes(resource):
                index.setdefault(resource.pool, set()).add(ref)
        self._by_name.setdefault(resource.model_name, set()).add(ref)

    def drop(self, ref: Ref) -> set[Ref]:
        """Forget an object. Returns every object to plan again."""
        was_malformed, resource = self.malformed.pop(ref, None), self.get(ref)
        if resource is None:
            return {ref} if was_malformed else set()
        affected = self._neighbours(resource) | {ref}
        self._remove(ref)
        return affected

    def get(self, ref: Ref) -> PoolObject | AdapterObject | None:
        return self.pools.get(ref) if ref.kind == "ServingPool" else self.adapters.get(ref)

    def serves(self, namespace: str) -> bool:
        """Return whether pools of the namespace are served here."""
        served = self.policy.pool_namespaces
        return served is None or namespace in served

    def folder_refusal(self, pool: PoolObject) -> str:
        """Explain why this pool may not use the folder in its modelCache; empty when it may."""
        folders = self.policy.shared_folders
        return folders.refusal(pool) if folders else ""

    def is_held(self, pool: PoolObject) -> bool:
        """Whether a pool's runners stay as they are: it is paused, or may not use its folder."""
        return pool.spec.paused or self.folder_refusal(pool) != ""

    def refs(self) -> list[Ref]:
        """List every object, pools first."""
        return [*self.pools, *self.adapters, *(self.malformed.keys() - self.pools.keys() - self.adapters.keys())]

    def meta(self, ref: Ref) -> Meta | None:
        """The metadata of the newest version of an object, readable or not."""
        resource = self.malformed.get(ref) or self.get(ref)
        return resource.meta if resource else None

    def adapters_of(self, pool: Ref) -> Iterator[AdapterObject]:
        """Return the adapters of this pool, permitted or not, even for a missing pool."""
        return (self.adapters[ref] for ref in self._by_pool.get(pool, ()))

    def counts(self, pool: Ref) -> tuple[int, int]:
        """Count the adapters of this pool, and its Ready adapters. Costs the same with 10,000."""
        return len(self._by_pool.get(pool, ())), len(self._ready.get(pool, ()))

    def claimants(self, model_name: str) -> Iterator[PoolObject | AdapterObject]:
        """Return every object that requests this name."""
        for ref in self._by_name.get(model_name, ()):
            claimant = self.get(ref)
            assert claimant is not None
            yield claimant

    def _neighbours(self, resource: PoolObject | AdapterObject) -> set[Ref]:
        near = self._by_name.get(resource.model_name, set())
        if isinstance(resource, PoolObject):
            return near | self._by_pool.get(resource.meta.ref, set())
        if resource.pool not in self.pools:
            return set()  # it is rejected, and has no neighbours
        # Pinned adapters share the slots for pinning.
        return near | {resource.pool} | (self._pinned.get(resource.pool, set()) if resource.spec.pinned else set())

    def _remove(self, ref: Ref) -> None:
        resource = self.pools.pop(ref, None) or self.adapters.pop(ref, None)
        if resource is None:
            return
        del self.by_uid[resource.meta.uid]
        _discard(self._by_name, resource.model_name, ref)
        if isinstance(resource, AdapterObject):
            for index in self._pool_indexes(resource):
                _discard(index, resource.pool, ref)

    def _pool_indexes(self, adapter: AdapterObject) -> Iterator[dict[Ref, set[Ref]]]:
        yield self._by_pool
        if adapter.spec.pinned:
            yield self._pinned
        if holds(adapter, "Ready"):
            yield self._ready


@dataclass(frozen=True, slots=True)
class ForeignObject:
    """A foreign object under the name of a pool's child, as it was read at `at`. No watch reports it."""

    obj: Object
    at: float

    @property
    def again_at(self) -> float:
        """The time of the next read."""
        return self.at + APPLY_RETRY_S


@dataclass(slots=True)
class ObservedState:
    """The state reported by depot, cluster and scheduler. Absent means "not known": it changes no status."""

    resolutions: dict[str, Resolution] = field(default_factory=dict)  # by uid; `canary_uid`, `template_uid`
    runners: dict[Ref, dict[int, RunnerProcess]] = field(default_factory=dict)  # by pool and index
    children: dict[Ref, dict[ObjectKey, Object]] = field(default_factory=dict)  # by pool; live objects as read
    foreign: dict[Ref, dict[ObjectKey, ForeignObject]] = field(default_factory=dict)  # by pool
    pods: dict[Ref, dict[str, Pod]] = field(default_factory=dict)  # by pool and name
    unschedulable_nodes: set[str] = field(default_factory=set)
    pool_reports: dict[str, PoolStatus] = field(default_factory=dict)  # by "namespace/name"
    adapter_reports: dict[str, AdapterStatus] = field(default_factory=dict)  # by uid
    unloaded: set[str] = field(default_factory=set)  # uids of deleted adapters held by no runner any more


@dataclass(slots=True)
class Expectations:
    """The effects of this process's writes, as long as they are not observed."""

    pools: dict[Ref, PoolSpec] = field(default_factory=dict)  # as published
    published_at: dict[Ref, float] = field(default_factory=dict)  # when a pool was last published
    adapters: dict[Ref, AdapterSpec] = field(default_factory=dict)  # as published
    unloading: set[str] = field(default_factory=set)  # uids of deleted and unpublished adapters
    applied: dict[ObjectKey, tuple[str, str]] = field(default_factory=dict)  # intent, and the resulting revision
    apply_failures: dict[Ref, dict[ObjectKey, ApplyFailure]] = field(default_factory=dict)  # by pool
    deletion_costs: dict[str, tuple[int, float]] = field(default_factory=dict)  # by uid of the pod: cost, and when
    retention: Retention = field(default_factory=Retention)


@dataclass(slots=True)
class ClusterState:
    """The complete state as the input of `reconcile`."""

    desired: DesiredState = field(default_factory=DesiredState)
    observed: ObservedState = field(default_factory=ObservedState)
    expectations: Expectations = field(default_factory=Expectations)


K = TypeVar("K")


def _same_spec(stored: PoolObject | AdapterObject, proposed: PoolObject | AdapterObject) -> bool:
    """Return whether only the status differs. The change concerns at most the adapter's pool and its ready adapters."""
    meta = replace(stored.meta, resource_version=proposed.meta.resource_version)
    return replace(stored, status=proposed.status, meta=meta) == proposed


def _discard(index: dict[K, set[Ref]], key: K, ref: Ref) -> None:
    index[key].discard(ref)
    if not index[key]:
        del index[key]
