"""Find tests that hang, from outside: a test that is stuck in C code cannot end itself.

A test hangs when the processes below its worker have used no CPU and moved no byte for `MAX_IDLE_S`, or when they have
used `CPU_FACTOR` times the CPU seconds recorded for it (at least `MIN_CPU_BOUND_S`). Neither asks how long the test
took: a slow or busy machine ends no test.
"""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from harness.guard import descendants

MAX_IDLE_S = 120.0
MIN_CPU_BOUND_S = 300.0
CPU_FACTOR = 10.0
NO_CPU_S = 0.05  # what a process uses that only wakes up and sleeps again; a loop that polls uses more
MAX_BEAT_S = 5.0  # what one observation can add to the idle time: a watcher that was stopped itself has seen nothing
TICKS_A_SECOND = 100.0  # of /proc's times, USER_HZ on every Linux
RUNNABLE = ("R", "D")  # waits for a core or a disk, and not for something that never comes


class Usage(NamedTuple):
    """What a tree of processes has used since each of them began."""

    cpu_s: float
    moved_bytes: int


@dataclass
class _Watched:
    """A test that runs, and what was seen of it."""

    test: str
    first: Usage | None = None
    moved: Usage | None = None  # when something moved for the last time
    at: float = 0.0
    idle_s: float = 0.0
    cpu_s: float = 0.0


class HangWatch:
    """The tests that run, one a worker process. Times are seconds of one monotonic clock, given by the caller."""

    def __init__(
        self, records: Mapping[str, float], max_idle_s: float = MAX_IDLE_S, min_cpu_bound_s: float = MIN_CPU_BOUND_S
    ) -> None:
        """`records` has CPU seconds by test."""
        self._records, self._max_idle_s, self._min_cpu_bound_s = records, max_idle_s, min_cpu_bound_s
        self._watched: dict[int, _Watched] = {}

    def begin(self, worker: int, test: str) -> None:
        """Watch a test that has begun in this worker process."""
        self._watched[worker] = _Watched(test)

    def end(self, worker: int) -> float:
        """Watch no longer. Returns the CPU seconds that were seen."""
        watched = self._watched.pop(worker, None)
        return watched.cpu_s if watched else 0.0

    def tests(self) -> dict[int, str]:
        """The running test of each worker process."""
        return {worker: watched.test for worker, watched in self._watched.items()}

    def observe(self, worker: int, usage: Usage, now: float) -> str:
        """Take what a worker's tree has used by now. Returns why its test hangs, "" while it does not."""
        watched = self._watched[worker]
        if watched.first is None or watched.moved is None:
            watched.first, watched.moved, watched.at = usage, usage, now
        watched.cpu_s = max(watched.cpu_s, usage.cpu_s - watched.first.cpu_s)
        still = abs(usage.cpu_s - watched.moved.cpu_s) < NO_CPU_S and usage.moved_bytes == watched.moved.moved_bytes
        watched.idle_s = watched.idle_s + min(now - watched.at, MAX_BEAT_S) if still else 0.0
        watched.at = now
        if not still:
            watched.moved = usage
        if watched.idle_s > self._max_idle_s:
            return f"its processes have used no CPU and moved no byte for {watched.idle_s:.0f} s"
        bound_s = max(self._min_cpu_bound_s, CPU_FACTOR * self._records.get(watched.test, 0.0))
        if watched.cpu_s > bound_s:
            return f"its processes have used {watched.cpu_s:.0f} CPU seconds; expected at most {bound_s:.0f}"
        return ""

    def forgive(self, worker: int) -> None:
        """Begin to count the idle time anew: something of the tree waits for the machine."""
        self._watched[worker].idle_s = 0.0


def usage_of(pid: int) -> Usage:
    """What a process, all below it and those that it has waited for have used. Nothing for one that has ended."""
    cpu_s, moved_bytes = 0.0, 0
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = _stat(each)
            cpu_s += time.clock_gettime((~each << 3) | 2)  # its CPU clock: clock_getcpuclockid(3)
            cpu_s += (int(fields[13]) + int(fields[14])) / TICKS_A_SECOND  # of its children that it has waited for
        with contextlib.suppress(OSError):  # another user's is not ours to read
            counts = Path(f"/proc/{each}/io").read_text().split()
            moved_bytes += int(counts[1]) + int(counts[3])  # rchar, wchar
    return Usage(cpu_s, moved_bytes)


def waits_for_the_machine(pid: int) -> bool:
    """Say whether a thread of the tree is runnable or in a disk wait."""
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                if _stat(task)[0] in RUNNABLE:
                    return True
    return False


def _stat(process: int | Path) -> list[str]:
    """The fields of proc(5)'s `stat` from the third, the state, on."""
    folder = process if isinstance(process, Path) else Path(f"/proc/{process}")
    return (folder / "stat").read_text().rpartition(")")[2].split()
