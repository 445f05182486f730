"""Worlds for the planner; `planning.py` says what is modelled and why."""

import pytest

from harness.quick import one_ssl_context  # noqa: F401 (a fixture)
from tests.unit.operator.cluster import ClusterWorld, cluster_world
from tests.unit.operator.planning import World, adapter_object, fetched_base, pool_object, verified, world_of
from weft_operator.local import ObjectStore


@pytest.fixture
def world() -> World:
    """An empty world whose depot has the base model and adapters `upper` and `lower`."""
    contents = {"file:base": fetched_base(), "file:upper": verified("a"), "file:lower": verified("c")}
    return world_of(ObjectStore(lambda: 0.0), contents, 1_000_000.0)


@pytest.fixture
def cluster() -> ClusterWorld:
    """The same sources, and a cluster in which runners are pods."""
    contents = {"file:base": fetched_base(), "file:upper": verified("a"), "file:lower": verified("c")}
    return cluster_world(ObjectStore(lambda: 0.0), contents, 1_000_000.0)


@pytest.fixture
def serving(world: World) -> World:
    """A settled world with the pool and both adapters."""
    for obj in (pool_object(), adapter_object("upper"), adapter_object("lower")):
        world.apply(obj)
    world.settle()
    return world
