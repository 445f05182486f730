from bisect import bisect_left
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.predictor.conftest import check_calibrator
from weft_predictor.core import OWN_SCORES, PRIOR_SCORES, ConformalCalibrator, ConformalCalibrators, conformal

ODD = ("", "odd")
score = st.floats(-20, 20)


@given(st.lists(score, max_size=60), st.floats(0.5, 1.0))
def test_the_window_and_its_sorted_view_agree_and_the_quantile_is_one_of_the_scores(scores, level):
    group = ConformalCalibrator()
    for value in scores:
        group.learn(value)
        check_calibrator(group)
    assert len(group) == len(scores)
    held = group.scores()
    bound = group.quantile(level)
    assert bound in held
    assert sum(value <= bound for value in held) >= min(level, 1.0) * len(held) - 1e-9


def test_every_real_score_replaces_a_made_up_one_and_the_window_is_bounded():
    group = ConformalCalibrator()
    for i in range(conformal.WINDOW + 300):
        group.learn(float(i))
        assert len(group.scores()) == min(max(len(PRIOR_SCORES), i + 1), conformal.WINDOW)
    check_calibrator(group)
    assert group.scores()[0] == 300.0


laws = st.sampled_from([lambda r: r.gauss(0, 1), lambda r: r.expovariate(1.0), lambda r: r.uniform(-1, 5)])


@given(seed=st.integers(0, 10_000), before=laws, after=laws, shift=st.floats(-4, 4), stretch=st.floats(0.25, 4))
def test_coverage_returns_to_90_within_3_percent_after_any_drift(seed, before, after, shift, stretch):
    rng, group = Random(seed), ConformalCalibrator()
    for _ in range(1_500):
        group.learn(before(rng))
    covered = [group.learn(shift + stretch * after(rng)) for _ in range(1_300)]
    assert sum(covered[300:]) / 1_000 == pytest.approx(0.9, abs=0.03)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=settings.default.max_examples // 2)
def test_without_drift_coverage_is_90_percent_from_the_start(seed):
    rng, group = Random(seed), ConformalCalibrator()
    covered = [group.learn(rng.lognormvariate(0, 1)) for _ in range(2_000)]
    assert sum(covered) / 2_000 == pytest.approx(0.9, abs=0.02)


def test_an_adapter_answers_for_itself_once_it_has_scores_enough():
    groups, rng = ConformalCalibrators(), Random(1)
    for i in range(OWN_SCORES):
        assert groups.of_group(ODD) is groups.pooled
        groups.learn(ODD, 10 + rng.random())
        groups.learn(("", f"other-{i % 7}"), rng.random())
    assert groups.of_group(ODD) is groups.by_group[ODD]
    assert groups.of_group(ODD).quantile(0.5) > 10
    assert groups.of_group(("", "never seen")) is groups.pooled
    assert groups.learn(ODD, groups.of_group(ODD).bound()), "a bound covers itself"


def test_calibrators_are_bounded_and_the_oldest_is_dropped():
    groups = ConformalCalibrators(max_adapters=2)
    for adapter in ("a", "b", "a", "c"):
        groups.learn(("", adapter), 1.0)
    assert list(groups.by_group) == [("", "a"), ("", "c")]


def test_a_tenant_without_scores_enough_is_answered_by_its_adapter_and_one_with_enough_by_itself_alone():
    groups = ConformalCalibrators()
    for _ in range(OWN_SCORES):
        groups.learn(("acme", "base"), 1.0)
    assert groups.of_group(("globex", "base")) is groups.by_group["", "base"]
    assert groups.of_group(("globex", "new")).quantile(0.5) == 1.0, "all together answer for an adapter without scores"
    for _ in range(OWN_SCORES):
        groups.learn(("globex", "base"), 9.0, shared=False)
    assert groups.of_group(("globex", "base")).quantile(0.5) == 9.0
    assert groups.of_group(("acme", "base")).quantile(0.99) == groups.of_group(("", "base")).quantile(0.99) == 1.0


@given(st.lists(score, min_size=20, max_size=100), score)
def test_a_censored_score_is_replaced_by_a_known_one_above_it(scores, bound):
    group = ConformalCalibrator(scores, prior=0)
    drawn = group.impute_censored(bound)
    below = sum(value <= bound for value in scores)
    if drawn is None:
        assert below < 0.05 * len(scores)
    elif below == len(scores):
        assert drawn == bound
    else:
        assert drawn > bound
        assert drawn in scores


def test_the_drawn_scores_are_spread_evenly_over_those_above_the_bound():
    group = ConformalCalibrator([float(i) for i in range(100)], prior=0)
    drawn = sorted(group.impute_censored(49.5) or 0.0 for _ in range(500))
    for quantile in (0.25, 0.5, 0.75):
        assert bisect_left(drawn, 50 + 50 * quantile) / 500 == pytest.approx(quantile, abs=0.03)
