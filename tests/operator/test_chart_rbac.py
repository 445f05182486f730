"""The operator's rights in the chart: the API server grants them, each of them is needed, and nothing else is given.

`USES` is the table: a right -> what of the operator's own code needs it. With all rights the code works; with one taken
away it is refused.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
from kubernetes.aio.client import Configuration
from kubernetes.client import AuthorizationV1Api, CoreV1Api, V1SubjectAccessReview

from harness import chart
from harness.cluster.cluster import Cluster
from harness.cluster.rights import grants
from harness.waiting import PATIENCE_S, eventually
from weft.leadership.election import Election
from weft.leadership.errors import LeaseUnavailable
from weft.leadership.lease import LeaseTimings
from weft.leadership.lease_api import LeaseApi
from weft_operator.core import Object, RecordEvent, Ref, SetStatus
from weft_operator.core.actions import AddFinalizer, ApplyChild, DeleteChild, SetPodDeletionCost
from weft_operator.core.api_keys import Key, UnreadSecret, parse_key
from weft_operator.core.children import RUNNER_LABEL
from weft_operator.core.state import Child
from weft_operator.errors import ApiFailed, ChildRefused, StaleWrite
from weft_operator.kubernetes import (
    BY_KIND,
    KEYS,
    NODES,
    PODS,
    WATCHED,
    EventRecorder,
    KeySecrets,
    KubeApi,
    KubernetesBackend,
    ObjectCache,
    ResourceKind,
    owner_of,
)

EVERYWHERE, RELEASE, POOLS, SYSTEM = "everywhere", "release", "pools", "kube-system"
FINALIZER = "serving.weft.dev/unload"


class Right(NamedTuple):
    """One verb on one resource, and where."""

    where: str
    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource} {self.where}"


@dataclass
class World:
    """What a use needs: the operator's client and backend under some rights, and objects made by the admin."""

    plane: Cluster
    release: str
    pools: str
    api: KubeApi
    backend: KubernetesBackend
    events: EventRecorder
    cache: ObjectCache

    @property
    def account(self) -> str:
        return f"system:serviceaccount:{self.release}:weft-operator"

    def made(self, manifest: Object) -> Object:
        """An object that the admin has made, as the operator knows it."""
        (live,) = self.plane.apply(manifest)
        self.cache.put(live)
        return live

    def own(self, kind: str) -> Object:
        """An adapter or a pool."""
        spec: Object = {"model": {"uri": "file:model"}}
        if kind == KEYS.kind:
            spec = {}
        elif kind == "LoRAAdapter":
            spec = {"poolRef": {"name": "p"}, "source": {"uri": "file:a"}}
        meta = {"name": f"x-{kind.lower()}", "namespace": self.pools}
        return self.made({"apiVersion": "serving.weft.dev/v1alpha1", "kind": kind, "metadata": meta, "spec": spec})

    def child(self, kind: str, name: str) -> Child:
        """Something that a pool owns, as small as its schema allows."""
        resource = BY_KIND[kind]
        labels = {"app.kubernetes.io/managed-by": "weft-operator", "app": name}
        runner = {"app": name, "app.kubernetes.io/component": "runner", RUNNER_LABEL: name}
        spec = {"containers": [{"name": "runner", "image": "runner"}], "automountServiceAccountToken": False}
        pod = {"metadata": {"labels": runner}, "spec": {**spec, "serviceAccountName": "p-runners"}}
        specs: dict[str, Object] = {
            "Deployment": {"spec": {"replicas": 0, "selector": {"matchLabels": {"app": name}}, "template": pod}},
            "StatefulSet": {
                "spec": {"replicas": 0, "serviceName": "x", "selector": {"matchLabels": {"app": name}}, "template": pod}
            },
            "NetworkPolicy": {"spec": {"podSelector": {"matchLabels": runner}}},
            "Service": {"spec": {"clusterIP": "None", "selector": runner}},
            "PodDisruptionBudget": {"spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": name}}}},
            "ServiceAccount": {},
            "Pod": {"spec": spec},
        }
        owner = {key: value for key, value in self._owner().items() if kind != "Pod"}
        meta = {"name": name, "namespace": self.pools, "labels": labels} | (
            {"ownerReferences": [owner]} if owner else {}
        )
        manifest = {"apiVersion": resource.api_version, "kind": kind, "metadata": meta, **specs[kind]}
        return Child(kind, self.pools, name, manifest)

    def _owner(self) -> dict[str, Any]:
        pool = self.own("ServingPool")
        meta = pool["metadata"]
        reference = {"apiVersion": pool["apiVersion"], "kind": "ServingPool", "name": meta["name"], "uid": meta["uid"]}
        return {**reference, "controller": True}


Use = Callable[[World], Awaitable[object]]


def ref_of(obj: Object) -> Ref:
    return Ref(obj["kind"], obj["metadata"]["namespace"], obj["metadata"]["name"])


def reads(resource: ResourceKind, where: str) -> dict[Right, Use]:
    """`Audit` lists and gets; kopf watches."""

    def namespace(world: World) -> str | None:
        return None if where == EVERYWHERE else world.pools

    async def lists(world: World) -> None:
        async for _ in world.api.pages(resource, namespace(world)):
            pass

    async def gets(world: World) -> None:
        await world.api.get(resource, "" if resource is NODES else world.pools, "nobody")

    async def watches(world: World) -> None:
        page = await world.api.request("GET", resource.path(namespace(world)), query={"limit": "1"})
        since = page["metadata"]["resourceVersion"]
        query = {"watch": "true", "resourceVersion": since, "timeoutSeconds": "1", "labelSelector": "no=body"}
        await world.api.request("GET", resource.path(namespace(world)), query=query)

    rights = {verb: Right(where, resource.group, resource.plural, verb) for verb in ("list", "get", "watch")}
    return {rights["list"]: lists, rights["get"]: gets, rights["watch"]: watches}


def finalizes(kind: str) -> Use:
    async def use(world: World) -> None:
        obj = world.own(kind)
        meta = obj["metadata"]
        await world.backend.add_finalizer(AddFinalizer(ref_of(obj), meta["uid"], meta["resourceVersion"], FINALIZER))

    return use


def tells_status(kind: str) -> Use:
    async def use(world: World) -> None:
        obj = world.own(kind)
        meta = obj["metadata"]
        await world.backend.set_status(SetStatus(ref_of(obj), meta["uid"], meta["resourceVersion"], {"conditions": []}))

    return use


def creates(kind: str) -> Use:
    """Server-side apply of something that is not there."""

    async def use(world: World) -> None:
        name = f"new-{time.monotonic_ns()}"
        child = world.child(kind, name)
        await world.backend.apply_child(ApplyChild(Ref("ServingPool", world.pools, "p"), child, None))

    return use


def applies(kind: str) -> Use:
    """Server-side apply of something that the admin had made, so that nothing is created."""

    async def use(world: World) -> None:
        child = world.child(kind, f"old-{time.monotonic_ns()}")
        live = world.made(child.manifest)
        pool = owner_of(live)
        assert pool is not None
        while True:
            world.cache.read(child.key, live)
            try:
                return await world.backend.apply_child(ApplyChild(pool, child, live["metadata"]["resourceVersion"]))
            except StaleWrite:  # its controller has told its status meanwhile
                live = world.plane.get(kind, child.name, world.pools)

    return use


def deletes(kind: str) -> Use:
    async def use(world: World) -> None:
        child = world.child(kind, f"gone-{time.monotonic_ns()}")
        uid = world.made(child.manifest)["metadata"]["uid"]
        pool = Ref("ServingPool", world.pools, "p")
        await world.backend.delete_child(DeleteChild(pool, kind, world.pools, child.name, uid))

    return use


async def marks(world: World) -> None:
    pod = world.made(world.child("Pod", f"pod-{time.monotonic_ns()}").manifest)["metadata"]
    await world.backend.set_pod_deletion_cost(
        SetPodDeletionCost(Ref("ServingPool", world.pools, "p"), world.pools, pod["name"], pod["uid"], -1)
    )


def announces(times: int) -> Use:
    """The first Event is created, an equal one patches it. A refusal is logged: what counts is what is there."""

    async def use(world: World) -> None:
        adapter = world.own("LoRAAdapter")
        action = RecordEvent(ref_of(adapter), adapter["metadata"]["uid"], "Normal", "Ready", f"{time.monotonic_ns()}")
        for _ in range(times):
            await world.events.send(action, time.time())
        events = world.plane.get("events.events.k8s.io", namespace=world.pools)["items"]
        recorded = [event for event in events if event.get("note") == action.message]
        counts = [(event.get("series") or {}).get("count", 1) for event in recorded]
        if counts != [times]:
            raise ApiFailed("announce", 403, "Forbidden", f"recorded {counts}, not [{times}]")

    return use


def elects(step: str) -> Use:
    """`get`: looks at the Lease; `create`: makes it; `update`: renews or releases it."""

    async def use(world: World) -> None:
        lease = LeaseApi(world.api.configuration, world.release, "weft-operator")
        election = Election(lease, identity=f"test-{step}", terms=LeaseTimings(120.0), clock=time.monotonic)
        meta = {"name": "weft-operator", "namespace": world.release}
        world.plane.delete({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta})
        async with contextlib.aclosing(lease):
            await election._try()  # pyright: ignore[reportPrivateUsage] (one attempt; `acquire` goes on for ever)
            await election._renew()  # pyright: ignore[reportPrivateUsage]

    return use


def key_and_secrets(world: World) -> tuple[Key, KeySecrets]:
    key = parse_key(world.own(KEYS.kind))
    assert isinstance(key, Key)
    return replace(key, secret=f"key-{time.monotonic_ns()}"), KeySecrets(world.api, lead=lambda: None, write_s=10.0)


async def reads_secret(world: World) -> None:
    key, secret_store = key_and_secrets(world)
    found = await secret_store.read(key)
    if isinstance(found, UnreadSecret):
        raise ApiFailed("get", 403, "Forbidden", found.message)


async def makes_secret(world: World) -> None:
    key, secret_store = key_and_secrets(world)
    await secret_store.create(key, "weft-key-" + "x" * 43)


CHILD_KINDS = ("Deployment", "StatefulSet", "Service", "PodDisruptionBudget", "ServiceAccount", "NetworkPolicy")


def uses() -> dict[Right, Use]:
    table: dict[Right, Use] = {}
    for own in WATCHED:
        table |= reads(own, EVERYWHERE)
        table[Right(EVERYWHERE, own.group, own.plural, "patch")] = finalizes(own.kind)
        table[Right(EVERYWHERE, own.group, f"{own.plural}/status", "update")] = tells_status(own.kind)
    table |= reads(NODES, EVERYWHERE)
    table[Right(EVERYWHERE, "events.k8s.io", "events", "create")] = announces(1)
    table[Right(EVERYWHERE, "events.k8s.io", "events", "patch")] = announces(2)
    for kind in CHILD_KINDS:
        resource = BY_KIND[kind]
        table |= reads(resource, POOLS)
        for verb, use in (("create", creates(kind)), ("patch", applies(kind)), ("delete", deletes(kind))):
            table[Right(POOLS, resource.group, resource.plural, verb)] = use
    table |= reads(PODS, POOLS)
    table[Right(POOLS, "", "pods", "patch")] = marks
    for verb, use in (("get", reads_secret), ("create", makes_secret)):
        table[Right(POOLS, "", "secrets", verb)] = use
    for verb in ("create", "get", "update"):
        table[Right(RELEASE, "coordination.k8s.io", "leases", verb)] = elects(verb)
    return table


USES = uses()


# -------------------------------------------------------------------------------------------------------- the chart


class Installed(NamedTuple):
    """A release's namespace, one for its pools, and the chart's rules by where they hold."""

    release: str
    pools: str
    rules: dict[str, list[dict[str, Any]]]

    def without(self, right: Right) -> dict[str, list[dict[str, Any]]]:
        """The rules, but for one right."""
        return {
            where: [less for rule in rules if (less := cut(rule, right))["verbs"]] if where == right.where else rules
            for where, rules in self.rules.items()
        }


def cut(rule: dict[str, Any], right: Right) -> dict[str, Any]:
    """A rule of one resource without one right."""
    if (rule["apiGroups"], rule["resources"]) != ([right.group], [right.resource]):
        return rule
    return {**rule, "verbs": [verb for verb in rule["verbs"] if verb != right.verb]}


def split(rules: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One rule a resource."""
    return [{**rule, "resources": [resource]} for rule in rules for resource in rule["resources"]]


@pytest.fixture(scope="module")
def installed(control_plane: Cluster) -> Iterator[Installed]:
    """The chart's RBAC objects and the operator's policies, applied."""
    release, pools = control_plane.create_namespace("release"), control_plane.create_namespace("pools")
    flags = (
        "--set",
        f"poolNamespaces={{{pools}}},apiKeys.namespaces={{{pools}}},crds.install=false,rbac.aggregateClusterRoles=false",
    )
    found = chart.objects(chart.render("default", *flags, namespace=release))
    kinds = ("ServiceAccount", "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")
    policies = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    objects = [obj for obj in found if obj["kind"] in kinds + policies]
    control_plane.apply(*objects)
    where = {release: RELEASE, pools: POOLS, SYSTEM: SYSTEM, None: EVERYWHERE}
    rules: dict[str, list[dict[str, Any]]] = {}
    for obj in objects:
        if obj["kind"] in ("Role", "ClusterRole"):
            rules.setdefault(where[obj["metadata"].get("namespace")], []).extend(split(obj["rules"]))
    yield Installed(release, pools, rules)
    control_plane.delete(*objects)
    for namespace in (release, pools):
        control_plane.empty(namespace, ("apikeys", "loraadapters", "servingpools"))
        control_plane.delete_namespace(namespace)


def rights(rules: dict[str, list[dict[str, Any]]]) -> set[Right]:
    return {
        Right(where, group, resource, verb)
        for where, given in rules.items()
        for rule in given
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@contextlib.asynccontextmanager
async def acting(plane: Cluster, installed: Installed, token: str) -> AsyncGenerator[World]:
    """A world in which the operator's code runs with the rights of that token."""
    configuration = Configuration()
    configuration.host, configuration.ssl_ca_cert = plane.url, str(plane.ca)
    configuration.api_key = {"BearerToken": f"Bearer {token}"}
    api, cache = KubeApi(configuration), ObjectCache()
    events = EventRecorder(api, lead=lambda: None, write_s=PATIENCE_S, instance="test", clock=time.time)
    backend = KubernetesBackend(api, cache, events, lead=lambda: None, write_s=PATIENCE_S, observe=lambda *_: None)
    try:
        yield World(plane, installed.release, installed.pools, api, backend, events, cache)
    finally:
        await api.aclose()


def test_the_chart_grants_what_the_table_names_and_nothing_else(installed: Installed) -> None:
    assert rights(installed.rules) == set(USES)
    assert not any("*" in part for right in rights(installed.rules) for part in right)


def test_the_api_server_allows_what_the_chart_grants_and_refuses_what_lies_beside(
    control_plane: Cluster, installed: Installed
) -> None:
    namespaces = {EVERYWHERE: "default", RELEASE: installed.release, POOLS: installed.pools}
    with control_plane.client() as client:
        reviews = AuthorizationV1Api(client)

        def allowed(right: Right, namespace: str, name: str = "") -> bool:
            resource, _, subresource = right.resource.partition("/")
            what = {
                "group": right.group,
                "resource": resource,
                "verb": right.verb,
                "namespace": namespace,
                "name": name,
            }
            account = f"system:serviceaccount:{installed.release}:weft-operator"
            spec: Any = {
                "user": account,
                "resourceAttributes": what | ({"subresource": subresource} if subresource else {}),
            }
            review: Any = reviews.create_subject_access_review(V1SubjectAccessReview(spec=spec))
            return bool(review.status.allowed)

        named = {"get", "update"}
        for right in USES:
            lease = "weft-operator" if right.resource == "leases" and right.verb in named else ""
            assert allowed(right, namespaces[right.where], lease), right
            if right.where != EVERYWHERE:
                assert not allowed(right, "default", lease), f"{right} in a namespace of nobody's"
        forbidden = [
            ("", "secrets", "list"), ("", "secrets", "watch"), ("", "secrets", "delete"), ("", "secrets", "patch"),
            ("", "pods", "create"), ("", "pods", "delete"),
            ("", "pods/exec", "create"), ("", "nodes", "patch"), ("", "namespaces", "list"),
            ("apps", "deployments", "update"), ("apps", "statefulsets", "update"),
            ("rbac.authorization.k8s.io", "roles", "create"),
            ("serving.weft.dev", "servingpools", "delete"), ("serving.weft.dev", "loraadapters", "create"),
            ("apiextensions.k8s.io", "customresourcedefinitions", "list"),
            ("admissionregistration.k8s.io", "validatingwebhookconfigurations", "patch"),
        ]  # fmt: skip
        for group, resource, verb in forbidden:
            for namespace in (installed.pools, installed.release):
                assert not allowed(Right(POOLS, group, resource, verb), namespace), f"{verb} {resource}"
        assert not allowed(Right(RELEASE, "apps", "statefulsets", "patch"), installed.release), "those of the chart"
        assert not allowed(Right(RELEASE, "coordination.k8s.io", "leases", "update"), installed.release, "another")


async def is_bounded(world: World) -> bool:
    """Whether the policies are in effect."""
    adapter, change = world.own("LoRAAdapter")["metadata"], {"metadata": {"labels": {"a": "b"}}}
    path = BY_KIND["LoRAAdapter"].path(adapter["namespace"], adapter["name"])
    try:
        await world.api.request(
            "PATCH", path, body=change, content_type="application/merge-patch+json", query={"dryRun": "All"}
        )
    except ApiFailed as refused:
        return "ValidatingAdmissionPolicy" in refused.message
    return False


async def test_with_all_rights_the_operators_code_does_everything(control_plane: Cluster, installed: Installed) -> None:
    by = control_plane.token_of(installed.release, "weft-operator")
    async with acting(control_plane, installed, by.token) as world:
        await eventually(lambda: is_bounded(world))
        for use in dict.fromkeys(USES.values()):
            await use(world)


@pytest.fixture(scope="module")
def lesser(control_plane: Cluster, installed: Installed) -> Iterator[dict[Right, str]]:
    """For each right the token of a ServiceAccount that has all of them but this one."""
    names = {right: f"lesser-{index}" for index, right in enumerate(USES)}
    objects: list[dict[str, Any]] = []
    for right, name in names.items():
        less = installed.without(right)
        places = {installed.release: less[RELEASE], installed.pools: less[POOLS]}
        objects += grants(installed.release, name, places, less[EVERYWHERE])
    control_plane.apply(*objects)
    with control_plane.client() as client:
        core = CoreV1Api(client)
        hour: Any = {"spec": {"expirationSeconds": 3600, "audiences": None}}
        made: dict[Right, Any] = {
            right: core.create_namespaced_service_account_token(name, installed.release, hour)
            for right, name in names.items()
        }
    yield {right: token.status.token for right, token in made.items()}
    control_plane.delete(*objects)


@pytest.mark.parametrize("right", USES, ids=str)
async def test_without_one_right_something_is_refused(
    control_plane: Cluster, installed: Installed, lesser: dict[Right, str], right: Right
) -> None:
    async with acting(control_plane, installed, lesser[right]) as world:
        with pytest.raises((ApiFailed, ChildRefused, LeaseUnavailable)) as refused:
            await USES[right](world)
    failed = refused.value.__cause__ if isinstance(refused.value, ChildRefused) else refused.value
    assert isinstance(failed, ApiFailed | LeaseUnavailable)
    assert failed.status == 403
