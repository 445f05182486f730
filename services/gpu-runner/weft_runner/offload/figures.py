"""What an executor, or a stage, that offloads has moved and waited for, and what lies where. Pure."""

from dataclasses import dataclass

from weft_runner.offload.accuracy import AccuracyFigures


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
