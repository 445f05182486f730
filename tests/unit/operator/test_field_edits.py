"""Every field of both resources is changed, given a wrong value, removed and put back, in any order.

The fields and their values come from the CustomResourceDefinitions. Wrong ones are refused; whatever is taken comes to
rest; with the first spec back everything is as a new object has it, and no other object has noticed anything.
"""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.field_edits import Edit, Path, right_edits, wrong_edits
from tests.unit.operator.cluster import ClusterWorld, cluster_world
from tests.unit.operator.planning import adapter_object, adapter_ref, fetched_base, pool_object, pool_ref, verified
from weft_operator.core import Ref
from weft_operator.errors import Invalid
from weft_operator.local.admission import admit
from weft_operator.local.objects import ObjectStore

Json = dict[str, Any]


def some(kind: str) -> st.SearchStrategy[list[Edit]]:
    """Edits of one kind, made when a test first draws: each worker imports this module, one of them runs it."""
    edit = st.deferred(lambda: st.sampled_from(right_edits(kind, most=3) + wrong_edits(kind)))
    return st.lists(edit, min_size=1, max_size=12)


def edited(obj: Json, path: Path, value: Any) -> Json:
    """None: without the field."""
    made = copy.deepcopy(obj)
    of = made["spec"]
    for name in path[:-1]:
        of = of.setdefault(name, {})
    if value is None:
        of.pop(path[-1], None)
    else:
        of[path[-1]] = value
    return made


def new_world() -> ClusterWorld:
    contents = {"file:base": fetched_base(), "file:other": fetched_base()}
    contents |= {"file:upper": verified("a"), "file:beside": verified("b")}
    world = cluster_world(ObjectStore(lambda: 0.0), contents, 1_000_000.0)
    for obj in (
        pool_object(replicas=2),
        pool_object("other", replicas=1),
        adapter_object("upper"),
        adapter_object("beside", pool="default/other"),
    ):
        world.apply(admit(obj, world.store.find))
    world.at_rest()
    return world


def owned(world: ClusterWorld) -> Json:
    """What pools own, without what differs between two objects of one spec."""
    found = {}
    for key, obj in world.cluster.objects.items():
        found[str(key)] = (obj["metadata"]["labels"], obj.get("spec"))
    return found


def served(world: ClusterWorld) -> Json:
    own = ("uid", "created_unix_s", "generation")
    return {
        entry.name: {f: getattr(entry, f) for f in entry.__dataclass_fields__ if f not in own}
        for entry in world.routed.values()
    }


def versions(world: ClusterWorld) -> list[str]:
    """Of the objects beside."""
    refs: tuple[Ref, ...] = (pool_ref("other"), adapter_ref("beside"))
    return [world.store.get(ref)["metadata"]["resourceVersion"] for ref in refs]


def as_applied(world: ClusterWorld, ref: Ref) -> Json:
    obj = copy.deepcopy(dict(world.store.get(ref)))
    return {**obj, "metadata": {"namespace": ref.namespace, "name": ref.name}}


def through(ref: Ref, steps: list[Edit]) -> None:
    world = new_world()
    first, beside = as_applied(world, ref), versions(world)
    for path, value in steps:
        wish = edited(as_applied(world, ref), path, value)
        try:
            admitted = admit(wish, world.store.find)
        except Invalid:
            continue
        world.apply(admitted)
        world.at_rest()
    world.apply(admit(first, world.store.find))
    world.wait(600)
    world.at_rest()
    fresh = new_world()
    assert owned(world) == owned(fresh)
    assert served(world) == served(fresh)
    assert versions(world) == beside
    for kind in ("Ready", "Accepted"):
        assert world.condition(ref, kind)[0] == "True"


@pytest.mark.slow
@given(some("ServingPool"))
def test_a_pool_whose_fields_were_edited_and_put_back_is_as_a_new_one(steps: list[Edit]) -> None:
    through(pool_ref(), steps)


@pytest.mark.slow
@given(some("LoRAAdapter"))
def test_an_adapter_whose_fields_were_edited_and_put_back_is_as_a_new_one(steps: list[Edit]) -> None:
    through(adapter_ref("upper"), steps)
