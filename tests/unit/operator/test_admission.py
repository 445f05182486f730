"""Admission: the same refusals as the API server's schema, with the field's path."""

from typing import Any

import pytest

from tests.unit.operator.planning import stored
from weft_operator.core import Pool, parse
from weft_operator.errors import Invalid
from weft_operator.local import admit


def manifest(kind: str, **spec: Any) -> dict[str, Any]:
    meta = {"name": "one", "namespace": "acme"}
    return {"apiVersion": "serving.weft.dev/v1alpha1", "kind": kind, "metadata": meta, "spec": spec}


def adapter(**spec: Any) -> dict[str, Any]:
    return manifest("LoRAAdapter", **{"poolRef": {"name": "p"}, "source": {"uri": "file:a"}} | spec)


def pool(**spec: Any) -> dict[str, Any]:
    return manifest("ServingPool", **{"model": {"uri": "file:m"}} | spec)


def test_defaults_are_written_out_so_that_the_planner_need_not_know_them() -> None:
    admitted = admit(pool(), lambda _: None)
    found = parse(stored(admitted))
    assert isinstance(found, Pool)
    assert (found.spec.advanced.max_adapters, found.spec.advanced.max_queue, found.spec.drain_seconds) == (
        None,
        1000,
        300,
    )
    assert (found.allowed_namespaces, found.spec.replicas, found.model_name) == ((), None, "one")


def test_a_status_in_a_manifest_is_not_taken() -> None:
    assert "status" not in admit(adapter() | {"status": {"modelName": "x"}}, lambda _: None)


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        (pool() | {"metadata": {"name": "Big"}}, "metadata.name"),
        (pool() | {"kind": "Pod"}, "kind"),
        (pool() | {"apiVersion": "v1"}, "apiVersion"),
    ],
)
def test_a_wrong_field_is_named(wish: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as caught:
        admit(wish, lambda _: None)
    assert field in [cause.field for cause in caught.value.causes]
    assert caught.value.body()["code"] == 422
