"""The planner under any history: it comes to rest, orders nothing twice, and forgets nothing at a restart."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.operator.planning import (
    World,
    adapter_object,
    adapter_ref,
    check_store,
    failed,
    fetched_base,
    pool_object,
    pool_ref,
    verified,
    world_of,
)
from weft_operator.core import OperationStatus, OperatorPolicy
from weft_operator.local import ObjectStore

NAMES = st.sampled_from(["a", "b", "c"])
NAMESPACES = st.sampled_from(["acme", "globex"])
POOLS = st.sampled_from(["one", "two"])
CONTENTS = st.one_of(
    st.sampled_from("0123456789").map(verified),
    st.sampled_from(["SourceNotFound", "ShapeMismatch", "RankTooLarge"]).map(failed),
    st.just(failed("NotFinite", validated=True)),
)
BASES = st.one_of(st.just(fetched_base()), st.just(failed("UnsupportedModel")))
ALLOWED: Any = st.sampled_from([["*"], [], ["acme"]])

OPERATIONS = st.one_of(
    st.tuples(st.just("adapter"), NAMESPACES, NAMES, POOLS, st.none() | st.sampled_from(["x", "y", "one"])),
    st.tuples(st.just("pool"), POOLS, st.none() | st.integers(0, 3), ALLOWED, st.none() | st.just("x")),
    st.tuples(st.just("delete adapter"), NAMESPACES, NAMES),
    st.tuples(st.just("delete pool"), POOLS),
    st.tuples(st.just("content"), NAMES, CONTENTS),
    st.tuples(st.just("base"), POOLS, BASES),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 2.5, 70.0, 500.0])),
    st.tuples(st.just("step")),
    st.tuples(st.just("settle")),
)


def new_world() -> World:
    return world_of(ObjectStore(lambda: 0.0), {}, 1_000_000.0)


def perform(world: World, operation: tuple[Any, ...]) -> None:
    match operation:
        case ("adapter", namespace, name, pool, model_name):
            more = {"modelName": model_name} if model_name else {}
            world.apply(adapter_object(name, namespace, f"default/{pool}", **more))
        case ("pool", name, replicas, allowed, model_name):
            model = {"name": model_name or name, "uri": f"file:{name}"}
            more = {} if replicas is None else {"replicas": replicas}
            world.apply(pool_object(name, model=model, allowedNamespaces=allowed, **more))
        case ("delete adapter", namespace, name):
            if world.store.find(adapter_ref(name, namespace)):
                world.store.delete(adapter_ref(name, namespace))
        case ("delete pool", name):
            if world.store.find(pool_ref(name)):
                world.store.delete(pool_ref(name))
        case ("content", name, answer):
            world.contents[f"file:{name}"] = answer
        case ("base", name, answer):
            world.contents[f"file:{name}"] = answer
        case ("wait", seconds):
            world.now += seconds
        case ("step",):
            world.step()
        case _:
            world.settle()


@given(st.lists(OPERATIONS, max_size=25))
def test_any_history_comes_to_rest_and_then_nothing_is_ordered(history: list[tuple[Any, ...]]) -> None:
    world = new_world()
    for operation in history:
        perform(world, operation)
    world.settle()
    assert world.plan() == []
    world.wait(30.0)  # sources that changed are found
    world.wait(30.0)
    writes = world.status_writes
    world.wait(30.0)
    assert world.status_writes == writes
    check_store(world.store)


@given(st.lists(OPERATIONS, max_size=20))
def test_names_are_served_once_and_only_from_accepted_objects(history: list[tuple[Any, ...]]) -> None:
    world = new_world()
    for operation in history:
        perform(world, operation)
    world.wait(60.0)
    bases = [entry.base_model_name for entry in world.routed_pools.values()]
    names = [entry.model_name for entry in world.routed.values()] + bases
    assert len(names) == len(set(names))
    refs = {adapter.meta.uid: ref for ref, adapter in world.desired.adapters.items()}
    for uid, entry in world.routed.items():
        ref = refs[uid]
        assert world.condition(ref, "Accepted") == ("True", "Accepted")
        assert world.condition(ref, "Ready")[0] == "True"
        assert world.status(ref)["digest"] == entry.digest
    for obj in world.store.objects("LoRAAdapter"):
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in obj["status"]["conditions"])
        assert ready is (obj["metadata"]["uid"] in world.routed)


@given(st.lists(OPERATIONS, max_size=20), st.integers(1, 4))
def test_a_restart_anywhere_ends_in_the_same_state(history: list[tuple[Any, ...]], early: int) -> None:
    world = new_world()
    for operation in history:
        perform(world, operation)
    for _ in range(early):  # crash in the middle of things; an edit nobody has planned for yet is told of nowhere
        world.step()
    assert served(world.restarted()) == served(world)


def served(world: World) -> tuple[object, ...]:
    world.wait(60.0)
    world.wait(60.0)
    pools = {ref: entry.base_digest for ref, entry in world.routed_pools.items()}
    adapters = {entry.model_name: (entry.pool, entry.digest) for entry in world.routed.values()}
    return pools, adapters, {ref: sorted(runners) for ref, runners in world.observed.runners.items()}


@given(st.lists(st.tuples(NAMES, CONTENTS, st.sampled_from(["base", "absent", "closed"])), max_size=8), st.booleans())
def test_bad_objects_never_disturb_others(bad: list[tuple[str, OperationStatus, str]], late: bool) -> None:
    world = world_of(ObjectStore(lambda: 0.0), {"file:base": fetched_base(), "file:upper": verified("a")}, 1_000_000.0)
    world.apply(pool_object())
    world.apply(pool_object("closed", allowedNamespaces=[]))
    world.apply(adapter_object("upper"))
    if late:
        world.settle()
    for name, answer, pool in bad:
        world.contents[f"file:bad-{name}"] = answer
        world.apply(adapter_object(f"bad-{name}", "globex", f"default/{pool}", modelName="acme/upper"))
        world.step()
    world.wait(10.0)
    assert world.condition(adapter_ref("upper"), "Ready") == ("True", "Published")
    assert [entry.namespace for entry in world.routed.values() if entry.model_name == "acme/upper"] == ["acme"]


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 5)
@given(st.integers(1, 40), st.integers(0, 40), st.sampled_from([1.0, 3.0, 10.0]), st.floats(0.1, 5.0))
def test_at_rest_no_more_is_asked_than_policy_allows(good_ones: int, bad_ones: int, most: float, step_s: float) -> None:
    world = new_world()
    world.policy = OperatorPolicy(resolve_period_s=2.0, resolves_per_s=most)
    world.contents = {"file:base": fetched_base()} | {f"file:a{i}": verified("a") for i in range(good_ones)}
    world.apply(pool_object())
    for number in range(good_ones + bad_ones):
        world.apply(adapter_object(f"a{number}"))
    world.settle()
    count, began, before = 1 + good_ones + bad_ones, world.now, len(world.asked)
    while world.now < began + 60.0:
        world.wait(step_s)
    assert len(world.asked) - before <= most * (world.now - began) + count


@given(st.lists(OPERATIONS, max_size=20))
def test_whatever_is_served_or_drains_is_kept(history: list[tuple[Any, ...]]) -> None:
    world = new_world()
    left: dict[str, float] = {}
    for operation in history:
        drains = {pool.name: pool.drain_s for pool in world.routed_pools.values()}
        before = {entry.digest: drains.get(entry.pool, 0.0) for entry in world.routed.values()}
        perform(world, operation)
        now = {entry.digest for entry in world.routed.values()}
        left |= {digest: world.now + drain_s for digest, drain_s in before.items() if digest not in now}
        if world.kept is not None and operation[0] == "settle":
            assert now <= world.kept
            assert {digest for digest, until in left.items() if until > world.now} <= world.kept
