"""Requests through a live stack: the times that clients see, and the CPU seconds of each process meanwhile."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from weft_sim.report import Served
from weft_sim.traces import TraceArrival
from weft_stage import sse
from weft_stage.stack import CONTROLLER, Stack

CLIENT, RUNNER, ENGINE = "client", "runner", "engine"  # beside gateway, scheduler, supervisor, predictor, depot
SETTLED_S = 0.1  # after an answer: outcomes are stored, reports are through
STEPS = "weft_runner_iterations"
HOST = "127.0.0.1"
PATIENT = {  # requests wait longer here than users would
    "WEFT_GATEWAY__HOLD_SECONDS": "3600",
    "WEFT_GATEWAY__MAX_IN_FLIGHT": "10000",
    "WEFT_GATEWAY__PREDICT_MS": "5000",
}
Bodies = Sequence[tuple[int, dict[str, Any]]]  # the adapter's number, and the request


class Cpu:
    """CPU seconds of every process of a stack, as the kernel's scheduler counts them (nanoseconds).

    Of the runner the first thread, which has its sockets, counts as `runner`, all others as `engine`.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._files: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self.find_threads()

    def find_threads(self) -> None:
        """Open the files of new threads: a thread that starts later is not counted before the next call."""
        for component in (*self._stack.components(), CONTROLLER):
            pid = self._stack.pid(component)
            for task in Path(f"/proc/{pid}/task").iterdir():
                path = str(task / "schedstat")
                if path not in self._files:
                    is_runner = component.startswith(RUNNER)
                    self._names[path] = (RUNNER if task.name == str(pid) else ENGINE) if is_runner else component
                    self._files[path] = os.open(path, os.O_RDONLY)

    def read(self) -> dict[str, float]:
        """Return the CPU seconds by process."""
        used = {CLIENT: time.process_time()}
        for path, file in self._files.items():
            try:
                seconds = int(os.pread(file, 64, 0).split()[0]) / 1e9
            except (OSError, IndexError):
                continue  # a thread that has ended
            used[self._names[path]] = used.get(self._names[path], 0.0) + seconds
        return used

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            os.close(file)


@dataclass(frozen=True, slots=True)
class LiveRun:
    """`cpu` and `after` (the part after answers had ended): seconds by process, without what it uses at rest.

    `others`: the share of the machine that processes of other people took meanwhile.
    """

    answers: tuple[sse.Streamed, ...]
    adapters: tuple[int, ...]
    cpu: Mapping[str, float]
    steps: float
    wall_s: float
    after: Mapping[str, float] | None = None
    others: float = 0.0

    @property
    def tokens(self) -> int:
        """Count the tokens of all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def rate(self) -> float:
        """Return the requests a second."""
        return len(self.answers) / self.wall_s

    def trace(self) -> list[TraceArrival]:
        """Return the same requests at the same times, for the simulator."""
        first = min(answer.start for answer in self.answers)
        return [
            TraceArrival(answer.start - first, answer.prompt_tokens, answer.tokens, adapter, answer.stopped)
            for answer, adapter in zip(self.answers, self.adapters, strict=True)
        ]

    def served(self) -> list[Served]:
        """Return the answers as the simulator reports its own."""
        return [
            Served(
                (one.first - one.start) * 1e3,
                (one.end - one.first) / (one.tokens - 1) * 1e3 if one.tokens > 1 else None,
                (one.end - one.start) * 1e3,
                one.tokens,
            )
            for one in self.answers
        ]

    def ttft_s(self) -> float:
        """Return the median time to the first token."""
        return median(answer.first - answer.start for answer in self.answers)

    def token_s(self) -> float:
        """Return the median time per token after the first."""
        return median((one.end - one.first) / (one.tokens - 1) for one in self.answers if one.tokens > 1)


class Live:
    """One stack under measurement. Its methods raise RequestFailed, StackFailed."""

    def __init__(self, stack: Stack) -> None:
        self._stack, self.cpu = stack, Cpu(stack)
        self._at_rest: dict[str, float] = {}

    def rest(self, seconds: float) -> None:
        """Measure what processes use with nothing to do."""
        self.cpu.find_threads()
        before = self.cpu.read()
        time.sleep(seconds)
        self._at_rest = {name: (used - before.get(name, 0.0)) / seconds for name, used in self.cpu.read().items()}

    def closed(self, bodies: Bodies, streams: int) -> LiveRun:
        """Run `streams` clients, each with its next request when the last has ended."""
        return self._run(bodies, lambda sent: asyncio.run(sse.run(HOST, self._stack.port, sent, streams)))

    def open(self, bodies: Bodies, at_s: Sequence[float]) -> LiveRun:
        """Send each request at its time."""
        return self._run(bodies, lambda sent: asyncio.run(sse.run_at(HOST, self._stack.port, sent, at_s)))

    def singly(self, bodies: Bodies) -> LiveRun:
        """Send each request when nothing of the request before is left to do."""
        answers, steps, began = list[sse.Streamed](), self._steps(), time.perf_counter()
        cpu, after = dict[str, float](), dict[str, float]()
        for _, body in bodies:
            since, before = time.perf_counter(), self.cpu.read()
            answers += asyncio.run(sse.run(HOST, self._stack.port, [body], 1))
            ended, at_end = time.perf_counter(), self.cpu.read()
            time.sleep(SETTLED_S)
            settled = self.cpu.read()
            self._add(after, at_end, settled, time.perf_counter() - ended)
            self._add(cpu, before, settled, time.perf_counter() - since)
        numbers = tuple(number for number, _ in bodies)
        time.sleep(SETTLED_S)
        wall_s = time.perf_counter() - began
        return LiveRun(tuple(answers), numbers, cpu, self._steps() - steps, wall_s, after)

    def _run(self, bodies: Bodies, run: Callable[[list[dict[str, Any]]], list[sse.Streamed]]) -> LiveRun:
        self.cpu.find_threads()
        steps, before, busy_s, began = self._steps(), self.cpu.read(), _busy_s(), time.perf_counter()
        answers = run([body for _, body in bodies])
        wall_s = time.perf_counter() - began
        time.sleep(3 * SETTLED_S)
        cpu, after, elapsed_s = dict[str, float](), self.cpu.read(), time.perf_counter() - began
        others_s = _busy_s() - busy_s - (sum(after.values()) - sum(before.values()))
        self._add(cpu, before, after, elapsed_s)
        others = max(0.0, others_s) / elapsed_s / (os.cpu_count() or 1)
        numbers = tuple(number for number, _ in bodies)
        return LiveRun(tuple(answers), numbers, cpu, self._steps() - steps, wall_s, others=others)

    def _add(
        self, to: dict[str, float], before: Mapping[str, float], after: Mapping[str, float], seconds: float
    ) -> None:
        """Add the CPU seconds between two readings, without those that processes use at rest."""
        for name, used in after.items():
            to[name] = to.get(name, 0.0) + used - before.get(name, 0.0) - seconds * self._at_rest.get(name, 0.0)

    def _steps(self) -> float:
        return self._stack.metric("runner", STEPS)


def _busy_s() -> float:
    """Return the CPU seconds of all processes of this machine, and what its host took from it."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
