# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""What the GPU itself gives, measured before anything is held against it: bytes, operations, launches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from weft_bench.gpu_timing import Timer
from weft_bench.roofline import Rates
from weft_stage.gpu_device import UNKNOWN, Gpu, smi
from weft_stage.lines import MACHINE, Line, Origin

READ_BLOCK = 4096  # numbers of a load: 32 a thread
READERS_PER_SM = 4
SHORT, LONG = 2, 258  # empty launches in a row; what one more costs is the slope between the two
RUNS = 30
GIGA = 1e9
CLOCKS = {"SM clock": "clocks.sm", "largest SM clock": "clocks.max.sm", "memory clock": "clocks.mem"}
NAME = f"{MACHINE}CUDA events"


@dataclass(frozen=True, slots=True)
class Sizes:
    """`n_bytes` of what is copied and read, `side` of the matrices."""

    n_bytes: int = 4 << 30
    side: int = 8192


TINY_SIZES = Sizes(1 << 16, 32)


@dataclass(frozen=True, slots=True)
class Machine:
    """The device as it was measured at the start. `floor_s`: two launches that depend on each other, and do nothing."""

    copy_bytes_s: float
    read_bytes_s: float
    flops_s: float
    floor_s: float
    launch_s: float

    @property
    def bytes_s(self) -> float:
        """The bandwidth that figures are held against: the most that it was seen to move."""
        return max(self.copy_bytes_s, self.read_bytes_s)

    @property
    def rates(self) -> Rates:
        return Rates(self.bytes_s, self.flops_s)

    def lines(self, gpu: Gpu, origin: Origin) -> Iterator[Line]:
        yield origin.line(NAME, "copy bandwidth (read + write)", self.copy_bytes_s / GIGA, "GB/s")
        yield origin.line(NAME, "read bandwidth", self.read_bytes_s / GIGA, "GB/s")
        yield origin.line(NAME, "bf16 matrix product", self.flops_s / 1e12, "TFLOP/s")
        yield origin.line(NAME, "two dependent empty launches in a graph", self.floor_s * 1e6, "us")
        yield origin.line(NAME, "one more empty launch in a graph", self.launch_s * 1e6, "us")
        told = smi(*CLOCKS.values()) if gpu.is_real else [UNKNOWN] * len(CLOCKS)
        for metric, value in zip(CLOCKS, told, strict=True):
            yield origin.line(NAME, metric, float(value) if value.isdigit() else None, "MHz")


def measured(gpu: Gpu, timer: Timer, sizes: Sizes) -> Machine:
    """Measure the device, which takes some seconds."""
    short, long = (timer.graph(empties(gpu, n)).median for n in (SHORT, LONG))
    return Machine(
        copy_bytes_s=copied(gpu, timer, sizes.n_bytes),
        read_bytes_s=max(summed(gpu, timer, sizes.n_bytes), read(gpu, timer, sizes.n_bytes)),
        flops_s=multiplied(gpu, timer, sizes.side),
        floor_s=short,
        launch_s=max(0.0, (long - short) / (LONG - SHORT)),
    )


def copied(gpu: Gpu, timer: Timer, n_bytes: int) -> float:
    """Measure the bytes/s of a copy, read and written ones."""
    source = torch.randn(n_bytes // 8, device=gpu.device)  # half of the bytes: fp32 numbers of one side
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / timer.graph(lambda: target.copy_(source), RUNS).median


def summed(gpu: Gpu, timer: Timer, n_bytes: int) -> float:
    """Measure the bytes/s that torch's sum reads."""
    data = torch.randn(n_bytes // 4, device=gpu.device)
    return data.numel() * 4 / timer.graph(data.sum, RUNS).median


def read(gpu: Gpu, timer: Timer, n_bytes: int) -> float:
    """Measure the bytes/s that a kernel reads which does nothing else."""
    data = torch.randn(n_bytes // 4, device=gpu.device)
    programs = READERS_PER_SM * gpu.sms
    sums = torch.empty(programs, device=gpu.device)

    def launch() -> None:
        _read[(programs,)](sums, data, data.numel(), BLOCK=READ_BLOCK, num_warps=4, num_stages=4)

    return data.numel() * 4 / timer.graph(launch, RUNS).median


def multiplied(gpu: Gpu, timer: Timer, side: int) -> float:
    """Measure the bf16 operations a second of a square product, of random numbers: of zeros it is faster."""
    a, b = (torch.randn(side, side, device=gpu.device).to(torch.bfloat16) for _ in range(2))
    return 2 * side**3 / timer.graph(lambda: a @ b, RUNS).median


def empties(gpu: Gpu, launches: int) -> Callable[[], Any]:
    """Return the work of `launches` kernels in a row that do nothing."""
    nothing = torch.zeros(16, device=gpu.device)

    def work() -> None:
        for _ in range(launches):
            _empty[(1,)](nothing, num_warps=1)

    return work


@triton.jit
def _empty(nothing):
    pass


@triton.jit
def _read(sums, data, n, BLOCK: tl.constexpr):  # noqa: N803
    """Read every n-th block, n the number of programs; the sum is kept so that the loads are."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(program, tl.cdiv(n, BLOCK), programs):
        at = block * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(data + at, mask=at < n, other=0.0)
    tl.store(sums + program, tl.sum(total, 0))
