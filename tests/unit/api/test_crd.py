"""The CRD files: current, structural, and of one mind with the types that read manifests."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from weft.api import reference
from weft.api.apikey import APIKeySpec, APIKeyStatus
from weft.api.crd import crds, main, render
from weft.api.fields import PATTERN_HELP, URI_PATTERN
from weft.api.loraadapter import LoRAAdapterSpec, LoRAAdapterStatus
from weft.api.reference import page
from weft.api.servingpool import ServingPoolSpec, ServingPoolStatus

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "crds"
CHART_FOLDER = ROOT / "charts" / "weft" / "files" / "crds"  # not a link: checkouts and archives without links keep it
POOL, ADAPTER = "servingpools.serving.weft.dev.yaml", "loraadapters.serving.weft.dev.yaml"
KEY = "apikeys.serving.weft.dev.yaml"
ALLOWED = {
    "type", "format", "description", "default", "enum", "minimum", "maximum", "minLength", "maxLength", "pattern",
    "minItems", "maxItems", "items", "properties", "additionalProperties", "maxProperties", "required",
    "x-kubernetes-validations", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-int-or-string",
    "x-kubernetes-preserve-unknown-fields",
}  # fmt: skip
# The API server describes these itself, and refuses anything but a type for metadata.
OPENINGS = ("The ", "A ", "An ", "Whether ", "How ", "When ", "What happens ")
STANDARD = (".apiVersion", ".kind", ".metadata")


CRDS = cache(crds)  # pydantic makes all schemas in each call; nothing here changes what this one returned


def root(name: str) -> dict[str, Any]:
    return CRDS()[name]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def walk(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from walk(field, f"{path}.{name}")
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from walk(schema["additionalProperties"], f"{path}[]")


def test_the_reference_is_current() -> None:
    assert (ROOT / "docs" / "api.md").read_text() == page(), "run `make crds`"


@pytest.mark.parametrize("folder", [FOLDER, CHART_FOLDER])
def test_the_files_are_current(folder: Path) -> None:
    assert {path.name for path in folder.glob("*.yaml")} == set(CRDS()), "run `make crds`"
    for name, crd in CRDS().items():
        assert (folder / name).read_text() == render(crd), "run `make crds`"


@pytest.mark.parametrize("name", [POOL, ADAPTER, KEY])
def test_no_default_holds_a_null(name: str) -> None:
    """The API server refuses such a schema: null is of no type."""

    def nulls(value: Any) -> bool:
        return value is None or (isinstance(value, dict) and any(map(nulls, value.values())))

    assert not [path for path, schema in walk(root(name)) if "default" in schema and nulls(schema["default"])]


def test_the_command_writes_them(tmp_path: Path) -> None:
    assert main(["--write", str(tmp_path / "new")]) == 0
    for name, crd in CRDS().items():
        assert yaml.safe_load((tmp_path / "new" / name).read_text()) == crd
    assert reference.main(["--write", str(tmp_path / "api.md")]) == 0
    assert (tmp_path / "api.md").read_text() == page()


@pytest.mark.parametrize("name", [POOL, ADAPTER, KEY])
def test_the_schema_is_structural_and_described(name: str) -> None:
    for path, field in walk(root(name)):
        assert set(field) <= ALLOWED, (path, set(field) - ALLOWED)
        typed = field.get("type") in ("object", "array", "string", "integer", "number", "boolean")
        assert typed != ("x-kubernetes-int-or-string" in field), path
        if path not in STANDARD and not path.endswith("[]"):
            text = field.get("description", "").strip()
            assert text.endswith("."), f"{path}: `kubectl explain` needs a sentence"
            assert text.startswith(OPENINGS) or not path, f"{path}: {text}"
            assert "\n" not in text.replace("\n\n", ""), f"{path}: `kubectl explain` wraps lines, and keeps their ends"
        assert "[]" not in path or "default" not in field, f"{path}: each apply of a list without it would be a change"
        if field.get("type") == "object" and path != ".metadata":
            kept = field.get("properties") or field.get("additionalProperties")
            assert kept or field["x-kubernetes-preserve-unknown-fields"], f"{path} would be pruned"


@pytest.mark.parametrize("name", [POOL, ADAPTER, KEY])
def test_everything_in_spec_is_bounded_so_that_rules_stay_cheap(name: str) -> None:
    for path, field in walk(root(name)["properties"]["spec"]):
        if field.get("type") == "string" or "x-kubernetes-int-or-string" in field:
            assert "maxLength" in field or "enum" in field, path
        if field.get("type") == "array":
            assert "maxItems" in field, path
        if "additionalProperties" in field:
            assert "maxProperties" in field, path
        if field.get("type") == "integer":
            assert {"minimum", "maximum", "format"} <= set(field), path


@pytest.mark.parametrize(
    ("name", "spec", "status"),
    [
        (POOL, ServingPoolSpec, ServingPoolStatus),
        (ADAPTER, LoRAAdapterSpec, LoRAAdapterStatus),
        (KEY, APIKeySpec, APIKeyStatus),
    ],
)
def test_fields_and_required_ones_are_those_of_the_types(name: str, spec: Any, status: Any) -> None:
    for part, model in (("spec", spec), ("status", status)):
        schema = root(name)["properties"][part]
        assert set(schema["properties"]) == {field.alias for field in model.model_fields.values()}
        required = {field.alias for field in model.model_fields.values() if field.is_required()}
        assert set(schema.get("required", [])) == required


def test_a_pattern_that_people_get_wrong_is_told_in_words() -> None:
    for name in (POOL, ADAPTER):
        for path, field in walk(root(name)):
            assert field.get("pattern") not in PATTERN_HELP, path
    rule = root(ADAPTER)["properties"]["spec"]["properties"]["source"]["properties"]["uri"]["x-kubernetes-validations"]
    assert [entry["message"] for entry in rule] == [PATTERN_HELP[URI_PATTERN]]


def test_a_pool_gives_its_owner_no_way_to_the_node() -> None:
    """But for two, which the platform's list bounds, no field of the whole spec is one by which pods get there."""
    fields = {path.removeprefix("."): field for path, field in walk(root(POOL)["properties"]["spec"])}
    below = {path: path.rpartition(".")[2].removesuffix("[]") for path in fields}
    forbidden = {
        "volumes", "volumeMounts", "securityContext", "serviceAccountName", "command", "args", "initContainers", "csi",
        "hostNetwork", "hostPID", "hostIPC", "nodeName", "secret", "secretName", "projected", "valueFrom", "envFrom",
        "ephemeral", "nfs", "devices", "hostPort", "imagePullSecrets", "lifecycle", "sysctls",
    }  # fmt: skip
    assert {path for path, name in below.items() if name in forbidden} == set()
    shared = {"hostPath", "persistentVolumeClaim"}
    assert {path for path, name in below.items() if name in shared} == {f"modelCache.{name}" for name in shared}
    templates = "template", "runnerGroups[].template"
    for template in templates:
        assert set(fields[f"{template}.env[]"]["properties"]) == {"name", "value"}
    free = {path for path, field in fields.items() if field.get("x-kubernetes-preserve-unknown-fields")}
    assert free == {f"{t}.{name}" for t in templates for name in ("affinity", "topologySpreadConstraints[]")}


def test_kubectl_shows_and_names_them() -> None:
    pool, adapter = CRDS()[POOL]["spec"], CRDS()[ADAPTER]["spec"]
    assert pool["names"]["shortNames"][0] == "spool"
    assert adapter["names"]["shortNames"][0] == "lora"
    scale = pool["versions"][0]["subresources"]["scale"]
    assert (scale["specReplicasPath"], scale["labelSelectorPath"]) == (".spec.replicas", ".status.selector")
    assert adapter["versions"][0]["subresources"] == {"status": {}}
    for name in (POOL, ADAPTER):
        paths = dict(walk(root(name)))
        for column in CRDS()[name]["spec"]["versions"][0]["additionalPrinterColumns"]:
            path = column["jsonPath"].partition("[")[0]
            assert path in paths or path == ".metadata.creationTimestamp", f"{column['name']} shows nothing"


def test_conditions_merge_by_type() -> None:
    conditions = root(POOL)["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
