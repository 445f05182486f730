"""Predicted against measured: what passes should have taken by the plan's cost model, and what they took. Pure.

A pass is not a full block: rows come and go. So it is predicted from what it had, with the streamed bytes of the plan
and the machine's tables, and the ratio of the two is followed (an average that forgets: `RATE`).
"""

from dataclasses import dataclass

from weft_runner.offload.machine import MachineRates, product_s
from weft_runner.offload.plan import OffloadPlan
from weft_runner.offload.sizes import ModelSizes

RATE = 0.05  # of a pass in the average: some twenty passes are remembered


@dataclass(frozen=True, slots=True)
class AccuracyFigures:
    """Seconds since start, and measured / predicted: of all, and of the last twenty passes or so (0: none yet)."""

    passes: int
    predicted_s: float
    measured_s: float
    recent: float

    @property
    def ratio(self) -> float:
        """Of all passes."""
        return self.measured_s / self.predicted_s if self.predicted_s else 0.0


class Accuracy:
    """One owner."""

    def __init__(self, plan: OffloadPlan, sizes: ModelSizes, machine: MachineRates) -> None:
        self._plan, self._sizes, self._machine = plan, sizes, machine
        self._table = machine.products[plan.formats.weights]
        self._passes, self._predicted_s, self._measured_s, self._recent = 0, 0.0, 0.0, 0.0

    def predict_s(self, tokens: int, sampled: int, keys: int) -> float:
        """A pass of `tokens` rows, of which `sampled` go through the head, that attend to `keys` tokens in sum."""
        plan, sizes, machine = self._plan, self._sizes, self._machine
        weights = plan.policy.weights
        read_s = weights.disk * sizes.weights / machine.disk_read
        copy_s = 0.0 if machine.one_memory else (weights.host + weights.disk) * sizes.weights / machine.to_device
        whole, rest = divmod(tokens, plan.batch_tokens)
        each = whole * product_s(self._table, plan.batch_tokens) + (product_s(self._table, rest) if rest else 0.0)
        compute_s = sizes.layers * sum(sizes.numbers) * each + keys * sizes.kv_token / machine.attention
        if sampled:
            compute_s += sizes.head_numbers * product_s(self._table, sampled)
        overlap = machine.overlap if plan.buffers > 1 else 0.0
        streams = (read_s, copy_s, compute_s)
        return overlap * max(streams) + (1 - overlap) * sum(streams)

    def learn(self, tokens: int, sampled: int, keys: int, measured_s: float) -> None:
        """A pass took so long."""
        predicted_s = self.predict_s(tokens, sampled, keys)
        self._passes += 1
        self._predicted_s += predicted_s
        self._measured_s += measured_s
        ratio = measured_s / predicted_s
        self._recent = ratio if self._passes == 1 else self._recent + RATE * (ratio - self._recent)

    @property
    def figures(self) -> AccuracyFigures:
        return AccuracyFigures(self._passes, self._predicted_s, self._measured_s, self._recent)
