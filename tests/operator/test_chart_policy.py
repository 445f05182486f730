"""The chart's admission policies on the operator's account: what its code makes passes, a stolen token gets no further.

A stolen token is the account's own, in other hands. Each theft is a request that the admin may make: the policy alone
refuses it.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import yaml

from harness import bad_manifests, chart
from harness.chart import Json
from harness.cluster.cluster import Cluster
from weft_devcluster.api import Api
from weft_devcluster.errors import Refused
from weft_devcluster.waiting import wait_until
from weft_operator.core.children import make_children, runner_children
from weft_operator.core.resources import parse_pool
from weft_operator.core.state import Child
from weft_operator.kubernetes import parse_runner_defaults

BASE = f"sha256:{0:064}"
MERGE, BY_NAME = "application/merge-patch+json", "application/strategic-merge-patch+json"
OURS = ("LoRAAdapter", "APIKey", "ServingPool")
KINDS = ("ServiceAccount", "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")
POLICIES = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
DENIED = r"ValidatingAdmissionPolicy 'weft-operator-({})-"
SITE = {  # what a site gives all runners, in forms that an API server fills in
    "spec": {
        "volumes": [
            {"name": "site-secret", "secret": {"secretName": "site"}},
            {"name": "site-token", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}},
        ]
    },
    "container": {"env": [{"name": "SITE", "valueFrom": {"secretKeyRef": {"name": "site", "key": "a"}}}]},
}


class Scene(NamedTuple):
    """A release under the policy: the admin, somebody with the operator's token, and what the operator has made."""

    admin: Cluster
    thief: Api
    namespace: str  # of pools
    found: list[Json]  # the chart's objects
    children: dict[str, Child]  # by kind, of two pools

    def child(self, kind: str) -> Json:
        """A fresh object, as the operator would make it."""
        made = copy.deepcopy(self.children[kind].manifest)
        return {**made, "metadata": {**made["metadata"], "name": "fresh-runners"}}


def pool(name: str, namespace: str, **spec: Any) -> Json:
    return bad_manifests.pool(name, namespace, model={"uri": "hf:org/model", "name": name}, **spec)


def made(live: Json, found: list[Json]) -> list[Child]:
    """Everything that the operator makes for a pool, told the chart's defaults."""
    text = chart.one(found, "ConfigMap", "weft-runner-defaults")["data"]["runner-defaults.yaml"]
    parsed, defaults = parse_pool(live), parse_runner_defaults(yaml.safe_load(text), "defaults")
    children = make_children(parsed, BASE, defaults, {"runners": 1})
    if parsed.spec.parallelism.pods_per_runner > 1:
        children += runner_children(parsed, parsed.groups[0], BASE, defaults, 0)
    return children


@pytest.fixture(scope="module")
def scene(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """The chart's rights and policies, and in the pools' namespace what a tenant and another release have there."""
    release, pools = control_plane.create_namespace("release"), control_plane.create_namespace("pools")
    flags = f"poolNamespaces={{{pools}}},apiKeys.namespaces={{{pools}}},crds.install=false"
    cache = {"hostPaths": ["/srv/weft"], "claims": [f"{pools}/cache", "elsewhere/other"]}
    sets = ("--set-json", f"runner.pod={json.dumps(SITE)},operator.modelCache={json.dumps(cache)}")
    found = chart.objects(chart.render("default", "--set", flags, *sets, namespace=release))
    applied = [obj for obj in found if obj["kind"] in (*KINDS, *POLICIES)]
    control_plane.apply(*applied)
    thief = Api()
    folder = tmp_path_factory.mktemp("thief")
    thief.folder, thief.endpoint = folder, control_plane.endpoint
    thief.admin = control_plane.token_of(release, "weft-operator")
    children: dict[str, Child] = {}
    for name, spec in (("one", {}), ("several", {"parallelism": {"tensor": 2, "podsPerRunner": 2}})):
        (live,) = control_plane.apply(pool(name, pools, **spec))
        children |= {child.kind: child for child in made(live, found)}
    there = Scene(control_plane, thief, pools, found, children)
    control_plane.apply(*belongings(there))
    for theft in {theft.policy: theft for theft in THEFTS}.values():  # each policy comes by itself
        wait_until(lambda theft=theft: is_denied(there, theft), f"the policy of {theft.policy} is in effect")
    yield there
    thief.objects.close()
    control_plane.delete(*applied)
    for namespace in (release, pools):
        control_plane.empty(namespace, ("apikeys", "loraadapters", "servingpools"))
        control_plane.delete_namespace(namespace)


def belongings(scene: Scene) -> list[Json]:
    """Objects of others, and a runner's pod."""
    ours = {"namespace": scene.namespace, "labels": {"app.kubernetes.io/managed-by": "Helm"}}
    named = {"metadata": {**ours, "name": "of-others"}}
    selector = {"matchLabels": {"app": "x"}}
    template = {"metadata": {"labels": {"app": "x"}}, "spec": {"containers": [{"name": "c", "image": "c"}]}}
    workload = {**named, "spec": {"replicas": 0, "selector": selector, "template": template}}
    adapter = {"poolRef": {"name": "one"}, "source": {"uri": "file:a"}}
    api = "serving.weft.dev/v1alpha1"
    return [
        {"apiVersion": api, "kind": "LoRAAdapter", **named, "spec": adapter},
        {"apiVersion": api, "kind": "APIKey", **named, "spec": {"models": ["a/b"]}},
        {"apiVersion": "apps/v1", "kind": "Deployment", **workload},
        {"apiVersion": "apps/v1", "kind": "StatefulSet", **workload},
        {"apiVersion": "v1", "kind": "Service", **named, "spec": {"clusterIP": "None", "selector": {"app": "x"}}},
        {"apiVersion": "v1", "kind": "ServiceAccount", **named},
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", **named, "spec": {"podSelector": {}}},
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", **named, "spec": {"selector": selector}},
        {"apiVersion": "v1", "kind": "Pod", **named, "spec": template["spec"]},
    ]


# ---------------------------------------------------------------------------------------------------------- the table


class Theft(NamedTuple):
    """A request of somebody with the operator's token. `make` returns it as method, kind, name and body."""

    name: str
    policy: str
    make: Callable[[Scene], tuple[str, str, str, Json | None]]


def patches(name: str, kind: str, change: Json, of: str = "of-others") -> Theft:
    """A merge patch of somebody's object."""
    policies = "wishes" if kind in OURS else "pods" if kind == "Pod" else "children|workloads|services|networkpolicies"
    return Theft(f"{kind}: {name}", policies, lambda _: ("PATCH", kind, of, change))


def ends(kind: str) -> Theft:
    """The end of somebody's object."""
    return Theft(f"{kind}: ends", "children", lambda _: ("DELETE", kind, "of-others", None))


def makes(name: str, kind: str, policy: str, change: Callable[[Json], object]) -> Theft:
    """An object that is new, and the operator's but for one thing."""

    def make(scene: Scene) -> tuple[str, str, str, Json]:
        body = scene.child(kind)
        change(body)
        return "POST", kind, "", body

    return Theft(f"{kind}: {name}", policy, make)


def with_volume(source: Json, name: str = "stolen") -> Callable[[Json], object]:
    def change(pod: Json) -> None:
        pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != name] + [{"name": name, **source}]

    return change


def with_variable(source: Json) -> Callable[[Json], object]:
    return lambda pod: pod["containers"][0]["env"].append({"name": "STOLEN", "valueFrom": source})


def in_container(**fields: Any) -> Callable[[Json], object]:
    return lambda pod: pod["containers"][0].update(fields)


OTHER = {"name": "other", "image": "x"}
PODS: dict[str, Callable[[Json], object]] = {
    "a Secret": with_volume({"secret": {"secretName": "weft-ca"}}),
    "a Secret by the name of the site's volume": with_volume({"secret": {"secretName": "weft-ca"}}, "site-secret"),
    "a Secret in a projected volume": with_volume(
        {"projected": {"sources": [{"serviceAccountToken": {"path": "token"}}, {"secret": {"name": "weft-ca"}}]}},
        "site-token",
    ),
    "a ConfigMap": with_volume({"configMap": {"name": "x"}}),
    "a folder of the node": with_volume({"hostPath": {"path": "/"}}),
    "a folder below one that is listed": with_volume({"hostPath": {"path": "/srv/weft/below"}}),
    "a claim": with_volume({"persistentVolumeClaim": {"claimName": "data-weft-supervisor-0"}}),
    "a claim that is listed for elsewhere": with_volume({"persistentVolumeClaim": {"claimName": "other"}}),
    "a driver's volume": with_volume({"csi": {"driver": "secrets-store.csi.k8s.io"}}),
    "a Secret in a variable": with_variable({"secretKeyRef": {"name": "weft-ca", "key": "tls.key"}}),
    "another key of the site's Secret": with_variable({"secretKeyRef": {"name": "site", "key": "b"}}),
    "a Secret in all variables": in_container(envFrom=[{"secretRef": {"name": "weft-ca"}}]),
    "privileges": in_container(securityContext={"privileged": True}),
    "a capability": in_container(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
    "a container before it": lambda pod: pod.update(initContainers=[OTHER]),
    "a container beside it": lambda pod: pod["containers"].append(OTHER),
    "the node's network": lambda pod: pod.update(hostNetwork=True),
    "the node's processes": lambda pod: pod.update(hostPID=True, shareProcessNamespace=False),
    "the token of an account": lambda pod: pod.update(automountServiceAccountToken=True),
    "another's account": lambda pod: pod.update(serviceAccountName="weft-depot"),
}
SUPERVISOR = {"app.kubernetes.io/component": "supervisor"}
SIZE = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
CLAIM = {"metadata": {"name": "data-weft"}, "spec": SIZE}
NOBODYS: Callable[[Json], object] = lambda obj: obj["metadata"].pop("ownerReferences")  # noqa: E731
CHILDREN = ("Deployment", "StatefulSet", "Service", "ServiceAccount", "NetworkPolicy", "PodDisruptionBudget")


def key_secret(**fields: Any) -> Theft:
    """A Secret as that of an APIKey, but for one thing."""

    def make(scene: Scene) -> tuple[str, str, str, Json]:
        owner = scene.admin.get("apikey", "of-others", scene.namespace)["metadata"]
        of = {"apiVersion": "serving.weft.dev/v1alpha1", "kind": "APIKey", "name": owner["name"], "uid": owner["uid"]}
        secret = {"apiVersion": "v1", "kind": "Secret", "immutable": True, "type": "Opaque"}
        meta = {"name": "stolen", "ownerReferences": [of]}
        return "POST", "Secret", "", {**secret, **fields, "metadata": {**meta, **fields.get("metadata", {})}}

    return Theft(f"Secret: {', '.join(fields) or 'whole'}", "secrets", make)


TOKEN_OF = {"annotations": {"kubernetes.io/service-account.name": "default"}}
THEFTS = (
    patches("its source", "LoRAAdapter", {"spec": {"source": {"uri": "file:stolen"}}}),
    patches("its pool", "LoRAAdapter", {"spec": {"poolRef": {"name": "several"}}}),
    patches("its labels", "LoRAAdapter", {"metadata": {"labels": {"a": "b"}}}),
    patches("its annotations", "LoRAAdapter", {"metadata": {"annotations": {"a": "b"}}}),
    patches("another's finalizer", "LoRAAdapter", {"metadata": {"finalizers": ["example.com/stolen"]}}),
    patches("its models", "APIKey", {"spec": {"models": ["*"]}}),
    patches("its scope", "APIKey", {"spec": {"scope": "ReadOnly"}}),
    patches("its owners", "APIKey", {"metadata": {"ownerReferences": []}, "spec": {"models": ["c/d"]}}),
    patches("its image", "ServingPool", {"spec": {"template": {"image": "stolen"}}}, "one"),
    patches("its namespaces", "ServingPool", {"spec": {"allowedNamespaces": ["*"]}}, "one"),
    patches("its image", "Pod", {"spec": {"containers": [{"name": "c", "image": "stolen"}]}}),
    patches("its labels", "Pod", {"metadata": {"labels": {"app": "y"}}}),
    patches("an annotation", "Pod", {"metadata": {"annotations": {"a": "b"}}}),
    *(patches("of another release", kind, {"metadata": {"annotations": {"a": "b"}}}) for kind in CHILDREN),
    *map(ends, CHILDREN),
    *(makes("of no pool", kind, "children", NOBODYS) for kind in CHILDREN),
    *(
        makes(name, kind, "workloads", lambda obj, change=change: change(obj["spec"]["template"]["spec"]))
        for kind in ("Deployment", "StatefulSet")
        for name, change in PODS.items()
    ),
    makes("pods of another component", "Deployment", "workloads", lambda obj: (
        obj["spec"]["selector"]["matchLabels"].update(SUPERVISOR),
        obj["spec"]["template"]["metadata"]["labels"].update(SUPERVISOR))),
    makes("claims", "StatefulSet", "statefulsets", lambda obj: obj["spec"].update(volumeClaimTemplates=[CLAIM])),
    makes("an address", "Service", "services", lambda obj: obj["spec"].update(clusterIP="", ports=[{"port": 80}])),
    makes("an address from outside", "Service", "services", lambda obj: obj["spec"].update(externalIPs=["192.0.2.1"])),
    makes("others' pods", "Service", "services", lambda obj: obj["spec"].update(selector={"app": "x"})),
    makes("others' pods", "NetworkPolicy", "networkpolicies", lambda obj: obj["spec"].update(podSelector={})),
    key_secret(type="kubernetes.io/service-account-token", metadata=TOKEN_OF, immutable=False),
    key_secret(type="kubernetes.io/service-account-token", metadata=TOKEN_OF),
    key_secret(immutable=False),
    key_secret(metadata={"ownerReferences": []}),
)  # fmt: skip


def steal(scene: Scene, theft: Theft, by: Api | None = None) -> Json:
    """Send the request as a dry run: an allowed request changes nothing."""
    method, kind, name, body = theft.make(scene)
    way = by or scene.thief
    path = scene.admin.objects.resource(kind).path(name=name or None, namespace=scene.namespace)
    content = "application/json" if method != "PATCH" else MERGE if kind in OURS else BY_NAME
    return way.objects.request(method, path, body, content=content, query={"dryRun": "All"})


def is_denied(scene: Scene, theft: Theft) -> bool:
    """Whether the policy refuses it; what else is refused is raised."""
    try:
        steal(scene, theft)
    except Refused as refused:
        if re.search(DENIED.format(theft.policy), refused.said):
            return True
        raise
    return False


@pytest.mark.parametrize("theft", THEFTS, ids=lambda theft: theft.name)
def test_a_stolen_token_gets_no_further(scene: Scene, theft: Theft) -> None:
    assert steal(scene, theft, scene.admin), "the request is a good one"
    assert is_denied(scene, theft)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"modelCache": {"hostPath": {"path": "/srv/weft"}}},
        {"modelCache": {"persistentVolumeClaim": {"claimName": "cache"}}, "template": {"env": [{"name": "A"}]}},
        {"memory": {"offload": {"deviceBytes": "1Gi", "diskBytes": "1Gi", "diskPath": "/offload"}}},
        {"parallelism": {"tensor": 4, "podsPerRunner": 2}, "modelCache": {"hostPath": {"path": "/srv/weft"}}},
    ],
    ids=lambda spec: ", ".join(spec) or "plain",
)
def test_what_the_operator_makes_for_a_pool_is_made_changed_and_deleted(scene: Scene, spec: Json) -> None:
    (live,) = scene.admin.apply(pool("served", scene.namespace, **spec))
    children = [child.manifest for child in made(live, scene.found)]
    assert {child["kind"] for child in children} >= {"ServiceAccount", "PodDisruptionBudget"}
    scene.thief.apply(*children, manager="weft-operator")
    for child in children:
        scene.thief.apply({**child, "metadata": {**child["metadata"], "annotations": {"a": "b"}}})
        scene.thief.objects.request("DELETE", scene.thief.path_of(child), {"propagationPolicy": "Background"})


def test_the_policies_fit_the_types_that_they_judge(scene: Scene) -> None:
    names = [obj["metadata"]["name"] for obj in scene.found if obj["kind"] == POLICIES[0]]
    assert len(names) == 8
    for name in names:
        scene.admin.wait_until(POLICIES[0], name, "", lambda obj: "typeChecking" in obj.get("status", {}), "is judged")
        assert scene.admin.get(POLICIES[0], name)["status"]["typeChecking"] == {}
