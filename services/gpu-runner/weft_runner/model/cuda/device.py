"""The GPU that the cuda executor computes on, and what it cannot compute of a model.

Triton is imported here alone, and only when it is asked for: a runner for CPUs may have a torch that comes without it.
"""

import os
import shutil
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from weft_kernels.cpu.memory import MappedMemory
from weft_runner.errors import ExecutorLost, OutOfMemory
from weft_runner.memory_estimate import MemoryLimit
from weft_runner.model.partition import Partition

OLDEST = (8, 0)  # Ampere: bf16 in tensor cores, copies to shared memory that do not wait
HEAD_STEP, MAX_HEAD = 16, 256  # sizes of heads: multiples
PAGE_TOKENS = (16, 32, 64, 128, 256)
P = ParamSpec("P")
S = TypeVar("S", bound="OnDevice")
T = TypeVar("T")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int4": torch.bfloat16}  # of KV and activations


class OnDevice(Protocol):
    """Who computes on one device. `at`: which."""

    @property
    def at(self) -> torch.device: ...


def on_device(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method that launches: without gradients, and on its device whichever thread calls it."""

    @wraps(method)
    def launching(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        here = torch.cuda.device(self.at) if self.at.type == "cuda" else nullcontext()
        with torch.inference_mode(), here, device_errors():
            return method(self, *args, **kwargs)

    return launching


@contextmanager
def device_errors() -> Generator[None]:
    """An error of the device itself is the end of this process's work on it: every later call would fail, too."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.AcceleratorError) or str(error).startswith("Triton Error [CUDA]"):
            raise ExecutorLost(f"the GPU has failed: {error}") from error
        raise


class GpuUnavailable(Exception):
    """There is no GPU here that the kernels run on, or they cannot compute this model; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Device on which the cuda executor computes: a GPU, or this machine's CPU under Triton's interpreter."""

    device: torch.device

    @property
    def is_real(self) -> bool:
        return self.device.type == "cuda"

    @property
    def available(self) -> MemoryLimit:
        """Return the device's free memory."""
        free, total = torch.cuda.mem_get_info(self.device)
        return MemoryLimit(free, f"GPU {self.device.index} ({torch.cuda.get_device_name(self.device)})", total)

    @property
    def name(self) -> str:
        """Name of the device's kind."""
        return torch.cuda.get_device_name(self.device) if self.is_real else "interpreted"

    def wait(self) -> None:
        """For all that was launched."""
        if self.is_real:
            torch.cuda.synchronize(self.device)

    def limit(self, n_bytes: int) -> None:
        """Torch takes no more of its memory than that from now on. Raises OutOfMemory: it has less."""
        if not self.is_real:
            return
        torch.cuda.empty_cache()  # of what was measured
        free, total = torch.cuda.mem_get_info(self.device)
        if n_bytes > free:
            raise OutOfMemory(f"GPU {self.device.index} has {free} bytes left, and {n_bytes} were asked for")
        torch.cuda.set_per_process_memory_fraction(min(1.0, n_bytes / total), self.device)

    def lift_limit(self) -> None:
        """Let torch take all of its memory again."""
        if self.is_real:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)


class PinnedMemory(MappedMemory):
    """Host memory of exactly `n_bytes`, that a GPU copies from and to by itself; any memory if absent."""

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        """Pin the memory. Raises OutOfMemory: the system pins no more."""
        super().__init__(n_bytes)
        self._pinned = device.type == "cuda" and n_bytes > 0
        self._cuda: Any = torch.cuda.cudart() if self._pinned else None  # CUDA's own functions
        if self._pinned and (code := int(self._cuda.cudaHostRegister(self.address, n_bytes, 0))):
            self._pinned = False
            raise OutOfMemory(f"{n_bytes} bytes of host memory cannot be pinned (CUDA error {code})")
        self.tensor = torch.from_numpy(self.array())

    def close(self) -> None:
        """Nothing copies from or to it any more."""
        if self._pinned:
            self._cuda.cudaHostUnregister(self.address)
            self._pinned = False


class CopyStream:
    """Copies to a device beside what it computes. Where there is none they are done at once, and events are None.

    An event stands for all that was launched before it.
    """

    def __init__(self, at: torch.device) -> None:
        self.at = at
        self._stream = torch.cuda.Stream(at) if at.type == "cuda" else None

    @on_device
    def copy(
        self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:  # fmt: skip
        """Each (to, source), after an event. Any thread; sources on the host are pinned."""
        with torch.cuda.stream(self._stream):
            if after is not None:
                after.wait()
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        return self._event(self._stream)

    @on_device
    def computed(self) -> torch.cuda.Event | None:
        """All that this thread has launched to compute."""
        return None if self._stream is None else self._event(torch.cuda.current_stream(self.at))

    @staticmethod
    def _event(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        if stream is None:
            return None
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event


def find_gpu(index: int = 0) -> Gpu:
    """GPU `index`; with TRITON_INTERPRET=1 there need not be one. Raises GpuUnavailable."""
    if find_spec("triton") is None:
        raise GpuUnavailable("triton is not installed: it comes with torch's builds for CUDA")
    from triton import knobs

    if knobs.runtime.interpret:
        return Gpu(torch.device("cpu"))
    if index >= torch.cuda.device_count():
        raise GpuUnavailable(
            f"torch sees {torch.cuda.device_count()} GPUs, and GPU {index} is needed: is a driver here?"
        )
    if not any(map(shutil.which, (os.environ.get("CC", ""), "gcc", "clang"))):
        raise GpuUnavailable("Triton needs a C compiler for what launches its kernels: install gcc, or name one in CC")
    found = torch.cuda.get_device_capability(index)
    if found < OLDEST:
        name = torch.cuda.get_device_name(index)
        raise GpuUnavailable(
            f"{name} has compute capability {found[0]}.{found[1]}; the kernels need 8.0 (Ampere) or newer"
        )
    from weft_kernels.triton.ahead import use_carried

    use_carried()
    return Gpu(torch.device("cuda", index))


def unsupported_reason(part: Partition, dtype: str, page_tokens: int, max_rank: int) -> str:
    """What of a model's part the kernels cannot compute; empty when they can."""
    from weft_runner.model.cuda.adapters import layout_of, unsupported_in_pages

    spec = part.local
    if dtype not in DTYPES:
        return f"--dtype {dtype}: computed are {', '.join(DTYPES)}"
    if page_tokens not in PAGE_TOKENS:
        return f"pages of {page_tokens} tokens: computed are {', '.join(map(str, PAGE_TOKENS))}"
    if spec.head_dim % HEAD_STEP or spec.head_dim > MAX_HEAD:
        return f"head_dim {spec.head_dim}: computed are multiples of {HEAD_STEP} up to {MAX_HEAD}"
    sizes = {"hidden_size": spec.hidden_size, "intermediate_size": spec.intermediate_size}
    if odd := [f"{name} {size}" for name, size in sizes.items() if size % 16]:
        return f"{', '.join(odd)}: computed are multiples of 16"
    if odd := sorted({w for site in layout_of(part, max_rank).sites for w in site.widths if w % 16}):
        return f"this device's outputs of a projection are {', '.join(map(str, odd))}: computed are multiples of 16"
    return unsupported_in_pages(part, page_tokens, max_rank)
