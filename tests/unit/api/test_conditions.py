"""Conditions: transition times move with the status alone, and setting what is there changes nothing."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from weft.api import Condition, find_condition, is_true, set_condition
from weft.api.reasons import ADVICE, ArtifactReason, Reason

T0 = datetime(2026, 1, 1, tzinfo=UTC)


def put(
    conditions: tuple[Condition, ...],
    kind: str = "Ready",
    status: str = "True",
    *,
    reason: str = "Published",
    message: str = "",
    generation: int = 1,
    after_s: float = 0,
) -> tuple[Condition, ...]:
    now = T0 + timedelta(seconds=after_s)
    return set_condition(conditions, kind, status, reason, message, generation=generation, now=now)  # type: ignore[arg-type]


def test_a_new_condition_starts_now() -> None:
    (ready,) = put((), after_s=5)
    assert ready.last_transition_time == T0 + timedelta(seconds=5)
    assert (ready.type, ready.status, ready.reason, ready.observed_generation) == ("Ready", "True", "Published", 1)


def test_reason_message_and_generation_change_without_a_transition() -> None:
    first = put(())
    (ready,) = put(first, reason="Other", message="m", generation=2, after_s=9)
    assert (ready.reason, ready.message, ready.observed_generation) == ("Other", "m", 2)
    assert ready.last_transition_time == T0


def test_a_change_of_status_is_a_transition() -> None:
    (ready,) = put(put(()), status="False", after_s=9)
    assert ready.last_transition_time == T0 + timedelta(seconds=9)


def test_setting_what_is_there_changes_nothing_and_order_and_others_stay() -> None:
    conditions = put(put(put((), "Accepted"), "Fetched", "False"), "Ready")
    assert put(conditions, "Fetched", "False", after_s=99) == conditions
    changed = put(conditions, "Fetched", "True", after_s=99)
    assert [c.type for c in changed] == ["Accepted", "Fetched", "Ready"]
    assert (changed[0], changed[2]) == (conditions[0], conditions[2])
    assert is_true(changed, "Fetched")
    assert not is_true(conditions, "Fetched")
    assert find_condition(changed, "Gone") is None


def test_a_message_is_cut_where_it_would_burden_the_server() -> None:
    (ready,) = put((), message="x" * 10_000)
    assert len(ready.message) == 4096
    assert ready.message.endswith("...")


def test_times_are_whole_seconds_in_utc_on_the_wire() -> None:
    (ready,) = put((), after_s=1.75)
    assert ready.to_dict()["lastTransitionTime"] == "2026-01-01T00:00:01Z"
    assert Condition.model_validate(ready.to_dict()) == ready


STEP = st.tuples(
    st.sampled_from(["A", "B"]), st.sampled_from(["True", "False", "Unknown"]), st.sampled_from(["X", "Y"])
)


@given(st.lists(STEP, max_size=20))
def test_the_transition_time_is_always_that_of_the_last_change_of_status(steps: list[tuple[str, str, str]]) -> None:
    conditions: tuple[Condition, ...] = ()
    changed_at: dict[str, tuple[str, int]] = {}
    for second, (kind, status, reason) in enumerate(steps):
        conditions = put(conditions, kind, status, reason=reason, after_s=second)
        if changed_at.get(kind, ("",))[0] != status:
            changed_at[kind] = (status, second)
    assert {c.type: (c.status, int((c.last_transition_time - T0).total_seconds())) for c in conditions} == changed_at


def test_every_reason_that_conditions_have_is_listed() -> None:
    """A condition's reason is written where its facts are judged: as a name there, or from those lists."""
    written = (Path(__file__).parents[3] / "operator" / "weft_operator" / "conditions.py").read_text()
    named = set(re.findall(r'Condition\(\s*"?\w*"?,\s*[^,]+,\s*"(\w+)"', written))
    assert {"Publishing", "Converging", "ScaledToZero", "Accepted"} <= named
    assert named <= set(ADVICE)


def test_every_reason_comes_with_advice() -> None:
    assert set(ADVICE) == {*map(str, Reason), *map(str, ArtifactReason)}
    assert all(reason[0].isupper() and reason.isalnum() for reason in ADVICE)
