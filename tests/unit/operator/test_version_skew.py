"""Objects of other versions of the API: absent fields have defaults, an unreadable spec is one object's condition."""

from copy import deepcopy
from typing import Any

from tests.unit.operator.planning import World, adapter_object, adapter_ref, pool_object, pool_ref, stored, verified
from weft_operator.core import DesiredState, PoolObject, RemoveRunner, parse
from weft_operator.core.resources import AdapterObject, Malformed


def stored_pool(world: World) -> dict[str, Any]:
    world.apply(pool_object())
    return deepcopy(dict(world.store.get(pool_ref())))


def test_fields_that_an_older_definition_did_not_have_get_their_defaults(world: World) -> None:
    older = stored_pool(world)
    for name in ("parallelism", "phases", "drainSeconds"):
        del older["spec"][name]
    del older["spec"]["advanced"]["consolidation"]
    pool = parse(older)
    assert isinstance(pool, PoolObject)
    found = pool.spec
    assert (found.parallelism.tensor, found.phases.mode, found.drain_seconds) == (1, "Unified", 300)
    assert found.advanced.consolidation == "never"


def test_fields_that_only_a_newer_definition_has_are_passed_over(world: World) -> None:
    newer = stored_pool(world)
    newer["spec"]["phases"]["speculation"] = {"mode": "Eager"}
    assert isinstance(parse(newer), PoolObject)
    adapter = stored(adapter_object("upper"))
    adapter["spec"]["source"]["mirror"] = adapter["spec"]["mirrored"] = True
    assert isinstance(parse(adapter), AdapterObject)


def unreadable(world: World) -> None:
    """The pool's spec becomes one that this version cannot read, past admission, as after a rollback."""
    world.apply(pool_object(phases={"mode": None}, replicas=1))


def test_what_was_served_of_an_object_that_cannot_be_read_stays_and_nobody_else_notices(world: World) -> None:
    world.apply(pool_object())
    for name in ("upper", "lower"):
        world.contents[f"file:{name}"] = verified("a")
        world.apply(adapter_object(name))
    world.settle()
    routed, runners = dict(world.routed), {ref: dict(of) for ref, of in world.observed.runners.items()}
    unreadable(world)
    assert isinstance(parse(world.store.get(pool_ref())), Malformed)
    world.settle()
    world.check(pool_ref(), Accepted="False InvalidSpec", Available="True RunnersReady")
    assert (world.routed, world.observed.runners) == (routed, runners)
    for name in ("upper", "lower"):
        assert world.condition(adapter_ref(name), "Ready") == ("True", "Published")
    world.settle(pool_object())
    assert world.condition(pool_ref(), "Accepted") == ("True", "Accepted")


def test_an_operator_that_starts_before_an_object_that_it_cannot_read_takes_no_runner_away(world: World) -> None:
    world.settle(pool_object())
    unreadable(world)
    after = world.restarted()
    for _ in range(5):
        assert not [action for action in after.step() if isinstance(action, RemoveRunner)]
    assert after.condition(pool_ref(), "Accepted") == ("False", "InvalidSpec")


def test_a_standby_follows_an_object_that_can_be_read_again(world: World) -> None:
    desired, good = DesiredState(), parse(stored_pool(world))
    unreadable(world)
    for resource in (parse(world.store.get(pool_ref())), good):
        desired.add(resource)
    assert (desired.get(pool_ref()), desired.malformed) == (good, {})


def test_an_object_that_cannot_be_read_can_be_deleted(world: World) -> None:
    world.settle(pool_object())
    unreadable(world)
    world.settle()
    world.remove(pool_ref())
    assert not world.routed_pools
    assert not world.observed.runners
