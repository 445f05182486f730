"""What every case of `weft bench gpu` gets: the device, what it gives, how much is measured, and its lines."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from weft_bench.cases import Gpu as Options
from weft_bench.cpu_shapes import BASE, DEVICE_SHAPES, DISTINCT, IDENTICAL, POPULARITIES
from weft_bench.drive.device import Timer, Times
from weft_bench.drive.device_machine import DeviceMachine, measured
from weft_bench.drive.engine import Batch
from weft_bench.run import Run
from weft_stage.errors import OutOfTime
from weft_stage.gpu_device import Gpu, find, origin
from weft_stage.lines import Line, Origin
from weft_stage.shapes import Shape


@dataclass(frozen=True, slots=True)
class Operator:
    """Projections that read the same input of `n_in` numbers, as one LoRA operator, and batches of it."""

    name: str
    n_in: int
    widths: tuple[int, ...]
    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is measured, of which model. `TINY` shows that it works."""

    model: str = "8B"
    stack_model: str = "1B"
    decode: tuple[tuple[int, int], ...] = ((32, 512), (256, 512), (1, 512), (64, 512), (32, 2048))  # rows, context
    prompts: tuple[int, ...] = (2048, 64, 512)
    clocked: int = 9  # runs of a step by the clock
    beside: int = 31  # decode rows beside a prompt, of as many tokens as a decode step's least context
    exact_tokens: tuple[int, int] = (96, 24)  # of a prompt, of decode steps after it
    stream_counts: tuple[int, ...] = (256, 128, 64, 16, 1)
    stream_adapters: tuple[int, ...] = (0, 64, 384)  # 0: the base
    stream_tokens: tuple[int, int] = (128, 128)  # of a prompt, of an answer
    mixed_counts: tuple[int, ...] = (256, 64)  # streams whose answers have mixed lengths
    stream_spread: int = 96  # tokens by which answers of mixed lengths differ from that at most
    stream_rounds: int = 3  # requests of each stream
    stack_adapters: int = 8
    operators: tuple[Operator, ...] = (
        Operator("4096 -> 4096", 4096, (4096,), (Batch(1, IDENTICAL), *(Batch(64, kind) for kind in POPULARITIES))),
        Operator("q, k, v 4096 -> 6144", 4096, (4096, 1024, 1024), (Batch(256, DISTINCT),)),
    )

    @property
    def shape(self) -> Shape:
        return DEVICE_SHAPES[self.model]


TINY = Amounts(
    model="tiny", stack_model="tiny", decode=((2, 20), (1, 20)), prompts=(20,), clocked=1, beside=1,
    exact_tokens=(10, 3), stream_counts=(2, 1), stream_adapters=(0, 3), stream_tokens=(4, 3), mixed_counts=(2,),
    stream_spread=1, stream_rounds=1, stack_adapters=2,
    operators=(Operator("q, k, v 64 -> 80", 64, (48, 16, 16), (Batch(3, DISTINCT),)),),
)  # fmt: skip


def of_adapters(adapters: int) -> str:
    """Name a number of adapters in a case."""
    return f"{adapters} adapters" if adapters else BASE


@dataclass(slots=True)
class Bench:
    """One run on one device. `folder`: of the present case, removed behind it; `ends`: its end, by time.monotonic."""

    run: Run
    amounts: Amounts
    gpu: Gpu
    timer: Timer
    machine: DeviceMachine
    origin: Origin
    folder: Path = Path()
    ends: float = math.inf

    @classmethod
    def made(cls, options: Options, run: Run) -> Self:
        """Measure the device. Raises NoDevice."""
        gpu = find()
        amounts = Amounts() if gpu.is_real else TINY
        if options.model and gpu.is_real:
            amounts = replace(amounts, model=options.model, stack_model=options.model)
        timer = Timer(gpu)
        return cls(run, amounts, gpu, timer, measured(gpu, timer), origin(gpu, run.origin().command))

    def check_time(self) -> None:
        """Raise OutOfTime after the end of the case: called before whatever takes seconds."""
        if time.monotonic() > self.ends:
            raise OutOfTime("no time was left")

    def line(
        self, case: str, metric: str, value: float | None, unit: str, *, baseline: float | None = None,
        bound_fraction: float | None = None, target: str | None = None,
    ) -> Line:  # fmt: skip
        """Make a line. Only usual amounts have targets."""
        target = target if self.amounts == Amounts() else None
        return self.origin.line(
            case, metric, value, unit, baseline=baseline, bound_fraction=bound_fraction, target=target
        )

    def times(self, case: str, metric: str, unit: str, times: Times, bound_s: float) -> Iterator[Line]:
        """Make lines of the median, beside its bound, and of the p99."""
        scale = {"us": 1e6, "ms": 1e3}[unit]
        share = bound_s / times.median
        yield self.line(
            case, f"{metric} p50", times.median * scale, unit, baseline=bound_s * scale, bound_fraction=share
        )
        yield self.line(case, f"{metric} p99", times.p99 * scale, unit)
