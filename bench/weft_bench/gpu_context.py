"""What every case of `make gpu-bench` is given: the device, what it gives, the amounts, and where figures go."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weft_bench.gpu_amounts import Amounts
from weft_bench.gpu_machine import Machine
from weft_bench.gpu_page import TARGETS
from weft_bench.gpu_timing import Timer, Times
from weft_stage.errors import OutOfTime
from weft_stage.gpu_device import Gpu
from weft_stage.lines import Line, Origin

PER_SECOND = {"us": 1e6, "ms": 1e3}


@dataclass(frozen=True, slots=True)
class Context:
    """One case on one device. `send` takes its lines as they are measured; `folder` is for files that go away.

    `ends`: when there is no more time, by time.monotonic.
    """

    amounts: Amounts
    gpu: Gpu
    timer: Timer
    machine: Machine
    origin: Origin
    send: Callable[[Line], None]
    folder: Path
    ends: float = math.inf

    def check_time(self) -> None:
        """Raises OutOfTime: called before whatever takes seconds."""
        if time.monotonic() > self.ends:
            raise OutOfTime("no time was left")

    def report(
        self, name: str, metric: str, value: float | None, unit: str, *, baseline: float | None = None,
        bound_fraction: float | None = None,
    ) -> None:  # fmt: skip
        """A figure, with its target if the page has one for it."""
        target = TARGETS.get((name, metric))
        self.send(
            self.origin.line(name, metric, value, unit, baseline=baseline, bound_fraction=bound_fraction, target=target)
        )

    def report_times(
        self, name: str, what: str, unit: str, times: Times, percent: int = 99, *, bound_s: float | None = None
    ) -> None:
        """The median beside its bound, and how far it goes up."""
        scale = PER_SECOND[unit]
        bound = None if bound_s is None else bound_s * scale
        share = None if bound_s is None else bound_s / times.median
        self.report(name, f"{what} p50", times.median * scale, unit, baseline=bound, bound_fraction=share)
        self.report(name, f"{what} p{percent}", times.tail(percent) * scale, unit)
