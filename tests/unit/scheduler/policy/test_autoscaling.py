"""How many runners a load asks for, and for how long: a pure function and its memory."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.routes import GroupPhase, PhaseCounts, PhaseGroups
from weft_scheduler.core.policy.autoscaling.autoscaler import Autoscaler, Contribution, PhaseBounds, PoolCapacity
from weft_scheduler.core.policy.autoscaling.demand import (
    MAX_WANTED_RUNNERS,
    PoolLoad,
    ReplicaBounds,
    RunnerCapacity,
    ScaleDownStabilization,
    demand_runners,
    desired_runners,
)

UNIT = RunnerCapacity(sequences=4, kv_tokens=1600, slots=2, tokens_per_s=50.0)
WORK_S = 30.0

# the load -> what it would fill, what is asked for
CASES: dict[str, tuple[dict[str, int], int, int]] = {
    "nobody": ({}, 0, 0),
    "the first request that waits": ({"queued": 1, "queued_tokens": 32}, 1, 1),
    "under half of a runner": ({"running": 2, "reserved_tokens": 800}, 1, 1),
    "no lightly loaded runner: one more": ({"running": 3}, 1, 2),
    "one full": ({"running": 4}, 1, 2),
    "one full and one lightly loaded: enough": ({"running": 6}, 2, 2),
    "straight to as many as those who wait fill": ({"running": 8, "queued": 9}, 5, 5),
    "long ones fill pages before sequences": ({"running": 2, "reserved_tokens": 4000}, 3, 3),
    "long ones that wait": ({"running": 4, "queued": 2, "reserved_tokens": 1600, "queued_tokens": 700}, 2, 2),
    "tokens that wait are work": ({"running": 4, "queued": 2, "queued_tokens": 3000}, 3, 3),
    "adapters that find no slot": ({"running": 2, "queued": 3, "busy_slots": 2, "queued_adapters": 3}, 3, 3),
    "one adapter that finds no slot": ({"running": 2, "queued": 1, "busy_slots": 4, "queued_adapters": 1}, 3, 3),
    "no slot is short while none is waited for": ({"running": 2, "queued": 1, "busy_slots": 8}, 1, 2),
    "no slot is short while nobody waits": ({"running": 2, "busy_slots": 2}, 1, 1),
    "more work than is done in time": ({"running": 1, "queued": 1, "queued_tokens": 9000}, 7, 7),
}


def fills(load: PoolLoad, unit: RunnerCapacity | None) -> int:
    return sum(demand_runners(load, unit, WORK_S))


def asks_for(load: PoolLoad, unit: RunnerCapacity | None) -> int:
    return sum(desired_runners(load, unit, WORK_S, PhaseCounts()))


@pytest.mark.parametrize("tokens_per_s", [5e-324, 1e-12])
def test_runners_that_compute_next_to_nothing_ask_for_a_number_that_can_be_sent(tokens_per_s: float) -> None:
    load = PoolLoad(running=1, queued=1, queued_tokens=2**40)
    asked = asks_for(load, RunnerCapacity(4, 1600, 2, tokens_per_s))
    assert asked == fills(load, RunnerCapacity(4, 1600, 2, tokens_per_s)) == MAX_WANTED_RUNNERS


@pytest.mark.parametrize("name", CASES)
def test_it_asks_for(name: str) -> None:
    load, filled, asked = CASES[name]
    assert fills(PoolLoad(**load), UNIT) == filled
    assert asks_for(PoolLoad(**load), UNIT) == asked


def test_prompts_that_wait_are_computed_within_the_objective() -> None:
    waiting, unit = (
        {"running": 4, "queued": 1, "queued_prompt_tokens": 6000},
        replace(UNIT, prefill_tokens_per_s=1000.0),
    )
    assert asks_for(PoolLoad(**waiting), unit) == 2
    assert asks_for(PoolLoad(**waiting, ttft_s=2.0), unit) == 1 + 3
    assert asks_for(PoolLoad(**waiting, ttft_s=2.0), UNIT) == 2, "prefill was not measured"


def test_prompt_tokens_that_are_found_are_not_work() -> None:
    waiting, unit = (
        PoolLoad(running=4, queued=1, queued_prompt_tokens=9000, queued_tokens=9000),
        replace(UNIT, kv_tokens=1e6),
    )
    assert asks_for(waiting, unit) == 7
    assert asks_for(replace(waiting, reused_share=0.5), unit) == 4
    elsewhere = replace(waiting, queued_tokens=15_000, split=True)
    assert demand_runners(elsewhere, unit, WORK_S).token == 1 + 4, "on prompt runners"
    in_time = replace(waiting, queued_tokens=0, ttft_s=2.0)
    unit = replace(UNIT, prefill_tokens_per_s=1000.0)
    assert asks_for(in_time, unit) == 1 + 5
    assert asks_for(replace(in_time, reused_share=0.8), unit) == 1 + 1


SPLIT = replace(UNIT, prefill_tokens_per_s=1000.0)
ONE_EACH = PhaseCounts(1, 1)

LOAD = PoolLoad(split=True)

# the load of a pool that splits phases -> what it would fill, what is asked for
SPLIT_CASES: dict[str, tuple[PoolLoad, tuple[int, int], tuple[int, int]]] = {
    "nobody": (replace(LOAD, prompt_tokens_per_s=500.0), (0, 0), (0, 0)),
    "one of each": (replace(LOAD, running=1), (0, 1), (1, 1)),
    "prompts that come": (replace(LOAD, running=2, prompt_tokens_per_s=2500.0), (3, 1), (3, 1)),
    "prompts of which half is found": (
        replace(LOAD, running=2, prompt_tokens_per_s=5000.0, reused_share=0.5),
        (3, 1),
        (3, 1),
    ),
    "prompts that wait": (replace(LOAD, running=2, queued=1, queued_prompt_tokens=90_000), (3, 1), (3, 1)),
    "prompts that wait, in time": (replace(LOAD, queued=1, queued_prompt_tokens=6000, ttft_s=2.0), (3, 1), (3, 1)),
    "streams": (replace(LOAD, running=9, prompt_tokens_per_s=100.0), (1, 3), (1, 3)),
    "pages": (replace(LOAD, running=1, reserved_tokens=4000, prompt_tokens_per_s=10.0), (1, 3), (1, 3)),
    "no room to spare where tokens fill theirs": (replace(LOAD, running=8, prompt_tokens_per_s=600.0), (1, 2), (1, 3)),
    "nor where prompts do": (replace(LOAD, running=6, prompt_tokens_per_s=2000.0), (2, 2), (2, 2)),
    "more for tokens where both are as full": (replace(LOAD, running=4, prompt_tokens_per_s=1000.0), (1, 1), (1, 2)),
    "more of the fuller side": (replace(LOAD, running=7, prompt_tokens_per_s=1990.0), (2, 2), (3, 2)),
}


@pytest.mark.parametrize("name", SPLIT_CASES)
def test_phases_that_are_split_are_counted_apart(name: str) -> None:
    load, filled, asked = SPLIT_CASES[name]
    assert demand_runners(load, SPLIT, WORK_S) == PhaseCounts(*filled)
    assert desired_runners(load, SPLIT, WORK_S, ONE_EACH) == PhaseCounts(*asked)


def test_before_any_runner_has_told_what_it_holds_one_is_asked_for() -> None:
    crowd = PoolLoad(queued=1000, queued_tokens=10**9, queued_adapters=50)
    assert asks_for(crowd, None) == fills(crowd, None) == fills(PoolLoad(queued=1), None) == 1
    assert asks_for(PoolLoad(), None) == fills(PoolLoad(), None) == 0
    for unit in (None, UNIT):  # which has not measured how fast it computes prompts
        assert demand_runners(PoolLoad(queued=1, prompt_tokens_per_s=1e6, split=True), unit, WORK_S) == ONE_EACH


def test_work_says_nothing_before_a_busy_runner_was_measured() -> None:
    long = PoolLoad(queued=1, queued_tokens=1500)
    assert asks_for(long, RunnerCapacity(4, 1600, 2)) == 2
    assert asks_for(long, RunnerCapacity(4, 1600, 2, 10.0)) == 5
    assert fills(PoolLoad(running=5, queued=1), RunnerCapacity(4, 1600, 2)) == 2


FIELDS = ("running", "queued", "reserved_tokens", "queued_tokens", "busy_slots", "queued_adapters")
LOADS = st.builds(
    PoolLoad, st.integers(0, 60), st.integers(0, 60), *[st.integers(0, 50_000)] * 2, *[st.integers(0, 60)] * 2
)
UNITS = st.builds(RunnerCapacity, *[st.integers(1, 64)] * 3, st.sampled_from([0.0, 0.5, 40.0])) | st.none()


@given(LOADS, UNITS, st.sampled_from(FIELDS), st.integers(1, 100))
def test_more_load_never_asks_for_fewer(load: PoolLoad, unit: RunnerCapacity | None, grown: str, by: int) -> None:
    fields = {name: getattr(load, name) for name in FIELDS}
    more = PoolLoad(**(fields | {grown: fields[grown] + by}))
    assert asks_for(more, unit) >= asks_for(load, unit)
    assert fills(more, unit) >= fills(load, unit)


@given(LOADS, UNITS)
def test_what_is_asked_for_covers_what_is_filled_and_nobody_asks_for_nothing(load: PoolLoad, unit: Any) -> None:
    asked = asks_for(load, unit)
    if load.running or load.queued:
        assert asked >= max(1, fills(load, unit))
    else:
        assert asked == 0


@given(st.integers(0, 9), st.integers(0, 9) | st.none(), st.integers(0, 20))
def test_bounds_hold_and_the_least_wins_over_a_smaller_most(least: int, most: int | None, runners: int) -> None:
    clamped = ReplicaBounds(least, most).clamp(runners)
    assert clamped >= least
    assert most is None or clamped <= max(least, most)
    assert clamped == runners or clamped in (least, max(most or 0, least))


# ------------------------------------------------------------------------------------------------ memory

KEEP_S = 60.0
HISTORIES = st.lists(st.tuples(st.floats(0.0, 50.0), st.integers(0, 9)), min_size=1, max_size=40)


def wanted(history: list[tuple[float, int]]) -> list[int]:
    """What is wanted after each (seconds later, asked)."""
    hold, now, told = ScaleDownStabilization(), 0.0, list[int]()
    for later_s, asked in history:
        now += later_s
        told.append(hold.recommend(asked, now, KEEP_S))
    return told


@given(HISTORIES)
def test_wanted_is_the_most_that_was_asked_for_within_the_time(history: list[tuple[float, int]]) -> None:
    """Against the definition, spelt out: a number counts until the next is asked for, and for a time after that."""
    now, asked_at = 0.0, list[tuple[float, int]]()
    for (later_s, asked), told in zip(history, wanted(history), strict=True):
        now += later_s
        asked_at.append((now, asked))
        ends = [at for at, _ in asked_at[1:]] + [now]
        assert told == max(n for (_, n), end in zip(asked_at, ends, strict=True) if end + KEEP_S > now)


@given(HISTORIES, st.data())
def test_more_load_at_any_time_never_wants_fewer_at_any_time(history: list[tuple[float, int]], data: Any) -> None:
    more = [(later_s, asked + data.draw(st.integers(0, 3))) for later_s, asked in history]
    assert all(a >= b for a, b in zip(wanted(more), wanted(history), strict=True))


@given(HISTORIES, st.integers(0, 9))
def test_a_load_that_stays_settles_after_one_change_and_stays(history: list[tuple[float, int]], asked: int) -> None:
    told = wanted([*history, *[(1.0, asked)] * 200])[len(history) :]
    assert all(a >= b for a, b in pairwise(told)), "it only goes down, never up and down"
    assert told[-100:] == [asked] * 100


def test_it_says_when_fewer_will_be_wanted() -> None:
    hold = ScaleDownStabilization()
    assert hold.recommend(3, 0.0, KEEP_S) == 3
    assert hold.next_deadline(KEEP_S) is None, "as long as it is asked for it is wanted"
    assert hold.recommend(1, 10.0, KEEP_S) == 3
    assert hold.next_deadline(KEEP_S) == 70.0
    assert hold.recommend(2, 20.0, KEEP_S) == 3
    assert hold.recommend(0, 30.0, KEEP_S) == 3
    assert hold.recommend(0, 70.0, KEEP_S) == 2
    assert hold.next_deadline(KEEP_S) == 90.0
    assert hold.recommend(0, 90.0, KEEP_S) == 0
    assert hold.next_deadline(KEEP_S) is None


def test_a_pool_of_groups_is_scaled_again_at_the_first_moment_at_which_one_may_shrink() -> None:
    groups = (PhaseGroups(GroupPhase.PROMPT), PhaseGroups(GroupPhase.TOKEN))
    scaler, phases = Autoscaler(PoolCapacity()), PhaseBounds(groups, ONE_EACH, 0.5)
    scaler.capacity.replace(
        None, Contribution(4, 1600, slots=2, prefill_tokens_per_s=1000, for_prompts=1, for_tokens=1)
    )
    due = [
        scaler.recommend(load, ReplicaBounds(0, 9), now, window_s=KEEP_S, work_s=WORK_S, keep=False, phases=phases)
        for now, load in (
            (0.0, replace(LOAD, running=2, prompt_tokens_per_s=2500.0)),  # 3 for prompts, 1 for tokens
            (10.0, replace(LOAD, running=9, prompt_tokens_per_s=100.0)),  # 1 and 3
            (20.0, replace(LOAD, running=1, prompt_tokens_per_s=100.0)),  # 1 and 1
        )
    ]
    assert due == [None, 10.0 + KEEP_S, 10.0 + KEEP_S]
