"""Events: transitions only, a cause once, steps on the way never."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.operator.planning import (
    World,
    adapter_object,
    adapter_ref,
    failed,
    pool_object,
    pool_ref,
    stored,
    verified,
)
from weft_operator.core.resources import parse_adapter, parse_pool
from weft_operator.core.status import events_for

CONDITIONS = st.lists(
    st.builds(
        lambda kind, status, reason: {"type": kind, "status": status, "reason": reason, "message": "m"},
        st.sampled_from(["Accepted", "Validated", "Fetched", "Ready"]),
        st.sampled_from(["True", "False", "Unknown"]),
        st.sampled_from(["Published", "RankTooLarge", "Resolving", "Deleting"]),
    ),
    unique_by=lambda condition: condition["type"],
)


def told(world: World) -> list[tuple[str, str, str]]:
    found = [(event.ref.name, event.type, event.reason) for event in world.announced]
    world.announced.clear()
    return found


def adapter(conditions: list[dict[str, Any]]) -> Any:
    return parse_adapter(stored(adapter_object("upper")) | {"status": {"conditions": conditions}})


@given(CONDITIONS)
def test_what_is_stored_already_is_no_news(conditions: list[dict[str, Any]]) -> None:
    later = [{**condition, "message": "in other words"} for condition in conditions]
    assert events_for(adapter(conditions), {"conditions": later}) == []


@given(CONDITIONS, CONDITIONS)
def test_only_turned_conditions_are_reported_once(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    events = events_for(adapter(before), {"conditions": after})
    assert len({(event.type, event.reason) for event in events}) == len(events)
    old = {(c["type"], c["status"], c["reason"]) for c in before}
    turned = {c["reason"] for c in after if (c["type"], c["status"], c["reason"]) not in old}
    assert {event.reason for event in events} <= turned
    assert "Resolving" not in {event.reason for event in events if event.type == "Warning"}


def test_the_life_of_a_good_adapter_is_one_event_and_rest_is_silent(world: World) -> None:
    world.settle(pool_object(), adapter_object("upper"))
    assert sorted(told(world)) == [("base", "Normal", "RunnersReady"), ("upper", "Normal", "Published")]
    world.wait(600)
    after = world.restarted()
    after.wait(60)
    assert (told(world), told(after)) == ([], [])


def test_a_bad_source_is_one_warning_and_its_recovery_one_word(world: World) -> None:
    world.contents["file:upper"] = failed("RankTooLarge", "rank 128")
    world.settle(pool_object(), adapter_object("upper"))
    assert ("upper", "Warning", "RankTooLarge") in told(world)
    world.wait(60)
    assert told(world) == []
    world.contents["file:upper"] = verified("a")
    world.wait(60)
    recovered = told(world)
    assert ("upper", "Normal", "Published") in recovered
    assert all(kind == "Normal" for _, kind, _ in recovered)


def test_an_edited_source_that_is_bad_is_reported_though_the_old_one_serves(serving: World) -> None:
    serving.announced.clear()
    serving.contents["file:upper"] = failed("NotFinite", validated=True)
    serving.wait(3)
    assert told(serving) == [("upper", "Warning", "NotFinite")]
    assert serving.condition(adapter_ref("upper"), "Ready") == ("True", "UpdateFailed")


def test_other_roles_of_as_many_runners_are_announced_with_the_reason() -> None:
    before = {"prompt": 2, "token": 1, "mixed": 0, "message": "before"}
    pool = parse_pool(stored(pool_object()) | {"status": {"phases": before}})
    (event,) = events_for(pool, {"phases": {"prompt": 1, "token": 1, "mixed": 1, "message": "requests wait"}})
    assert (event.type, event.reason) == ("Normal", "RolesChanged")
    assert event.message == "from 2 prompt, 1 token, 0 mixed to 1 prompt, 1 token, 1 mixed: requests wait"
    assert events_for(pool, {"phases": {"prompt": 2, "token": 2, "mixed": 0, "message": "one more runner"}}) == []


def test_runners_that_are_wanted_in_another_group_are_announced() -> None:
    counts = {"prompt": 2, "token": 1, "mixed": 0, "message": ""}
    before = counts | {"wanted": {"prompt": 2, "token": 1, "any": 0}}
    pool = parse_pool(stored(pool_object()) | {"status": {"phases": before}})
    (event,) = events_for(pool, {"phases": counts | {"wanted": {"prompt": 1, "token": 2, "any": 0}}})
    assert (event.type, event.reason) == ("Normal", "GroupsScaled")
    assert event.message.startswith("from 2 prompt, 1 token, 0 any to 1 prompt, 2 token, 0 any")
    for silent in (counts | {"wanted": {"prompt": 2, "token": 2, "any": 0}}, counts, None):
        assert events_for(pool, {"phases": silent}) == []


def test_a_change_of_scale_is_reported_with_its_reason(serving: World) -> None:
    serving.announced.clear()
    serving.settle(pool_object(replicas=3))
    assert {event.reason for event in serving.announced} == {"Scaled", "RunnersReady"}, "the way there is no news"
    (event,) = [event for event in serving.announced if event.reason == "Scaled"]
    assert (event.ref, event.type, event.message) == (pool_ref(), "Normal", "from 1 to 3 runners: Replicas")
