"""What this machine reads and computes a second, with all the threads that are given.

By the native kernels where they load, else by torch: then the page says so, since torch may reach less than the
machine has.
"""

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from weft_bench.roofline import Rates
from weft_kernels.cpu.errors import NativeUnavailable
from weft_kernels.cpu.library import Library, load
from weft_kernels.cpu.pool import Pool

MEMORY_BYTES = 1 << 30  # beyond the caches of most machines
LEAST_BYTES = 4 << 20  # of a working set, whose reading is measured in its own size
TORCH_SIZE = 2048
REPETITIONS = 5


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
        return self.library.peak(self.pool)


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
