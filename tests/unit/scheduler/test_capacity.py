"""How many runners a pool wants."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_scheduler.core.capacity import PoolLoad, surplus, wanted_runners
from weft_scheduler.core.effects import PoolStatus

# (idle, light, busy, queued, batch, minimum) -> wanted now, wanted once the surplus has lasted
CASES = {
    "nothing there, nothing asked": ((0, 0, 0, 0, 4, 0), 0, 0),
    "nothing there, somebody waits": ((0, 0, 0, 1, 4, 0), 1, 1),
    "straight to as many as the queue fills": ((0, 0, 2, 9, 4, 0), 5, 5),
    "no lightly loaded runner: one more": ((0, 0, 3, 0, 4, 0), 4, 4),
    "one lightly loaded: enough": ((0, 1, 3, 0, 4, 0), 4, 4),
    "one idle in hand beside busy ones": ((1, 0, 3, 0, 4, 0), 4, 4),
    "two idle: one goes back": ((2, 0, 3, 0, 4, 0), 5, 4),
    "a light one is in hand already: the idle one goes back": ((1, 1, 3, 0, 4, 0), 5, 4),
    "all idle: all go back": ((3, 0, 0, 0, 4, 0), 3, 0),
    "not below the minimum": ((3, 0, 0, 0, 4, 2), 3, 2),
    "the minimum is asked for": ((0, 0, 0, 0, 4, 2), 2, 2),
    "nobody is given back while somebody waits": ((2, 0, 3, 1, 4, 0), 6, 6),
}


@pytest.mark.parametrize("name", CASES)
def test_it_wants(name: str) -> None:
    load, now, later = CASES[name]
    assert wanted_runners(PoolLoad(*load), False) == now
    assert wanted_runners(PoolLoad(*load), True) == later


LOADS = st.builds(PoolLoad, *[st.integers(0, 20)] * 4, st.integers(1, 8), st.integers(0, 5))


@given(LOADS, st.booleans())
def test_only_idle_runners_are_given_back_and_never_below_the_minimum(load: PoolLoad, give_back: bool) -> None:
    wanted = wanted_runners(load, give_back)
    assert wanted >= load.min_runners
    assert wanted >= min(load.runners, load.light + load.busy)
    assert wanted >= load.runners or give_back
    assert surplus(load) <= load.idle


def test_an_idle_runner_is_given_back_after_a_while_and_kept_if_work_comes(desk: Any, picked: Any) -> None:
    desk.start()
    desk.runner("a")
    desk.runner("b")

    def wanted(seconds: float) -> list[int]:
        return [s.wanted_runners for s in picked(desk.wait(seconds), PoolStatus)]

    assert wanted(59.0) == [2]
    assert wanted(2.0) == [0]
    desk.place("r")
    assert wanted(1.0)[-1] == 1
