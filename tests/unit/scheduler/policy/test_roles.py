"""Roles of runners: bounds, what suits a group, and that nothing goes back and forth."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.runner import RunnerRole
from weft_scheduler.core.policy.phases.roles import (
    GROW_S,
    LOST_IN_A_ROW,
    LOST_TOGETHER_S,
    MAX_SUSPEND_S,
    PERIOD_S,
    REPLANNED,
    REVIEW_S,
    SHRINK_S,
    SUSPEND_S,
    PhaseRunner,
    RolePlan,
)
from weft_scheduler.core.policy.placement.splitwise import KvDomain

PROMPT, TOKEN, MIXED = RunnerRole.PROMPT, RunnerRole.TOKEN, RunnerRole.MIXED
M, OTHER, NONE = KvDomain("m", "x"), KvDomain("n", "x"), KvDomain("", "x")


def fleet(n: int, preferred: Sequence[RunnerRole | None] = (), **fields: object) -> list[PhaseRunner]:
    """`prompt_s` and `token_s` of an A100 with a 7B model: 0.1 ms and 0.5 ms."""
    preferred = [*preferred, *[None] * (n - len(preferred))]
    return [PhaseRunner(f"r{i:03}", M, preferred[i], 1e-4, 5e-4)._replace(**fields) for i in range(n)]


def counts(roles: RolePlan, runners: Sequence[PhaseRunner]) -> Counter[RunnerRole]:
    return Counter(roles.role_of(runner.uuid) for runner in runners)


def planned(runners: Sequence[PhaseRunner]) -> RolePlan:
    roles = RolePlan()
    roles.plan(runners, 0.0)
    return roles


@pytest.mark.parametrize(
    ("n", "work", "expected"),
    [
        (1, (1000, 100), (0, 0)),
        (2, (1000, 100), (1, 1)),
        (9, (1000, 100), (6, 3)),  # 0.1 s of prompt and 0.05 s of tokens
        (9, (1000, 400), (3, 6)),
        (9, (10, 4000), (1, 8)),
        (9, (4000, 10), (8, 1)),
        (2, (4000, 10), (1, 1)),
    ],
)
def test_first_roles_follow_from_each_phases_seconds(n: int, work: tuple[int, int], expected: tuple[int, int]) -> None:
    roles, runners = RolePlan(), fleet(n)
    for _ in range(1000):
        roles.work.observe(*work)
    roles.plan(runners, 0.0)
    assert (counts(roles, runners)[PROMPT], counts(roles, runners)[TOKEN]) == expected


def test_a_groups_runners_are_in_its_phase_and_others_where_they_are_faster() -> None:
    runners = fleet(6, [TOKEN, None, PROMPT, PROMPT, PROMPT, PROMPT])
    roles = planned(runners)
    assert [roles.role_of(runner.uuid) for runner in runners] == [TOKEN, TOKEN, *[PROMPT] * 4]
    token = fleet(6, [TOKEN] * 5)
    assert counts(planned(token), token) == {PROMPT: 1, TOKEN: 5}
    slow = [*fleet(4)[:3], fleet(4)[3]._replace(prompt_s=4e-4)]
    roles = planned(slow)
    assert [roles.role_of(runner.uuid) for runner in slow] == [PROMPT, PROMPT, PROMPT, TOKEN]
    only_prompt = fleet(3, [PROMPT] * 3)
    assert counts(planned(only_prompt), only_prompt) == {PROMPT: 2, TOKEN: 1}, "someone has to"


def test_who_exchanges_no_kv_is_mixed() -> None:
    alone = [*fleet(3, domain=NONE), PhaseRunner("z", OTHER, None, 1e-4, 5e-4)]
    assert counts(planned(alone), alone) == {MIXED: 4}
    assert planned(alone).reason == "no two runners can send KV to each other"
    assert planned([]).prompt_share == 0.5


def test_the_number_changes_slowly_and_not_back_and_forth() -> None:
    roles, runners = planned(fleet(9)), fleet(9)
    before = dict(roles.base)
    for _ in range(1000):
        roles.work.observe(1000, 400)
    roles.review(runners, PERIOD_S - 1, waiting=False)
    assert roles.base == before
    roles.review(runners, PERIOD_S, waiting=False)
    assert counts(roles, runners)[PROMPT] == 3
    kept = dict(roles.base)
    for period, output in enumerate((300, 550, 290, 560), 2):  # wanted: 3.6, 2.4, 3.7, 2.4 of 9
        for _ in range(1000):
            roles.work.observe(1000, output)
        roles.review(runners, period * PERIOD_S, waiting=False)
        assert roles.base == kept


def test_of_a_large_pool_those_who_come_join_the_side_that_lacks_one() -> None:
    runners = fleet(REPLANNED + 20)
    roles = planned(runners[:REPLANNED])
    before = dict(roles.base)
    roles.plan(runners, 1.0)
    assert before.items() <= roles.base.items()
    for _ in range(1000):
        roles.work.observe(1000, 400)
    roles.plan(runners[1:], 2.0)
    assert before.items() - {("r000", before["r000"])} <= roles.base.items(), "nor does another one change its own"
    share = counts(roles, runners)[PROMPT] / len(runners)
    assert abs(share - counts(planned(runners[:REPLANNED]), runners[:REPLANNED])[PROMPT] / REPLANNED) < 0.02


def test_a_mixed_set_grows_while_prompts_wait_and_shrinks_when_they_do_not() -> None:
    closed = fleet(6, queue_open=False)
    roles = planned(closed)
    assert counts(roles, closed) == {PROMPT: 4, TOKEN: 2}
    roles.review(closed, 1.0, waiting=True)
    assert counts(roles, closed) == {PROMPT: 4, TOKEN: 1, MIXED: 1}
    roles.review(closed, 1.0 + GROW_S, waiting=True)
    assert counts(roles, closed)[TOKEN] == 1, "the last one"
    end = 1.0 + GROW_S + SHRINK_S
    roles.review(fleet(6), end - 0.1, waiting=False)
    assert counts(roles, closed)[MIXED] == 1
    roles.review(closed, end, waiting=False)
    assert counts(roles, closed)[MIXED] == 1, "the prompt runners' queues are full"
    roles.review(fleet(6), end, waiting=False)
    assert counts(roles, closed) == {PROMPT: 4, TOKEN: 2}


def test_the_least_loaded_become_mixed_one_after_the_other_and_one_of_each_side_is_not() -> None:
    runners = [r._replace(queue_open=i == 8, reserved_share=i / 10) for i, r in enumerate(fleet(9))]
    roles = RolePlan()
    for _ in range(1000):
        roles.work.observe(1000, 100)
    roles.plan(runners, 0.0)
    assert counts(roles, runners) == {PROMPT: 6, TOKEN: 3}
    for now, mixed in ((1.0, ["r006"]), (0.9 + GROW_S, ["r006"]), (1.0 + GROW_S, ["r006", "r007"])):
        roles.review(runners, now, waiting=True)
        assert [*roles.mixed] == mixed
        assert roles.reason.endswith(f"; {len(mixed)} do both while requests wait")
    roles.plan([*runners, PhaseRunner("new", M, TOKEN, 1e-4, 5e-4)], 2.0)
    assert [*roles.mixed] == ["r006", "r007"]
    roles.plan(runners[:8], 2.0)
    assert [*roles.mixed] == ["r007"], "one of the two has to be for tokens alone, the longer mixed one"
    assert counts(roles, runners[:8]) == {PROMPT: 6, TOKEN: 1, MIXED: 1}
    roles.plan(runners[7:8], 3.0)
    assert not roles.mixed, "alone it is not so for a while"


@pytest.mark.parametrize(("share", "open_", "mixed"), [(0.5, False, 0), (0.6, True, 1)])
def test_a_prompt_runner_is_mixed_where_memory_is_short_until_half_free(share: float, open_: bool, mixed: int) -> None:
    full = [r._replace(reserved_share=1.0) if i >= 4 else r for i, r in enumerate(fleet(6))]
    roles = planned(full)
    roles.review(full, 1.0, waiting=True)
    assert counts(roles, full) == {PROMPT: 3, TOKEN: 2, MIXED: 1}
    later = [r._replace(reserved_share=share if i >= 4 else 0.0, queue_open=open_) for i, r in enumerate(full)]
    later.append(PhaseRunner("other", OTHER, None, 1e-4, 5e-4))
    roles.review(later, 1.0 + SHRINK_S, waiting=False)
    assert counts(roles, full)[MIXED] == mixed


def test_a_mixed_runner_for_tokens_goes_back_once_prompts_fit_elsewhere() -> None:
    closed = [r._replace(queue_open=i >= 4) for i, r in enumerate(fleet(6))]
    roles = planned(closed)
    roles.review(closed, 1.0, waiting=True)
    roles.review(closed, 1.0 + SHRINK_S, waiting=False)
    assert counts(roles, closed)[MIXED] == 1, "queues of runners for tokens are no place for prompts, nor is its own"


def test_the_next_review_is_soon_while_something_waits_and_else_once_a_period() -> None:
    roles, closed = planned(fleet(6)), fleet(6, queue_open=False)
    assert roles.next_review(10.0, waiting=False) is None, "no request has come since"
    roles.work.observe(100, 100)
    reviews = [roles.next_review(now, waiting=False) for now in (0.0, 10.0, PERIOD_S)]
    assert reviews == [PERIOD_S, PERIOD_S, PERIOD_S + REVIEW_S]
    assert roles.next_review(10.5 * PERIOD_S, waiting=False) == 11 * PERIOD_S
    assert roles.next_review(10.0, waiting=True) == 10.0 + REVIEW_S
    roles.review(closed, 20.0, waiting=True)
    assert roles.next_review(20.0, waiting=False) == 20.0 + REVIEW_S, "one is mixed"
    for n in range(LOST_IN_A_ROW):
        roles.lost(30.0 + n)
    until = 30.0 + LOST_IN_A_ROW - 1 + SUSPEND_S
    assert [roles.next_review(now, waiting=True) for now in (until - 1, until)] == [until, until + REVIEW_S]


def test_after_transfers_that_failed_in_a_row_phases_are_not_split_for_a_while_that_doubles() -> None:
    runners, now = fleet(4), 0.0
    roles = planned(runners)
    assert not roles.resumes(now)
    for suspension in (SUSPEND_S, 2 * SUSPEND_S, 40.0, 80.0, 160.0, MAX_SUSPEND_S, MAX_SUSPEND_S):
        for number in range(1, LOST_IN_A_ROW + 1):
            now += LOST_TOGETHER_S
            assert roles.lost(now) == (number == LOST_IN_A_ROW)
        roles.plan(runners, now)
        assert counts(roles, runners) == {MIXED: 4}
        assert not roles.resumes(now + suspension - 1)
        now += suspension
        assert roles.resumes(now)
        assert not roles.resumes(now)
        roles.plan(runners, now)
        assert counts(roles, runners)[PROMPT]
    roles.lost(now + LOST_TOGETHER_S)
    roles.handed_off()
    assert not any(roles.lost(now + number * LOST_TOGETHER_S) for number in range(2, LOST_IN_A_ROW + 1))


def test_transfers_that_one_stream_takes_with_it_are_lost_once() -> None:
    roles = planned(fleet(4))
    assert not any(roles.lost(now) for now in (5.0, 5.0, 5.1, 5.5, 5.9))


RUNNER = st.builds(
    PhaseRunner,
    uuid=st.sampled_from("abcdefghij"),
    domain=st.sampled_from([M, M, OTHER, NONE]),
    preferred=st.sampled_from([None, None, PROMPT, TOKEN]),
    prompt_s=st.sampled_from([1e-4, 4e-4]),
    token_s=st.sampled_from([5e-4, 1e-3]),
    pending_prompt_tokens=st.integers(0, 9),
    queue_open=st.booleans(),
    reserved_share=st.sampled_from([0.0, 0.4, 1.0]),
)
STEPS = st.lists(
    st.tuples(
        st.lists(RUNNER, unique_by=lambda runner: runner.uuid),
        st.sampled_from([0.1, GROW_S, SHRINK_S, PERIOD_S]),
        st.booleans(),
        st.tuples(st.integers(1, 4000), st.integers(1, 1000)),
    ),
    max_size=20,
)


@given(STEPS)
def test_there_are_runners_for_both_phases_whatever_comes_and_goes(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    roles, now, present = RolePlan(), 0.0, set[tuple[object, ...]]()
    for runners, seconds, waiting, work in steps:
        now += seconds
        roles.work.observe(*work)
        if {runner[:3] for runner in runners} != present:
            present = {runner[:3] for runner in runners}
            roles.plan(runners, now)
        before = len(roles.mixed)
        roles.review(runners, now, waiting=waiting)
        assert abs(len(roles.mixed) - before) <= 1
        domains: dict[KvDomain, list[RunnerRole]] = {}
        for runner in runners:
            domains.setdefault(runner.domain, []).append(roles.role_of(runner.uuid))
        for domain, of_domain in domains.items():
            if len(of_domain) < 2 or not domain.kv_layout:
                assert {*of_domain} == {MIXED}
            else:
                assert {PROMPT, TOKEN} <= {*of_domain}
