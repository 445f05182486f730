"""Predicted against measured: what passes should have taken by the cost model, and what they took. Pure.

A pass is not a full block: rows come and go. So it is predicted from what it had (`passes`), and the ratio of the two
is followed (an average that forgets: `RATE`).
"""

from dataclasses import dataclass

from weft_runner.offload.machine import MachineRates
from weft_runner.offload.passes import PassWork, Placement, predict_pass
from weft_runner.offload.sizes import ModelSizes

RATE = 0.05  # of a pass in the average: some twenty passes are remembered


@dataclass(frozen=True, slots=True)
class AccuracyFigures:
    """Seconds since start, and measured / predicted: of all, and of the last twenty passes or so (0: none yet)."""

    passes: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    recent: float = 0.0

    @property
    def ratio(self) -> float:
        """Of all passes."""
        return self.measured_s / self.predicted_s if self.predicted_s else 0.0


class Accuracy:
    """One owner. `alone_s`: a token of one request alone, as predicted: the disk's bound where that decides."""

    def __init__(self, placement: Placement, sizes: ModelSizes, machine: MachineRates) -> None:
        self._placement, self._sizes, self._machine = placement, sizes, machine
        self.figures = AccuracyFigures()
        self.alone_s = self.predict_s(PassWork(1, 1))

    def predict_s(self, work: PassWork) -> float:
        """Of a pass."""
        return predict_pass(work, self._placement, self._sizes, self._machine).pass_s

    def learn(self, work: PassWork, measured_s: float) -> None:
        """A pass took so long."""
        predicted_s, before = self.predict_s(work), self.figures
        ratio = measured_s / predicted_s
        self.figures = AccuracyFigures(
            before.passes + 1,
            before.predicted_s + predicted_s,
            before.measured_s + measured_s,
            before.recent + RATE * (ratio - before.recent) if before.passes else ratio,
        )
