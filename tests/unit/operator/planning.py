"""A world for the planner: the real object store, records and planner; depot, scheduler and runners are modelled.

The modelled depot answers from a table of contents, the modelled scheduler routes what it was told, the modelled
backend starts what it was ordered to. Every step is explicit, so a test may stop anywhere and look.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from harness.bad_manifests import manifest
from weft.artifacts.depot_api import ResolveRequest
from weft.domain.routes import AdapterSpec, AdapterStatus, CanaryCounts, PoolSpec, PoolStatus
from weft_operator.core import (
    ClusterState,
    DesiredState,
    EnsureRunner,
    OperationStatus,
    OperatorPolicy,
    PublishAdapter,
    PublishPool,
    RecordEvent,
    Ref,
    RemoveRunner,
    Resolve,
    RetainBlobs,
    RunnerProcess,
    SetStatus,
    UnpublishAdapter,
    UnpublishPool,
    parse,
    reconcile_all,
    requeue_at,
)
from weft_operator.core.actions import Action, ForgetSource, RemoveFinalizer
from weft_operator.core.artifacts import updated
from weft_operator.core.canary import owner_uid
from weft_operator.core.expectations import expect, forget, restore_resolutions
from weft_operator.core.resources import AdapterObject, holds
from weft_operator.core.state import Expectations, ObservedState
from weft_operator.local import ObjectStore, WatchEvent

BASE = "sha256:" + "b" * 64
GOOD = {"rank": 8, "alpha": 16, "targetModules": ["q_proj"], "sizeBytes": 100, "dtype": "float32", "baseModel": "base"}


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


def pool_object(name: str = "base", namespace: str = "default", **spec: Any) -> dict[str, Any]:
    """Make a ServingPool as admission leaves it: every default written out."""
    whole: dict[str, Any] = {
        "model": {"name": name, "uri": f"file:{name}"},
        "lora": {"maxRank": 64},
        "memory": {},
        "parallelism": {"tensor": 1, "pipeline": 1, "podsPerRunner": 1},
        "phases": {"mode": "Unified"},
        "drainSeconds": 60,
        "allowedNamespaces": ["*"],
    }
    advanced: dict[str, Any] = {
        "queue": "fcfs",
        "reservation": "calibrated",
        "consolidation": "never",
        "maxQueue": 1000,
        "maxSequences": 32,
        "maxBatchTokens": 512,
        "maxAdapters": 8,
        "kvPages": 1024,
        "kvAcrossClasses": False,
        "sparseAttention": "Off",
        "speculation": "Suffix",
    }
    if groups := spec.get("runnerGroups"):
        spec["runnerGroups"] = [{"phase": "Any"} | group for group in groups]
    whole["advanced"] = advanced | spec.pop("advanced", {})
    return manifest("ServingPool", name, whole | spec, namespace)


def adapter_object(name: str, namespace: str = "acme", pool: str = "default/base", **spec: Any) -> dict[str, Any]:
    """Make a LoRAAdapter as admission leaves it."""
    pool_namespace, _, pool_name = pool.partition("/")
    whole: dict[str, Any] = {
        "poolRef": {"namespace": pool_namespace, "name": pool_name},
        "source": {"uri": f"file:{name}"},
        "pinned": False,
        "revisionHistoryLimit": 0,
    }
    return manifest("LoRAAdapter", name, whole | spec, namespace)


def stored(wish: Mapping[str, Any], **metadata: Any) -> dict[str, Any]:
    """Return a manifest as an API server has it."""
    name = f"{wish['kind']}-{wish['metadata']['name']}"
    given = {"uid": name, "generation": 1, "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {**wish, "metadata": {**given, **wish["metadata"], **metadata}}


def pool_ref(name: str = "base", namespace: str = "default") -> Ref:
    return Ref("ServingPool", namespace, name)


def runner_name(index: int) -> str:
    return f"runner-{index:03}"


def adapter_ref(name: str, namespace: str = "acme") -> Ref:
    return Ref("LoRAAdapter", namespace, name)


def verified(letter: str) -> OperationStatus:
    return OperationStatus("Fetched", digest(letter), {**GOOD, "eosTokenIds": [ord(letter)]})


def failed(reason: str, message: str = "because", *, validated: bool = False) -> OperationStatus:
    return OperationStatus("Failed", None, GOOD if validated else None, reason, message)


def template(letter: str, origin: str, **fault: str) -> OperationStatus:
    return OperationStatus("Fetched", digest(letter), {"from": origin, **fault}, watch=digest(letter))


def fetched_base() -> OperationStatus:
    facts = {"eosTokenIds": [1, 2], "generationDefaults": {"temperature": 0.7, "topK": 20}}
    verdict = {"architecture": "LlamaForCausalLM", "maxContext": 2048, "sizeBytes": 1, **facts}
    return OperationStatus("Fetched", BASE, verdict)


@dataclass
class World:
    """One operator, from its objects to what others were told. `now` moves only by hand."""

    store: ObjectStore
    contents: dict[str, OperationStatus] = field(default_factory=dict)  # what the depot finds at a URI
    now: float = 1_000_000.0
    state: ClusterState = field(default_factory=ClusterState)
    routed_pools: dict[Ref, PoolSpec] = field(default_factory=dict)
    routed: dict[str, AdapterSpec] = field(default_factory=dict)  # by uid
    unserved: dict[str, AdapterSpec] = field(default_factory=dict)  # by uid: declared without a digest
    kept: frozenset[str] | None = None
    asked: list[ResolveRequest] = field(default_factory=list)
    announced: list[RecordEvent] = field(default_factory=list)
    status_writes: int = 0
    ready_runners: bool = True
    scheduler_speaks: bool = True
    demand: dict[Ref, int] = field(default_factory=dict)  # runners that the scheduler could use; else the least
    canaries: dict[str, CanaryCounts] = field(default_factory=dict)  # by digest, how their requests end
    unloading: set[str] = field(default_factory=set)  # uids that the scheduler was told to let go of

    @property
    def desired(self) -> DesiredState:
        return self.state.desired

    @property
    def observed(self) -> ObservedState:
        return self.state.observed

    @property
    def expectations(self) -> Expectations:
        return self.state.expectations

    @property
    def policy(self) -> OperatorPolicy:
        return self.desired.policy

    @policy.setter
    def policy(self, policy: OperatorPolicy) -> None:
        self.desired.policy = policy

    def serve_only(self, *namespaces: str) -> None:
        """Serve pools in these namespaces alone. Has to come before anything is applied."""
        self.policy = replace(self.policy, pool_namespaces=frozenset(namespaces))

    def apply(self, obj: dict[str, Any]) -> None:
        self.now += 0.001
        self.store.apply(obj)

    def on_event(self, event: WatchEvent) -> None:
        resource = parse(event.object)
        ref, known = resource.meta.ref, self.desired.get(resource.meta.ref)
        if known is not None and (event.type == "DELETED" or known.meta.uid != resource.meta.uid):
            forget(known.meta.uid, ref, self.state)
        if event.type == "DELETED":
            self.desired.drop(ref)
        else:
            self.desired.put(resource)

    def plan(self) -> list[Action]:
        check_indexes(self.desired)
        return reconcile_all(self.state, self.now)

    def step(self) -> list[Action]:
        """Plan, carry everything out, let everybody answer. Returns what was ordered."""
        actions = self.plan()
        for action in actions:
            self.do(action)
        self.answers()
        return actions

    def settle(self, *objects: dict[str, Any], limit: int = 30) -> int:
        """Apply these, then step until nothing is ordered. Returns the number of steps; raises when it does not end."""
        for obj in objects:
            self.apply(obj)
        for count in range(limit):
            if not self.step():
                return count
        raise AssertionError(f"no rest after {limit} steps: {self.plan()}")

    def remove(self, ref: Ref) -> None:
        """Delete an object, then settle."""
        self.store.delete(ref)
        self.settle()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.answers()
        self.settle()

    def do(self, action: Action) -> None:
        match action:
            case SetStatus():
                self.status_writes += 1
                self.store.set_status(action.ref, action.uid, action.resource_version, action.status)
            case RemoveFinalizer():
                self.store.remove_finalizer(action.ref, action.uid, action.resource_version, action.finalizer)
            case RecordEvent():
                self.announced.append(action)
            case EnsureRunner(pool=pool, index=index, launch=launch):
                runners = self.observed.runners.setdefault(pool, {})
                state = "Ready" if self.ready_runners else "Starting"
                runners[index] = RunnerProcess(launch, state, name=runner_name(index))
            case RemoveRunner(pool=pool, index=index):
                del self.observed.runners[pool][index]
                if not self.observed.runners[pool]:
                    del self.observed.runners[pool]
            case PublishPool(ref=ref, entry=entry):
                self.routed_pools[ref] = entry
            case UnpublishPool(ref=ref):
                del self.routed_pools[ref]
            case PublishAdapter(ref=ref, entry=entry):
                before = self.expectations.adapters.get(ref)
                for uid in (before.uid if before else "", entry.uid):
                    self.routed.pop(uid, None)
                    self.unserved.pop(uid, None)
                (self.routed if entry.digest else self.unserved)[entry.uid] = entry
            case UnpublishAdapter(uid=uid, unload=unload):
                self.routed.pop(uid, None)
                self.unserved.pop(uid, None)
                self.unloading |= {uid} if unload else set()
            case RetainBlobs(digests=digests):
                self.kept = digests
            case ForgetSource():
                pass
            case Resolve(request=request):
                self.asked.append(request)
            case _:
                self.do_in_cluster(action)
        expect(action, self.state, self.now)

    def do_in_cluster(self, action: Action) -> None:
        raise AssertionError(f"there is no cluster here: {action}")

    def answers(self) -> None:
        """Let depot and scheduler say what is true for them."""
        for uid, resolution in list(self.observed.resolutions.items()):
            if resolution.running:
                ref = self.desired.by_uid[owner_uid(uid)]
                resource = self.desired.get(ref)
                request = resolution.request
                missing = failed("SourceNotFound", "nothing there")
                answer = self.contents.get(request.uri if request.text is None else request.text, missing)
                pool = getattr(resource, "pool", None)
                self.observed.resolutions[uid] = updated(resolution, answer, self.now, pool)
        if self.scheduler_speaks:
            self.reports()

    def reports(self) -> None:
        """Let the scheduler report. Of runners beyond those it wants the last by name should go."""
        for ref, entry in self.routed_pools.items():
            ready = self.ready_names(ref)
            wanted = max(entry.min_runners, min(self.demand.get(ref, 0), entry.max_runners))
            victims = tuple(reversed(ready[wanted:]))
            self.observed.pool_reports[str(ref)] = PoolStatus(len(ready), wanted, victims, entry.generation)
        for uid, entry in self.routed.items():
            if self.desired.by_uid.get(uid):
                canary = next((self.canaries.get(v.digest) for v in entry.versions if v.weight), None)
                self.observed.adapter_reports[uid] = AdapterStatus(
                    entry.digest, True, canary=canary, observed_generation=entry.generation
                )
        self.observed.unloaded |= self.unloading & self.expectations.unloading

    def generation(self, ref: Ref) -> int:
        """Return the generation of a pool's spec."""
        return self.desired.pools[ref].meta.generation

    def ready_names(self, ref: Ref) -> list[str]:
        """Return the runners that take requests, by name."""
        return sorted(runner.name for runner in self.observed.runners.get(ref, {}).values() if runner.state == "Ready")

    def restarted(self, *, nothing_runs: bool = False) -> Self:
        """Return the same objects and sources under a new operator that remembers nothing else."""
        store = ObjectStore(lambda: 0.0, self.store.objects(), self.store.version)
        after = self.another(store)
        after.policy, after.ready_runners = self.policy, self.ready_runners
        after.demand, after.scheduler_speaks = dict(self.demand), self.scheduler_speaks
        if not nothing_runs:
            after.observed.runners = {ref: dict(runners) for ref, runners in self.observed.runners.items()}
        restore_resolutions(after.state, after.now)
        after.expectations.retention.started_at = after.now
        return after

    def another(self, store: ObjectStore) -> Self:
        return connected(type(self)(store, self.contents, self.now))

    def condition(self, ref: Ref, kind: str) -> tuple[str, str]:
        """Return status and reason of a condition."""
        found = next(c for c in self.store.get(ref)["status"]["conditions"] if c["type"] == kind)
        return found["status"], found["reason"]

    def check(self, ref: Ref, **conditions: str) -> None:
        """Check conditions of an object, each given as `Status Reason`."""
        found = {one["type"]: f"{one['status']} {one['reason']}" for one in self.status(ref)["conditions"]}
        assert found.items() >= conditions.items()

    def status(self, ref: Ref) -> Any:
        return self.store.get(ref)["status"]

    def due(self, ref: Ref) -> float:
        """Return when an object is planned again by itself."""
        when = requeue_at(ref, self.state, self.now)
        assert when is not None
        return when


def world_of(store: ObjectStore, contents: dict[str, OperationStatus], now: float) -> World:
    return connected(World(store, contents, now))


W = TypeVar("W", bound=World)


def connected(world: W) -> W:
    """Return a world that hears of its store, and knows what is in it."""
    store = world.store
    store._clock = lambda: world.now  # pyright: ignore[reportPrivateUsage]
    for obj in store.objects():
        world.desired.put(parse(obj))
    store.listen(world.on_event)
    return world


def check_indexes(desired: DesiredState) -> None:
    """Check that the indexes hold every object exactly where its fields say, and nothing else."""
    by_name: dict[str, set[Ref]] = {}
    by_pool: dict[Ref, set[Ref]] = {}
    pinned: dict[Ref, set[Ref]] = {}
    ready: dict[Ref, set[Ref]] = {}
    for resource in (*desired.pools.values(), *desired.adapters.values()):
        by_name.setdefault(resource.model_name, set()).add(resource.meta.ref)
        if isinstance(resource, AdapterObject):
            by_pool.setdefault(resource.pool, set()).add(resource.meta.ref)
            if resource.spec.pinned:
                pinned.setdefault(resource.pool, set()).add(resource.meta.ref)
            if holds(resource, "Ready"):
                ready.setdefault(resource.pool, set()).add(resource.meta.ref)
    assert by_name == desired._by_name, "names"
    assert by_pool == desired._by_pool, "pools"
    assert pinned == desired._pinned, "pinned"
    assert ready == desired._ready, "ready"


def check_store(store: ObjectStore) -> None:
    """Check that versions are unique, none above the store's, and that generations start at 1."""
    versions = [int(obj["metadata"]["resourceVersion"]) for obj in store.objects()]
    assert len(set(versions)) == len(versions), "two objects share a version"
    assert all(version <= store.version for version in versions), "an object is newer than the store"
    assert all(obj["metadata"]["generation"] >= 1 for obj in store.objects()), "generation"
