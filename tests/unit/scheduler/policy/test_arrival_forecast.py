"""The forecast: a probability whatever the clock does, bounded, and higher where arrivals say so."""

import random

from hypothesis import given
from hypothesis import strategies as st

from weft_scheduler.core.policy.prefetch.arrival_forecast import (
    BUCKETS,
    DAY_S,
    MOST_GAPS,
    UNSEEN_S,
    ArrivalForecast,
    GapTable,
)

ADAPTERS = st.sampled_from("abcde")
JUMPS = st.sampled_from([0.0, 1e-9, 0.5, 1.0, 60.0, 3600.0, 1e6, 1e12])


@given(st.lists(st.tuples(ADAPTERS, JUMPS), max_size=60), st.sampled_from([1.0, 600.0, DAY_S, 1e9]))
def test_it_is_a_probability_grows_with_the_horizon_and_its_state_is_bounded(
    arrivals: list[tuple[str, float]], within_s: float
) -> None:
    forecast, now = ArrivalForecast(3), 1000.0
    for digest, jump in arrivals:
        now += jump
        forecast.arrived(digest, now)
        forecast.settle(len(arrivals) % 5, now)
        assert len(forecast) <= 3
        for other in "abcde":
            near, far = (forecast.probability(other, now, seconds) for seconds in (within_s / 2, within_s))
            assert 0.0 <= near <= far <= 1.0


@given(st.lists(st.floats(0.0, 1e9), max_size=30), st.integers(0, 5))
def test_counts_are_bounded_and_hazards_stay_below_one(gaps: list[float], repeated: int) -> None:
    table = GapTable()
    for gap_s in gaps * (1 + repeated * MOST_GAPS // 10 if len(gaps) == 1 else 1):
        table.add(gap_s)
    assert max(table.ended) <= MOST_GAPS
    assert all(0.0 < hazard < 1.0 for hazard in table.hazards([0.5] * BUCKETS, 2.0))


def test_what_comes_each_hour_is_due_within_the_hour_and_not_within_a_minute() -> None:
    forecast, now = ArrivalForecast(10), 0.0
    for _ in range(50):
        now += 3600.0
        forecast.arrived("hourly", now)
        forecast.settle(1, now)
    assert forecast.probability("hourly", now + 60.0, 60.0) < 0.1
    assert forecast.probability("hourly", now + 2000.0, 3600.0) > 0.8


def test_a_burst_says_nothing_of_the_night_after_it() -> None:
    """A hundred bursts, a day apart: within a burst the next one is a second away, after it a day."""
    forecast, now = ArrivalForecast(10), 0.0
    for _ in range(100):
        now += DAY_S
        for _ in range(20):
            now += 1.0
            forecast.arrived("a", now)
        forecast.settle(1, now)
    assert forecast.probability("a", now, 10.0) > 0.9
    assert forecast.probability("a", now + 3600.0, 600.0) < 0.05
    assert forecast.probability("a", now + 3600.0, DAY_S) > 0.8


def test_an_adapter_with_one_arrival_is_judged_as_those_of_its_pool() -> None:
    def after_one(gap_s: float) -> float:
        forecast, chance, now = ArrivalForecast(100), random.Random(1), 0.0
        for _ in range(2000):
            now += chance.expovariate(1.0) * gap_s / 20
            forecast.arrived(f"a{chance.randrange(20)}", now)
        forecast.arrived("new", now)
        forecast.settle(21, now)
        return forecast.probability("new", now, 600.0)

    assert after_one(60.0) > 0.9 > 0.5 > after_one(36_000.0)


def test_those_without_an_arrival_are_judged_by_first_arrivals_lately_and_not_at_the_beginning() -> None:
    forecast = ArrivalForecast(100)
    forecast.settle(60, 100.0)
    for n in range(10):
        forecast.arrived(f"early{n}", 101.0)
    forecast.settle(60, 100.0 + UNSEEN_S - 1)
    assert forecast.probability("never", 100.0 + UNSEEN_S - 1, DAY_S) == 0.0
    forecast.settle(60, 100.0 + 2 * UNSEEN_S)
    assert forecast.probability("never", 100.0 + 2 * UNSEEN_S, DAY_S) == 0.0, "none came lately"
    for n in range(10):
        forecast.arrived(f"late{n}", 100.0 + 2 * UNSEEN_S)
    forecast.settle(60, 100.0 + 2 * UNSEEN_S)
    few = forecast.probability("never", 100.0 + 2 * UNSEEN_S, DAY_S)
    assert 0.3 < few < 0.9
    assert forecast.probability("never", 100.0 + 2 * UNSEEN_S, 60.0) < few / 5
