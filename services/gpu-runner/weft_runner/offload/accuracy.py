"""Predicted against measured: what passes should have taken by the cost model, and what they took. Pure.

A pass is not a full block: rows come and go. So it is predicted from what it had (`passes`). Of passes without prompts,
in which each row gets a token, the two times are also followed by averages that forget (`RATE`).
"""

from dataclasses import dataclass, replace

from weft_runner.offload.machine import MachineRates
from weft_runner.offload.passes import PassWork, WeightPlacement, predict_pass
from weft_runner.offload.plan import PassTime
from weft_runner.offload.sizes import ModelSizes

RATE = 0.05  # of a pass in the averages: some twenty passes are remembered


@dataclass(frozen=True, slots=True)
class AccuracyFigures:
    """Seconds since start of all passes; and of a pass without prompts, lately (0: none yet).

    `alone_s`: a token of one request alone, as predicted; `alone_reads`: reading the disk is what takes longest of it.
    """

    alone_s: float
    alone_reads: bool
    passes: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    token_predicted_s: float = 0.0
    token_measured_s: float = 0.0


class Accuracy:
    """One owner."""

    def __init__(self, placement: WeightPlacement, sizes: ModelSizes, machine: MachineRates) -> None:
        self._placement, self._sizes, self._machine = placement, sizes, machine
        alone = predict_pass(PassWork(1, 1), placement, sizes, machine)
        self.figures = AccuracyFigures(alone.pass_s, alone.disk_read_s >= alone.compute_s)

    def predict(self, work: PassWork) -> PassTime:
        return predict_pass(work, self._placement, self._sizes, self._machine)

    def predict_s(self, work: PassWork) -> float:
        """Seconds that a pass of this work should take."""
        return self.predict(work).pass_s

    def learn(self, work: PassWork, measured_s: float) -> None:
        """A pass took so long."""
        predicted_s, before = self.predict_s(work), self.figures
        token = before.token_predicted_s, before.token_measured_s
        if not work.pairs:
            rate = RATE if token[0] else 1.0
            token = token[0] + rate * (predicted_s - token[0]), token[1] + rate * (measured_s - token[1])
        self.figures = replace(
            before,
            passes=before.passes + 1,
            predicted_s=before.predicted_s + predicted_s,
            measured_s=before.measured_s + measured_s,
            token_predicted_s=token[0],
            token_measured_s=token[1],
        )
