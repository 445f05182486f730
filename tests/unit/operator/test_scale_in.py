"""A node is drained: a pool whose evictions wait moves its runners one by one, and never has fewer that are ready."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.operator.cluster import ClusterWorld, cluster_world
from tests.unit.operator.planning import fetched_base, pool_object, pool_ref
from weft_operator.local import ObjectStore

WAITS = {"maxUnavailable": 0}


def started(replicas: int, nodes: dict[str, bool], **spec: object) -> ClusterWorld:
    world = cluster_world(ObjectStore(lambda: 0.0), {"file:base": fetched_base()}, 1_000_000.0)
    world.cluster.nodes = nodes
    world.apply(pool_object(replicas=replicas, **spec))
    world.at_rest()
    return world


def cordon(world: ClusterWorld, node: str, *, takes: bool = False) -> None:
    world.cluster.nodes[node] = takes
    world.cluster.seen_by(world.observed)


def ready(world: ClusterWorld) -> int:
    return sum(pod.ready for pod in world.cluster.pods.values())


def nodes_of(world: ClusterWorld) -> list[str]:
    return sorted(pod.node for pod in world.cluster.pods.values())


@pytest.mark.slow
@given(
    size=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["a", "b"]), st.booleans(), st.booleans(), st.booleans()), max_size=20),
)
def test_a_drained_node_is_left_with_every_runner_ready(size: int, steps: list[tuple[str, bool, bool, bool]]) -> None:
    world = started(size, {"a": True, "b": True}, disruptionBudget=WAITS)
    for node, takes, become_ready, late in steps:
        cordon(world, node, takes=takes)
        world.cluster.pods_become_ready = become_ready
        world.now += 6.0 if late else 0.0
        world.step()
        assert ready(world) >= size
        assert len(world.cluster.pods) <= size + 1
    world.cluster.pods_become_ready = True
    cordon(world, "a", takes=True)
    cordon(world, "b")
    for _ in range(4 * size):
        world.wait(6.0)
        assert ready(world) >= size
    world.at_rest()
    assert nodes_of(world) == ["a"] * size
    assert world.condition(pool_ref(), "Ready") == ("True", "RunnersReady")


def test_each_runner_of_a_drained_node_leaves_once_another_one_is_ready() -> None:
    world = started(4, {"a": True, "b": True}, disruptionBudget=WAITS)
    cordon(world, "a")
    for _ in range(8):
        world.wait(6.0)
        assert (ready(world), len(world.cluster.pods)) in ((4, 4), (4, 5), (5, 5))
    assert nodes_of(world) == ["b"] * 4


def test_without_room_elsewhere_a_runner_stays_and_the_status_says_why() -> None:
    world = started(1, {"a": True}, disruptionBudget=WAITS)
    (name,) = world.cluster.pods
    cordon(world, "a")
    world.settle()
    assert ready(world) == 1
    assert nodes_of(world) == ["", "a"]
    conditions = {c["type"]: c["message"] for c in world.status(pool_ref())["conditions"]}
    assert conditions["Progressing"] == (f"runner {name} leaves unschedulable node a, once another runner is ready")
    cordon(world, "a", takes=True)
    world.at_rest()
    assert nodes_of(world) == ["a"]


def test_a_pool_whose_evictions_do_not_wait_leaves_them_to_the_api_server() -> None:
    world = started(2, {"a": True, "b": True})
    before, budget = set(world.cluster.pods), world.cluster.objects
    cordon(world, "a")
    world.at_rest()
    assert set(world.cluster.pods) == before
    assert [obj["spec"]["maxUnavailable"] for key, obj in budget.items() if key.kind == "PodDisruptionBudget"] == [1]
