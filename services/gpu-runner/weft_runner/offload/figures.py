"""Figures of an executor, or a stage, that offloads: bytes and waits, what lies where, predicted times. Pure."""

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
    """Predicted against measured: what passes should have taken by the cost model, and what they took. One owner.

    A pass is not a full block: rows come and go. So it is predicted from what it had (`passes`). Of passes without
    prompts, in which each row gets a token, the two times are also followed by averages that forget (`RATE`).
    """

    def __init__(self, placement: WeightPlacement, sizes: ModelSizes, machine: MachineRates) -> None:
        self._placement, self._sizes, self._machine = placement, sizes, machine
        alone = predict_pass(PassWork(1, 1), placement, sizes, machine)
        self.figures = AccuracyFigures(alone.pass_s, alone.disk_read_s >= alone.compute_s)

    def predict(self, work: PassWork) -> PassTime:
        return predict_pass(work, self._placement, self._sizes, self._machine)

    def learn(self, work: PassWork, measured_s: float) -> None:
        """A pass took so long."""
        predicted_s, before = self.predict(work).pass_s, self.figures
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


@dataclass(slots=True)
class TierFigures:
    """Since start: bytes loaded and stored, for how long computing waited for them, and for how long any were loading.

    `copied_bytes`: weights to a GPU, from the host and from the disk; their `read_bytes` are those from the disk.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    waited_s: float = 0.0
    reading_s: float = 0.0
    copied_bytes: int = 0


@dataclass(frozen=True, slots=True)
class OffloadFigures:
    """For metrics. Bytes and seconds since start; `streamed_bytes`: of each pass, from the disk.

    `host_bytes`: of weights in the memory of the host, beside a GPU.
    """

    resident_bytes: int
    host_bytes: int
    streamed_bytes: int
    ring_bytes: int
    stream: TierFigures
    kv: TierFigures
    activations: TierFigures
    step_s: float
    planned_pass_s: float  # of a pass without prompts, by the plan; 0: there is none
    accuracy: AccuracyFigures | None  # None: passes are not predicted

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, wherever they lie."""
        return self.resident_bytes + self.host_bytes + self.streamed_bytes
