"""The scale of errors by predicted length: the usual error, a value per octave.

Short predictions err by a larger factor than long ones (mean absolute residual of log length 0.60 below 20 tokens, 0.39
above 70 on Alpaca). Residuals are divided by this scale before the conformal quantile (normalised scores). This cuts
the reservation of a q90 from 1.90 to 1.73 times the use, at the same overrun rate.
"""

import math

import numpy as np
from numpy.typing import NDArray

OCTAVES = 20  # up to a million tokens
PRIOR_COUNT = 50.0  # outcomes' worth of trust in the prior
MEMORY = 2_000.0  # outcomes counted per octave
LOG_2 = math.log(2.0)


class ResidualScale:
    """Mean absolute residual by octave. `scale`, `count`: [OCTAVES]."""

    def __init__(self, scale: NDArray[np.float64], count: NDArray[np.float64]) -> None:
        self.scale, self.count = scale, count

    @classmethod
    def cold(cls, prior: float) -> "ResidualScale":
        return cls(np.full(OCTAVES, prior), np.full(OCTAVES, PRIOR_COUNT))

    def scale_at(self, log_tokens: float) -> float:
        """The scale at a predicted log length, linear between the middles of octaves."""
        position = min(max(log_tokens / LOG_2 - 0.5, 0.0), OCTAVES - 1.0)
        low = min(int(position), OCTAVES - 2)
        part = position - low
        return float(self.scale[low] * (1.0 - part) + self.scale[low + 1] * part)

    def learn(self, log_tokens: float, residual: float) -> None:
        """Learn a residual of a prediction with the given length."""
        octave = min(max(int(log_tokens / LOG_2), 0), OCTAVES - 1)
        self.count[octave] = min(self.count[octave] + 1.0, MEMORY)
        self.scale[octave] += (abs(residual) - self.scale[octave]) / self.count[octave]
