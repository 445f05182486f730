"""Ridge regression on hashed features, learned outcome by outcome; `training.fit_ridge` makes the same state at once.

Recursive least squares with a diagonal covariance (the regression form of AROW; Crammer et al. 2009, Vaits and
Crammer 2011): each weight carries a variance, so a rare feature learns fast and a common one settles. Measured on 8,283
Alpaca prompts: R2(log) 0.57 in one pass at 10 us an outcome, against 0.59 for the batch fit.
"""

import numpy as np
from numpy.typing import NDArray

from weft_predictor.core.features import FeatureRows, Features

Weights = NDArray[np.float32]
RIDGE = 3.0  # flat optimum between 2 and 4 on held-out Alpaca, batch and online alike
VARIANCE_FLOOR = (
    1.0 / 2_000
)  # never stop learning: the oldest feature still follows a drift within some thousand outcomes


class Ridge:
    """The regression y ~ base + w . x. `weight`, `variance`: [dim]; `base` is the mean that an unknown prompt gets."""

    def __init__(self, weight: Weights, variance: Weights, base: float) -> None:
        self.weight, self.variance, self.base = weight, variance, base

    @classmethod
    def cold(cls, dim: int, base: float) -> "Ridge":
        """Make the model without outcomes: `base` for every prompt."""
        return cls(np.zeros(dim, dtype=np.float32), np.full(dim, 1.0 / RIDGE, dtype=np.float32), base)

    def predict(self, x: Features) -> float:
        """Predict the target of a single row."""
        return self.base + float(self.weight[x.index] @ x.value)

    def predict_rows(self, xs: FeatureRows) -> NDArray[np.float64]:
        """Predict the targets of several rows [n], each to the bit independent of the rest."""
        summed = np.bincount(xs.row, self.weight[xs.index] * xs.value)
        return self.base + summed.astype(np.float64, copy=False)

    def learn(self, x: Features, target: float) -> None:
        """Step towards `target`: the Kalman update with the covariance kept diagonal."""
        spread = self.variance[x.index] * x.value
        gain = spread / (1.0 + float(spread @ x.value))
        self.weight[x.index] += gain * (target - self.predict(x))
        self.variance[x.index] = np.maximum(self.variance[x.index] - spread * gain, VARIANCE_FLOOR)
