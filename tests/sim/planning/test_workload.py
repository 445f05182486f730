"""Requests that a cluster is planned for."""

import random

import pytest

from weft_sim.planning import BadWorkload, Workload, distribution
from weft_sim.traces import TraceArrival

TRACE = tuple(TraceArrival(0.5 * number, 100 + number, 1 + number) for number in range(100))


def test_a_trace_with_its_own_times_gives_a_part_and_another_seed_another() -> None:
    first, second = (Workload(TRACE).arrivals(10, seed) for seed in (0, 1))
    assert first[0].at_s == 0.0
    assert [one.at_s for one in first] == [0.5 * number for number in range(10)]
    assert first != second


def test_a_rate_draws_requests_whole_from_the_trace() -> None:
    found = Workload(TRACE, rate_s=10).arrivals(2_000, 0)
    assert found[-1].at_s == pytest.approx(200, rel=0.1)
    assert all(one.prompt_tokens == 99 + one.output_tokens for one in found)


def test_distributions() -> None:
    chance = random.Random(0)
    assert distribution("fixed:7")(chance) == 7
    assert {distribution("uniform:2,4")(chance) for _ in range(50)} == {2, 3, 4}
    drawn = sorted(distribution("lognormal:100,0.5")(chance) for _ in range(2_001))
    assert drawn[1_000] == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("text", ["fixed", "uniform:4,2", "normal:1,2", "lognormal:3", "fixed:x"])
def test_a_distribution_that_cannot_be(text: str) -> None:
    with pytest.raises(BadWorkload, match="lognormal:MEDIAN"):
        distribution(text)


def test_nothing_to_draw_from() -> None:
    with pytest.raises(BadWorkload, match="give a trace"):
        Workload(rate_s=1.0).arrivals(1, 0)
