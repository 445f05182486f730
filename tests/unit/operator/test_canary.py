"""Canaries: their share, what rolls them back or promotes them, and that nobody goes back and forth."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.operator.planning import (
    World,
    adapter_object,
    adapter_ref,
    digest,
    failed,
    fetched_base,
    pool_object,
    verified,
    world_of,
)
from weft.domain.routes import AdapterSpec, CanaryCounts
from weft_operator.core import OperationStatus
from weft_operator.local import ObjectStore

REF = adapter_ref("upper")
CONTENTS = {"file:upper": verified("a"), "file:next": verified("c"), "file:base": fetched_base()}
GOOD, BAD = (CanaryCounts(digest("c"), 100, bad, 1000, 10) for bad in (5, 50))


def canary(weight: int = 10, uri: str = "file:next", **more: Any) -> dict[str, Any]:
    return {"source": {"uri": uri}, "weight": weight, "maxErrorPercent": 5, "minRequests": 20} | more


@pytest.fixture
def world() -> World:
    """An adapter Ready, in the state before it has a canary."""
    return ready()


def ready(contents: dict[str, OperationStatus] = CONTENTS) -> World:
    made = world_of(ObjectStore(lambda: 0.0), dict(contents), 1_000_000.0)
    made.settle(pool_object(), adapter_object("upper"))
    return made


def edit(world: World, **spec: Any) -> None:
    world.settle(adapter_object("upper", revisionHistoryLimit=1, **spec))


def entry(world: World) -> AdapterSpec:
    (found,) = world.routed.values()
    return found


def shares(world: World) -> dict[str, int]:
    """Percent of the requests without a pin, by content."""
    of = {v.digest: v.weight for v in entry(world).versions if v.weight}
    return {entry(world).digest: 100 - sum(of.values())} | of


def test_a_canary_gets_its_share_once_it_is_fetched(world: World) -> None:
    world.contents["file:next"] = OperationStatus("Pending")
    edit(world, canary=canary())
    world.wait(4)
    assert shares(world) == {digest("a"): 100}
    assert world.condition(REF, "CanaryPromoted") == ("Unknown", "Resolving")
    world.contents["file:next"] = verified("c")
    world.wait(0.1)
    assert shares(world) == {digest("a"): 90, digest("c"): 10}
    world.check(REF, CanaryPromoted="Unknown Progressing", Ready="True Published")
    assert world.status(REF)["canary"]["phase"] == "Progressing"
    edit(world, canary=canary(50))
    assert shares(world) == {digest("a"): 50, digest("c"): 50}
    edit(world)
    assert shares(world) == {digest("a"): 100}
    assert "canary" not in world.status(REF)
    assert set(world.observed.resolutions) == {obj["metadata"]["uid"] for obj in world.store.objects()}


@pytest.mark.parametrize(("name", "published"), [("v2", "v2"), ("v1", "")])
def test_a_canary_has_its_name_unless_the_other_content_has_it(world: World, name: str, published: str) -> None:
    edit(world, version="v1", canary=canary(version=name))
    (version,) = [version for version in entry(world).versions if version.weight]
    assert (version.name, version.eos_token_ids) == (published, (ord("c"),))
    assert world.status(REF)["canary"]["eosTokenIds"] == [ord("c")]


def test_a_canary_waits_for_a_content_beside_it() -> None:
    world = ready(CONTENTS | {"file:upper": failed("ShapeMismatch")})
    edit(world, canary=canary())
    assert world.condition(REF, "CanaryPromoted") == ("Unknown", "Resolving")
    assert world.routed == {}


def test_a_canary_that_is_refused_gets_nothing_and_says_why(world: World) -> None:
    world.contents["file:next"] = failed("ShapeMismatch")
    edit(world, canary=canary())
    assert shares(world) == {digest("a"): 100}
    world.check(REF, CanaryPromoted="False ShapeMismatch", Ready="True Published")
    world.contents["file:next"] = verified("c")
    world.wait(10)
    assert shares(world) == {digest("a"): 90, digest("c"): 10}


def test_failures_roll_a_canary_back_until_it_has_another_content(world: World) -> None:
    edit(world, canary=canary(promoteAfter="10s"))
    world.canaries[digest("c")] = BAD._replace(requests=19, failed=19)
    world.wait(0.1)
    assert shares(world)[digest("c")] == 10, "too few requests to judge"
    world.canaries[digest("c")] = BAD._replace(requests=20, failed=20)
    world.wait(0.1)
    for current in (world, world.restarted()):
        current.wait(60)
        assert shares(current) == {digest("a"): 100}
        assert current.condition(REF, "CanaryPromoted") == ("False", "RolledBack")
        assert current.status(REF)["canary"]["failedRequests"] == 20
    assert [e.reason for e in world.announced if e.type == "Warning"] == ["RolledBack"]
    world.contents["file:next"] = verified("d")
    world.wait(10)
    assert shares(world) == {digest("a"): 90, digest("d"): 10}
    assert world.status(REF)["canary"]["requests"] == 0


def test_what_was_decided_lasts_while_the_adapter_is_not_accepted(world: World) -> None:
    edit(world, canary=canary())
    world.canaries[digest("c")] = BAD
    world.wait(0.1)
    edit(world, canary=canary(), baseModel="wrong")
    assert world.status(REF)["canary"]["phase"] == "RolledBack"
    edit(world, canary=canary())
    for current in (world, world.restarted()):
        current.wait(10)
        assert shares(current) == {digest("a"): 100}
        assert current.condition(REF, "CanaryPromoted") == ("False", "RolledBack")


def test_failures_of_both_contents_are_not_the_canarys(world: World) -> None:
    edit(world, canary=canary())
    world.canaries[digest("c")] = CanaryCounts(digest("c"), 100, 50, 1000, 490)
    world.wait(0.1)
    assert shares(world)[digest("c")] == 10


def test_a_canary_that_lasts_is_promoted_and_its_source_takes_over_without_a_step_back(world: World) -> None:
    edit(world, canary=canary(promoteAfter="60s"))
    world.canaries[digest("c")] = GOOD
    world.wait(59)
    assert shares(world) == {digest("a"): 90, digest("c"): 10}
    world.wait(2)
    for current in (world, world.restarted()):
        current.wait(60)
        assert shares(current) == {digest("c"): 100}
        assert current.condition(REF, "CanaryPromoted") == ("True", "Promoted")
        assert [v.digest for v in entry(current).versions] == [digest("a")], "it can still be pinned"
    assert published(world, lambda: edit(world, source={"uri": "file:next"})) == {digest("c")}
    assert "canary" not in world.status(REF)
    assert world.condition(REF, "Ready") == ("True", "Published")


def test_the_removal_of_a_promoted_canary_is_a_step_back(world: World) -> None:
    edit(world, canary=canary(promoteAfter="1s"))
    world.canaries[digest("c")] = GOOD
    world.wait(5)
    assert shares(world) == {digest("c"): 100}
    after = world.restarted()
    after.settle()
    for current in (world, after):
        edit(current)
        assert shares(current) == {digest("a"): 100}


def test_a_promotion_by_hand_is_an_edit_of_the_source(world: World) -> None:
    edit(world, canary=canary())
    seen = published(world, lambda: edit(world, source={"uri": "file:next"}))
    assert shares(world) == {digest("c"): 100}
    assert seen <= {digest("a"), digest("c")}


def test_counts_cost_two_writes_a_minute(world: World) -> None:
    edit(world, canary=canary())
    before = world.status_writes
    for count in range(60):
        world.canaries[digest("c")] = CanaryCounts(digest("c"), count + 1)
        world.wait(1)
    assert 1 <= world.status_writes - before <= 2


def published(world: World, change: Callable[[], None]) -> set[str]:
    """The contents that requests without a pin may have had during a change."""
    seen: set[str] = set()
    do = world.do

    def watched(action: Any) -> None:
        do(action)
        seen.update(one.digest for one in world.routed.values())

    with patch.object(world, "do", watched):
        change()
    return seen


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("canary"), st.none() | st.tuples(st.integers(1, 100), st.sampled_from(["next", "other"]))),
        st.tuples(st.just("source"), st.sampled_from(["upper", "next", "other"])),
        st.tuples(st.just("content"), st.sampled_from(["next", "other"]), st.sampled_from("cdef-")),
        st.tuples(st.just("counts"), st.sampled_from("cdef"), st.integers(0, 100)),
        st.tuples(st.just("wait"), st.sampled_from([1.0, 40.0])),
        st.tuples(st.just("restart")),
    ),
    max_size=12,
)


@given(STEPS)
def test_an_adapter_serves_what_its_sources_gave_and_restarts_decide_nothing_anew(steps: list[tuple[Any, ...]]) -> None:
    world = ready({**CONTENTS, "file:other": verified("e")})
    spec: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for step in steps:
        match step:
            case ("canary", None):
                spec.pop("canary", None)
                edit(world, **spec)
            case ("canary", (weight, uri)):
                spec["canary"] = canary(weight, f"file:{uri}", promoteAfter="30s")
                edit(world, **spec)
            case ("source", uri):
                spec["source"] = {"uri": f"file:{uri}"}
                edit(world, **spec)
            case ("content", uri, letter):
                world.contents[f"file:{uri}"] = failed("ShapeMismatch") if letter == "-" else verified(letter)
                world.wait(20)
            case ("counts", letter, bad):
                world.canaries[digest(letter)] = CanaryCounts(digest(letter), 100, bad, 100, 0)
                world.wait(0.1)
            case ("wait", seconds):
                world.wait(seconds)
            case _:
                counts = world.canaries
                world = replace(world.restarted(), canaries=counts)
                world.settle()
        given_weights = shares(world)
        assert entry(world).digest != ""
        before, found = found, world.status(REF).get("canary", {})
        if before.get("phase") == "RolledBack" and "canary" in spec and found.get("digest") == before["digest"]:
            assert found["phase"] == "RolledBack"
            assert given_weights.get(found["digest"], 0) in (0, 100), "it may be the source's own content"
        again = world.restarted()
        again.canaries = world.canaries
        again.settle()
        assert shares(again) == given_weights
