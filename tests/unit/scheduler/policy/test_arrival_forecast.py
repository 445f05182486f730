"""The forecast: a probability whatever the clock does, bounded, and higher where arrivals say so."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given
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


BEGINS = [0.0, *(2.0**n for n in range(BUCKETS - 1))]
ENDS = [*BEGINS[1:], math.inf]


def ending(gaps: Sequence[float], prior: Sequence[float]) -> list[float]:
    """For each bucket the share of these gaps that ends in it, of those that reach it; two more are as `prior` says."""
    found: list[float] = []
    for begin, end, expected in zip(BEGINS, ENDS, prior, strict=True):
        ended, reached = sum(begin <= gap < end for gap in gaps), sum(begin <= gap for gap in gaps)
        found.append((ended + 2 * expected) / (reached + 2))
    return found


@given(
    st.lists(st.tuples(ADAPTERS, st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 60.0, 2.0**18, 2.0**19, 2.0**20]))),
    st.sampled_from([0.0, 0.25, 1.0, 5.0, 600.0, 2.0**20]),
    st.sampled_from([0.25, 1.0, 600.0, DAY_S, 2.0**21]),
)
@example([("a", 0.0), ("a", 3.0)], 5.0, 2.0**21)
def test_it_is_the_life_table_of_the_gaps(arrivals: list[tuple[str, float]], age_s: float, within_s: float) -> None:
    forecast, now = ArrivalForecast(10), 0.0
    last, own = dict[str, float](), dict[str, list[float]]()
    for digest, gap_s in arrivals:
        now += gap_s
        forecast.arrived(digest, now)
        own.setdefault(digest, []).extend([now - last[digest]] if digest in last else [])
        last[digest] = now
    forecast.settle(5, now)
    prior = ending([gap for gaps in own.values() for gap in gaps], [0.5] * BUCKETS)
    for digest, gaps in own.items():
        since, expected = now + age_s - last[digest], 0.0
        for begin, end, share in zip(BEGINS, ENDS, ending(gaps, prior), strict=True):
            overlap = max(0.0, min(since + within_s, end) - max(since, begin))
            expected -= math.log(1 - share) * overlap / (end - begin if end < math.inf else begin)
        assert forecast.hazards(digest, now + age_s, within_s) == [pytest.approx(expected)]


def test_old_gaps_fade_and_rare_ones_stay() -> None:
    table = GapTable()
    for gap_s in (1e6, 3600.0, 3600.0, *[1.0] * MOST_GAPS):
        table.add(gap_s)
    assert max(table.ended) == MOST_GAPS
    table.add(1.0)
    assert sorted(table.ended)[-3:] == [1, 1, MOST_GAPS // 2 + 1]


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
    assert forecast.probability("never", 1000.0, DAY_S) == 0.0
    forecast.settle(60, 1000.0)
    for n in range(10):
        forecast.arrived(f"early{n}", 1001.0)
    forecast.settle(60, 1000.0 + UNSEEN_S - 1)
    assert forecast.probability("never", 1000.0 + UNSEEN_S - 1, DAY_S) == 0.0
    forecast.settle(60, 1000.0 + 2 * UNSEEN_S)
    assert forecast.probability("never", 1000.0 + 2 * UNSEEN_S, DAY_S) == 0.0, "none came lately"
    for n in range(10):
        forecast.arrived(f"late{n}", 1000.0 + (2.0, 1.0)[n % 2] * UNSEEN_S)
    forecast.settle(60, 1000.0 + UNSEEN_S)
    assert forecast.probability("never", 1000.0 + UNSEEN_S, DAY_S) > 0.0, "ten did, of fifty that had none"
    for adapters, unseen in ((60, 40), (20, 0)):
        forecast.settle(adapters, 1000.0 + 2 * UNSEEN_S)
        found = forecast.hazards("never", 1000.0 + 2 * UNSEEN_S, DAY_S, 60.0)
        a_doubling = -math.log(1 - 10 / (10 + unseen + 1)) / math.log2(2 * UNSEEN_S / 512)
        assert found == pytest.approx([a_doubling * math.log2(1 + s / (2 * UNSEEN_S)) for s in (DAY_S, 60.0)])
