"""The fields of this version that a group's OpenAPI document lacks."""

from copy import deepcopy
from typing import Any

import pytest

from weft.api.crd import crds
from weft.api.meta import GROUP, VERSION
from weft_operator.kubernetes import missing_fields


@pytest.fixture
def schemas() -> dict[str, Any]:
    """Return schemas by kind, as the API server publishes them for the definitions of this version."""
    found: dict[str, Any] = {}
    for crd in crds().values():
        kind = crd["spec"]["names"]["kind"]
        schema = deepcopy(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
        schema["x-kubernetes-group-version-kind"] = [{"group": GROUP, "version": VERSION, "kind": kind}]
        found[kind] = schema
    return found


def document(schemas: dict[str, Any]) -> dict[str, Any]:
    return {"components": {"schemas": {f"weft.{kind}": schema for kind, schema in schemas.items()} | {"Status": {}}}}


def test_definitions_of_this_version_lack_nothing(schemas: dict[str, Any]) -> None:
    assert missing_fields(document(schemas)) == []


def test_the_outermost_field_that_is_missing_is_named(schemas: dict[str, Any]) -> None:
    fields = schemas["ServingPool"]["properties"]
    del fields["spec"]["properties"]["phases"]
    del fields["spec"]["properties"]["runnerGroups"]["items"]["properties"]["minRunners"]
    del schemas["LoRAAdapter"]["properties"]["status"]["properties"]["versions"]
    assert sorted(missing_fields(document(schemas))) == [
        "LoRAAdapter.status.versions",
        "ServingPool.spec.phases",
        "ServingPool.spec.runnerGroups[].minRunners",
    ]


def test_a_newer_definition_lacks_nothing(schemas: dict[str, Any]) -> None:
    schemas["ServingPool"]["properties"]["spec"]["properties"]["speculation"] = {"type": "object"}
    assert missing_fields(document(schemas)) == []


def test_a_part_that_keeps_unknown_fields_lacks_none(schemas: dict[str, Any]) -> None:
    schemas["ServingPool"]["properties"]["spec"] = {"x-kubernetes-preserve-unknown-fields": True}
    assert missing_fields(document(schemas)) == []
