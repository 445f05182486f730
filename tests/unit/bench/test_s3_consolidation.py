"""The one hour of a picture: its requests, and what is counted in it."""

import pytest

from weft_bench import s3_consolidation


def test_a_runner_is_partial_where_it_is_neither_full_nor_idle_and_receives() -> None:
    hour = s3_consolidation.Hour(best_batch=8)
    for runner, (batch, received) in enumerate([(8, 3), (4, 2), (5, 1), (4, 0), (0, 0)]):
        hour.minutes[str(runner), 0] = s3_consolidation.Minute([batch] * 3, received)
    assert hour.partial(0) == 2
    assert hour.in_shape() == (s3_consolidation.MINUTES - 1) / s3_consolidation.MINUTES


def test_the_hour_rises_to_its_middle_and_names_few_adapters_most_often() -> None:
    requests = s3_consolidation.arrivals(0, 4)
    span_s = s3_consolidation.MINUTES * s3_consolidation.MINUTE_S
    thirds = [sum(at <= one.at_s * 3 / span_s < at + 1 for one in requests) for at in range(3)]
    assert thirds[1] > 1.5 * max(thirds[0], thirds[2])
    assert sum(one.adapter == 0 for one in requests) > len(requests) / 4
    kept = [one.output_tokens <= one.predicted.p90_tokens for one in requests if one.predicted]
    assert sum(kept) / len(requests) == pytest.approx(0.9, abs=0.03)
