"""Wishes against a real API server: what it makes of one fulfils it, and a second look writes nothing.

The planner's model of the server is `tests/unit/operator/cluster.py`; here is the real one.
"""

import json
from typing import Any

import pytest

from harness.bad_manifests import pool
from harness.cluster.cluster import Cluster
from weft_operator.core import PoolObject
from weft_operator.core.children import MANAGER, make_children
from weft_operator.core.drift import matches, spec_hash
from weft_operator.core.resources import parse_pool
from weft_operator.core.runner_defaults import RunnerDefaults
from weft_operator.core.state import Child

BASE = "sha256:" + "b" * 64
SITES = {
    "plain": RunnerDefaults("registry.example/runner:1", "supervisor:7300", "http://depot:7100"),
    "whole": RunnerDefaults(
        "registry.example/runner@sha256:" + "0" * 64,
        "supervisor:7300",
        "https://depot:7100",
        image_pull_policy="IfNotPresent",
        image_pull_secrets=("regcred", "other"),
        tls_secret="runner-tls",
        command=("/opt/venv/bin/python", "-m", "weft_runner"),
        env=(
            {"name": "PYTHONPATH", "value": ""},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ),
        volumes=(
            {"name": "code", "hostPath": {"path": "/code", "type": ""}},
            {"name": "files", "configMap": {"name": "files", "optional": True, "defaultMode": 0o444}},
        ),
        volume_mounts=({"name": "code", "mountPath": "/code", "readOnly": False}, {"name": "files", "mountPath": "/f"}),
        resources={"requests": {"cpu": "0.5", "memory": "1024Mi"}, "limits": {"memory": "2Gi"}},
        pod_labels={"team": "platform"},
        pod_annotations={"note": "x"},
    ),
}
TEMPLATE: dict[str, Any] = {
    "image": "own:2",
    "resources": {"limits": {"nvidia.com/gpu": 1, "cpu": "1500m", "memory": "1e9"}, "requests": {"cpu": 1.5e0}},
    "env": [{"name": "EMPTY", "value": ""}, {"name": "THREADS", "value": "2"}],
    "labels": {"team": "red"},
    "annotations": {"owner": "me"},
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [
        {"key": "gpu", "operator": "Exists"},
        {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0},
    ],
    "affinity": {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 1, "podAffinityTerm": {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}}}
            ]
        }
    },
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    "runtimeClassName": "nvidia",
}
TEMPLATE["resources"]["requests"] = {"cpu": "1.5", "memory": "500M"}


@pytest.fixture(params=sorted(SITES))
def defaults(request: pytest.FixtureRequest) -> RunnerDefaults:
    return SITES[request.param]


def stored_pool(control_plane: Cluster, namespace: str, name: str = "demo", **spec: Any) -> PoolObject:
    """Return a pool as this API server stores it: its owner references have to name a real one."""
    (stored,) = control_plane.apply(pool(name, namespace, **spec))
    return parse_pool(stored)


def wishes(pool: PoolObject, defaults: RunnerDefaults, size: int) -> list[Child]:
    return make_children(pool, BASE, defaults, {group.name: size for group in pool.groups})


def apply(control_plane: Cluster, child: Child) -> dict[str, Any]:
    """Apply a child as the shell does: server-side, forced. Returns the object as it is then."""
    (made,) = control_plane.apply(child.manifest, manager=MANAGER)
    return made


def live(control_plane: Cluster, child: Child) -> dict[str, Any]:
    return control_plane.get(child.kind.lower(), child.name, child.namespace)


def generation(obj: dict[str, Any]) -> Any:
    return obj["metadata"].get("generation")


GROUPS = [
    {"name": "fast", "minRunners": 1, "maxRunners": 2, "template": TEMPLATE},
    {"name": "cheap", "template": {"image": "own:3"}},
]


@pytest.mark.parametrize("spec", [{}, {"template": TEMPLATE}, {"runnerGroups": GROUPS}], ids=["plain", "own", "groups"])
@pytest.mark.parametrize("size", [0, 2])
def test_what_servers_make_of_a_manifest_fits_it(
    control_plane: Cluster, namespace: str, defaults: RunnerDefaults, spec: dict[str, Any], size: int
) -> None:
    pool = stored_pool(control_plane, namespace, **spec)
    for child in wishes(pool, defaults, size):
        answer = apply(control_plane, child)
        assert matches(answer, child.manifest), child.key
        assert matches(live(control_plane, child), child.manifest), child.key
        again = apply(control_plane, child)
        assert (again.get("spec"), generation(again)) == (answer.get("spec"), generation(answer)), child.key


def test_what_others_change_is_found_and_put_back(control_plane: Cluster, namespace: str) -> None:
    pool = stored_pool(control_plane, namespace, template=TEMPLATE)
    child = next(wish for wish in wishes(pool, SITES["whole"], 2) if wish.kind == "Deployment")
    patches: list[Any] = [
        {"spec": {"replicas": 5}},
        {"spec": {"template": {"spec": {"nodeSelector": {"gpu": "none"}}}}},
        {"spec": {"template": {"spec": {"automountServiceAccountToken": None}}}},
        {"spec": {"template": {"spec": {"tolerations": [{"operator": "Exists"}]}}}},
        {"spec": {"strategy": {"rollingUpdate": {"maxSurge": 1}}}},
        {"metadata": {"labels": {"serving.weft.dev/group": "other"}}},
        {"metadata": {"annotations": {"serving.weft.dev/intent": None}}},
    ]
    apply(control_plane, child)
    for patch in patches:
        edit = json.dumps(patch)
        control_plane.kubectl("patch", "deployment", child.name, "-n", namespace, "--type=merge", "-p", edit)
        assert not matches(live(control_plane, child), child.manifest), patch
        assert matches(apply(control_plane, child), child.manifest), patch


def test_what_is_no_longer_intended_is_found_and_deleted(control_plane: Cluster, namespace: str) -> None:
    before, after = (
        next(wish for wish in wishes(pool, SITES["plain"], 1) if wish.kind == "Deployment")
        for pool in (
            stored_pool(control_plane, namespace, template=TEMPLATE),
            stored_pool(control_plane, namespace, template={"image": "own:2"}),
        )
    )
    apply(control_plane, before)
    assert not matches(live(control_plane, before), after.manifest)
    pod = apply(control_plane, after)["spec"]["template"]["spec"]
    assert "nodeSelector" not in pod
    assert "THREADS" not in {item["name"] for item in pod["containers"][0]["env"]}
    assert spec_hash(live(control_plane, after)) == spec_hash(after.manifest)


def test_names_of_any_pool_are_taken(control_plane: Cluster, namespace: str) -> None:
    for name in ("7b", "x" * 63, "a-b-c"):
        pool = stored_pool(control_plane, namespace, name, runnerGroups=[{"name": "g" * 32}])
        for child in wishes(pool, SITES["plain"], 1):
            assert matches(apply(control_plane, child), child.manifest)
