"""What this machine reads and computes a second, with all the threads that are given.

By the native kernels where they load, else by torch: then the page says so, since torch may reach less than the
machine has.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from weft_bench.lines import MACHINE, Line, Origin
from weft_bench.roofline import Rates
from weft_kernels.cpu.errors import NativeUnavailable
from weft_kernels.cpu.library import Library, load
from weft_kernels.cpu.pool import Pool

MEMORY_BYTES = 1 << 30  # beyond the caches of most machines
LEAST_BYTES = 4 << 20  # of a working set, whose reading is measured in its own size
TORCH_SIZE = 2048
REPETITIONS = 5
GIGA = 1e9


class Meter(Protocol):
    """Measures; `name` says by what means."""

    @property
    def name(self) -> str: ...

    def bandwidth(self, n_bytes: int) -> float:
        """Bytes/s of reading so many bytes again and again."""
        ...

    def peak(self) -> float:
        """bf16 operations a second."""
        ...


@dataclass(frozen=True, slots=True)
class Native:
    """The kernels' own measurements, at the level they would run at."""

    library: Library
    pool: Pool

    @property
    def name(self) -> str:
        return f"native kernels ({self.library.level})"

    def bandwidth(self, n_bytes: int) -> float:
        return self.library.read_bandwidth(self.pool, max(n_bytes, LEAST_BYTES), REPETITIONS)

    def peak(self) -> float:
        return max(self.library.peak(self.pool) for _ in range(REPETITIONS))


class Torch:
    """Sums and matrix products of torch."""

    name = "torch"

    def bandwidth(self, n_bytes: int) -> float:
        data = torch.ones(max(n_bytes, LEAST_BYTES) // 4, dtype=torch.float32)
        return data.numel() * 4 / _best_s(lambda: data.sum())

    def peak(self) -> float:
        a = torch.randn(TORCH_SIZE, TORCH_SIZE).to(torch.bfloat16)
        return 2 * TORCH_SIZE**3 / _best_s(lambda: a @ a)


def meter(threads: int) -> Meter:
    """What measures here, with so many threads."""
    try:
        library = load()
        return Native(library, library.pool(threads))
    except NativeUnavailable:
        torch.set_num_threads(threads)
        return Torch()


def rates(by: Meter, n_bytes: float, peak: float) -> Rates:
    """The machine for a working set of `n_bytes`: a small one is read from a cache, and its bound is that cache's."""
    return Rates(by.bandwidth(min(int(n_bytes), MEMORY_BYTES)), peak)


def machine_lines(origin: Origin, by: Meter, peak: float) -> Iterator[Line]:
    """What the memory gives, and the peak as it was measured before."""
    yield origin.line(f"{MACHINE}{by.name}", "read bandwidth", by.bandwidth(MEMORY_BYTES) / GIGA, "GB/s")
    yield origin.line(f"{MACHINE}{by.name}", "bf16 peak", peak / GIGA, "GFLOP/s")


def _best_s(work: "Work") -> float:
    work()
    best = float("inf")
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


class Work(Protocol):
    def __call__(self) -> object: ...
