"""Expected lengths against sampling, and predictions that make no sense."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_scheduler.core.policy.length_distribution import NORMAL, LengthDistribution

QUANTILES = ((0.1, 20.0), (0.5, 100.0), (0.9, 400.0), (0.99, 3_000.0))


def sampled(count: int) -> list[float]:
    """Log-normal in pieces: between two quantiles log tokens grow evenly with the normal score."""
    drawn, scores = random.Random(3), [NORMAL.inv_cdf(level) for level, _ in QUANTILES]
    lengths: list[float] = []
    for _ in range(count):
        score = drawn.gauss(0.0, 1.0)
        place = min(sum(score > edge for edge in scores[1:-1]), len(scores) - 2)
        low, high = math.log(QUANTILES[place][1]), math.log(QUANTILES[place + 1][1])
        share = (score - scores[place]) / (scores[place + 1] - scores[place])
        lengths.append(math.exp(low + share * (high - low)))
    return lengths


@pytest.mark.slow
@pytest.mark.parametrize(("emitted", "limit"), [(0, 2_048), (0, 200), (50, 500), (300, 2_048), (1_000, 4_096)])
def test_what_is_still_to_come_is_the_mean_of_the_answers_that_are_longer(emitted: int, limit: int) -> None:
    longer = [min(length, limit) - emitted for length in sampled(200_000) if length > emitted]
    expected = LengthDistribution(QUANTILES).expected_remaining(emitted, limit)
    assert expected == pytest.approx(sum(longer) / len(longer), rel=0.03)


def test_its_quantiles_are_the_ones_it_was_made_of() -> None:
    lengths = LengthDistribution(QUANTILES)
    assert [1 - lengths.survival(tokens) for _, tokens in QUANTILES] == pytest.approx([level for level, _ in QUANTILES])
    assert lengths.survival(0) == 1.0


@given(st.lists(st.integers(0, 2**31), min_size=4, max_size=4), st.integers(0, 10**6), st.integers(1, 10**6))
def test_any_prediction_gives_work_within_what_is_allowed(tokens: list[int], emitted: int, left: int) -> None:
    """Out of order, all alike, huge."""
    lengths = LengthDistribution([(level, tokens) for (level, _), tokens in zip(QUANTILES, tokens, strict=True)])
    assert 1.0 <= lengths.expected_remaining(emitted, emitted + left) <= left
