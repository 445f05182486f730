"""How much is reserved."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_scheduler.core.policy.reservation.calibrated import (
    Calibrated,
    OutputLengthStats,
    double_past,
    remaining_tokens,
)


def lengths() -> OutputLengthStats:
    return OutputLengthStats(0.9, 256, 100)


@pytest.mark.parametrize(
    ("p90", "max_tokens", "expected"),
    [(30, 100, 30), (300, 100, 100), (1, 1, 1), (0, 1000, 256), (0, 100, 100)],
)
def test_the_cover_is_the_calibrated_quantile_capped_by_what_is_allowed(
    p90: int, max_tokens: int, expected: int
) -> None:
    assert Calibrated(lengths()).initial_tokens("p", "d", p90, max_tokens) == expected


@given(p90=st.integers(1, 500))
def test_ten_times_the_prediction_is_ten_times_the_reservation(p90: int) -> None:
    once = Calibrated(lengths()).initial_tokens("p", "d", p90, 100_000)
    assert Calibrated(lengths()).initial_tokens("p", "d", 10 * p90, 100_000) == 10 * once


def test_a_predictor_times_ten_reserves_ten_times_as_much_through_the_core(driver: Any) -> None:
    driver.start()
    driver.runner("a", total_pages=1000)
    plain = sum(driver.place(f"r{i}", p90_tokens=10 + i, max_tokens=1000).reservation_tokens for i in range(2))
    scaled = sum(driver.place(f"s{i}", p90_tokens=10 * (10 + i), max_tokens=1000).reservation_tokens for i in range(2))
    assert scaled == 10 * plain


@pytest.mark.parametrize(
    ("cover", "emitted", "max_tokens", "expected"),
    [(40, 0, 100, 40), (40, 30, 100, 10), (40, 40, 100, 40), (40, 95, 100, 5), (1, 7, 100, 1), (40, 100, 100, 1)],
)
def test_what_is_left_of_a_cover_after_some_tokens(cover: int, emitted: int, max_tokens: int, expected: int) -> None:
    assert remaining_tokens(cover, emitted, max_tokens) == expected


@given(cover=st.integers(1, 1000), emitted=st.integers(0, 5000))
def test_an_outgrown_cover_has_doubled_until_it_reaches_beyond(cover: int, emitted: int) -> None:
    grown = double_past(cover, emitted)
    assert grown > emitted
    assert grown == cover or grown <= 2 * emitted
    assert grown % cover == 0


def test_a_dead_predictor_is_replaced_by_the_adapters_own_quantile() -> None:
    seen = lengths()
    for tokens in range(1, 21):
        seen.observe("p", "short", tokens, censored=False)
        seen.observe("p", "long", 10 * tokens, censored=False)
    assert seen.quantile_tokens("p", "short") == 19  # rank ceil(0.9 * 21)
    assert seen.quantile_tokens("p", "long") == 190
    assert 100 < seen.quantile_tokens("p", "unseen") <= 200  # the pool's
    assert seen.quantile_tokens("other pool", "short") == 256


def test_too_few_answers_are_no_quantile() -> None:
    seen = lengths()
    for _ in range(8):
        seen.observe("p", "d", 5, censored=False)
    assert seen.quantile_tokens("p", "d") == 256  # 0.9 of 8 answers cannot be bounded by any of them
    seen.observe("p", "d", 5, censored=False)
    assert seen.quantile_tokens("p", "d") == 5


def test_a_censored_length_counts_only_where_it_is_news() -> None:
    seen = lengths()
    for _ in range(20):
        seen.observe("p", "d", 10, censored=False)
    for _ in range(20):
        seen.observe("p", "d", 3, censored=True)
    assert seen.quantile_tokens("p", "d") == 10
    for _ in range(60):
        seen.observe("p", "d", 50, censored=True)
    assert seen.quantile_tokens("p", "d") == 50


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 2000), st.booleans()), max_size=80))
def test_what_is_remembered_is_bounded(observations: list[tuple[str, int, bool]]) -> None:
    seen = OutputLengthStats(0.9, 256, 4)
    for digest, tokens, censored in observations:
        seen.observe("p", digest, tokens, censored)
    assert len(seen) <= 4


def test_through_the_core_outcomes_teach_the_reservation_of_the_next(driver: Any) -> None:
    driver.start("sha256:1")
    driver.runner("a")
    for i in range(10):
        driver.place(f"r{i}", "sha256:1", p90_tokens=0)
        driver.outcome(f"r{i}", tokens=7, digest="sha256:1")
    assert driver.place("next", "sha256:1", p90_tokens=0).reservation_tokens == 7
