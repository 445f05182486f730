"""The figures of `weft bench path` from known timings."""

import pytest

from weft_bench.lines import Origin
from weft_bench.path import LONG, MANY, SHORT, Taken, bodies, lines, percentile
from weft_bench.sse import Streamed


@pytest.mark.parametrize(("percent", "value"), [(50, 2.0), (90, 4.0), (99, 4.0), (25, 1.0)])
def test_percentiles_are_values_that_occurred(percent: int, value: float) -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], percent) == value


def test_figures_follow_from_timings() -> None:
    answers = [Streamed(0.0, first=0.1, end=0.5, tokens=3, at=(0.1, 0.2, 0.4, 0.5, 0.5)) for _ in range(4)]
    taken = Taken(2.0, 0.5, {"gateway": 0.006, "scheduler": 0.002, "runner": 0.1, "client": 0.2})
    got = {line.metric: line for line in lines(Origin("c", "m", "v"), SHORT, answers, taken)}
    assert got["requests"].value == 2.0
    assert got["output tokens"].value == 6.0
    assert got["time to first token p50"].value == pytest.approx(100)
    assert got["time outside the runner"].value == 0.75
    assert got["CPU a request, all but the runner"].value == pytest.approx(2)
    assert got["CPU a request, all but the runner"].met
    assert got["tokens a second of the gateway's CPU"].value == pytest.approx(2000)
    assert got["the client's CPU"].value == pytest.approx(0.1)
    long = {line.metric: line for line in lines(Origin("c", "m", "v"), LONG, answers, taken)}
    assert long["time per output token p99"].value == pytest.approx(200)
    assert long["tokens a second of the gateway's CPU"].met is False


def test_requests_take_turns_over_the_models_and_repeat_with_the_seed() -> None:
    made = list(bodies(["a", "b"], MANY, 6, seed=3))
    assert [body["model"] for body in made] == ["a", "b"] * 3
    assert made == list(bodies(["a", "b"], MANY, 6, seed=3))
    assert [body["max_tokens"] for body in bodies(["a"], LONG, 2, seed=3)] == [256, 256]
