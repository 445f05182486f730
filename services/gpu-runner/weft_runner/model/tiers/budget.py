"""What an offloading executor is given, and what it says of itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weft.domain.runner import OffloadState
from weft_runner.offload.figures import OffloadFigures
from weft_runner.offload.machine import MachineRates
from weft_runner.offload.plan import OffloadPlan
from weft_runner.offload.policy import Budgets, Formats


@dataclass(frozen=True, slots=True)
class OffloadBudget:
    """`device_bytes`: for weights that stay, the ring, KV, adapters and what steps work on; `path`: on the disk.

    `host_bytes`: without a GPU more of the same, since device and host are one memory; else of memory for weights that
    are copied to the GPU in each pass, and for KV. `kv_disk_pages`: of all KV pages, in a file; `kv_host_pages`: beside
    a GPU, in memory of the host. `activation_disk_tokens`, `activation_host_tokens`: the same of the `max_tokens` of a
    pass, whose rows between layers are there.

    `in_flight`: passes at a time in a pipeline, each with rows that come from another stage or leave for one.

    `base`: the digest that the file is named by. `micro_batch`, `max_tokens`, `max_sequences`: most tokens that a layer
    computes at a time, and of a step. `max_rank`: of adapters. `share`: of the weights that may stay (FlexGen's wg).
    """

    device_bytes: int
    disk_bytes: int
    path: Path
    base: str
    micro_batch: int
    max_tokens: int
    max_sequences: int
    max_rank: int
    share: float = 1.0
    host_bytes: int = 0
    kv_disk_pages: int = 0
    kv_host_pages: int = 0
    activation_disk_tokens: int = 0
    activation_host_tokens: int = 0
    in_flight: int = 1
    plan: OffloadPlan | None = None  # what lies where; None: as many weights stay as fit
    machine: MachineRates | None = None  # what was measured: passes are predicted from it; None: they are not

    @property
    def budgets(self) -> Budgets:
        """The bytes of each tier, as policies have them."""
        return Budgets(self.device_bytes, self.host_bytes, self.disk_bytes)


def state_of(figures: OffloadFigures, share: float) -> OffloadState:
    """Report the figures to those who watch. `share`: of the weights, that is where it is computed with."""
    stream, accuracy = figures.stream, figures.accuracy
    state = OffloadState(share, stream.read_bytes / stream.reading_s if stream.reading_s else 0.0)
    if accuracy is None:
        return state
    return state._replace(
        predicted_ms=accuracy.token_predicted_s * 1e3, measured_ms=accuracy.token_measured_s * 1e3,
        alone_ms=accuracy.alone_s * 1e3, disk_bound=accuracy.alone_reads,
    )  # fmt: skip


def formats_of(dtype: str, kv_dtype: str = "auto", executor: Literal["cpu", "cuda"] = "cpu") -> Formats:
    """Return the formats of an executor's weights and KV."""
    match dtype:
        case "bf16" | "fp32" | "int8" | "int4":
            kv = "int4" if kv_dtype == "int4" else "fp32" if dtype == "fp32" else "bf16"
            return Formats(dtype, kv, executor=executor)
        case _:
            raise AssertionError(dtype)
