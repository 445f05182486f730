"""How much is reserved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.scheduler_driver import Driver
from weft_scheduler.core.model.request import remaining_tokens
from weft_scheduler.core.policy.reservation import RESERVATION_POLICIES
from weft_scheduler.core.policy.reservation.output_lengths import OutputLengthStats
from weft_scheduler.core.policy.reservation.policies import ExpectedOutput


def lengths() -> OutputLengthStats:
    return OutputLengthStats(0.9, 256, 100)


def reserved(policy: str, seen: OutputLengthStats, max_tokens: int, p90: int = 0, bucket: int = 0) -> int:
    return RESERVATION_POLICIES[policy](seen).initial_tokens(ExpectedOutput("p", "d", max_tokens, p90, bucket))


@pytest.mark.parametrize(
    ("policy", "max_tokens", "p90", "bucket", "expected"),
    [
        ("calibrated", 100, 30, 205, 30),
        ("calibrated", 100, 300, 205, 100),
        ("calibrated", 1000, 0, 0, 90),  # the adapter's own p90
        ("s3", 1000, 30, 205, 205),
        ("s3", 100, 30, 205, 100),
        ("s3", 1000, 30, 0, 30),
        ("s3", 1000, 0, 0, 90),
        ("constant", 1000, 30, 205, 900),  # the pool's p90
        ("constant", 100, 30, 205, 100),
        ("max", 1000, 30, 205, 1000),
        ("paged", 1000, 30, 205, 1),
        ("pooled", 1000, 30, 205, 30),
    ],
)
def test_what_a_policy_reserves(policy: str, max_tokens: int, p90: int, bucket: int, expected: int) -> None:
    seen = lengths()
    for tokens in range(1, 10):
        seen.observe("p", "other", 100 * tokens, censored=False)
    for tokens in range(1, 10):
        seen.observe("p", "d", 10 * tokens, censored=False)
    assert reserved(policy, seen, max_tokens, p90, bucket) == expected


def test_without_any_answer_the_default_stands_in() -> None:
    for policy in ("calibrated", "s3", "constant"):
        assert reserved(policy, lengths(), 1000) == 256


def test_paged_reserves_nothing_after_a_migration_either() -> None:
    driver = Driver().start(reservation="paged")
    driver.runner("a")
    assign = driver.place("r", p90_tokens=500, max_tokens=1000, emitted_tokens=300)
    assert (assign.reservation_tokens, assign.allotment.by_page) == (1, True)


def test_only_under_s3_the_overrunner_itself_leaves() -> None:
    for policy in ("s3", "calibrated"):
        driver = Driver().start(reservation=policy)
        driver.runner("a")
        assert driver.place("r", p90_tokens=5, max_tokens=9).allotment.leaves == (policy == "s3")


@pytest.mark.parametrize(
    ("cover", "emitted", "max_tokens", "expected"),
    [(40, 0, 100, 40), (40, 30, 100, 10), (40, 40, 100, 40), (40, 95, 100, 5), (1, 7, 100, 1), (40, 100, 100, 1)],
)
def test_what_is_left_of_a_cover_after_some_tokens(cover: int, emitted: int, max_tokens: int, expected: int) -> None:
    assert remaining_tokens(cover, emitted, max_tokens) == expected


@given(cover=st.integers(1, 1000), emitted=st.integers(0, 5000))
def test_an_outgrown_cover_has_doubled_until_it_reaches_beyond(cover: int, emitted: int) -> None:
    grown = remaining_tokens(cover, emitted, 10_000) + emitted
    assert grown > emitted
    assert grown == cover or grown <= 2 * emitted
    assert grown % cover == 0


def test_a_dead_predictor_is_replaced_by_the_adapters_own_quantile() -> None:
    seen = lengths()
    for tokens in range(1, 21):
        seen.observe("p", "short", tokens, censored=False)
        seen.observe("p", "long", 10 * tokens, censored=False)
    assert seen.of_adapter("p", "short") == 19  # rank ceil(0.9 * 21)
    assert seen.of_adapter("p", "long") == 190
    assert 100 < seen.of_adapter("p", "unseen") <= 200  # the pool's
    assert seen.of_adapter("other pool", "short") == 256


def test_too_few_answers_are_no_quantile() -> None:
    seen = lengths()
    for _ in range(8):
        seen.observe("p", "d", 5, censored=False)
    assert seen.of_adapter("p", "d") == 256  # 0.9 of 8 answers cannot be bounded by any of them
    seen.observe("p", "d", 5, censored=False)
    assert seen.of_adapter("p", "d") == 5


def test_a_censored_length_counts_only_where_it_is_news() -> None:
    seen = lengths()
    for _ in range(20):
        seen.observe("p", "d", 10, censored=False)
    for _ in range(20):
        seen.observe("p", "d", 3, censored=True)
    assert seen.of_adapter("p", "d") == 10
    for _ in range(60):
        seen.observe("p", "d", 50, censored=True)
    assert seen.of_adapter("p", "d") == 50


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 2000), st.booleans()), max_size=80))
def test_what_is_remembered_is_bounded(observations: list[tuple[str, int, bool]]) -> None:
    seen = OutputLengthStats(0.9, 256, 4)
    for digest, tokens, censored in observations:
        seen.observe("p", digest, tokens, censored)
    assert len(seen) <= 4


def test_through_the_core_outcomes_teach_the_reservation_of_the_next(driver: Driver) -> None:
    driver.start("sha256:1").runner("a")
    for i in range(10):
        driver.place(f"r{i}", "sha256:1", p90_tokens=0)
        driver.outcome(f"r{i}", tokens=7, digest="sha256:1")
    assert driver.place("next", "sha256:1", p90_tokens=0).reservation_tokens == 7
