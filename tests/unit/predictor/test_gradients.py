"""The encoder's logits are those of transformers, its gradients the slopes of its loss, its steps those of AdamW."""

import numpy as np
import pytest

from weft_predictor.core import Encoder, EncoderShape
from weft_predictor.core.encoder_gradients import BETA_1, BETA_2, MAX_NORM, EncoderLoss, Parameters
from weft_predictor.encoder_training import tensors_of

EXAMPLES = [((2, 7, 3), 0), ((2, 9, 4, 10, 5, 3), 2), ((2, 3), 1)]
LOGITS = {  # of transformers' classifiers with the same weights, for the longest example
    "distilbert": [-1.2453, -0.8658, 0.1577],
    "bert": [-0.4943, -1.7843, -2.5077],
}


def network(kind: str) -> tuple[EncoderShape, Parameters]:
    """Two layers, each weight of them at random."""
    rng, shape = np.random.default_rng(7), EncoderShape(kind, 11, 6, 2, 2, 8, 12, (5, 20, 100))
    return shape, Parameters({name: rng.normal(0.0, 0.5, dims).astype(np.float32) for name, dims in tensors_of(shape)})


@pytest.mark.parametrize("kind", LOGITS)
def test_a_loss_is_the_cross_entropy_of_the_logits_and_its_gradients_are_its_slopes(kind):
    shape, parameters = network(kind)
    encoder, loss = Encoder(shape, parameters.weights), EncoderLoss(shape, parameters)
    logits = np.array([encoder.logits(ids) for ids, _ in EXAMPLES])
    assert logits[1] == pytest.approx(LOGITS[kind], abs=1e-4)
    assert encoder.logits((*EXAMPLES[1][0], 8)).tolist() == logits[1].tolist(), "cut at the positions"
    value, backward = loss.forward(EXAMPLES)
    right = logits[np.arange(3), [label for _, label in EXAMPLES]]
    assert value == pytest.approx((np.log(np.exp(logits).sum(1)) - right).mean(), abs=1e-5)
    backward()
    backward()  # they add up
    rng, step = np.random.default_rng(8), np.float32(4e-3)
    for name, weight in parameters.weights.items():
        before, direction = weight.copy(), rng.choice(np.float32([-1, 1]), weight.shape)
        ends = []
        for sign in (1, -1):
            weight[:] = before + sign * step * direction
            ends.append(loss.forward(EXAMPLES)[0])
        weight[:] = before
        slope = (ends[0] - ends[1]) / (2 * step)
        assert (parameters.gradient[name] * direction).sum() / 2 == pytest.approx(slope, rel=2e-2, abs=2e-3), name


def test_steps_are_those_of_adamw_on_the_clipped_gradient_and_one_that_is_not_finite_changes_nothing():
    parameters, expected = Parameters({"a": np.ones(3, np.float32)}), np.ones(3)
    mean, square = np.zeros(3), np.zeros(3)
    for n, gradient in enumerate(([30.0, 40.0, 0.0], [0.1, -0.2, 0.3], [-0.5, 0.5, 0.0]), 1):
        for value in (np.nan, np.inf):
            parameters.gradient["a"][1] = value
            assert not parameters.step(0.1, 0.1)
        parameters.clear()
        parameters.gradient["a"] += np.float32(gradient)
        assert parameters.step(0.1, 0.1)
        g = np.array(gradient) * min(1.0, MAX_NORM / np.linalg.norm(gradient))
        mean, square = BETA_1 * mean + (1 - BETA_1) * g, BETA_2 * square + (1 - BETA_2) * g * g
        step = mean / (1 - BETA_1**n) / (np.sqrt(square / (1 - BETA_2**n)) + 1e-8)
        expected = expected * (1 - 0.1 * 0.1) - 0.1 * step
        assert parameters.copy()["a"] == pytest.approx(expected, abs=1e-4)


def test_dropout_keeps_the_mean_and_passes_the_gradient_of_what_it_keeps():
    shape, parameters = network("bert")
    kept, back = EncoderLoss(shape, parameters, np.random.default_rng(9), 0.25)._drop(np.ones((100, 100), np.float32))
    assert np.unique(kept) == pytest.approx([0.0, 4 / 3])
    assert kept.mean() == pytest.approx(1.0, abs=0.02)
    assert (back(kept) == kept * kept).all()
    losses = [EncoderLoss(shape, parameters, np.random.default_rng(seed), 0.5) for seed in range(2)]
    assert losses[0].forward(EXAMPLES)[0] != losses[1].forward(EXAMPLES)[0]
