"""What this machine reads and computes a second, with all the threads that are given.

By the native kernels where they load, else by torch: then the page says so, since torch may reach less than the
machine has.
"""

import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from weft_bench.roofline import Rates
from weft_kernels.cpu.errors import NativeUnavailable
from weft_kernels.cpu.library import Library, load
from weft_kernels.cpu.threads import ThreadPool
from weft_stage.lines import MACHINE, Line, Origin

MEMORY_BYTES = 1 << 30  # beyond the caches of most machines
WORKING_SETS = tuple(int(MEMORY_BYTES / 2 ** (step / 2)) for step in range(16, -1, -1))  # from 4 MiB on, two per octave
TORCH_SIZE = 2048
REPETITIONS = 5
GIGA = 1e9


class Meter(Protocol):
    """Measures; `name` says by what means."""

    @property
    def name(self) -> str: ...

    def bandwidth(self, n_bytes: int) -> float:
        """Measure the bytes a second of reading `n_bytes` again and again."""
        ...

    def peak(self) -> float:
        """Measure the bf16 operations a second."""
        ...


@dataclass(frozen=True, slots=True)
class Native:
    """The kernels' own measurements, at the level they would run at."""

    library: Library
    pool: ThreadPool

    @property
    def name(self) -> str:
        return f"native kernels ({self.library.level})"

    def bandwidth(self, n_bytes: int) -> float:
        return self.library.read_bandwidth(self.pool, n_bytes, REPETITIONS)

    def peak(self) -> float:
        return max(self.library.peak(self.pool) for _ in range(REPETITIONS))


class Torch:
    """Sums and matrix products of torch."""

    name = "torch"

    def bandwidth(self, n_bytes: int) -> float:
        data = torch.ones(n_bytes // 4, dtype=torch.float32)
        return data.numel() * 4 / _best_s(lambda: data.sum())

    def peak(self) -> float:
        a = torch.randn(TORCH_SIZE, TORCH_SIZE).to(torch.bfloat16)
        return 2 * TORCH_SIZE**3 / _best_s(lambda: a @ a)


def meter(threads: int) -> Meter:
    """Return what measures on this machine with `threads` threads."""
    try:
        library = load()
        return Native(library, library.pool(threads))
    except NativeUnavailable:
        torch.set_num_threads(threads)
        return Torch()


@dataclass(frozen=True, slots=True)
class Machine:
    """The rates as they were measured at the start. `bandwidths`: bytes/s by working set, the smallest first."""

    name: str
    peak: float
    bandwidths: Mapping[int, float]

    @classmethod
    def measured(cls, by: Meter) -> "Machine":
        """Measure by `by`; what was measured for a larger set is reached for a smaller one, too.

        (A larger set is never read faster: where it seems to be, something else disturbed the smaller one.)
        """
        found: dict[int, float] = {}
        best = 0.0
        for n_bytes in reversed(WORKING_SETS):
            found[n_bytes] = best = max(best, by.bandwidth(n_bytes))
        return cls(by.name, by.peak(), dict(sorted(found.items())))

    def rates(self, n_bytes: float) -> Rates:
        """Return the rates for a working set of this size: those of the next smaller one that was measured.

        Never those of a larger one, which might be beyond the cache that this one is read from: a small model's bound
        is its cache's.
        """
        at = max(bisect_right(WORKING_SETS, n_bytes) - 1, 0)
        return Rates(self.bandwidths[WORKING_SETS[at]], self.peak)

    def lines(self, origin: Origin) -> Iterator[Line]:
        """Yield what the memory gives, and the peak."""
        yield origin.line(f"{MACHINE}{self.name}", "read bandwidth", self.bandwidths[MEMORY_BYTES] / GIGA, "GB/s")
        yield origin.line(f"{MACHINE}{self.name}", "bf16 peak", self.peak / GIGA, "GFLOP/s")


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
