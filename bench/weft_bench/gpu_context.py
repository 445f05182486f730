"""What every case of `gpu-bench` is given: the device, what it gives, the plan, and where figures go."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weft_bench.errors import BenchFailed
from weft_bench.gpu_amounts import SHAPES, Amounts
from weft_bench.gpu_device import Gpu
from weft_bench.gpu_machine import Machine
from weft_bench.gpu_plan import Plan
from weft_bench.gpu_timing import Timer, Times
from weft_bench.lines import Line, Origin
from weft_bench.roofline import Shape

PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}


class OutOfTime(BenchFailed):
    """What is left of a case's time is not enough for what comes next; its rows stay unmeasured."""


@dataclass(frozen=True, slots=True)
class Context:
    """One case on one device. `send` takes its lines as they are measured; `folder` is for files that go away."""

    case: str
    plan: Plan
    gpu: Gpu
    timer: Timer
    machine: Machine
    origin: Origin
    send: Callable[[Line], None]
    folder: Path
    ends: float  # on the monotonic clock

    @property
    def amounts(self) -> Amounts:
        return self.plan.amounts

    @property
    def shape(self) -> Shape:
        return SHAPES[self.plan.shape]

    @property
    def text_shape(self) -> Shape:
        return SHAPES[self.plan.text_shape]

    @property
    def left_s(self) -> float:
        return self.ends - time.monotonic()

    def needs(self, seconds: float, what: str) -> None:
        """Raises OutOfTime when they are not there."""
        if self.left_s < seconds:
            raise OutOfTime(f"{what} needs about {seconds:.0f} s, and {max(0.0, self.left_s):.0f} s are left")

    def tell(
        self, name: str, metric: str, value: float | None, *, baseline: float | None = None,
        bound_fraction: float | None = None,
    ) -> None:  # fmt: skip
        """A figure of the plan. Raises KeyError where the plan has no such row."""
        row = self.plan.row(self.case, name, metric)
        self.send(
            self.origin.line(
                name, metric, value, row.unit, baseline=baseline, bound_fraction=bound_fraction, target=row.target
            )
        )

    def tell_times(
        self, name: str, what: str, times: Times, percent: int = 99, *, bound_s: float | None = None
    ) -> None:
        """The median beside its bound, and how far it goes up."""
        scale = PER_SECOND[self.plan.row(self.case, name, f"{what} p50").unit]
        bound = None if bound_s is None else bound_s * scale
        share = None if bound_s is None else bound_s / times.median
        self.tell(name, f"{what} p50", times.median * scale, baseline=bound, bound_fraction=share)
        self.tell(name, f"{what} p{percent}", times.tail(percent) * scale)
