"""Every pod of the chart, and every runner pod that the operator makes, under Pod Security `restricted`.

They are posted as Pods, by server-side dry run, into a namespace that enforces it: the API server is the judge.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from kubernetes.client import CoreV1Api
from kubernetes.client.exceptions import ApiException

from harness import chart
from harness.chart import VALUE_SETS, Json
from harness.cluster.cluster import Cluster
from weft_operator.core.children import make_children
from weft_operator.core.resources import parse_pool
from weft_operator.kubernetes import parse_runner_defaults

RESTRICTED = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "pod-security.kubernetes.io/enforce-version": "latest",
}
SAFE = [name for name in VALUE_SETS if name != "dev"]  # dev mounts folders of the node: for tests and one's own machine
POOL = """
apiVersion: serving.weft.dev/v1alpha1
kind: ServingPool
metadata: {name: llama}
spec:
  model: {uri: "hf:org/llama"}
  runnerGroups:
    - name: h100
      template: {resources: {limits: {nvidia.com/gpu: "1"}}}
    - name: small
      template:
        nodeSelector: {accelerator: l4}
        tolerations: [{key: nvidia.com/gpu, operator: Exists}]
        env: [{name: OMP_NUM_THREADS, value: "4"}]
"""
HOST_PATH = 'restricted volume type \\"hostPath\\"'
BASE = f"sha256:{'0' * 64}"


@pytest.fixture(scope="module")
def guarded(control_plane: Cluster) -> Iterator["Guarded"]:
    namespace = control_plane.create_namespace("restricted", RESTRICTED)
    with control_plane.client() as client:
        create = ("create", "-n", namespace, "-o", "json", "-f", "-")
        yield Guarded(CoreV1Api(client), namespace, json.loads(control_plane.kubectl(*create, stdin=POOL)))
    control_plane.delete_namespace(namespace)


class Guarded:
    """A namespace that enforces the restricted standard; a pool in it, as the API server completes it."""

    def __init__(self, api: CoreV1Api, namespace: str, pool: Json) -> None:
        self._api, self._namespace, self.pool = api, namespace, pool

    def post(self, name: str, template: Json) -> None:
        """Dry run of a pod of that template, with its claims as the StatefulSet's controller adds them.

        The account is not looked for: it says nothing of the pod's security.
        """
        spec: Json = {**template["spec"], "serviceAccountName": "default"}
        known = {volume["name"] for volume in spec.get("volumes", ())}
        mounted = {mount["name"] for container in spec["containers"] for mount in container.get("volumeMounts", ())}
        claims = [{"name": volume, "persistentVolumeClaim": {"claimName": volume}} for volume in mounted - known]
        spec["volumes"] = [*spec.get("volumes", ()), *claims]
        labels = template["metadata"].get("labels", {})
        pod: Any = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
        self._api.create_namespaced_pod(self._namespace, pod, dry_run="All", field_validation="Strict")


def runner_templates(pool: Json, found: list[Json]) -> dict[str, Json]:
    """The pods that the operator makes for a pool with two groups, told this render's defaults."""
    defaults = parse_runner_defaults(
        yaml.safe_load(chart.one(found, "ConfigMap", "weft-runner-defaults")["data"]["runner-defaults.yaml"]),
        "defaults",
    )
    made = make_children(parse_pool(pool), BASE, defaults, {"h100": 1, "small": 2})
    return {child.name: child.manifest["spec"]["template"] for child in made if child.kind == "Deployment"}


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Json]]:
    return {name: chart.objects(chart.render(name)) for name in VALUE_SETS}


@pytest.mark.parametrize("name", SAFE)
def test_every_pod_of_the_chart_is_admitted(guarded: Guarded, rendered: dict[str, list[Json]], name: str) -> None:
    templates = dict(chart.pod_templates(rendered[name]))
    assert set(templates) == {f"weft-{component}" for component in (*chart.COMPONENTS, "test")}
    for pod, template in templates.items():
        guarded.post(pod, template)


@pytest.mark.parametrize("name", SAFE)
def test_every_runner_pod_is_admitted(guarded: Guarded, rendered: dict[str, list[Json]], name: str) -> None:
    templates = runner_templates(guarded.pool, rendered[name])
    assert len(templates) == 2
    for pod, template in templates.items():
        guarded.post(pod, template)


def test_runner_pods_are_under_policy_and_monitor(guarded: Guarded, rendered: dict[str, list[Json]]) -> None:
    found = rendered["cert-manager"]
    policy = chart.one(found, "NetworkPolicy", "weft-runner")["spec"]["podSelector"]["matchLabels"]
    monitor = chart.one(found, "PodMonitor", "weft-runners")["spec"]
    for template in runner_templates(guarded.pool, found).values():
        assert policy.items() <= template["metadata"]["labels"].items()
        assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports


def test_folders_of_the_node_are_refused(guarded: Guarded, rendered: dict[str, list[Json]]) -> None:
    templates = dict(chart.pod_templates(rendered["dev"])) | runner_templates(guarded.pool, rendered["dev"])
    assert len(templates) == 10
    for pod, template in templates.items():
        refused_for(guarded, pod, template, HOST_PATH)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hostNetwork": True}, "host namespaces"),
        ({"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}, HOST_PATH),
        ({"securityContext": {"runAsUser": 0}}, "runAsNonRoot"),
    ],
)
def test_the_namespace_does_refuse_what_is_not_restricted(
    guarded: Guarded, rendered: dict[str, list[Json]], change: dict[str, Any], why: str
) -> None:
    template = copy.deepcopy(dict(chart.pod_templates(rendered["default"]))["weft-scheduler"])
    guarded.post("right", template)
    template["spec"] |= {**change, "volumes": [*template["spec"]["volumes"], *change.get("volumes", ())]}
    refused_for(guarded, "wrong", template, why)


def refused_for(guarded: Guarded, pod: str, template: Json, why: str) -> None:
    with pytest.raises(ApiException) as refused:
        guarded.post(pod, template)
    assert refused.value.status == 403, refused.value.body
    assert "violates PodSecurity" in str(refused.value.body), pod
    assert why in str(refused.value.body), pod
