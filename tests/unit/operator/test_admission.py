"""Admission: the same refusals as the API server's schema, with the field's path."""

from typing import Any

import pytest

from harness.bad_manifests import adapter, pool
from tests.unit.operator.planning import stored
from weft_operator.core import PoolObject, parse
from weft_operator.errors import Invalid
from weft_operator.local import admit


def test_defaults_are_written_out_so_that_the_planner_need_not_know_them() -> None:
    found = parse(stored(admit(pool(), lambda _: None)))
    assert isinstance(found, PoolObject)
    assert (found.spec.advanced.max_adapters, found.spec.advanced.max_queue, found.spec.drain_seconds) == (
        None,
        1000,
        300,
    )
    assert (found.allowed_namespaces, found.spec.replicas, found.model_name) == ((), None, "tiny")


def test_a_status_in_a_manifest_is_not_taken() -> None:
    assert "status" not in admit(adapter() | {"status": {"modelName": "x"}}, lambda _: None)


@pytest.mark.parametrize(
    ("wish", "field"), [(pool() | {"kind": "Pod"}, "kind"), (pool() | {"apiVersion": "v1"}, "apiVersion")]
)
def test_a_wrong_field_is_named(wish: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as caught:
        admit(wish, lambda _: None)
    assert field in [cause.field for cause in caught.value.causes]
    assert caught.value.body()["code"] == 422
