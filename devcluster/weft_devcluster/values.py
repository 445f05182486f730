"""Values of the chart on a test node, where there is no image registry and no hub: for people and for tests."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft_devcluster.image import PAUSE_IMAGE
from weft_devcluster.python_pod import ROOT, python_volumes

QUICKSTART = ROOT / "examples" / "quickstart"
COMPONENTS = ("gateway", "operator", "scheduler", "supervisor", "predictor", "depot", "batch")
SMALL = {"requests": {"cpu": "1m", "memory": "1Mi"}}  # a node has what its machine has, and tests run there too


def small_values() -> dict[str, Any]:
    """Make values for any cluster of tests: next to no requests, and a gateway that asks for no keys."""
    components: dict[str, Any] = {component: {"resources": SMALL} for component in COMPONENTS}
    components["gateway"] |= {"replicas": 1, "auth": False}
    return {**components, "runner": {"pod": {"container": {"env": [{"name": "OMP_NUM_THREADS", "value": "1"}]}}}}


def node_values(sources: Path) -> dict[str, Any]:
    """Make such values with Python from the machine instead of an image, and `sources` as the depot's file root."""
    python = python_volumes()
    environment = [variable for variable in python.env if variable["name"] != "HOME"]  # the chart sets it
    repository, _, tag = PAUSE_IMAGE.rpartition(":")
    image = {"repository": repository, "tag": tag}
    volume = {"name": "sources", "hostPath": {"path": str(sources), "type": "Directory"}}
    depot = {
        "schemes": ["file"],
        "fileRoot": "/sources",
        "pod": overlay([volume], [{"name": "sources", "mountPath": "/sources", "readOnly": True}]),
    }
    common = {"pod": overlay(python.volumes, python.mounts, environment)}
    machine = {"image": image | {"pullPolicy": "Never"}, "common": common, "runner": {"image": image}, "depot": depot}
    return merged(small_values(), machine)


def overlay(volumes: Sequence[Any], mounts: Sequence[Any], environment: Sequence[Any] = ()) -> dict[str, Any]:
    """Make what a component's `pod` says of volumes, if they are mounted, and variables."""
    return {"spec": {"volumes": [*volumes]}, "container": {"volumeMounts": [*mounts], "env": [*environment]}}


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge values as Helm does: mappings by key, everything else replaced."""
    out = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if both else value
    return out


def copy_sources(folder: Path) -> None:
    """Copy the quickstart's model and adapters, readable for everybody: pods run as somebody else."""
    for name in ("model", "adapters"):
        shutil.copytree(QUICKSTART / name, folder / name, dirs_exist_ok=True)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
