# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""What a GPU itself gives, measured before anything is held against it: bandwidth, operations, launches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from weft_bench.drive.device import Timer
from weft_bench.roofline import Rates
from weft_stage.gpu_device import Gpu
from weft_stage.lines import MACHINE, Line, Origin

READ_BLOCK = 4096  # numbers of a load: 32 a thread
READERS_PER_SM = 4
SHORT, LONG = 2, 258  # empty launches in a row; the slope between the two is what one more costs
RUNS = 30
SIZES, TINY_SIZES = (4 << 30, 8192), (1 << 16, 32)  # bytes that are copied and read, side of the matrices
NAME = f"{MACHINE}CUDA events"


@dataclass(frozen=True, slots=True)
class DeviceMachine:
    """The device as it was measured at the start. `floor_s`: two dependent launches that do nothing."""

    copy_bytes_s: float
    read_bytes_s: float
    flops_s: float
    floor_s: float
    launch_s: float

    @property
    def bytes_s(self) -> float:
        """Return the larger bandwidth, which figures are held against."""
        return max(self.copy_bytes_s, self.read_bytes_s)

    @property
    def rates(self) -> Rates:
        return Rates(self.bytes_s, self.flops_s)

    def lines(self, origin: Origin) -> Iterator[Line]:
        yield origin.line(NAME, "copy bandwidth (read + write)", self.copy_bytes_s / 1e9, "GB/s")
        yield origin.line(NAME, "read bandwidth", self.read_bytes_s / 1e9, "GB/s")
        yield origin.line(NAME, "bf16 matrix product", self.flops_s / 1e12, "TFLOP/s")
        yield origin.line(NAME, "two dependent empty launches in a graph", self.floor_s * 1e6, "us")
        yield origin.line(NAME, "one more empty launch in a graph", self.launch_s * 1e6, "us")


def measured(gpu: Gpu, timer: Timer) -> DeviceMachine:
    """Measure the device, which takes some seconds."""
    n_bytes, side = SIZES if gpu.is_real else TINY_SIZES
    short, long = (timer.graph(empties(gpu, n)).median for n in (SHORT, LONG))
    data = torch.randn(n_bytes // 4, device=gpu.device)
    source, target = data[: len(data) // 2], torch.empty(len(data) // 2, device=gpu.device)
    a, b = (torch.randn(side, side, device=gpu.device).to(torch.bfloat16) for _ in range(2))  # faster with zeros
    sums = torch.empty(READERS_PER_SM * gpu.sms, device=gpu.device)

    def read() -> None:
        _read[(len(sums),)](sums, data, data.numel(), BLOCK=READ_BLOCK, num_warps=4, num_stages=4)

    return DeviceMachine(
        copy_bytes_s=2 * source.nbytes / timer.graph(lambda: target.copy_(source), RUNS).median,
        read_bytes_s=data.nbytes / min(timer.graph(work, RUNS).median for work in (data.sum, read)),
        flops_s=2 * side**3 / timer.graph(lambda: a @ b, RUNS).median,
        floor_s=short,
        launch_s=max(0.0, (long - short) / (LONG - SHORT)),
    )


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
