"""How many runners, of which group, and who goes: the accounts, as properties."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.operator.planning import pool_object, stored
from weft.domain.routes import PhaseCounts, PoolStatus
from weft_operator.core.resources import Group, parse_pool
from weft_operator.core.scaling import (
    Bounds,
    ScaledRunner,
    counted_together,
    counts_apart,
    deletion_costs,
    distribute,
    one_for_one,
    phase_groups,
    select_victims,
    sizes,
    target,
)
from weft_scheduler.core import Autoscaler, PhaseBounds, PoolCapacity, PoolLoad, ReplicaBounds

POOL, SPLIT = (parse_pool(stored(pool_object(phases={"mode": mode}))) for mode in ("Unified", "Split"))
COUNTS = st.integers(0, 40)
GROUPS = st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 8)), min_size=1, max_size=5).map(
    lambda pairs: tuple(
        Group(f"g{i}", {}, low, None if more is None else low + more) for i, (low, more) in enumerate(pairs)
    )
)
GENERATION = 7
BOUNDS = st.tuples(COUNTS, COUNTS).map(lambda pair: Bounds(min(pair), max(pair), GENERATION))
RUNNERS = st.lists(st.booleans(), max_size=12).map(
    lambda ready: [ScaledRunner(f"r{number}", ready) for number, ready in enumerate(ready)]
)


def room(groups: Sequence[Group]) -> int:
    return sum(10_000 if group.max is None else group.max for group in groups)


@given(COUNTS, GROUPS)
def test_groups_hold_all_runners_that_fit_and_none_beyond_their_maximum(count: int, groups: tuple[Group, ...]) -> None:
    sizes = distribute(count, groups)
    assert list(sizes) == [group.name for group in groups]
    assert sum(sizes.values()) == min(count, room(groups))
    for group in groups:
        assert sizes[group.name] >= 0
        assert group.max is None or sizes[group.name] <= group.max


@given(COUNTS, GROUPS)
def test_minima_come_first_in_list_order(count: int, groups: tuple[Group, ...]) -> None:
    sizes, left = distribute(count, groups), count
    for group in groups:
        assert sizes[group.name] >= min(group.min, left)
        left -= min(group.min, left)


@given(COUNTS, GROUPS)
def test_one_more_runner_is_one_more_in_one_group_and_none_moves(count: int, groups: tuple[Group, ...]) -> None:
    before, after = distribute(count, groups), distribute(count + 1, groups)
    grown = [name for name in before if after[name] != before[name]]
    assert len(grown) <= 1
    assert all(after[name] == before[name] + 1 for name in grown)


@given(st.integers(0, 200), GROUPS)
def test_a_later_group_passes_its_least_only_when_earlier_ones_are_full(count: int, groups: tuple[Group, ...]) -> None:
    sizes = distribute(count, groups)
    full = True
    for group in groups:
        assert full or sizes[group.name] <= group.min
        full = full and group.max is not None and sizes[group.name] == group.max


PHASED = st.lists(
    st.tuples(st.sampled_from(["Prompt", "Token", "Any"]), st.integers(0, 2), st.none() | st.integers(3, 8)), max_size=4
).map(
    lambda drawn: tuple(
        Group(f"g{i}", {}, low, most, phase)
        for i, (phase, low, most) in enumerate([("Prompt", 0, None), ("Token", 0, None), *drawn])
    )
)


@given(st.integers(0, 30), PHASED, st.integers(0, 4), st.integers(0, 4), st.floats(0, 1), st.booleans())
def test_a_number_that_people_wrote_gives_each_phase_its_least_and_the_rest_by_expected_lengths(
    replicas: int, groups: tuple[Group, ...], prompt: int, token: int, share: float, answered: bool
) -> None:
    """Without load. The scheduler counts; until it has answered each group has one before one has two."""
    pool = replace(SPLIT, groups=groups)
    bounds, least = Bounds(replicas, replicas, GENERATION), PhaseCounts(max(1, prompt), max(1, token))
    autoscaler, report = Autoscaler(PoolCapacity()), None
    if answered:
        limits, asked = PhaseBounds(phase_groups(pool), least, share), ReplicaBounds(replicas, replicas)
        autoscaler.recommend(PoolLoad(split=True), asked, 0.0, window_s=60.0, work_s=30.0, keep=False, phases=limits)
        report = PoolStatus(0, replicas, (), GENERATION, wanted=autoscaler.target)
    found, of_phase = sizes(pool, replicas, report, bounds, {}), Counter[str]()
    for group in groups:
        of_phase[group.phase] += found[group.name]
    assert sum(found.values()) == replicas
    minima = sum(group.min for group in groups)
    if not answered and replicas >= sum(max(1, group.min) for group in groups):
        assert all(found[group.name] >= max(1, group.min) for group in groups)
    if replicas >= minima + sum(least):
        due = (least.prompt, least.token) if answered else (1, 1)
        missing = sum(max(0, count - of_phase[phase]) for phase, count in zip(("Prompt", "Token"), due, strict=True))
        assert missing <= of_phase["Any"], "a runner for any phase is for the one that lacks it"
    if answered and len(groups) == 2 and replicas >= sum(least):
        assert abs(of_phase["Prompt"] - least.prompt - share * (replicas - sum(least))) <= 0.5


@given(
    BOUNDS,
    COUNTS,
    st.none() | st.builds(PoolStatus, COUNTS, COUNTS, st.just(()), st.sampled_from((0, GENERATION - 1, GENERATION))),
)
def test_targets_are_within_bounds_and_the_schedulers(bounds: Bounds, present: int, report: PoolStatus | None) -> None:
    count = target(bounds, report, present)
    assert bounds.min <= count <= bounds.max
    if (
        report is not None
        and report.observed_generation == GENERATION
        and bounds.min <= report.wanted_runners <= bounds.max
    ):
        assert count == report.wanted_runners
    elif report is not None and report.observed_generation == 0:
        assert count >= min(present, bounds.max), "one that knows of no runner takes none away"
    elif (report is None or report.observed_generation != GENERATION) and bounds.min <= present <= bounds.max:
        assert count == present


@given(RUNNERS, COUNTS, BOUNDS, st.permutations([f"r{number}" for number in range(14)]), COUNTS, st.booleans())
def test_who_goes(
    present: list[ScaledRunner], wanted: int, bounds: Bounds, names: list[str], count: int, waited: bool
) -> None:
    report = PoolStatus(len(present), wanted, tuple(names[:count]), GENERATION)
    going = select_victims(present, wanted, report, bounds, waited=waited)
    assert going is not None
    assert len(set(going)) == len(going) <= max(0, len(present) - wanted)
    assert set(going) <= set(present)
    if bounds.fixed:
        assert len(going) == max(0, len(present) - wanted)
    ready = [runner.name for runner in going if runner.ready]
    named = [name for name in ready if name in report.victims]
    if not bounds.fixed:
        assert ready == named  # nobody ready goes without being named
    assert named == sorted(named, key=report.victims.index)
    left_over = [r for r in present if r.ready and r.name in report.victims and r not in going]
    assert not left_over or all(runner.name in report.victims or not runner.ready for runner in going)


@given(RUNNERS, COUNTS, BOUNDS)
def test_nobody_goes_before_an_answer_or_its_time(present: list[ScaledRunner], wanted: int, bounds: Bounds) -> None:
    other = PoolStatus(1, 1, tuple(runner.name for runner in present), GENERATION - 1)
    for report in (None, other):
        going = select_victims(present, wanted, report, bounds, waited=False)
        assert going == ([] if len(present) <= wanted else None)
        late = select_victims(present, wanted, report, bounds, waited=True)
        assert late is not None
        if bounds.fixed:
            assert len(late) == max(0, len(present) - wanted)


SIZES = st.tuples(*(COUNTS for _ in "abc")).map(lambda counts: dict(zip("abc", counts, strict=True)))


@given(SIZES, SIZES, COUNTS)
@example({"a": 2, "b": 2, "c": 2}, {"a": 0, "b": 0, "c": 0}, 3)  # what the last one gives, the next need not
def test_groups_grow_only_as_far_as_others_left(wanted: dict[str, int], present: dict[str, int], count: int) -> None:
    found, kept = (
        one_for_one(wanted, {name: n for name, n in present.items() if n}, count),
        {name: min(wanted[name], present[name]) for name in wanted},
    )
    assert all(kept[name] <= found[name] <= wanted[name] for name in wanted)
    assert sum(found.values()) == min(sum(wanted.values()), max(count, sum(kept.values())))


@given(RUNNERS)
def test_marks_grow_in_the_order_of_going_and_are_all_below_an_unmarked_one(going: list[ScaledRunner]) -> None:
    costs = deletion_costs(going)
    assert list(costs) == [runner.name for runner in going]
    assert list(costs.values()) == sorted(set(costs.values()))
    assert all(cost < 0 for cost in costs.values())


@pytest.mark.parametrize(
    ("phases", "of_groups", "apart"),
    [
        ("Split", ("Prompt", "Token", "Token"), True),
        ("Split", ("Any", "Any", "Any"), False),
        ("Unified", ("Prompt", "Token", "Token"), False),
    ],
)
def test_groups_are_counted_apart_in_a_split_pool_whose_hardware_is_for_phases(
    phases: str, of_groups: tuple[Literal["Any", "Prompt", "Token"], ...], apart: bool
) -> None:
    groups = tuple(Group(name, {}, phase=phase) for name, phase in zip("abc", of_groups, strict=True))
    pool = replace(SPLIT if phases == "Split" else POOL, groups=groups)
    assert counts_apart(pool) == apart
    assert counted_together(pool, "a") == (set() if apart else {"b", "c"})
    assert counted_together(pool, "b") == ({"c"} if apart else {"a", "c"})


@pytest.mark.parametrize(("generation", "total"), [(GENERATION - 1, 4), (GENERATION, 3)])
def test_numbers_of_phases_that_are_of_another_spec_or_sum_move_no_runner(generation: int, total: int) -> None:
    groups = Group("p", {}, phase="Prompt"), Group("t", {}, phase="Token")
    pool, bounds = replace(SPLIT, groups=groups), Bounds(4, 4, GENERATION)
    report = PoolStatus(0, 4, (), generation, wanted=PhaseCounts(total, 0))
    assert sizes(pool, 4, report, bounds, {"p": 1, "t": 3}) == {"p": 1, "t": 3}


@pytest.mark.parametrize(
    ("fixed", "apart", "answered", "goes"),
    [
        (True, False, True, True),
        (True, True, False, True),
        (True, True, True, False),  # the scheduler has named others, in another group
        (False, False, True, False),
    ],
)
def test_a_ready_runner_goes_unnamed_for_a_written_number(fixed: bool, apart: bool, answered: bool, goes: bool) -> None:
    bounds = Bounds(1 if fixed else 0, 1, GENERATION)
    report = PoolStatus(2, 1, (), GENERATION) if answered else None
    going = select_victims(
        [ScaledRunner("r0", True), ScaledRunner("r1", True)], 1, report, bounds, waited=True, is_separate=apart
    )
    assert going == ([ScaledRunner("r1", True)] if goes else [])


@pytest.mark.parametrize(("unready", "victims"), [("r0", ()), ("r1", ()), ("r2", ()), ("", ("r1",)), ("", ("r2",))])
def test_nobody_goes_twice(unready: str, victims: tuple[str, ...]) -> None:
    present = [ScaledRunner(name, name != unready) for name in ("r0", "r1", "r2")]
    going = select_victims(present, 0, PoolStatus(3, 0, victims, GENERATION), Bounds(0, 0, GENERATION), waited=True)
    assert going is not None
    assert sorted(going, key=lambda runner: runner.name) == present
