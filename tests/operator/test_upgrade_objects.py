"""Objects of an earlier form, converted, meet today's definitions and operator: nothing is lost, and they serve."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.operator.stage import Stage, playing
from weft.api.conversion import convert

STORED = Path(__file__).parent / "fixtures" / "v1alpha1.yaml"
PASSING = ("lastTransitionTime", "publishTime", "time")  # when something was observed
Json = dict[str, Any]


def stored(namespace: str) -> list[Json]:
    """Return objects of the fixture as `weft convert` leaves them."""
    return [dict(convert(obj).obj) for obj in yaml.safe_load_all(STORED.read_text().replace("NAMESPACE", namespace))]


def take_in(stage: Stage, obj: Json) -> None:
    """Store an object as etcd has it, with its finalizers and its status."""
    kind, name = obj["kind"].lower(), obj["metadata"]["name"]
    folder = stage.control_plane.folder / "stored"
    folder.mkdir(exist_ok=True)
    path = folder / f"{kind}-{name}.json"
    path.write_text(json.dumps({**obj, "status": {}}))
    stage.kubectl("create", "--validate=ignore", "-f", path)
    status = json.dumps({"status": obj["status"]})
    stage.kubectl("patch", kind, name, "--subresource=status", "--type=merge", "-p", status)


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    """Return every path of `before` that `after` does not have with the same value."""
    if isinstance(before, dict):
        fields: Json = before  # pyright: ignore[reportUnknownVariableType]
        within = after if isinstance(after, dict) else {}
        return [
            gone
            for name, value in fields.items()
            if name not in PASSING
            for gone in lost(value, within.get(name), f"{path}.{name}")
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = zip(before, after, strict=True)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        return [gone for index, (a, b) in enumerate(pairs) for gone in lost(a, b, f"{path}[{index}]")]
    return [] if before == after else [f"{path}: {before!r} became {after!r}"]


@pytest.fixture
def objects(stage: Stage) -> list[Json]:
    found = stored(stage.namespace)
    for obj in found:
        take_in(stage, obj)
    return found


def test_every_field_of_what_was_stored_is_kept_and_all_are_ready_again(stage: Stage, objects: list[Json]) -> None:
    for obj in objects:
        found = stage.get(obj["kind"].lower(), obj["metadata"]["name"])
        assert not lost({"spec": obj["spec"], "status": obj["status"]}, found), "before an operator has seen it"
    with playing(stage):
        stage.wait_for("servingpool", "base", "Ready")
        stage.wait_for("loraadapter", "upper", "Ready")
        stage.wait_for_value("loraadapter", "upper", "status.unavailableRunners", 0)
        stage.wait_for_value("servingpool", "base", "status.adapters", {"total": 2, "ready": 1})
        stage.wait_for("loraadapter", "nowhere", "Ready", "False")
        for obj in objects:
            kind, name = obj["kind"].lower(), obj["metadata"]["name"]
            found = stage.get(kind, name)
            assert found["metadata"].get("finalizers") == obj["metadata"].get("finalizers")
            assert found["metadata"]["generation"] == 1, "no version rewrites a spec"
            assert not lost({"spec": obj["spec"]}, found)
            assert not lost({"status": _steady(obj["status"])}, {"status": _steady(found["status"])})


def _steady(status: Json) -> Json:
    """Return conditions by type, and without what says when a scheduler or a generation was seen."""
    conditions = {c["type"]: {k: v for k, v in c.items() if k != "observedGeneration"} for c in status["conditions"]}
    return {**{name: v for name, v in status.items() if name != "observedGeneration"}, "conditions": conditions}
