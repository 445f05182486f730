"""The device under test, and what stands beside each of its figures."""

import gc
import shutil
import subprocess
from dataclasses import dataclass

import torch

from weft_runner.model.cuda import device as gpu
from weft_runner.model.cuda.executor import INTERPRETED_SMS
from weft_stage.errors import BenchFailed
from weft_stage.lines import Origin
from weft_stage.machine import machine as host_machine
from weft_stage.machine import versions

SMI_TIMEOUT_S = 20
UNKNOWN = "unknown"


class NoDevice(BenchFailed):
    """Neither a GPU nor Triton's interpreter."""


@dataclass(frozen=True, slots=True)
class Gpu(gpu.Gpu):
    """What the engine computes on, and what measuring asks of it."""

    @property
    def sms(self) -> int:
        if not self.is_real:
            return INTERPRETED_SMS
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    @property
    def dtype(self) -> torch.dtype:
        """What the engine computes in here: the interpreter cuts bf16 off where a GPU rounds it."""
        return torch.bfloat16 if self.is_real else torch.float32

    def sync(self) -> None:
        """Wait, and raise what went wrong on the device."""
        if self.is_real:
            torch.cuda.synchronize(self.device)

    def works(self) -> bool:
        """Whether the device still computes: an illegal access leaves a process without it."""
        try:
            self.sync()
        except RuntimeError:
            return False
        return True

    def free(self) -> None:
        """What nobody refers to any more goes back to the device: graphs, their memory pools, caches."""
        gc.collect()
        if self.is_real:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()


def find() -> Gpu:
    """The first GPU; under TRITON_INTERPRET=1 the CPU. Raises NoDevice."""
    try:
        return Gpu(gpu.find_gpu().device)
    except gpu.GpuUnavailable as error:
        raise NoDevice(f"{error}; TRITON_INTERPRET=1 runs on the CPU, for tests") from error


def origin(gpu: Gpu, command: str) -> Origin:
    """Machine and versions as every line of this run has them."""
    return Origin(command=command, machine=_machine(gpu), versions=_versions(gpu))


def smi(*fields: str) -> list[str]:
    """What nvidia-smi says of GPU 0, such as `driver_version` or `clocks.sm`; it is asked, never told anything."""
    nothing, path = [UNKNOWN] * len(fields), shutil.which("nvidia-smi")
    if path is None:
        return nothing
    command = [path, "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return nothing
    values = [value.strip() for value in told.partition("\n")[0].split(",")]
    return values if len(values) == len(fields) else nothing


def _machine(gpu: Gpu) -> str:
    if not gpu.is_real:
        return f"Triton's interpreter on {host_machine()}"
    found = torch.cuda.get_device_properties(gpu.device)
    return f"{found.name}, {found.multi_processor_count} SMs, {found.total_memory / 2**30:.0f} GiB"


def _versions(gpu: Gpu) -> str:
    told = versions("torch", "triton", "transformers", "peft", "numpy")
    return f"{told}, CUDA {torch.version.cuda}, driver {smi('driver_version')[0]}" if gpu.is_real else told
