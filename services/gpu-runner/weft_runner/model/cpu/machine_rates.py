"""The constants of the offload cost model, measured on this machine with what the cpu executor itself uses.

The disk is read and written past the page cache, in the blocks and by the threads of the weight stream, into as much
memory as a ring. Products are those of the native library on packed matrices of the model's largest shape, more of them
than caches hold; attention is that of native steps with the model's heads (`attention_rates`). `overlap` is what is
left of products and reads when both run, `duplex` of reads and writes: medians of rounds in which each runs alone, then
both, so that a machine that is slower for a while is so in all three. Every part ends within its seconds, on any
machine. Torch is not needed.
"""

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.domain.model.config import ModelSpec
from weft.domain.model.packed import stacked_shapes
from weft_kernels.cpu.library import Library, load
from weft_kernels.cpu.memory import MappedMemory
from weft_kernels.cpu.pool import ThreadPool
from weft_kernels.cpu.structs import BF16, FP32, INT4, INT8, Matrix
from weft_runner.model.cpu.attention_rates import attention_rates
from weft_runner.model.tiers.disk_rates import (
    MEMORY_BYTES,
    REPEATS,
    Clock,
    DiskStream,
    beside_share,
    disk_read,
    disk_write,
    median_s,
    request_s,
    scratch_file,
    written,
)
from weft_runner.offload.machine import MachineRates, Table, check_machine, rising
from weft_runner.offload.policy import Formats, KvFormat, WeightsFormat
from weft_runner.offload.sizes import model_sizes

KINDS: dict[WeightsFormat, int] = {"bf16": BF16, "fp32": FP32, "int8": INT8, "int4": INT4}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WEIGHT_BYTES = 512 << 20  # of packed matrices, at most: a model that a cache holds is read from there, as it is later
PRODUCTS_S = 3.0  # for those of a format
OVERLAP_ROWS = 32


def measure_rates(
    folder: Path, spec: ModelSpec, formats: Sequence[WeightsFormat], kv: KvFormat, threads: int | None = None,
    most_bytes: int = WEIGHT_BYTES, clock: Clock = time.perf_counter,
) -> MachineRates:  # fmt: skip
    """Some seconds, and `DISK_BYTES` of the disk meanwhile. `most_bytes`: of weights at a time, that may be in memory.

    Raises DiskUnusable, NativeUnavailable, MachineInvalid.
    """
    library = load()
    with scratch_file(folder) as path, library.pool(threads) as pool:
        n_bytes, write = disk_write(path, clock)
        read = disk_read(path, n_bytes, clock)
        memory = library.read_bandwidth(pool, MEMORY_BYTES, REPEATS)
        attention, sparse, flops = attention_rates(library, pool, spec, kv, clock)
        benches = {name: _Products(library, pool, spec, name, most_bytes, clock) for name in formats}
        products = {name: bench.table() for name, bench in benches.items()}
        reading = DiskStream(path, n_bytes, os.O_RDONLY, written(MEMORY_BYTES))
        rates = MachineRates(
            disk_read=read,
            disk_write=write,
            to_device=(copy := _copy_rate(library, pool, clock)),
            to_host=copy,
            memory_read=memory,
            attention=attention or memory,
            host_attention=attention or memory,
            attention_flops_per_s=flops or library.peak(pool, 1 << 18),
            products=products,
            overlap=beside_share(reading, _Computing(benches[formats[0]]), clock),
            duplex=beside_share(reading, DiskStream(path, n_bytes, os.O_RDWR, reading.memory), clock),
            request_s=request_s(path, n_bytes, (read, write), clock),
            sparse_attention=sparse,
        )
    check_machine(rates)
    return rates


# ---- memory and products


@dataclass(frozen=True, slots=True)
class _Computing:
    """Products of a batch, matrix by matrix."""

    products: "_Products"

    def run(self, until: Callable[[], bool]) -> int:
        done = 0
        while not until():
            self.products.multiply_next(OVERLAP_ROWS)
            done += 1
        return done


def _copy_rate(library: Library, pool: ThreadPool, clock: Clock) -> float:
    pieces, each = 64, 2 << 20
    memory = MappedMemory(2 * pieces * each)
    ctypes.memset(memory.address, 1, memory.n_bytes)
    places = [memory.address + i * each for i in range(2 * pieces)]
    return pieces * each / median_s(lambda: library.copy(pool, places[:pieces], places[pieces:], each), clock)


class _Products:
    """Packed matrices of the model's largest shape, as many bytes as the model has, and rows to multiply them with."""

    def __init__(
        self, library: Library, pool: ThreadPool, spec: ModelSpec, weights: WeightsFormat, most_bytes: int, clock: Clock
    ) -> None:
        kind, whole = KINDS[weights], min(model_sizes(spec, Formats(weights)).weights, most_bytes, WEIGHT_BYTES)
        self._library, self._pool, self._clock, self._next = library, pool, clock, 0
        n_out, n_in = max(stacked_shapes(spec), key=lambda shape: shape[0] * shape[1])
        n_out = min(n_out, max(16, (64 << 20) // (4 * n_in) // 64 * 64))  # the numbers to pack take at most 64 MiB
        generator = np.random.default_rng(0)
        source = generator.standard_normal((n_out, n_in), np.float32)
        size = library.packed_bytes(kind, n_out, n_in)
        self._packed = [MappedMemory(size) for _ in range(max(1, whole // size))]
        self._scale = np.zeros(-(-n_out // 16) * 16, np.float32)
        used = self._scale.ctypes.data if kind == INT8 else None
        for memory in self._packed:
            library.pack(pool, source.ctypes.data, FP32, n_in, (n_out, n_in), memory.address, kind, scale=used)
        self._matrices = [
            Matrix(data=memory.address, scale=used, bias=None, n_in=n_in, n_out=n_out, kind=kind)
            for memory in self._packed
        ]
        self._x_kind = FP32 if kind == FP32 else BF16
        x = generator.standard_normal((ROWS[-1], n_in), np.float32)
        self._x = x if self._x_kind == FP32 else np.ascontiguousarray(x.view(np.uint16)[:, 1::2])
        self._y, self._numbers = np.zeros((ROWS[-1], n_out), np.float32), n_out * n_in

    def multiply(self, rows: int, matrices: int | None = None) -> None:
        """With so many of the matrices (None: all)."""
        for matrix in self._matrices[:matrices]:
            self._library.matmul(self._pool, matrix, self._x.ctypes.data, self._x_kind, rows, self._y.ctypes.data)

    def multiply_next(self, rows: int) -> None:
        """With one of the matrices: each time the one after the last."""
        self._next = (self._next + 1) % len(self._matrices)
        matrix = self._matrices[self._next]
        self._library.matmul(self._pool, matrix, self._x.ctypes.data, self._x_kind, rows, self._y.ctypes.data)

    def table(self) -> Table:
        """Seconds for each number of a matrix by rows: as many entries as there is time for, two at least."""
        numbers, found = len(self._matrices) * self._numbers, dict[int, float]()
        until = self._clock() + PRODUCTS_S
        for rows in ROWS:
            found[rows] = median_s(lambda rows=rows: self.multiply(rows), self._clock) / numbers
            if len(found) > 1 and self._clock() + 2 * REPEATS * numbers * found[rows] > until:
                break
        return rising(found)
