"""What a disk does, measured past the page cache in the blocks and by the threads of the weight stream.

It is read and written from and to as much memory as a ring has. Every part ends within its seconds, on any machine.
"""

import ctypes
import os
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

import numpy as np

from weft_kernels.cpu.memory import MappedMemory
from weft_runner.errors import DiskUnusable
from weft_runner.model.tiers.direct_io import BLOCK, DirectFile, IoQueue
from weft_runner.model.tiers.weight_stream import THREADS
from weft_runner.offload.machine import Table, rising

DISK_BYTES = 256 << 20
MEMORY_BYTES = 128 << 20  # that reads go to: a small buffer, which stays in the cache, makes a virtual disk look faster
REPEATS, ROUNDS = 3, 5
DISK_S, SLICE_S = 2.0, 0.1  # each sweep over the disk; of a round
REQUESTS, REQUEST_BYTES = 1024, 32 << 10  # of scattered reads, then of writes

Clock = Callable[[], float]


@contextmanager
def scratch_file(folder: Path) -> Generator[Path]:
    """Make an empty file that goes again. Raises DiskUnusable, also for what fails on it meanwhile."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".weft-rates-", dir=folder)
    except OSError as error:
        raise DiskUnusable(f"{folder}: {error}") from error
    os.close(handle)
    try:
        yield Path(name)
    except OSError as error:
        raise DiskUnusable(f"{folder}: {error}") from error
    finally:
        Path(name).unlink()


def disk_write(path: Path, clock: Clock = time.perf_counter, n_bytes: int = DISK_BYTES) -> tuple[int, float]:
    """Write up to `n_bytes` in DISK_S. Returns the bytes that the file has, and bytes a second."""
    blocks, seconds = _sweep(path, os.O_RDWR, n_bytes // BLOCK, clock)
    return blocks * BLOCK, blocks * BLOCK / seconds


def disk_read(path: Path, n_bytes: int, clock: Clock = time.perf_counter) -> float:
    """Return bytes a second, the median of a few sweeps over the file."""
    rates, until = list[float](), clock() + DISK_S
    for _ in range(REPEATS):
        blocks, seconds = _sweep(path, os.O_RDONLY, n_bytes // BLOCK, clock)
        rates.append(blocks * BLOCK / seconds)
        if clock() >= until:
            break
    return median(rates)


def _sweep(path: Path, flags: int, n_blocks: int, clock: Clock) -> tuple[int, float]:
    """Move blocks in order, by the threads in turns, one each or more, until DISK_S are over. Returns (blocks, s)."""
    stream, began = DiskStream(path, n_blocks * BLOCK, flags, written(MEMORY_BYTES)), clock()
    least = min(stream.blocks(lambda done: done > 0 and clock() - began > DISK_S, once=True))
    return least * THREADS, clock() - began


def request_s(path: Path, n_bytes: int, rates: tuple[float, float], clock: Clock) -> float:
    """Time what a small request takes beside its bytes, of many under way: the mean of reads and writes."""
    count = min(REQUESTS, n_bytes // REQUEST_BYTES)
    memory, queue, file = written(count * REQUEST_BYTES), IoQueue(), DirectFile(path, os.O_RDWR)
    places = np.random.default_rng(0).permutation(n_bytes // REQUEST_BYTES)[:count]
    at = memory.address + REQUEST_BYTES * np.arange(count)
    requests = np.stack([at, np.full(count, REQUEST_BYTES), REQUEST_BYTES * places], axis=1)
    try:
        taken = [
            median_s(lambda call=call: call(file, requests), clock) / count - REQUEST_BYTES / rate
            for call, rate in zip((queue.read, queue.write), rates, strict=True)
        ]
    finally:
        queue.close()
        file.close()
    return min(1.0, sum(max(0.0, one) for one in taken) / len(taken))


def written(n_bytes: int) -> MappedMemory:
    """Map memory that the system has given already."""
    memory = MappedMemory(n_bytes)
    ctypes.memset(memory.address, 1, n_bytes)
    return memory


class Work(Protocol):
    """What runs alone and beside another one."""

    def run(self, until: Callable[[], bool]) -> int:
        """Work until then, and return how much was done. Raises DiskUnusable."""
        ...


@dataclass(frozen=True, slots=True)
class DiskStream:
    """Blocks of a file, read or written as weights are."""

    path: Path
    n_bytes: int
    flags: int
    memory: MappedMemory

    def run(self, until: Callable[[], bool]) -> int:
        return sum(self.blocks(lambda _: until()))

    def blocks(self, until: Callable[[int], bool], *, once: bool = False) -> list[int]:
        """Move all blocks in order, again and again or `once`, by threads in turns; returns how many each has moved.

        `until`: asked before each block, with those that the thread has moved.
        """
        file, n_blocks, memory = DirectFile(self.path, self.flags), self.n_bytes // BLOCK, self.memory
        call = file.read if self.flags == os.O_RDONLY else file.write

        def share(thread: int) -> int:
            done = 0
            while not (once and done * THREADS + thread >= n_blocks) and not until(done):
                block = (done * THREADS + thread) % n_blocks
                call(memory.address + block * BLOCK % memory.n_bytes, BLOCK, block * BLOCK)
                done += 1
            return done

        try:
            with ThreadPoolExecutor(THREADS) as several:
                return list(several.map(share, range(THREADS)))
        finally:
            file.close()


def beside_share(one: Work, other: Work, clock: Clock) -> float:
    """Measure the share of the shorter of two that runs beside the longer one: the median of rounds.

    With rates beside each other over those alone of a and b, time 1 did a of one and b of the other, which takes
    share x max(a, b) + (1 - share) (a + b).
    """
    found = list[float]()
    for _ in range(ROUNDS):
        alone = [_rates([work], clock)[0] for work in (one, other)]
        beside = _rates([one, other], clock)
        if not all((*alone, *beside)):
            continue
        a, b = (min(1.0, rate / most) for rate, most in zip(beside, alone, strict=True))
        found.append(min(1.0, max(0.0, (a + b - 1.0) / min(a, b))))
    return median(found) if found else 1.0


def _rates(works: Sequence[Work], clock: Clock) -> list[float]:
    """Measure how much of each is done a second, all at a time."""
    began = clock()

    def run(work: Work) -> float:
        done = work.run(lambda: clock() - began > SLICE_S)
        return done / (clock() - began)

    with ThreadPoolExecutor(len(works)) as several:
        return list(several.map(run, works))


def product_table(
    row_counts: Sequence[int], measured_s: Callable[[int], float], numbers: int, clock: Clock, *, within_s: float,
    times: int,
) -> Table:  # fmt: skip
    """Measure seconds for each of `numbers` numbers by rows: as many entries as there is time for, two at least.

    `times`: the calls of one measurement, of which the next one may take as long each.
    """
    found, until = dict[int, float](), clock() + within_s
    for rows in row_counts:
        found[rows] = measured_s(rows) / numbers
        if len(found) > 1 and clock() + times * numbers * found[rows] > until:
            break
    return rising(found)


def median_s(call: Callable[[], None], clock: Clock) -> float:
    """Return the median time of a few calls: the least one is what a machine with others on it does not keep up."""
    taken = list[float]()
    for _ in range(REPEATS):
        began = clock()
        call()
        taken.append(clock() - began)
    return median(taken)
