"""Runners over groups of hardware for one phase: sums, bounds, and who goes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.routes import GroupPhase, PhaseCounts, PhaseGroups
from weft.domain.runner import RunnerRole
from weft_scheduler.core.policy.autoscaling.autoscaler import Contribution, PoolCapacity
from weft_scheduler.core.policy.autoscaling.demand import RunnerCapacity
from weft_scheduler.core.policy.autoscaling.groups import VictimCandidate, allocate, divide, select_victims, surplus

PROMPT, TOKEN, ANY = GroupPhase
BOTH = (PhaseGroups(PROMPT), PhaseGroups(TOKEN))
WITH_ANY = (*BOTH, PhaseGroups(ANY))


@pytest.mark.parametrize(
    ("total", "wanted", "groups", "expected"),
    [
        (5, (2, 3), (), (0, 0, 5)),
        (5, (2, 3), BOTH, (2, 3, 0)),
        (5, (2, 3), WITH_ANY, (2, 3, 0)),
        (5, (2, 3), (PhaseGroups(PROMPT), PhaseGroups(ANY)), (2, 0, 3)),
        (8, (9, 3), BOTH, (6, 2, 0)),
        (2, (9, 1), BOTH, (1, 1, 0)),
        (6, (4, 2), (PhaseGroups(PROMPT, 0, 1), PhaseGroups(TOKEN), PhaseGroups(ANY, 0, 2)), (1, 3, 2)),
        (4, (1, 3), (PhaseGroups(PROMPT, 3), PhaseGroups(TOKEN)), (3, 1, 0)),
        (3, (1, 1), (PhaseGroups(PROMPT, 0, 1), PhaseGroups(TOKEN, 0, 1)), (1, 2, 0)),
    ],
)
def test_a_number_of_runners_is_spread_over_groups(
    total: int, wanted: tuple[int, int], groups: tuple[PhaseGroups, ...], expected: tuple[int, int, int]
) -> None:
    assert allocate(total, PhaseCounts(*wanted), groups) == PhaseCounts(*expected)


def test_runners_are_counted_by_the_phase_of_their_groups() -> None:
    capacity = PoolCapacity()
    for one in (Contribution(of_prompt_group=1), Contribution(of_token_group=1), Contribution(), Contribution()):
        capacity.replace(None, one)
    assert (capacity.of_groups(BOTH), capacity.of_groups(())) == (PhaseCounts(1, 1, 2), PhaseCounts(any=4))


def test_a_mean_runner_needs_one_of_each_phase() -> None:
    capacity, tokens = PoolCapacity(), Contribution(sequences=8, for_tokens=1)
    capacity.replace(None, tokens)
    assert capacity.mean(1.0) is None
    capacity.replace(tokens, prompts := Contribution(prefill_tokens_per_s=100, for_prompts=1))
    assert capacity.mean(1.0) is None
    capacity.replace(None, tokens)
    assert capacity.mean(1.0) == RunnerCapacity(8, 0, 0, 1.0, 100)
    capacity.replace(prompts, None)
    assert capacity.mean(1.0) is None


COUNTS = st.builds(PhaseCounts, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
PHASES = st.builds(PhaseCounts, st.integers(0, 9), st.integers(0, 9), st.just(0))
GROUPS = st.lists(
    st.builds(PhaseGroups, st.sampled_from(GroupPhase), st.integers(0, 2), st.integers(0, 5)),
    unique_by=lambda group: group.phase,
)


@given(st.integers(0, 30), PHASES, GROUPS)
def test_a_sum_is_kept_and_one_more_takes_none_away(total: int, wanted: PhaseCounts, groups: list[PhaseGroups]) -> None:
    counts, more = allocate(total, wanted, groups), allocate(total + 1, wanted, groups)
    assert sum(counts) == total
    assert all(after >= before for before, after in zip(counts, more, strict=True))
    room = sum(max(group.min_runners, group.max_runners) or total for group in groups)
    for group in groups:
        if group.max_runners and total <= room:
            assert getattr(counts, group.phase.value) <= max(group.min_runners, group.max_runners)


@given(st.integers(0, 30), PHASES, st.floats(0, 1))
def test_each_phase_gets_what_it_demands_and_spare_ones_stay(total: int, demand: PhaseCounts, share: float) -> None:
    phases = divide(total, demand, share, PhaseCounts())
    assert phases.prompt >= demand.prompt
    assert phases.token >= demand.token
    assert sum(phases) == max(total, sum(demand))
    if total > sum(demand):
        for nearby in (share - 0.2 / total, share + 0.2 / total):
            assert divide(total, demand, min(1.0, max(0.0, nearby)), phases) == phases


@pytest.mark.parametrize(
    ("total", "share", "before", "expected"),
    [(10, 0.9, (5, 5), (9, 1)), (4, 0.6875, (2, 2), (2, 2)), (4, 0.6875, (2, 3), (3, 1))],
)
def test_a_number_is_divided_anew(total: int, share: float, before: tuple[int, int], expected: tuple[int, int]) -> None:
    assert divide(total, PhaseCounts(), share, PhaseCounts(*before)) == PhaseCounts(*expected)


@given(COUNTS, COUNTS)
def test_no_more_runners_go_than_too_many_and_one_to_another_group(present: PhaseCounts, wanted: PhaseCounts) -> None:
    going = surplus(present, wanted)
    over = sum(present) - sum(wanted)
    assert all(0 <= n <= max(0, a - b) for n, a, b in zip(going, present, wanted, strict=True))
    assert sum(going) <= max(0, over + 1)
    assert sum(going) >= over, "as many as are too many can go"
    if over < 0:
        assert sum(going) == 0, "what comes is awaited before more go"


@given(COUNTS, COUNTS)
def test_moves_one_by_one_end_at_what_is_wanted(present: PhaseCounts, wanted: PhaseCounts) -> None:
    """Whoever is named goes, then as many come as are missing, in groups that lack some."""
    counts = present
    for _ in range(30):
        left = [n - gone for n, gone in zip(counts, surplus(counts, wanted), strict=True)]
        for group in range(3):
            while left[group] < wanted[group] and sum(left) < sum(wanted):
                left[group] += 1
        counts = PhaseCounts(*left)
    assert counts == wanted


CANDIDATES = st.lists(
    st.builds(
        VictimCandidate,
        working_set=st.integers(0, 3),
        minus_arrival=st.integers(-9, 0),
        uuid=st.sampled_from("abcdefghij"),
        role=st.sampled_from(RunnerRole),
        group=st.sampled_from(["prompt", "token", "any"]),
    ),
    unique_by=lambda candidate: candidate.uuid,
)


@given(CANDIDATES, st.lists(st.sampled_from("abcdefghijk"), unique=True), COUNTS, PHASES)
def test_victims_are_of_their_groups_and_leave_no_role_empty_where_another_can_go(
    candidates: list[VictimCandidate], kept: list[str], going: PhaseCounts, phases: PhaseCounts
) -> None:
    victims = select_victims(candidates, kept, going, phases)
    by_uuid = {candidate.uuid: candidate for candidate in candidates}
    present, gone = Counter(c.group for c in candidates), Counter(by_uuid[uuid].group for uuid in victims)
    assert len({*victims}) == len(victims)
    assert all(gone[group] == min(present[group], count) for group, count in going._asdict().items())
    roles, chosen = Counter(c.role for c in candidates), Counter(by_uuid[uuid].role for uuid in victims)
    for candidate in candidates:
        if not kept and chosen[candidate.role] and chosen[candidate.role] == roles[candidate.role]:
            others = [c for c in candidates if c.group == candidate.group and c.role is not candidate.role]
            spare = [c for c in others if c.uuid not in victims and roles[c.role] - chosen[c.role] > 1]
            mine = [u for u in victims if by_uuid[u].role is candidate.role and by_uuid[u].group == candidate.group]
            assert not (mine and spare), "the last one of a role goes where nobody else can"


def test_the_role_that_has_more_than_it_wants_gives_first_and_the_least_loaded_of_it() -> None:
    prompt, token = RunnerRole.PROMPT, RunnerRole.TOKEN
    fleet = [
        VictimCandidate(0, 0, "idle token", token),
        VictimCandidate(2, -1, "prompt", prompt),
        VictimCandidate(1, -2, "light prompt", prompt),
        VictimCandidate(3, -3, "token", token),
    ]
    assert select_victims(fleet, [], PhaseCounts(any=1), PhaseCounts(1, 2)) == ["light prompt"]
    assert select_victims(fleet, [], PhaseCounts(any=2), PhaseCounts(1, 1)) == ["idle token", "light prompt"]
    assert select_victims(fleet, ["token"], PhaseCounts(any=2), PhaseCounts(1, 1)) == ["token", "light prompt"]


def test_the_last_prompt_runner_stays_where_another_can_go_though_no_prompts_are_demanded() -> None:
    prompt, mixed = RunnerRole.PROMPT, RunnerRole.MIXED
    fleet = [VictimCandidate(0, 0, "a", prompt), VictimCandidate(0, 0, "b", mixed), VictimCandidate(0, 0, "c", mixed)]
    assert select_victims(fleet, [], PhaseCounts(any=1), PhaseCounts()) == ["b"]
    assert select_victims(fleet[:2], [], PhaseCounts(any=1), PhaseCounts()) == ["a"], "so is the other one"


def test_the_last_prompt_runner_stays_though_the_other_one_has_to_go() -> None:
    """The group of `alone` has nobody else; in the group of `idle` a mixed runner can go."""
    prompt, mixed = RunnerRole.PROMPT, RunnerRole.MIXED
    fleet = [
        VictimCandidate(0, -1, "idle", prompt, "prompt"),
        VictimCandidate(0, 0, "alone", prompt, "any"),
        VictimCandidate(0, 0, "mixed", mixed, "prompt"),
        VictimCandidate(0, 0, "other", mixed, "prompt"),
    ]
    assert {*select_victims(fleet, [], PhaseCounts(prompt=1, any=1), PhaseCounts())} == {"alone", "mixed"}
