"""The figures of `weft bench path` from known timings."""

import pytest

from weft_bench.lines import Origin
from weft_bench.load import Timing
from weft_bench.path import bodies, lines, percentile


@pytest.mark.parametrize(("percent", "value"), [(50, 2.0), (90, 4.0), (99, 4.0), (25, 1.0)])
def test_percentiles_are_values_that_occurred(percent: int, value: float) -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], percent) == value


def test_figures_follow_from_timings() -> None:
    timings = [Timing(start=0.0, pieces=[0.1, 0.2, 0.4], end=0.5, completion_tokens=3) for _ in range(4)]
    got = {line.metric: line.value for line in lines(Origin("c", "m", "v"), "x", timings, wall_s=2.0, busy_s=0.5)}
    assert got["requests"] == 2.0
    assert got["output tokens"] == 6.0
    assert got["time to first token p50"] == pytest.approx(100)
    assert got["time per output token p99"] == pytest.approx(200)
    assert got["time outside the runner"] == 0.75


def test_requests_take_turns_over_the_models_and_repeat_with_the_seed() -> None:
    made = list(bodies(["a", "b"], 6, seed=3))
    assert [body["model"] for body in made] == ["a", "b"] * 3
    assert made == list(bodies(["a", "b"], 6, seed=3))
