import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft_predictor.core import Features, ResidualScale, Ridge, feature_rows, residual_scale
from weft_predictor.core import ridge as core
from weft_predictor_train.training import fit_ridge

DIM = 64


def rows(seed: int, count: int) -> list[Features]:
    rng = np.random.default_rng(seed)
    columns = [np.sort(rng.choice(np.arange(1, DIM), 5, replace=False)) for _ in range(count)]
    return [Features(np.concatenate([[0], c]), np.concatenate([[1.0], rng.uniform(0.1, 1.0, 5)])) for c in columns]


def dense(xs: list[Features]) -> np.ndarray:
    matrix = np.zeros((len(xs), DIM))
    for row, x in zip(matrix, xs, strict=True):
        row[x.index] = x.value
    return matrix


@given(st.integers(0, 1_000))
@settings(max_examples=settings.default.max_examples // 2)
def test_the_batch_fit_is_the_closed_form(seed):
    xs, rng = rows(seed, 80), np.random.default_rng(seed)
    y = rng.normal(4.0, 1.0, 80)
    ridge, matrix = fit_ridge(xs, y, DIM), dense(xs)
    exact = np.linalg.solve(matrix.T @ matrix + core.RIDGE * np.eye(DIM), matrix.T @ (y - y.mean()))
    assert np.allclose(ridge.weight, exact, atol=2e-3)
    assert ridge.base == pytest.approx(y.mean())


def test_one_column_alone_is_learned_online_exactly_as_in_the_batch():
    x, targets = Features(np.array([3]), np.array([1.0])), [1.0, 2.0, 4.0]
    ridge = Ridge.cold(DIM, 0.0)
    for target in targets:
        ridge.learn(x, target)
    assert ridge.weight[3] == pytest.approx(sum(targets) / (len(targets) + core.RIDGE), rel=1e-5)
    assert ridge.variance[3] == pytest.approx(1 / (core.RIDGE + len(targets)), rel=1e-5)


def test_one_pass_online_comes_near_the_batch():
    rng, truth = np.random.default_rng(5), np.random.default_rng(6).normal(0, 1, DIM)
    xs = rows(7, 3_000)
    y = np.array([truth[x.index] @ x.value for x in xs]) + rng.normal(0, 0.2, len(xs))
    online, batch = Ridge.cold(DIM, 0.0), fit_ridge(xs[:2_500], y[:2_500], DIM)
    for x, target in zip(xs[:2_500], y[:2_500], strict=True):
        online.learn(x, target)
    rest = list(zip(xs[2_500:], y[2_500:], strict=True))
    errors = [np.mean([(model.predict(x) - target) ** 2 for x, target in rest]) for model in (batch, online)]
    assert errors[1] < 0.25 * np.var(y)
    assert errors[0] < errors[1]


def test_it_never_stops_learning():
    ridge, row = Ridge.cold(DIM, 0.0), feature_rows([("always the same prompt", 4)], DIM)
    x = Features(row.index, row.value)
    for _ in range(5_000):
        ridge.learn(x, 1.0)
    assert ridge.predict(x) == pytest.approx(1.0, abs=0.01)
    assert (ridge.variance >= core.VARIANCE_FLOOR * 0.999).all()
    for _ in range(5_000):
        ridge.learn(x, 2.0)
    assert ridge.predict(x) == pytest.approx(2.0, abs=0.05)


def test_how_far_off_answers_are_is_learned_by_octave_and_read_on_lines_between_their_middles():
    scale, octave = ResidualScale(np.arange(20.0) ** 2, np.full(20, 1.0)), math.log(2.0)
    found = [scale.scale_at(octaves * octave) for octaves in (-9.0, 0.5, 3.5, 3.75, 18.75, 19.5, 99.0)]
    assert found == pytest.approx([0.0, 0.0, 9.0, 10.75, 333.25, 361.0, 361.0])
    for octaves, residual in ((3.2, -7.0), (-1.0, 1.0), (99.0, 21.0)):
        scale.learn(octaves * octave, residual)
    assert (scale.scale[3], scale.scale[0], scale.scale[19], scale.scale[4]) == (8.0, 0.5, 191.0, 16.0)
    scale.count[:] = residual_scale.MEMORY
    scale.learn(3.2 * octave, 8.0 + residual_scale.MEMORY)
    assert (scale.scale[3], scale.count[3]) == (9.0, residual_scale.MEMORY)
