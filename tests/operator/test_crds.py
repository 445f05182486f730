"""The CRDs at a real API server: it takes them, refuses what is in the table, and reads well in kubectl."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from kubernetes.client import CustomObjectsApi
from kubernetes.client.exceptions import ApiException

from harness.bad_manifests import BAD, GOOD, Bad, Manifest, adapter, pool
from harness.chart import CHART, ROOT
from harness.cluster.cluster import Cluster
from weft.api.manifests import parse_object
from weft_devcluster.waiting import wait_until

GROUP, VERSION = "serving.weft.dev", "v1alpha1"
PLURALS = {"ServingPool": "servingpools", "LoRAAdapter": "loraadapters"}


@pytest.fixture(scope="module")
def api(control_plane: Cluster) -> Iterator[CustomObjectsApi]:
    with control_plane.client() as client:
        yield CustomObjectsApi(client)


def at(namespace: str, manifest: Manifest) -> Manifest:
    return {**manifest, "metadata": {**manifest["metadata"], "namespace": namespace}}


def path(manifest: Manifest) -> tuple[str, str, str, str, str]:
    return GROUP, VERSION, manifest["metadata"]["namespace"], PLURALS[manifest["kind"]], manifest["metadata"]["name"]


def create(api: CustomObjectsApi, manifest: Manifest, *, dry_run: bool = False) -> Any:
    options: dict[str, Any] = {"field_validation": "Strict"} | ({"dry_run": "All"} if dry_run else {})
    return api.create_namespaced_custom_object(*path(manifest)[:-1], manifest, **options)


def replace(api: CustomObjectsApi, manifest: Manifest) -> Any:
    return api.replace_namespaced_custom_object(*path(manifest), manifest, field_validation="Strict")


def delete(api: CustomObjectsApi, manifest: Manifest) -> None:
    api.delete_namespaced_custom_object(*path(manifest), grace_period_seconds=0)


def refused(api: CustomObjectsApi, row: Bad, namespace: str) -> dict[str, Any]:
    """The API server's Status."""
    wish = at(namespace, row.wish)
    if row.before is None:
        return status_of(lambda: create(api, wish, dry_run=True))
    wish["metadata"]["resourceVersion"] = create(api, at(namespace, row.before))["metadata"]["resourceVersion"]
    try:
        return status_of(lambda: replace(api, wish))
    finally:
        delete(api, wish)


def status_of(call: Callable[[], Any]) -> dict[str, Any]:
    with pytest.raises(ApiException) as caught:
        call()
    return json.loads(str(caught.value.body))


@pytest.mark.parametrize("row", BAD, ids=lambda row: row.name)
def test_a_bad_manifest_is_refused_with_the_message_that_is_promised(
    api: CustomObjectsApi, default_namespace: str, row: Bad
) -> None:
    status = refused(api, row, default_namespace)
    if row.says == "unknown field":
        assert f'unknown field "{row.field}"' in status["message"]
        return
    causes = {(cause["field"], cause["message"]) for cause in status["details"]["causes"]}
    assert any(field.startswith(row.field) and row.there in message for field, message in causes), status


@pytest.mark.parametrize("name", GOOD)
def test_on_the_right_side_of_a_bound_it_is_taken_with_the_same_defaults(
    api: CustomObjectsApi, default_namespace: str, name: str
) -> None:
    wish = at(default_namespace, GOOD[name])
    assert create(api, wish, dry_run=True)["spec"] == with_local_defaults(wish)


def with_local_defaults(wish: Manifest) -> Manifest:
    """The spec with the defaults of the local API. Lists stay as they are written: a merge patch replaces them."""

    def stored(written: Any, local: Any) -> Any:
        if isinstance(written, dict) and isinstance(local, dict):
            return {name: stored(written[name], value) if name in written else value for name, value in local.items()}
        return written if isinstance(written, list) else local

    return stored(wish["spec"], parse_object(wish).to_dict()["spec"])


@pytest.fixture(scope="module")
def default_namespace(control_plane: Cluster) -> str:
    return control_plane.create_namespace("bad")


FULL_POOL = pool(
    "full",
    model={
        "name": "acme/tiny",
        "uri": "s3://models/tiny",
        "credentialsRef": {"name": "models"},
        "endpoint": "https://minio.example.com:9000",
    },
    autoscaling={"minReplicas": 0, "maxReplicas": 6},
    template={
        "image": "registry.example.com/weft/runner@sha256:" + "0" * 64,
        "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "64Gi"}, "requests": {"cpu": "500m", "memory": "1e9"}},
        "env": [{"name": "OMP_NUM_THREADS", "value": "4"}, {"name": "EMPTY"}],
        "labels": {"team": "serving", "example.com/cost-centre": "7"},
        "annotations": {"example.com/note": "any text, even with spaces"},
        "nodeSelector": {"node.kubernetes.io/instance-type": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100}]}},
        "topologySpreadConstraints": [{"topologyKey": "topology.kubernetes.io/zone"}],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
    },
    runnerGroups=[{"name": "big", "minRunners": 1, "maxRunners": 2}, {"name": "small", "template": {}}],
    allowedNamespaces=["acme", "globex"],
)
FULL_ADAPTER = adapter(
    "full",
    poolRef={"name": "full", "namespace": "platform"},
    baseModel="acme/tiny",
    modelName="upper",
    source={"uri": "hf:acme/upper/v2", "revision": "main", "credentialsRef": {"name": "hub"}},
    maxRank=16,
    pinned=True,
    tier="Host",
)


@pytest.mark.parametrize(
    "manifest", [pool(), adapter(), FULL_POOL, FULL_ADAPTER], ids=["pool", "adapter", "pool+", "adapter+"]
)
def test_defaults_are_those_of_the_local_api_and_applying_twice_changes_nothing(
    api: CustomObjectsApi, control_plane: Cluster, namespace: str, manifest: Manifest
) -> None:
    wish = at(namespace, manifest)
    stored = create(api, wish)
    assert stored["spec"] == with_local_defaults(wish)
    assert parse_object(stored).to_dict()["spec"] == parse_object(wish).to_dict()["spec"]
    for _ in range(2):
        control_plane.apply(wish)
    again = api.get_namespaced_custom_object(*path(wish))
    assert (again["metadata"]["generation"], again["spec"]) == (1, stored["spec"])
    control_plane.apply(wish)
    last = api.get_namespaced_custom_object(*path(wish))
    assert last["metadata"]["resourceVersion"] == again["metadata"]["resourceVersion"]


def test_what_kubectl_or_argo_cd_applies_again_is_unchanged(control_plane: Cluster, namespace: str) -> None:
    """Their patch is empty: what the manifest has is in the object, with lists as they are written."""
    wishes = [
        {**wish, "metadata": {**wish["metadata"], "name": f"wish-{number}", "namespace": namespace}}
        for number, wish in enumerate([*shown(), *GOOD.values(), FULL_POOL, FULL_ADAPTER])
    ]
    assert {wish["kind"] for wish in wishes} == {"ServingPool", "LoRAAdapter", "APIKey"}
    manifests = json.dumps({"apiVersion": "v1", "kind": "List", "items": wishes})
    control_plane.kubectl("apply", "-f", "-", stdin=manifests)
    lives = [control_plane.get(wish["kind"].lower() + "s", wish["metadata"]["name"], namespace) for wish in wishes]
    patches = {wish["metadata"]["name"]: merge_patch(live, wish) for wish, live in zip(wishes, lives, strict=True)}
    assert {name: patch for name, patch in patches.items() if patch} == {}
    again = control_plane.kubectl("apply", "-f", "-", stdin=manifests).splitlines()
    assert [line for line in again if not line.endswith(" unchanged")] == []
    assert len(again) == len(wishes)
    control_plane.kubectl("diff", "-f", "-", stdin=manifests)  # its exit code 1 is Refused: there is a difference


def shown() -> Iterator[Manifest]:
    """The objects of examples/ and of the pages' and the chart's examples."""
    texts = [path.read_text() for path in sorted(ROOT.glob("examples/**/*.yaml"))]
    pages = (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
    texts += [block for page in pages for block in re.findall(r"(?ms)^```yaml\n(.*?)^```", page.read_text())]
    texts.append(yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]["artifacthub.io/crdsExamples"])
    for text in texts:
        if "{name, namespace, labels?" not in text:  # a form, which no object has
            for document in yaml.safe_load_all(text):
                for found in document if isinstance(document, list) else [document]:
                    if isinstance(found, dict) and str(found.get("apiVersion", "")).startswith(GROUP):
                        yield found


def merge_patch(live: Manifest, wish: Manifest) -> Manifest:
    """Return the JSON merge patch from `live` to `wish`, the manifest that was applied last."""
    patch = dict[str, Any]()
    for name, value in wish.items():
        there = live.get(name)
        if isinstance(value, dict) and isinstance(there, dict):
            patch |= {name: below} if (below := merge_patch(there, value)) else {}
        elif there != value:
            patch[name] = value
    return patch


def test_a_status_that_the_operator_writes_is_kept_whole_and_kubectl_shows_it(
    api: CustomObjectsApi, control_plane: Cluster, namespace: str
) -> None:
    create(api, at(namespace, pool(replicas=3)))
    condition = {
        "type": "Available",
        "status": "True",
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-02T03:04:05Z",
        "reason": "RunnersReady",
        "message": "2 runners are ready.",
    }
    status = {
        "observedGeneration": 1,
        "baseDigest": "sha256:" + "0" * 64,
        "desiredReplicas": 3,
        "replicas": 2,
        "readyReplicas": 2,
        "selector": "serving.weft.dev/pool=tiny,app.kubernetes.io/component=runner",
        "lastScale": {"time": "2026-01-02T03:04:05Z", "from": 1, "to": 3, "reason": "spec.replicas"},
        "adapters": {"total": 5, "ready": 4},
        "conditions": [condition],
    }
    body = {"status": status}
    written = api.patch_namespaced_custom_object_status(GROUP, VERSION, namespace, "servingpools", "tiny", body)
    assert written["status"] == status
    header, line = control_plane.kubectl("get", "spool", "-n", namespace).splitlines()
    assert header.split() == ["NAME", "MODEL", "DESIRED", "READY", "ADAPTERS", "AVAILABLE", "REASON", "AGE"]
    assert line.split()[:-1] == ["tiny", "file:models/tiny", "3", "2", "4", "True", "RunnersReady"]
    assert "tiny" in control_plane.kubectl("get", "weft", "-n", namespace)


def test_scale_reads_status_and_writes_replicas_and_never_those_of_an_autoscaled_pool(
    api: CustomObjectsApi, control_plane: Cluster, namespace: str
) -> None:
    create(api, at(namespace, pool(replicas=1)))
    create(api, at(namespace, pool("scaled", autoscaling={"maxReplicas": 4})))
    status = {"status": {"replicas": 1, "selector": "serving.weft.dev/pool=tiny"}}
    api.patch_namespaced_custom_object_status(GROUP, VERSION, namespace, "servingpools", "tiny", status)
    scale = api.get_namespaced_custom_object_scale(GROUP, VERSION, namespace, "servingpools", "tiny")
    assert scale["spec"] == {"replicas": 1}
    assert scale["status"] == {"replicas": 1, "selector": "serving.weft.dev/pool=tiny"}
    control_plane.kubectl("scale", "spool/tiny", "--replicas=3", "-n", namespace)
    assert api.get_namespaced_custom_object(GROUP, VERSION, namespace, "servingpools", "tiny")["spec"]["replicas"] == 3
    with pytest.raises(Exception, match="replicas and autoscaling exclude each other"):
        control_plane.kubectl("scale", "spool/scaled", "--replicas=3", "-n", namespace)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("lora", "A LoRA adapter served by a ServingPool."),
        ("lora.spec.source.uri", "hf:ORG/NAME"),
        ("lora.spec.tier", "The minimum tier of the adapter on every ready runner."),
        ("spool.spec.autoscaling.minReplicas", "The gateway holds the first request until a runner is ready"),
        ("spool.spec.template", "The platform's settings apply to unset fields."),
        ("spool.spec.runnerGroups", "The groups of runners, for several kinds of hardware"),
        ("spool.status.selector", "The label selector of the runners' pods"),
    ],
)
def test_kubectl_explains(control_plane: Cluster, field: str, says: str) -> None:
    """The API server serves new resources before it publishes their OpenAPI documents, which kubectl reads."""
    schemas = ("get", "--raw", "/openapi/v3")
    wait_until(
        lambda: f"apis/{GROUP}/{VERSION}" in control_plane.kubectl(*schemas), "OpenAPI documents of Weft's resources"
    )
    assert says in " ".join(control_plane.kubectl("explain", field).split())
