"""A GPU's rates, measured in a process of its own: who asks has no torch, and the GPU is free again afterwards."""

from collections.abc import Sequence
from pathlib import Path

from weft.domain.model.config import ModelSpec
from weft_runner.offload.machine import MachineRates, machine_of
from weft_runner.offload.policy import WeightsFormat
from weft_runner.offload.wire import ask_process, spec_json

MEASURE_S = 180.0  # with torch's import and kernels that are compiled for the first time


def measured_gpu(folder: Path, spec: ModelSpec, formats: Sequence[WeightsFormat], most_bytes: int) -> MachineRates:
    """Measure this machine's GPU as a runner does (`model.cuda.machine_rates`), with the disk of `folder`.

    Raises OffloadError, also where there is no GPU that the kernels run on.
    """
    question = {"folder": str(folder), "spec": spec_json(spec), "formats": list(formats), "most_bytes": most_bytes}
    return machine_of(ask_process("weft_runner.model.cuda.measuring", question, MEASURE_S, "runner")["machine"])
