"""Every field of both resources is changed, given a wrong value, removed and put back, in any order.

The fields and their values come from the CustomResourceDefinitions. Wrong ones are refused; whatever is taken comes to
rest; with the first spec back everything is as a new object has it, and no other object has noticed anything.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.field_edits import Edit, Path, Place, right_edits, unread, wrong_edits
from tests.unit.operator.cluster import ClusterWorld, cluster_world
from tests.unit.operator.planning import (
    adapter_object,
    adapter_ref,
    digest,
    fetched_base,
    pool_object,
    pool_ref,
    verified,
)
from weft.domain.routes import CanaryCounts
from weft_operator.core import Ref
from weft_operator.errors import Invalid
from weft_operator.local import ObjectStore, admit

Json = dict[str, Any]


def some(kind: str) -> st.SearchStrategy[list[Edit]]:
    """Edits of one kind, made when a test first draws: each worker imports this module, one of them runs it."""
    edit = st.deferred(lambda: st.sampled_from(right_edits(kind, most=3) + wrong_edits(kind)))
    return st.lists(edit, min_size=1, max_size=12)


def edited(obj: Json, path: Path, value: Any) -> Json:
    """Return the object with another value; None: without the field."""
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
    """Return what pools own, without what differs between two objects of one spec."""
    found = {}
    for key, obj in world.cluster.objects.items():
        found[str(key)] = (obj["metadata"]["labels"], obj.get("spec"))
    return found


def served(world: ClusterWorld) -> Json:
    own = ("uid", "created_unix_s", "generation")
    return {
        entry.model_name: {f: getattr(entry, f) for f in entry.__dataclass_fields__ if f not in own}
        for entry in world.routed.values()
    }


def versions(world: ClusterWorld) -> list[str]:
    """Return the versions of the objects beside."""
    refs: tuple[Ref, ...] = (pool_ref("other"), adapter_ref("beside"))
    return [world.store.get(ref)["metadata"]["resourceVersion"] for ref in refs]


def as_applied(world: ClusterWorld, ref: Ref) -> Json:
    return {**copy.deepcopy(dict(world.store.get(ref))), "metadata": {"namespace": ref.namespace, "name": ref.name}}


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


# ---------------------------------------------------------------- each field's value reaches something

HF: Json = {"uri": "hf:aa/bb"}
CANARY: Json = {"source": {"uri": "file:beside"}, "weight": 10}
TEMPLATES = {"inline": {"chatTemplate": {"from": "Inline"}}, "configMapRef": {"chatTemplate": {"from": "ConfigMap"}}}
POOL_NEEDS: dict[Place, Json] = {
    ("model", "revision"): {"model": HF},
    ("model", "credentialsRef"): {"model": HF},
    ("model", "endpoint"): {"model": {"uri": "s3://aaa/bb"}},
    ("autoscaling",): {"autoscaling": {"maxReplicas": 3}},
    ("memory", "offload"): {"memory": {"offload": {"deviceBytes": "1Gi", "diskPath": "/aa"}}},
    ("advanced", "sparseAttention"): {"memory": {"offload": {"deviceBytes": "1Gi", "diskPath": "/aa"}}},
    ("phases",): {"phases": {"mode": "Split"}, "replicas": 3},
    ("runnerGroups", 0): {"replicas": 3, "runnerGroups": [{"name": "aa"}, {"name": "cc"}]},
    ("runnerGroups", 0, "minRunners"): {"runnerGroups": [{"name": "aa"}, {"name": "cc", "minRunners": 3}]},
    ("runnerGroups", 0, "phase"): {"phases": {"mode": "Split"}},
    ("slo", "admission"): {"slo": {"ttftMs": 1000}},
    ("parallelism", "podsPerRunner"): {"parallelism": {"tensor": 2}},
    **{("model", "chatTemplate", name): {"model": needs} for name, needs in TEMPLATES.items()},
}
ADAPTER_NEEDS: dict[Place, Json] = {
    **{("chatTemplate", name): needs for name, needs in TEMPLATES.items()},
    ("source", "revision"): {"source": HF},
    ("source", "credentialsRef"): {"source": HF},
    ("source", "endpoint"): {"source": {"uri": "s3://aaa/bb"}},
    ("canary",): {"canary": CANARY},
    ("canary", "source", "revision"): {"canary": {"source": HF}},
    ("canary", "source", "credentialsRef"): {"canary": {"source": HF}},
    ("canary", "source", "endpoint"): {"canary": {"source": {"uri": "s3://aaa/bb"}}},
    ("canary", "maxErrorPercent"): {"canary": {"minRequests": 1}},
    ("canary", "promoteAfter"): {"canary": {"minRequests": 1, "maxErrorPercent": 100}},
}


def told(world: ClusterWorld) -> str:
    """Return what everybody else was told: the cluster, the scheduler, the depot and people. Uids are drawn.

    What a pool is hashed to is nobody's reason: it only says that something is another.
    """
    world.settle()
    cluster = [(str(key), obj["metadata"]["labels"], obj.get("spec")) for key, obj in world.cluster.objects.items()]
    entries = [replace(entry, generation=0) for entry in world.routed_pools.values()]
    conditions = [obj.get("status", {}).get("conditions") for obj in world.store.objects()]
    text = repr((cluster, entries, world.routed, world.unserved, world.asked, conditions))
    for obj in world.store.objects():
        text = text.replace(obj["metadata"]["uid"], obj["metadata"]["name"])
    return text


def outcome_of_pool(spec: Json) -> str | None:
    contents = {uri: fetched_base() for uri in ("file:base", "file:beside", "file:next", "hf:aa/bb", "s3://aaa/bb")}
    world = cluster_world(ObjectStore(lambda: 0.0), contents, 1_000_000.0)
    if spec["model"].get("chatTemplate") == {"from": "Inline"}:
        # Auto and Base are the same here, and the others need something each.
        spec["model"]["chatTemplate"]["inline"] = "aa"
    try:
        world.apply(admit(pool_object() | {"spec": spec}, world.store.find))
    except Invalid:
        return None
    return told(world)


def outcome_of_adapter(spec: Json) -> str | None:
    """An adapter is served, its canary fails one request of two, an hour and a half later its source is another."""
    contents = {"file:base": fetched_base(), "file:upper": verified("a"), "file:beside": verified("b")}
    contents |= {"file:next": verified("c"), "hf:aa/bb": verified("d"), "s3://aaa/bb": verified("e")}
    world = cluster_world(ObjectStore(lambda: 0.0), contents, 1_000_000.0)
    world.apply(admit(pool_object(), world.store.find))
    try:
        world.apply(admit(adapter_object("walked") | {"spec": spec}, world.store.find))
    except Invalid:
        return None
    first = told(world)
    for letter in "bcde":
        world.canaries[digest(letter)] = CanaryCounts(digest(letter), 2, 1, 2, 0)
    world.wait(5400)
    second = told(world)
    world.contents["file:last"] = verified("f")
    world.apply(admit(adapter_object("walked") | {"spec": spec | {"source": {"uri": "file:last"}}}, world.store.find))
    return first + second + told(world)


def test_the_value_of_each_field_of_a_pool_reaches_something() -> None:
    assert unread("ServingPool", {"model": {"uri": "file:base"}}, POOL_NEEDS, outcome_of_pool) == []


def test_the_value_of_each_field_of_an_adapter_reaches_something() -> None:
    base = {"poolRef": {"name": "base", "namespace": "default"}, "source": {"uri": "file:upper"}}
    assert unread("LoRAAdapter", base, ADAPTER_NEEDS, outcome_of_adapter) == []


def test_a_field_that_nobody_reads_is_named() -> None:
    def without_scope(spec: Json) -> str:
        return repr({name: value for name, value in spec.items() if name != "scope"})

    assert unread("APIKey", {}, {}, without_scope) == ["scope"]
