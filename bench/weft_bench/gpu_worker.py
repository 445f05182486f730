"""The process that has the GPU: runs the cases it is asked for, one after the other, and tells what comes of each.

A case that fails ends alone. After an error that leaves the device unusable (a bad address stays an error for every
later call) the worker says so, and the parent starts another one.
"""

import importlib
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from weft_bench.errors import BenchFailed
from weft_bench.gpu_check import CheckContext, Differs
from weft_bench.gpu_context import Context
from weft_bench.gpu_device import Gpu, NoDevice, find, origin
from weft_bench.gpu_machine import TINY_SIZES, Sizes, measured
from weft_bench.gpu_messages import Ended, Hello, Job, Message, Outcome, Told, share_of
from weft_bench.gpu_plan import Plan
from weft_bench.gpu_timing import timer
from weft_bench.lines import Origin

CHECK_THREADS = 2
TRACE_LINES = 12  # of a failure: where it happened, and what the error says
Send = Callable[[Message], None]


class Side(Protocol):
    """What a worker does: figures or checks."""

    def run(self, name: str, seconds: float) -> None:
        """One case, or one group of checks or a share of it, in so many seconds if it can."""
        ...


def work(pipe: Connection, job: Job) -> None:
    """A worker's whole life: ready, then what it is asked for, until None comes."""
    logging.basicConfig(level=logging.WARNING)
    try:
        gpu = find()
        side = side_of(job, gpu, pipe.send)
    except NoDevice as error:
        pipe.send(Ended("", 0.0, str(error), lost=True))
        return
    while (asked := pipe.recv()) is not None:
        name, seconds = asked
        ended = ran(side, gpu, name, seconds)
        pipe.send(ended)
        if ended.lost:
            return


def side_of(job: Job, gpu: Gpu, send: Send) -> Side:
    """Says that it is ready, and what the machine gives."""
    here = origin(gpu, job.command)
    send(Hello(here))
    match job.kind:
        case "check":
            torch.set_num_threads(CHECK_THREADS)  # of the reference: several workers share the processor
            return Checks(CheckContext(gpu, tiny=job.tiny), send)
        case "compile":
            return Compiling(gpu, job.plan)
        case _:
            return Figures(job, gpu, here, send)


def ran(side: Side, gpu: Gpu, name: str, seconds: float) -> Ended:
    """One case, whatever becomes of it."""
    started, error, lost = time.monotonic(), "", False
    try:
        side.run(name, seconds)
        gpu.sync()
    except BenchFailed as failed:
        error = str(failed)
    except Exception:  # noqa: BLE001 (it is told, with its trace, and the next case runs)
        error = trace()
    try:
        gpu.free()
    except Exception:  # noqa: BLE001 (nothing on this device works any more)
        error, lost = error or trace(), True
    return Ended(name, time.monotonic() - started, error, lost)


def trace() -> str:
    """The last lines of the present exception's trace."""
    return "\n".join(traceback.format_exc().rstrip().splitlines()[-TRACE_LINES:])


def module_of(prefix: str, name: str) -> Any:
    """`weft_bench.PREFIX_NAME`: imported when it runs, so that what one of them lacks is missing to it alone."""
    return importlib.import_module(f"weft_bench.{prefix}_{name.replace('-', '_')}")


class Figures:
    """Cases of `gpu-bench`."""

    def __init__(self, job: Job, gpu: Gpu, here: Origin, send: Send) -> None:
        self._job, self._gpu, self._send = job, gpu, send
        self._origin, self._timer = here, timer(gpu.device)
        self._machine = measured(gpu, self._timer, TINY_SIZES if job.tiny else Sizes())
        for line in self._machine.lines(gpu, self._origin):
            send(Told(line))
        gpu.free()

    def run(self, name: str, seconds: float) -> None:
        context = Context(
            case=name, plan=self._job.plan, gpu=self._gpu, timer=self._timer, machine=self._machine,
            origin=self._origin, send=lambda line: self._send(Told(line)), folder=self._job.folder,
            ends=time.monotonic() + seconds,
        )  # fmt: skip
        module_of("gpu", name).measure(context)


class Compiling:
    """Shares of what `gpu-bench` will need."""

    def __init__(self, gpu: Gpu, plan: Plan) -> None:
        self._gpu, self._plan = gpu, plan

    def run(self, name: str, seconds: float) -> None:
        del seconds
        module_of("gpu", "compile").run(self._gpu, name, self._plan.amounts)


class Checks:
    """Groups of `gpu-check`."""

    def __init__(self, context: CheckContext, send: Send) -> None:
        self._context, self._send = context, send

    def run(self, name: str, seconds: float) -> None:
        ends = time.monotonic() + seconds
        group, share, shares = share_of(name)
        checks: Iterator[tuple[str, Callable[[], None]]] = module_of("gpu_check", group).checks(self._context)
        for label, check in islice(checks, share, None, shares):
            if time.monotonic() > ends:
                raise BenchFailed(f"out of time before {label!r}")
            self._send(Outcome(name, label, self._fault(check)))

    def _fault(self, check: Callable[[], None]) -> str:
        fault = ""
        try:
            check()
        except Differs as differs:
            fault = str(differs)
        except Exception:  # noqa: BLE001 (it is this check's failure, and the next one runs)
            fault = trace()
        if fault:
            self._context.gpu.sync()  # raises where nothing more can run
        return fault
