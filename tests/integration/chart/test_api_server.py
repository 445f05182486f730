"""What a real API server makes of the chart: objects of other projects' kinds, rights of tenants."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes.client import AuthorizationV1Api

from harness import chart
from harness.cluster.cluster import Cluster, own_cluster
from harness.waiting import wait_until
from weft_devcluster import tools
from weft_devcluster.errors import Refused, ToolMissing

KINDS = {"Certificate", "HTTPRoute", "Issuer", "PodMonitor", "PrometheusRule"}
READ = {"get", "list", "watch"}
WRITE = {"create", "delete", "patch", "update"}


@pytest.fixture(scope="module")
def plane() -> Iterator[Cluster]:
    try:
        tools.path("kube-apiserver")
    except ToolMissing as error:
        pytest.skip(str(error))
    with own_cluster() as made:
        yield made


@pytest.fixture(scope="module")
def with_others(plane: Cluster) -> Cluster:
    """With the CRDs of cert-manager, the Prometheus operator and the Gateway API."""
    chart.create_others(plane)
    plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": chart.NAMESPACE}})
    return plane


@pytest.mark.slow
def test_objects_of_other_projects_are_what_their_schemas_and_rules_take(with_others: Cluster) -> None:
    """Strictly: an unknown field is refused."""
    found = chart.objects(chart.render("cert-manager", *chart.HTTP_ROUTE, "--set", "prometheusRule.enabled=true"))
    mine = [obj for obj in found if obj["kind"] in KINDS]
    assert {obj["kind"] for obj in mine} == KINDS
    with_others.apply(*mine, dry_run=True)
    wrong = copy.deepcopy(next(obj for obj in mine if obj["kind"] == "Certificate"))
    wrong["spec"]["dnsName"] = ["a"]
    with pytest.raises(Refused, match="dnsName"):
        with_others.apply(wrong, dry_run=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "adapters", "pools", "scale"),
    [
        ("view", READ, READ, {"get"}),
        ("edit", READ | WRITE, READ, {"get"}),
        ("admin", READ | WRITE, READ | WRITE, {"get", "patch", "update"}),
    ],
)
def test_a_tenant_with_one_of_kubernetes_roles_has_its_rights_on_adapters_and_pools(
    plane: Cluster, role: str, adapters: set[str], pools: set[str], scale: set[str]
) -> None:
    """In the namespace where it is bound, and nowhere else."""
    made = chart.objects(chart.render("default", *chart.QUICK, "--show-only", "templates/clusterroles.yaml"))
    plane.apply(*made)
    namespace = plane.create_namespace(f"tenant-{role}")
    rbac, metadata = "rbac.authorization.k8s.io", {"name": "team", "namespace": namespace}
    of = {"roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": role}}
    to = {"subjects": [{"apiGroup": rbac, "kind": "Group", "name": f"team-{role}"}]}
    plane.apply({"apiVersion": f"{rbac}/v1", "kind": "RoleBinding", "metadata": metadata, **of, **to})
    with plane.client() as client:
        api = AuthorizationV1Api(client)

        def allowed(resource: str, verbs: set[str], where: str, subresource: str = "") -> set[str]:
            about = {"group": "serving.weft.dev", "resource": resource, "subresource": subresource, "namespace": where}
            who = {"user": "somebody", "groups": [f"team-{role}"]}

            def may(verb: str) -> bool:
                review: Any = {"spec": {**who, "resourceAttributes": {**about, "verb": verb}}}
                answer: Any = api.create_subject_access_review(review)
                return answer.status.allowed

            return set(filter(may, verbs))

        everything = READ | WRITE

        def rights() -> tuple[set[str], ...]:
            scaled = allowed("servingpools", {"get", "patch", "update"}, namespace, "scale")
            return *(allowed(kind, everything, namespace) for kind in ("loraadapters", "servingpools")), scaled

        def has_all() -> bool:
            """Kubernetes adds the rules of view to edit and those to admin one after the other; each brings some."""
            return all(found >= ours for found, ours in zip(rights(), (adapters, pools, scale), strict=True))

        wait_until(has_all, f"{role} has the chart's rules")
        assert rights() == (adapters, pools, scale)
        assert allowed("loraadapters", {"patch"}, namespace, "status") == set()
        assert allowed("loraadapters", everything, "default") == set()
