"""Objectives: what is tolerated, and runs that end early."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_sim.planning import Objective, PlannedRequest, Watch, counted_quantile
from weft_sim.report import quantile


def request(ttft_s: float, e2e_s: float, tokens: int = 11) -> PlannedRequest:
    return PlannedRequest(0, 0.0, 10, tokens, first_at=ttft_s, ended=e2e_s)


@given(st.lists(st.floats(0, 2), min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_run_ends_early_only_if_the_objective_is_missed(values: list[float], level: float) -> None:
    watch = Watch([Objective.of_level("e2e", level, 1.0)], len(values))
    ended = [watch(request(0.0, value)) for value in values]
    if any(ended):
        assert quantile(values, level) > 1.0
    if min(values) > 1.0:
        assert any(ended)


def test_times_to_the_first_token_count_when_it_is_there() -> None:
    watch = Watch([Objective.of_level("ttft", 0.5, 1.0), Objective.of_level("tpot", 0.5, 1.0)], 1)
    first = PlannedRequest(0, 0.0, 10, 11, first_at=2.0)
    assert watch(first)
    assert watch.missed is not None
    assert watch.missed.label == "ttft p50"


@given(st.lists(st.integers(0, 30), min_size=1, max_size=50), st.floats(0, 1))
def test_the_quantile_of_counts_is_one_of_the_two_nearest_ranks(values: list[int], level: float) -> None:
    place = level * (len(values) - 1)
    ordered = sorted(values)
    assert counted_quantile(Counter(values), level) in (
        ordered[int(place)],
        ordered[min(len(values) - 1, int(place) + 1)],
    )


def test_mean_time_between_tokens() -> None:
    assert request(1.0, 3.0).tpot_s == pytest.approx(0.2)
