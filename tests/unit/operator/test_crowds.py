"""What one tenant makes the operator do with thousands of objects: work that grows with them, not with their square."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.operator.planning import adapter_object, adapter_ref, check_indexes, pool_object, stored
from weft_operator.core import ClusterState, DesiredState, acceptance
from weft_operator.core.acceptance import pool_view, reject_adapter
from weft_operator.core.resources import AdapterObject, parse_adapter, parse_pool
from weft_operator.core.scaling import Bounds
from weft_operator.core.validation import validate

MANY = 400


def crowd(**spec: Any) -> list[AdapterObject]:
    return [parse_adapter(stored(adapter_object(f"a{number}", **spec))) for number in range(MANY)]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows with each claimant that is looked at."""
    seen: list[None] = []
    real = acceptance._precedence  # pyright: ignore[reportPrivateUsage]

    def counting(claimant: Any) -> Any:
        seen.append(None)
        return real(claimant)

    monkeypatch.setattr(acceptance, "_precedence", counting)
    return seen


@pytest.mark.parametrize("spec", [{"modelName": "wanted"}, {"pinned": True}, {"modelName": "wanted", "pinned": True}])
def test_a_manifest_and_one_of_a_crowd_are_judged_in_a_few_passes(compared: list[None], spec: dict[str, Any]) -> None:
    desired = DesiredState()
    for adapter in crowd(**spec):
        desired.add(adapter)
    desired.add(parse_pool(stored(pool_object(allowedNamespaces=["*"]))))  # behind its adapters
    check_indexes(desired)
    assert validate(adapter_object("one-more", **spec), None, desired).objections
    assert len(compared) <= 3 * MANY
    compared.clear()
    refused = reject_adapter(desired.adapters[adapter_ref(f"a{MANY - 1}")], desired)
    assert refused is not None
    assert refused.reason in ("NameConflict", "NoSlots")
    assert len(compared) <= 3 * MANY


@pytest.mark.parametrize("spec", [{"modelName": "wanted"}, {"pinned": True}])
def test_adapters_that_wait_for_a_pool_concern_nobody_but_themselves(spec: dict[str, Any]) -> None:
    desired = DesiredState()
    for adapter in crowd(**spec):
        assert desired.put(adapter) == {adapter.meta.ref}
    check_indexes(desired)
    pool = parse_pool(stored(pool_object()))
    assert desired.put(pool) == {pool.meta.ref, *desired.adapters}
    check_indexes(desired)
    first = desired.adapters[adapter_ref("a0")]
    assert desired.drop(first.meta.ref) == {first.meta.ref, pool.meta.ref, *desired.adapters}
    check_indexes(desired)


def ready(adapter: AdapterObject, *, status: str = "True") -> AdapterObject:
    return replace(adapter, status={"conditions": [{"type": "Ready", "status": status}]})


def test_a_pool_counts_its_crowd_without_looking_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    desired, pool = DesiredState(), parse_pool(stored(pool_object()))
    desired.add(pool)
    for number, adapter in enumerate(crowd()):
        desired.add(ready(adapter) if number % 4 else adapter)
    check_indexes(desired)
    monkeypatch.setattr(desired, "adapters_of", None)
    view = pool_view(pool, ClusterState(desired), Bounds(1, 1, 1), 1, 0.0)
    assert (view.adapters_total, view.adapters_ready) == (MANY, MANY * 3 // 4)


def test_a_status_concerns_the_pool_when_the_adapter_becomes_ready_or_not() -> None:
    desired, pool = DesiredState(), parse_pool(stored(pool_object()))
    desired.add(pool)
    adapter = crowd()[0]
    desired.add(adapter)
    assert desired.put(ready(adapter, status="False")) == {adapter.meta.ref}
    assert desired.put(ready(adapter)) == {adapter.meta.ref, pool.meta.ref}
    more = replace(ready(adapter), status={**ready(adapter).status, "unavailableRunners": 2})
    assert desired.put(more) == {adapter.meta.ref}
    assert desired.put(adapter) == {adapter.meta.ref, pool.meta.ref}
    check_indexes(desired)
    assert desired.counts(pool.meta.ref) == (1, 0)
