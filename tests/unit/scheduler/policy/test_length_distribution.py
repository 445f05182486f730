"""Expected lengths against the definition, and predictions that make no sense."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_scheduler.core.policy.length_distribution import LengthDistribution

NORMAL = NormalDist()
QUANTILES = ((0.1, 20.0), (0.5, 100.0), (0.9, 400.0), (0.99, 3_000.0))


def survival(tokens: float, quantiles: Sequence[tuple[float, float]] = QUANTILES) -> float:
    """Log-normal in pieces: between two quantiles log tokens grow evenly with the normal score, and so beyond them."""
    scores, logs = [NORMAL.inv_cdf(level) for level, _ in quantiles], [math.log(n) for _, n in quantiles]
    place = min(sum(math.log(tokens) > edge for edge in logs[1:-1]), len(logs) - 2)
    share = (math.log(tokens) - logs[place]) / (logs[place + 1] - logs[place])
    return NORMAL.cdf(-(scores[place] + share * (scores[place + 1] - scores[place])))


@pytest.mark.parametrize(("emitted", "limit"), [(0, 2_048), (0, 200), (50, 500), (300, 2_048), (1_000, 4_096)])
def test_what_is_still_to_come_is_the_mean_of_the_answers_that_are_longer(emitted: int, limit: int) -> None:
    step = (limit - emitted) / 5_000
    mean = sum(survival(emitted + (n + 0.5) * step) for n in range(5_000)) * step
    expected = LengthDistribution(QUANTILES).expected_remaining(emitted, limit)
    assert expected == pytest.approx(mean / (survival(emitted) if emitted else 1.0), rel=1e-4)


@pytest.mark.parametrize(
    ("emitted", "limit", "left"), [(10**7, 10**9, 10**7), (10**7, 10**7 + 5, 5), (10**7, 10**7, 1)]
)
def test_beyond_all_that_was_predicted_as_much_is_expected_again(emitted: int, limit: int, left: int) -> None:
    assert LengthDistribution(QUANTILES).expected_remaining(emitted, limit) == left


def test_its_quantiles_are_the_ones_it_was_made_of() -> None:
    lengths = LengthDistribution(QUANTILES)
    assert [1 - lengths.survival(tokens) for _, tokens in QUANTILES] == pytest.approx([level for level, _ in QUANTILES])
    assert lengths.survival(0) == 1.0
    from_one = ((0.1, 1.0), *QUANTILES[1:])
    for tokens in (1.0, 1.5, 5.0, 50.0, 200.0, 1_000.0, 10_000.0):
        assert LengthDistribution(from_one).survival(tokens) == pytest.approx(survival(tokens, from_one))


def test_quantiles_that_coincide_are_no_certainty() -> None:
    lengths, apart = LengthDistribution([(level, 50.0) for level in (0.1, 0.5, 0.9)]), 0.05 * NORMAL.inv_cdf(0.9)
    assert [lengths.survival(50.0 * math.exp(n * apart)) for n in range(3)] == pytest.approx([0.9, 0.5, 0.1])


@given(st.lists(st.integers(0, 2**31), min_size=4, max_size=4), st.integers(0, 10**6), st.integers(1, 10**6))
def test_any_prediction_gives_work_within_what_is_allowed(tokens: list[int], emitted: int, left: int) -> None:
    """Out of order, all alike, huge."""
    lengths = LengthDistribution([(level, tokens) for (level, _), tokens in zip(QUANTILES, tokens, strict=True)])
    assert 1.0 <= lengths.expected_remaining(emitted, emitted + left) <= left
