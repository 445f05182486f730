"""A modelled cluster for the planner: an API server that defaults, controllers that follow what it has.

What is modelled: server-side apply by one manager (defaults, quantities as the server writes them, empty values
dropped, versions and generations), deletion by uid, garbage collection by owner, pods that follow replicas and
templates, and the ReplicaSet's choice of whom to stop: who is not ready first, then the lowest deletion cost.
"""

import copy
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

from tests.unit.operator.planning import World, connected
from weft.api.template import amount
from weft_operator.core import ClusterState, DesiredState, OperatorPolicy, Ref
from weft_operator.core.actions import Action, AddFinalizer, ApplyChild, DeleteChild, ScaleChild, SetPodDeletionCost
from weft_operator.core.children import GROUP_LABEL, POOL_LABEL, RUNNER_LABEL, template_hash
from weft_operator.core.drift import QUANTITIES
from weft_operator.core.expectations import apply_failed
from weft_operator.core.runner_defaults import RunnerDefaults
from weft_operator.core.state import Child, ObjectKey, ObservedState, Pod
from weft_operator.errors import ChildRefused
from weft_operator.local import ObjectStore

SITE = RunnerDefaults(image="registry.example/weft-runner:1", supervisor="supervisor:7300", depot="http://depot:7100")
Json = dict[str, Any]


@dataclass(frozen=True)
class ModelPod:
    """`deployment`: or StatefulSet."""

    pool: Ref
    deployment: ObjectKey
    group: str
    name: str
    uid: str
    template: Json
    ready: bool
    cost: int | None = None
    node: str = ""


@dataclass
class ModelCluster:
    """A cluster that outlives operators. `requests`: what they sent, `writes`: what changed something by anybody."""

    objects: dict[ObjectKey, Json] = field(default_factory=dict)
    pods: dict[str, ModelPod] = field(default_factory=dict)
    pods_become_ready: bool = True
    nodes: dict[str, bool] = field(
        default_factory=dict[str, bool]
    )  # whether each takes pods; empty: nodes are no matter
    refuses: dict[str, str] = field(default_factory=dict[str, str])  # kinds that are not taken, and why
    writes: int = 0
    requests: int = 0
    _count: int = 0

    def apply(self, child: Child) -> None:
        """Apply server-side, forced. What was applied before and is not any more goes; the rest stays."""
        self.requests += 1
        before = self.objects.get(child.key)
        assert before is None or owner_of(before) == owner_of(child.manifest), "it has another controller: 422"
        made = served(child.manifest)
        made["metadata"] |= {"uid": before["metadata"]["uid"] if before else self.unique("uid")}
        made["metadata"]["generation"] = before["metadata"]["generation"] if before else 1
        if before and made["spec" if "spec" in made else "kind"] != before["spec" if "spec" in before else "kind"]:
            made["metadata"]["generation"] += 1
        same = before is not None and _without_version(before) == _without_version(made)
        self.store(child.key, before if same and before else made, changed=not same)

    def edit(self, key: ObjectKey, change: Any) -> None:
        """Write as somebody else."""
        obj = copy.deepcopy(self.objects[key])
        change(obj)
        obj["metadata"]["generation"] += 1
        self.store(key, obj)

    def store(self, key: ObjectKey, obj: Json, *, changed: bool = True) -> None:
        if changed:
            self.writes += 1
            obj["metadata"]["resourceVersion"] = self.unique("")
        self.objects[key] = obj

    def delete(self, key: ObjectKey, uid: str) -> None:
        self.requests += 1
        if key in self.objects and self.objects[key]["metadata"]["uid"] == uid:
            self.writes += 1
            del self.objects[key]

    def scale(self, key: ObjectKey, uid: str, replicas: int) -> None:
        self.requests += 1
        if key in self.objects and self.objects[key]["metadata"]["uid"] == uid:
            obj = copy.deepcopy(self.objects[key])
            obj["spec"]["replicas"] = replicas
            obj["metadata"]["generation"] += 1
            self.store(key, obj)

    def mark(self, name: str, uid: str, cost: int) -> None:
        self.requests += 1
        if name in self.pods and self.pods[name].uid == uid:
            self.writes += 1
            self.pods[name] = replace(self.pods[name], cost=cost)

    def unique(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    # ------------------------------------------------------------------------------------------ its controllers

    def follow(self, owners: dict[str, Ref]) -> None:
        """Run one round: garbage, pods of Deployments, readiness. `owners`: the pools there are, by uid."""
        for key, obj in list(self.objects.items()):
            if not any(owner["uid"] in owners for owner in obj["metadata"]["ownerReferences"]):
                del self.objects[key]
        self.pods = {name: pod for name, pod in self.pods.items() if pod.deployment in self.objects}
        for name, pod in self.pods.items():
            if not pod.node:  # it waits for room
                self.pods[name] = replace(pod, node=self._free_node())
        if self.pods_become_ready:
            self.pods = {name: replace(pod, ready=self._is_placed(pod)) for name, pod in self.pods.items()}
        for key, obj in self.objects.items():
            if key.kind == "Deployment":
                self._follow_deployment(key, obj)
            elif key.kind == "StatefulSet":
                self._follow_set(key, obj)

    def _follow_deployment(self, key: ObjectKey, obj: Json) -> None:
        mine = [pod for pod in self.pods.values() if pod.deployment == key]
        template, replicas = obj["spec"]["template"], obj["spec"]["replicas"]
        bounds, outdated = obj["spec"]["strategy"]["rollingUpdate"], [pod for pod in mine if pod.template != template]
        by_rank = sorted(mine, key=lambda pod: (pod.ready, pod.cost or 0, pod.name))
        for pod in by_rank[: max(0, len(mine) - replicas - (bounds["maxSurge"] if outdated else 0))]:
            del self.pods[pod.name]
        outdated = [pod for pod in outdated if pod.name in self.pods]
        present = [pod for pod in mine if pod.name in self.pods]
        for pod in sorted(outdated, key=lambda pod: pod.ready):  # those that serve nobody first
            if not pod.ready or sum(one.ready for one in present) > replicas - bounds["maxUnavailable"]:
                del self.pods[pod.name]
                present.remove(pod)
        most = replicas + (bounds["maxSurge"] if any(pod in outdated for pod in present) else 0)
        current = sum(pod.template == template for pod in present)
        for _ in range(min(replicas - current, most - len(present))):
            name = f"{key.name}-{self.unique('')}"
            labels = obj["metadata"]["labels"]
            pool = Ref("ServingPool", key.namespace, labels[POOL_LABEL])
            group = labels[GROUP_LABEL]
            self.pods[name] = ModelPod(
                pool, key, group, name, self.unique("pod"), copy.deepcopy(template), False, node=self._free_node()
            )

    def _is_placed(self, pod: ModelPod) -> bool:
        return not self.nodes or pod.node in self.nodes

    def _free_node(self) -> str:
        """Return of the nodes that take pods the one with the fewest."""
        count = Counter(pod.node for pod in self.pods.values())
        return min((node for node, takes in self.nodes.items() if takes), key=lambda node: count[node], default="")

    def _follow_set(self, key: ObjectKey, obj: Json) -> None:
        """Follow a set, all pods at once; updateStrategy OnDelete."""
        for index in range(obj["spec"]["replicas"]):
            if (name := f"{key.name}-{index}") not in self.pods:
                labels = obj["metadata"]["labels"]
                pool, template = Ref("ServingPool", key.namespace, labels[POOL_LABEL]), obj["spec"]["template"]
                self.pods[name] = ModelPod(
                    pool, key, labels[GROUP_LABEL], name, self.unique("pod"), copy.deepcopy(template), False
                )

    def seen_by(self, observed: ObservedState) -> None:
        """Tell what watches tell."""
        observed.children, observed.pods = {}, {}
        observed.unschedulable_nodes = {node for node, takes in self.nodes.items() if not takes}
        for key, obj in self.objects.items():
            pool = Ref("ServingPool", key.namespace, obj["metadata"]["labels"][POOL_LABEL])
            observed.children.setdefault(pool, {})[key] = obj
        for pod in self.pods.values():
            state = "Ready" if pod.ready else "Starting"
            observed.pods.setdefault(pod.pool, {})[pod.name] = Pod(
                pod.name, pod.uid, pod.group, state, cost=pod.cost, template=template_hash(pod.template), node=pod.node,
                runner=pod.template["metadata"]["labels"].get(RUNNER_LABEL, ""),
            )  # fmt: skip


def owner_of(obj: Json) -> str:
    return obj["metadata"]["ownerReferences"][0]["uid"]


def served(manifest: Json) -> Json:
    """Return a manifest as the API server stores it."""
    obj = _canonical(copy.deepcopy(manifest), quantity=False)
    obj["metadata"] |= {"creationTimestamp": "2026-01-01T00:00:00Z", "managedFields": [{"manager": "weft-operator"}]}
    if obj["kind"] in ("Deployment", "StatefulSet"):
        obj["spec"] |= {"progressDeadlineSeconds": 600} if obj["kind"] == "Deployment" else {"minReadySeconds": 0}
        pod = obj["spec"]["template"]["spec"]
        pod |= {"restartPolicy": "Always", "dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler"}
        pod["serviceAccount"] = pod["serviceAccountName"]
        for container in pod["containers"]:
            container.setdefault("imagePullPolicy", "IfNotPresent")
            container.setdefault("resources", {})
            container["terminationMessagePath"] = "/dev/termination-log"
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                container[probe]["httpGet"]["scheme"] = "HTTP"
                container[probe]["successThreshold"] = 1
        for volume in pod["volumes"]:
            if "secret" in volume:
                volume["secret"].setdefault("defaultMode", 420)
    if obj["kind"] == "Service":
        obj["spec"] |= {"type": "ClusterIP", "clusterIPs": ["None"], "sessionAffinity": "None"}
    return obj


def _canonical(value: Any, *, quantity: bool) -> Any:
    """Return quantities as the server writes them; strings and lists that are empty dropped."""
    if isinstance(value, dict):
        fields = {name: _canonical(v, quantity=quantity or name in QUANTITIES) for name, v in value.items()}
        return {name: v for name, v in fields.items() if v not in ("", [])}
    if isinstance(value, list):
        return [_canonical(item, quantity=quantity) for item in value]
    if quantity:
        number = amount(value)
        return f"{number:f}" if number == number.to_integral() else f"{number * 1000:f}".split(".")[0] + "m"
    return value


def _without_version(obj: Json) -> Json:
    skipped = ("resourceVersion", "generation")
    return {**obj, "metadata": {name: value for name, value in obj["metadata"].items() if name not in skipped}}


@dataclass
class ClusterWorld(World):
    """A world whose runners are pods of a modelled cluster."""

    cluster: ModelCluster = field(default_factory=ModelCluster)

    def step(self) -> list[Action]:
        """Step. A refusal ends what was planned, as it does for its object in the controller: it is planned again."""
        actions = self.plan()
        with suppress(ChildRefused):
            for action in actions:
                self.do(action)
        self.answers()
        return actions

    def do_in_cluster(self, action: Action) -> None:
        match action:
            case AddFinalizer(ref=ref, finalizer=finalizer):
                obj = self.store.get(ref)
                own = {"name": ref.name, "namespace": ref.namespace}
                finalizers = [*obj["metadata"].get("finalizers", ()), finalizer]
                self.store.apply({**obj, "metadata": {**own, "finalizers": finalizers}})
            case ApplyChild(child=child):
                if why := self.cluster.refuses.get(child.kind):
                    self.cluster.requests += 1
                    apply_failed(action.pool, child, why, self.state, self.now)
                    raise ChildRefused(why)
                self.cluster.apply(child)
            case ScaleChild(key=key, uid=uid, replicas=replicas):
                self.cluster.scale(key, uid, replicas)
            case DeleteChild(key=key, uid=uid, successor=successor):
                if successor and (why := self.cluster.refuses.get(successor.kind)):
                    self.cluster.requests += 1
                    apply_failed(action.pool, successor, why, self.state, self.now)
                    raise ChildRefused(why)
                self.cluster.delete(key, uid)
            case SetPodDeletionCost(name=name, uid=uid, cost=cost):
                self.cluster.mark(name, uid, cost)
            case _:
                super().do_in_cluster(action)
        self.cluster.seen_by(self.observed)

    def answers(self) -> None:
        pools = {obj["metadata"]["uid"]: obj for obj in self.store.objects("ServingPool")}
        self.cluster.follow(pools)
        self.cluster.seen_by(self.observed)
        super().answers()

    def ready_names(self, ref: Ref) -> list[str]:
        return sorted(pod.name for pod in self.observed.pods.get(ref, {}).values() if pod.state == "Ready")

    def another(self, store: ObjectStore) -> Self:
        after = cluster_world(store, self.contents, self.now)
        after.cluster = self.cluster
        after.cluster.seen_by(after.observed)
        return after

    def sizes(self, ref: Ref) -> dict[str, int]:
        """Return the replicas by group."""
        return {
            obj["metadata"]["labels"][GROUP_LABEL]: obj["spec"]["replicas"]
            for key, obj in self.cluster.objects.items()
            if key.kind == "Deployment" and obj["metadata"]["labels"][POOL_LABEL] == ref.name
        }

    def at_rest(self) -> None:
        """Step until nothing is ordered and nothing moves, time included."""
        for _ in range(12):
            self.settle()
            before = (self.cluster.requests, dict(self.cluster.pods))
            self.wait(6.0)
            if before == (self.cluster.requests, self.cluster.pods) and not self.plan():
                return
        raise AssertionError("the cluster does not come to rest")


def cluster_world(store: ObjectStore, contents: Any, now: float) -> ClusterWorld:
    return connected(ClusterWorld(store, contents, now, ClusterState(DesiredState(OperatorPolicy(defaults=SITE)))))
