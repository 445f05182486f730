"""Admission by the expected use of a runner's sequences together."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.scheduler_driver import Driver
from weft.domain.request import FailReason, Preempt
from weft_scheduler.core.policy.reservation.pooled import (
    DEVIATIONS,
    HEAVY,
    HORIZONS,
    MAX_DEVIATIONS,
    OVERRUN_RATE,
    ExpectedUse,
    Margin,
    PooledUse,
    UseForecast,
)

CHAT = ((0.1, 20), (0.5, 80), (0.9, 300), (0.99, 900))


def test_a_forecast_begins_with_what_is_held_and_ends_with_the_limit() -> None:
    assert UseForecast(112, 512, CHAT).use(0, page_tokens=16).means[0] == 128
    use = UseForecast(111, 512, CHAT).use(0, page_tokens=16)
    assert (use.means[0], use.variances[0]) == (112, 0), "seven pages hold the prompt and the first token"
    assert use.means[1] == max(use.means), "nearly all are there 16 steps later; fewer and fewer from then on"
    assert all(mean == 0 for mean, steps in zip(use.means, HORIZONS, strict=True) if steps >= 512)


def test_an_answer_that_has_outlived_most_is_expected_to_continue() -> None:
    forecast = UseForecast(100, 4096, CHAT)
    young, old = forecast.use(0), forecast.use(800)
    assert old.means[4] / 1029 > 0.7 > young.means[4] / 229, "the share that lives 128 steps later"


@pytest.mark.parametrize(
    ("quantiles", "typical"), [(CHAT, 80), (CHAT[1:], 300), (CHAT[2:], 300), (((0.5, 0), (0.9, 0)), 1)]
)
def test_missed_answers_last_as_long_as_the_median(quantiles: tuple[tuple[float, int], ...], typical: int) -> None:
    prompt, emitted, steps = 4_000_000, 20_000 if typical > 1 else 0, HORIZONS[-1]
    share = (typical + emitted) / (typical + emitted + steps) * (1.0 if emitted else HEAVY)
    mean = UseForecast(prompt, 10**6, quantiles).use(emitted).means[-1]
    assert mean == pytest.approx(share * (prompt + emitted + steps), rel=5e-4, abs=1)


def test_the_margin_of_many_is_smaller_than_their_margins() -> None:
    one = UseForecast(16, 1024, CHAT).use(0)
    together = ExpectedUse()
    for _ in range(64):
        together = together.plus(one)
    assert together.peak_tokens(3.0) < 0.6 * 64 * one.peak_tokens(3.0)


NOT_TOKENS = st.tuples(*(st.integers(-(2**31), 2**31) for _ in range(4)))


@given(NOT_TOKENS, st.integers(1, 5000), st.integers(1, 5000), st.integers(-10, 2**32))
def test_poisoned_predictions_are_bounded(quantiles: tuple[int, ...], prompt: int, limit: int, kv_tokens: int) -> None:
    forecast = UseForecast(prompt, limit, tuple(zip((0.1, 0.5, 0.9, 0.99), quantiles, strict=True)))
    use = forecast.use(forecast.emitted(kv_tokens), page_tokens=16)
    assert all(0 <= mean <= prompt + limit + 16 for mean in use.means)
    assert all(0 <= variance <= (prompt + limit + 16) ** 2 / 4 + 1 for variance in use.variances)
    assert use.means[0] > prompt, "it runs now"


@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from(("add", "hold", "progress", "remove"))), max_size=60)
)
def test_the_account_equals_the_recomputed_one(steps: list[tuple[str, str]]) -> None:
    pooled, chance = PooledUse(16), random.Random(0)
    for name, step in steps:
        match step:
            case "add":
                pooled.add(name, UseForecast(chance.randint(1, 500), 1000, CHAT), chance.randint(0, 900), 3)
            case "hold":
                pooled.hold(name, chance.randint(0, 60))
            case "progress":
                pooled.progress(name, chance.randint(0, 1500))
            case _:
                pooled.remove(name)
        pooled.check()
        deviations = chance.choice([1.0, 2.5])
        pooled.settle(deviations)
        assert pooled.peak_tokens == pooled.sum.peak_tokens(deviations)
    for name in "abcde":
        pooled.remove(name)
    pooled.settle(1.0)
    assert (pooled.peak_tokens, pooled.held_pages) == (0, 0)


def test_a_forecast_is_renewed_each_page_or_eighth_of_its_answer_less_the_pages_of_others() -> None:
    pooled, forecast = PooledUse(16), UseForecast(100, 4000, CHAT)
    pooled.add("r", forecast, 0, 7)
    member, renewed = pooled.members["r"], [0]
    assert member.use == forecast.use(0, 16)
    for kv_tokens in range(0, 1000):
        pooled.progress("r", kv_tokens)
        renewed += [member.emitted] * (member.emitted != renewed[-1])
    assert renewed[1] <= 16
    assert renewed[2:] == [emitted + max(16, emitted // 8) for emitted in renewed[1:-1]]
    for held, kv_tokens, shared in ((60, 2001, 66), (200, 3000, 0)):
        pooled.hold("r", held)
        pooled.progress("r", kv_tokens)
        assert (member.emitted, member.shared_pages) == (kv_tokens - 100, shared)


@pytest.mark.parametrize("enough", [0.5, 2.0, 5.0])
def test_overruns_come_to_their_rate_whatever_margin_it_takes(enough: float) -> None:
    margin, chance, overruns = Margin(), random.Random(1), 0
    for _ in range(20_000):
        if chance.random() < 0.3 * max(0.0, enough - margin.deviations):
            overruns += 1
            margin.overran()
        margin.ended()
    assert overruns / 20_000 == pytest.approx(OVERRUN_RATE, rel=0.3)


def test_a_margin_is_bounded() -> None:
    margin = Margin()
    for _ in range(1000):
        margin.overran()
    assert margin.deviations == MAX_DEVIATIONS
    for _ in range(100_000):
        margin.ended()
    assert margin.deviations == 0.0


# ---------------------------------------------------------------- through the core

LENGTHS = {"p10_tokens": 20, "p50_tokens": 80, "p90_tokens": 300, "p99_tokens": 900, "max_tokens": 1000}
LARGE = {"total_pages": 100, "max_sequences": 64, "max_context_tokens": 1600}


def admitted(driver: Any) -> int:
    """How many chats one runner takes, of 40."""
    driver.runner("a", **LARGE)
    for number in range(40):
        driver.submit(f"r{number}", **LENGTHS)
    return sum(driver.request(f"r{number}").placed for number in range(40))


def test_more_are_admitted_than_by_a_quantile_each_and_fewer_than_without_any() -> None:
    found = {policy: admitted(Driver().start(reservation=policy)) for policy in ("calibrated", "pooled", "paged")}
    assert found["calibrated"] == 5
    assert found["calibrated"] < found["pooled"] < found["paged"]


def test_a_pooled_request_reserves_nothing_on_its_runner() -> None:
    driver: Any = Driver().start(reservation="pooled")
    driver.runner("a", **LARGE)
    assign = driver.place("r", **LENGTHS)
    assert (assign.reservation_tokens, assign.allotment.by_page) == (1, True)


def test_what_ends_makes_room_for_the_next() -> None:
    driver = Driver().start(reservation="pooled")
    count = admitted(driver)
    running = [driver.view(f"r{number}")._replace(reserved_pages=2) for number in range(count)]
    driver.runner("a", *running, free=100 - 2 * count)
    assert not driver.request(f"r{count}").placed
    driver.outcome("r0")
    assert not driver.request(f"r{count}").placed, "its runner has not reported the end"
    driver.runner("a", *running[1:], free=100 - 2 * (count - 1))
    assert driver.request(f"r{count}").placed


def test_progress_changes_what_is_expected() -> None:
    driver: Any = Driver().start(reservation="pooled")
    driver.runner("a", **LARGE)
    driver.place("r", **LENGTHS)
    running = driver.view("r")._replace(reserved_pages=2)
    driver.runner("a", running, free=98)
    before = driver.record("a").accounts.free_tokens
    reported = driver.report_of("a", running._replace(reserved_pages=20), free=80)
    driver.reports(reported._replace(report=reported.report._replace(progress=(320,))))
    assert before - driver.record("a").accounts.free_tokens > 18 * 16, "it holds 18 pages more, and will be longer"
    reported = driver.report_of("a", running._replace(reserved_pages=20), free=80)
    driver.reports(reported._replace(report=reported.report._replace(progress=(2**32 - 1, 7))))  # of a lying runner


def test_the_first_preemption_of_a_request_raises_the_margin() -> None:
    driver: Any = Driver().start(reservation="pooled")
    driver.runner("a", **LARGE)
    driver.place("r", **LENGTHS)
    for _ in range(2):
        assert any(isinstance(effect.message, Preempt) for effect in driver.preempt("a", "r", 1))
        driver.failed("r", FailReason.PREEMPTED, emitted=40)
    assert driver.pool().fleet.margin.deviations == pytest.approx(DEVIATIONS + 0.1)
    driver.outcome("r")
    assert driver.pool().fleet.margin.deviations == pytest.approx(DEVIATIONS + 0.099)


def test_so_does_a_swap_on_its_runner() -> None:
    driver: Any = Driver().start(reservation="pooled")
    driver.runner("a", **LARGE)
    driver.place("r", **LENGTHS)
    for pages in (4, 0, 4, 0):
        driver.runner("a", driver.view("r")._replace(reserved_pages=pages), free=90)
    assert driver.pool().fleet.margin.deviations == pytest.approx(DEVIATIONS + 0.1)


def test_another_policy_takes_over_what_runs() -> None:
    driver: Any = Driver().start(reservation="pooled")
    driver.runner("a", **LARGE)
    driver.place("r", **LENGTHS)
    driver.registry(reservation="calibrated")
    driver.place("s", **LENGTHS)
    driver.runner("a", driver.view("r"), driver.view("s"), free=80)
    driver.outcome("r")
    driver.runner("a", driver.view("s"), free=81)
    assert (driver.record("a").accounts.pooled, driver.record("a").accounts.free_pages) == (None, 81)
