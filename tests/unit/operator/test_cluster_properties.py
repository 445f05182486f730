"""The planner and a cluster under any history: it converges, writes nothing at rest, and a crash changes nothing."""

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.operator.cluster import ClusterWorld, cluster_world
from tests.unit.operator.planning import (
    adapter_object,
    adapter_ref,
    check_store,
    failed,
    fetched_base,
    pool_object,
    pool_ref,
    stored,
    verified,
)
from weft_operator.core import parse
from weft_operator.core.resources import FINALIZER, Malformed
from weft_operator.local import ObjectStore

NAMES = st.sampled_from(["a", "b"])
POOLS = st.sampled_from(["one", "two"])
GROUPS = st.sampled_from(
    [
        None,
        [{"name": "fast", "minRunners": 1, "maxRunners": 2}, {"name": "cheap", "minRunners": 0}],
        [{"name": "cheap", "minRunners": 0, "maxRunners": 2}],
    ]
)
SCALES: Any = st.one_of(
    st.none(), st.integers(0, 4), st.tuples(st.integers(0, 2), st.integers(0, 3)).map(lambda t: (t[0], t[0] + t[1]))
)
OPERATIONS = st.one_of(
    st.tuples(st.just("pool"), POOLS, SCALES, GROUPS, st.sampled_from([1024, 2048])),
    st.tuples(st.just("adapter"), NAMES, POOLS),
    st.tuples(st.just("delete pool"), POOLS),
    st.tuples(st.just("delete adapter"), NAMES),
    st.tuples(st.just("content"), NAMES, st.sampled_from([verified("1"), verified("2"), failed("RankTooLarge")])),
    st.tuples(st.just("demand"), POOLS, st.integers(0, 6)),
    st.tuples(st.just("scheduler"), st.booleans()),
    st.tuples(st.just("drift"), st.integers(0, 20)),
    st.tuples(st.just("lose child"), st.integers(0, 20)),
    st.tuples(st.just("lose pod"), st.integers(0, 20)),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 6.0, 120.0])),
    st.tuples(st.just("step")),
)
HISTORIES = st.lists(OPERATIONS, max_size=14)


def new_world() -> ClusterWorld:
    contents = {
        "file:one": fetched_base(),
        "file:two": fetched_base(),
        "file:a": verified("a"),
        "file:b": verified("b"),
    }
    return cluster_world(ObjectStore(lambda: 0.0), contents, 1_000_000.0)


def perform(world: ClusterWorld, operation: tuple[Any, ...]) -> None:
    children = sorted(world.cluster.objects)
    match operation:
        case ("pool", name, scale, groups, pages):
            wish = pool_object(name, **pool_spec(name, scale, groups, pages))
            if not isinstance(parse(stored(wish)), Malformed):  # bounds and groups that the API takes together
                world.apply(wish)
        case ("adapter", name, pool):
            ref = adapter_ref(name)
            known = world.store.find(ref)
            if not (known and known["metadata"].get("deletionTimestamp")):
                world.apply(adapter_object(name, pool=f"default/{pool}"))
        case ("delete pool", name):
            if world.store.find(pool_ref(name)):
                world.store.delete(pool_ref(name))
        case ("delete adapter", name):
            if world.store.find(adapter_ref(name)):
                world.store.delete(adapter_ref(name))
        case ("content", name, answer):
            world.contents[f"file:{name}"] = answer
        case ("demand", name, count):
            world.demand[pool_ref(name)] = count
        case ("scheduler", speaks):
            world.scheduler_speaks = speaks
        case ("drift", index) if children:
            world.cluster.edit(children[index % len(children)], vandalise)
        case ("lose child", index) if children:
            key = children[index % len(children)]
            world.cluster.delete(key, world.cluster.objects[key]["metadata"]["uid"])
        case ("lose pod", index) if world.cluster.pods:
            del world.cluster.pods[sorted(world.cluster.pods)[index % len(world.cluster.pods)]]
        case ("wait", seconds):
            world.now += seconds
        case _:
            world.step()


def pool_spec(name: str, scale: Any, groups: Any, pages: int) -> dict[str, Any]:
    spec: dict[str, Any] = {"model": {"name": name, "uri": f"file:{name}"}, "advanced": {"kvPages": pages}}
    if groups:
        spec["runnerGroups"] = groups
    if isinstance(scale, tuple):
        spec["autoscaling"] = dict(zip((("minReplicas", "maxReplicas", "idleSeconds")), (*scale, 60), strict=True))
    elif scale is not None:
        spec["replicas"] = scale
    return spec


def vandalise(obj: dict[str, Any]) -> None:
    if "spec" in obj:
        obj["spec"]["selector"] = {"stolen": "yes"}
    obj["metadata"]["labels"].pop("app.kubernetes.io/component", None)  # may be gone already


def rest(world: ClusterWorld) -> ClusterWorld:
    """Everybody speaks again, and time passes until nothing moves."""
    world.scheduler_speaks = True
    world.wait(120.0)
    world.answers()
    world.at_rest()
    return world


def ending(world: ClusterWorld) -> Any:
    """What users would see, without the names and times that chance gives."""
    statuses = {}
    for obj in world.store.objects():
        status = copy.deepcopy(obj.get("status", {}))
        status.pop("lastScale", None)
        for condition in status.get("conditions", ()):
            condition.pop("lastTransitionTime")
        statuses[obj["kind"], obj["metadata"]["name"]] = status
    specs = {key: obj.get("spec") for key, obj in world.cluster.objects.items()}
    pods = sorted((pod.pool, pod.group, pod.ready) for pod in world.cluster.pods.values())
    routed = {entry.model_name: entry.digest for entry in world.routed.values()}
    return statuses, specs, pods, routed, dict(world.routed_pools)


@given(HISTORIES)
def test_any_history_comes_to_rest_and_then_nothing_is_written(history: list[tuple[Any, ...]]) -> None:
    world = new_world()
    for operation in history:
        perform(world, operation)
    rest(world)
    before = (world.cluster.requests, world.status_writes, len(world.announced))
    world.wait(600.0)
    after = world.restarted()
    after.at_rest()
    assert (world.cluster.requests, world.status_writes, len(world.announced)) == before
    assert (after.status_writes, after.announced) == (0, [])
    check_store(world.store)


@given(HISTORIES)
def test_at_rest_everything_is_as_desired(history: list[tuple[Any, ...]]) -> None:
    world = new_world()
    for operation in history:
        perform(world, operation)
    rest(world)
    for ref, pool in world.desired.pools.items():
        status, sizes = world.status(ref), world.sizes(ref)
        assert sizes.keys() == {group.name for group in pool.groups}
        assert sum(sizes.values()) == status["desiredReplicas"] == status["replicas"] == status["readyReplicas"]
        if pool.spec.replicas is not None:
            assert status["desiredReplicas"] == min(pool.spec.replicas, room(pool))
    owners = {pool.meta.uid for pool in world.desired.pools.values()}
    for obj in world.cluster.objects.values():
        assert obj["metadata"]["ownerReferences"][0]["uid"] in owners
        assert "stolen" not in str(obj)
    assert not any(adapter.meta.deleting for adapter in world.desired.adapters.values())
    refs = {adapter.meta.uid: ref for ref, adapter in world.desired.adapters.items()}
    for uid in world.routed:
        assert FINALIZER in world.store.get(refs[uid])["metadata"]["finalizers"]


def room(pool: Any) -> int:
    return sum(1024 if group.max is None else group.max for group in pool.groups)


@given(HISTORIES, OPERATIONS, st.integers(0, 12), st.integers(1, 3))
def test_a_crash_between_any_two_actions_ends_as_if_there_had_been_none(
    history: list[tuple[Any, ...]], last: tuple[Any, ...], survived: int, crashes: int
) -> None:
    worlds = (new_world(), new_world())
    for world in worlds:
        for operation in history:
            perform(world, operation)
        rest(world)
        perform(world, last)
    undisturbed, crashed = worlds
    for _ in range(crashes):
        for action in crashed.plan()[:survived]:
            crashed.do(action)
        crashed.answers()
        crashed = crashed.restarted()
    assert ending(rest(crashed)) == ending(rest(undisturbed))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=40))
def test_a_ready_pod_of_an_autoscaled_pool_goes_only_once_it_was_named(demands: list[tuple[int, bool]]) -> None:
    world, ref, named = new_world(), pool_ref("one"), set[str]()
    world.settle(pool_object("one", **pool_spec("one", (0, 5), None, 1024)))
    for world.demand[ref], world.scheduler_speaks in demands:
        before = dict(world.cluster.pods)
        unready = {pod.name for pod in before.values() if not pod.ready}
        world.step()
        assert (before.keys() - world.cluster.pods.keys()) <= named | unready
        named |= {*world.observed.pool_reports[str(ref)].victims, *unready}  # these too were marked while they could be
