"""Cases in worker processes: one that hangs or dies costs its own case, and the rest goes on. Pure but for processes.

A worker runs case after case, since starting one takes seconds; it is replaced when it dies, when a case takes much
longer than it may, and when it says that its device is lost.
"""

import multiprocessing
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

from weft_bench.errors import NotReady
from weft_bench.gpu_messages import Ended, Hello, Job, Message

START_S = 150.0  # imports, a context on the device, the first kernels, the machine's own figures
GRACE_S = 15.0  # beyond what a case was told that it has: it may be on its way to the end
LEAST_S = 3.0  # nothing is begun with less


class Worker(Protocol):
    """A process that runs cases."""

    def ask(self, name: str, seconds: float) -> None: ...

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, None when none came in time. Raises EOFError when the process is gone."""
        ...

    def end(self) -> None:
        """It is gone afterwards."""
        ...


class Process:
    """A worker as a process of its own, started afresh: a CUDA context does not survive a fork."""

    def __init__(self, job: Job) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, job), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, name: str, seconds: float) -> None:
        self._pipe.send((name, seconds))

    def receive(self, timeout_s: float) -> Message | None:
        try:
            return self._pipe.recv() if self._pipe.poll(max(0.0, timeout_s)) else None
        except OSError as error:
            raise EOFError(str(error)) from error

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _work(pipe: Any, job: Job) -> None:
    if job.tiny:
        _interpret_without_gpu()
    from weft_bench.gpu_worker import work

    work(pipe, job)


def _interpret_without_gpu() -> None:
    """Before anything imports Triton, which looks once."""
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


class Clock:
    """What is left of a run. `limits`: the most seconds of each case; `start_s`: of a worker until it is ready."""

    def __init__(
        self, budget_s: float, limits: Callable[[str], float], now: Callable[[], float] = time.monotonic,
        start_s: float = START_S,
    ) -> None:  # fmt: skip
        self.now, self.start_s, self._limits = now, start_s, limits
        self._ends = now() + budget_s

    def seconds(self, name: str) -> float:
        return min(self._limits(name), self._ends - self.now())


def supervise(names: deque[str], start: Callable[[], Worker], clock: Clock) -> Iterator[Message]:
    """Run what is in `names`, which others may take from, too. Each ends with one `Ended`. Raises NotReady."""
    worker: Worker | None = None
    try:
        while (name := _taken(names)) is not None:
            seconds = clock.seconds(name)
            if seconds < LEAST_S:
                yield Ended(name, 0.0, "no time was left for it")
                continue
            if worker is None:
                worker = start()
                yield _ready(worker, name, names, clock.start_s)
            ended = yield from _heard(worker, name, clock)
            yield ended
            if ended.lost:
                worker.end()
                worker = None
    finally:
        if worker is not None:
            worker.end()


def _taken(names: deque[str]) -> str | None:
    try:
        return names.popleft()
    except IndexError:
        return None


def _ready(worker: Worker, name: str, names: deque[str], start_s: float) -> Hello:
    """Its first words. Raises NotReady when they do not come, with `name` left over: no other one would do better."""
    try:
        said = worker.receive(start_s)
    except EOFError as error:
        names.appendleft(name)
        raise NotReady("a worker's process ended before it was ready; what it said is above") from error
    if isinstance(said, Hello):
        return said
    names.appendleft(name)
    raise NotReady(said.error if isinstance(said, Ended) else f"a worker was not ready within {start_s:.0f} s")


def _heard(worker: Worker, name: str, clock: Clock) -> Generator[Message, None, Ended]:
    """What a case tells; returns how it ended."""
    started, seconds = clock.now(), clock.seconds(name)
    most = max(seconds, LEAST_S) + GRACE_S
    try:
        worker.ask(name, seconds)
        while (left := started + most - clock.now()) > 0:
            said = worker.receive(left)
            if isinstance(said, Ended):
                return said
            if said is not None:
                yield said
    except (EOFError, OSError):
        return Ended(name, clock.now() - started, "its process ended; what it said is above", lost=True)
    return Ended(name, clock.now() - started, f"it was stopped after {most:.0f} s", lost=True)


def side_by_side(runs: list[Iterator[Message]]) -> Iterator[Message]:
    """Several runs at a time, their messages as they come. Raises what a run raises."""
    told: queue.Queue[Message | BaseException | None] = queue.Queue()

    def drive(run: Iterator[Message]) -> None:
        try:
            for message in run:
                told.put(message)
        except BaseException as error:  # noqa: BLE001 (raised where the messages are read)
            told.put(error)
        told.put(None)

    for run in runs:
        threading.Thread(target=drive, args=(run,), daemon=True).start()
    open_runs = len(runs)
    while open_runs:
        message = told.get()
        if isinstance(message, BaseException):
            raise message
        if message is None:
            open_runs -= 1
        else:
            yield message
