"""What a stored pool means where its spec leaves something open, beside the API's own defaults."""

from tests.unit.operator.planning import pool_object, stored
from weft_operator.core import PoolObject, parse
from weft_operator.core.resources import parse_pool


def test_a_pool_without_groups_has_one_that_may_be_empty_and_as_large_as_the_pool() -> None:
    template = {"image": "runner:1"}
    (group,) = parse_pool(stored(pool_object(template=template))).groups
    assert (group.name, group.template, group.min, group.max, group.phase) == ("runners", template, 0, None, "Any")


def test_a_spec_is_read_once_a_generation_and_all_else_of_an_object_each_time() -> None:
    before = parse_pool(stored(pool_object()))
    meta = {"uid": before.meta.uid, "generation": 2, "resourceVersion": "2", "finalizers": ["a"]}
    changed = parse(stored(pool_object(drainSeconds=9), **meta) | {"status": {"replicas": 3}}, before)
    assert isinstance(changed, PoolObject)
    assert (changed.spec.drain_seconds, changed.meta.finalizers, changed.status) == (9, ("a",), {"replicas": 3})
    third = stored(pool_object(drainSeconds=9), **meta | {"resourceVersion": "3"}) | {"status": {"replicas": 4}}
    later = parse(third, changed)
    assert isinstance(later, PoolObject)
    assert (later.meta.resource_version, later.status) == ("3", {"replicas": 4})
    assert later.spec is changed.spec
    assert isinstance(
        found := parse(stored(pool_object(drainSeconds=5), **meta | {"uid": "another"}), later), PoolObject
    )
    assert found.spec.drain_seconds == 5, "an object of the same name that was made anew"
