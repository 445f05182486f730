"""A message is described twice, as a value and in its contract: names, types and bounds of the two agree."""

from dataclasses import make_dataclass
from enum import Enum
from typing import Annotated, Any

import pytest

from weft.domain.bounds import Any64, Bound, Listed
from weft.wire.codec import batch, cluster, kv_transfer, prediction, registry, scheduling, session
from weft.wire.codec.direction import Direction
from weft.wire.codec.pairs import ByHand, Pair
from weft.wire.v1 import scheduler_pb2

PAIRS: dict[str, Any] = {
    f"{name}.{field}": pair
    for module in (batch, cluster, kv_transfer, prediction, registry, scheduling, session)
    for name, of in vars(module).items()
    for field, pair in (of.pairs if isinstance(of, Direction) else {"": of}).items()
    if isinstance(pair, Pair) or (isinstance(of, Direction) and isinstance(pair, ByHand))
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_value_has_the_names_types_and_bounds_of_its_message(name: str) -> None:
    assert callable(PAIRS[name].fill)
    assert callable(PAIRS[name].read)


def test_by_hand_are_only_messages_whose_speed_is_measured() -> None:
    hand = {name for name, pair in PAIRS.items() if isinstance(pair, ByHand)}
    assert hand == {"RUNNER_TO_GATEWAY.step", "RUNNER_TO_SUPERVISOR.report"}


@pytest.mark.parametrize(
    ("fields", "message", "what"),
    [
        ({}, "RoutesApplied", "has no version"),
        ({"version": Any64, "more": bool}, "RoutesApplied", "has more beyond it"),
        ({"version": int}, "RoutesApplied", "has no bound of version"),
        ({"version": Annotated[str, Bound(9)]}, "RoutesApplied", "another type of version"),
        ({"version": Listed[Any64]}, "RoutesApplied", "another type of version"),
        ({"version": Annotated[int, Bound(1 << 64)]}, "RoutesApplied", "a bound of version that it cannot carry"),
        ({"request_ids": tuple[str, ...]}, "OutcomeAck", "has no bound of request_ids"),
        ({"request_ids": Listed[str]}, "OutcomeAck", "has no bound of request_ids"),
        ({"request_ids": Listed[Any64]}, "OutcomeAck", "another type of request_ids"),
        ({"runner": Any64}, "RunnerGone", "another type of runner"),
        ({"phase": Enum("Phase", ["ANY", "PROMPT"])}, "PhaseGroups", "differ in .*TOKEN"),
    ],
)
def test_a_value_that_is_not_its_message(fields: dict[str, Any], message: str, what: str) -> None:
    of = make_dataclass("Value", list(fields.items()))
    with pytest.raises(TypeError, match=what):
        _ = Pair(of, getattr(scheduler_pb2, message)).read
