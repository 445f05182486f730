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

from weft.domain.model.config import ModelSpec
from weft.domain.model.packed import stacked_shapes
from weft_kernels.cpu.library import Library, load
from weft_kernels.cpu.memory import MappedMemory
from weft_kernels.cpu.pool import ThreadPool
from weft_kernels.cpu.structs import BF16, FP32, INT4, INT8, Matrix
from weft_runner.errors import DiskUnusable
from weft_runner.model.cpu.attention_rates import attention_rates
from weft_runner.model.cpu.direct_io import BLOCK, DirectFile, IoQueue
from weft_runner.model.cpu.weight_stream import THREADS
from weft_runner.offload.machine import MachineRates, Table, check_machine, rising
from weft_runner.offload.policy import Formats, KvFormat, WeightsFormat
from weft_runner.offload.sizes import model_sizes

KINDS: dict[WeightsFormat, int] = {"bf16": BF16, "fp32": FP32, "int8": INT8, "int4": INT4}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DISK_BYTES = 256 << 20
MEMORY_BYTES = 128 << 20  # that reads go to: a small buffer, which stays in the cache, makes a virtual disk look faster
WEIGHT_BYTES = 512 << 20  # of packed matrices, at most: a model that a cache holds is read from there, as it is later
REPEATS = 3
DISK_S, PRODUCTS_S, SLICE_S = 2.0, 3.0, 0.1  # each sweep over the disk; a format's products; of a round
ROUNDS = 5
OVERLAP_ROWS = 32
REQUESTS, REQUEST_BYTES = 1024, 32 << 10  # of scattered reads, then of writes

Clock = Callable[[], float]


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
        reading = _Stream(path, n_bytes, os.O_RDONLY, _written(MEMORY_BYTES))
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
            overlap=_beside(reading, _Computing(benches[formats[0]]), clock),
            duplex=_beside(reading, _Stream(path, n_bytes, os.O_RDWR, reading.memory), clock),
            request_s=_request_s(path, n_bytes, (read, write), clock),
            sparse_attention=sparse,
        )
    check_machine(rates)
    return rates


# ---- the disk


@contextmanager
def scratch_file(folder: Path) -> Generator[Path]:
    """An empty file that goes again. Raises DiskUnusable, also for what fails on it meanwhile."""
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
    """(bytes that the file has, bytes a second): up to `n_bytes`, as many as DISK_S has time for."""
    blocks, seconds = _sweep(path, os.O_RDWR, n_bytes // BLOCK, clock)
    return blocks * BLOCK, blocks * BLOCK / seconds


def disk_read(path: Path, n_bytes: int, clock: Clock = time.perf_counter) -> float:
    """Bytes a second, the median of a few sweeps over the file."""
    rates, until = list[float](), clock() + DISK_S
    for _ in range(REPEATS):
        blocks, seconds = _sweep(path, os.O_RDONLY, n_bytes // BLOCK, clock)
        rates.append(blocks * BLOCK / seconds)
        if clock() >= until:
            break
    return median(rates)


def _sweep(path: Path, flags: int, n_blocks: int, clock: Clock) -> tuple[int, float]:
    """(blocks, seconds): in order, by the threads in turns, each at least one block, until DISK_S are over."""
    memory, file, began = _written(MEMORY_BYTES), DirectFile(path, flags), clock()
    call = file.read if flags == os.O_RDONLY else file.write

    def share(thread: int) -> int:
        done = 0
        for block in range(thread, n_blocks, THREADS):
            call(memory.address + block * BLOCK % MEMORY_BYTES, BLOCK, block * BLOCK)
            done += 1
            if clock() - began > DISK_S:
                break
        return done

    try:
        with ThreadPoolExecutor(THREADS) as several:
            least = min(several.map(share, range(THREADS)))
    finally:
        file.close()
    return least * THREADS, clock() - began


def _request_s(path: Path, n_bytes: int, rates: tuple[float, float], clock: Clock) -> float:
    """That a small request takes beside its bytes, of many that are under way: the mean of reads and writes."""
    count = min(REQUESTS, n_bytes // REQUEST_BYTES)
    memory, queue, file = _written(count * REQUEST_BYTES), IoQueue(), DirectFile(path, os.O_RDWR)
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


def _written(n_bytes: int) -> MappedMemory:
    """Memory that the system has given already."""
    memory = MappedMemory(n_bytes)
    ctypes.memset(memory.address, 1, n_bytes)
    return memory


class _Work(Protocol):
    """What runs alone and beside another one."""

    def run(self, until: Callable[[], bool]) -> int:
        """How much was done until then. Raises DiskUnusable."""
        ...


@dataclass(frozen=True, slots=True)
class _Stream:
    """Blocks of a file, read or written as weights are."""

    path: Path
    n_bytes: int
    flags: int
    memory: MappedMemory

    def run(self, until: Callable[[], bool]) -> int:
        file, n_blocks, memory = DirectFile(self.path, self.flags), self.n_bytes // BLOCK, self.memory
        call = file.read if self.flags == os.O_RDONLY else file.write

        def share(thread: int) -> int:
            done = 0
            while not until():
                block = (done * THREADS + thread) % n_blocks
                call(memory.address + block * BLOCK % memory.n_bytes, BLOCK, block * BLOCK)
                done += 1
            return done

        try:
            with ThreadPoolExecutor(THREADS) as several:
                return sum(several.map(share, range(THREADS)))
        finally:
            file.close()


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


def _beside(one: _Work, other: _Work, clock: Clock) -> float:
    """The share of the shorter of two that runs beside the longer one: the median of rounds.

    Of a and b, the rates beside each other over those alone: in time 1 there was a of one and b of the other, which
    takes share x max(a, b) + (1 - share) (a + b).
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


def _rates(works: Sequence[_Work], clock: Clock) -> list[float]:
    """How much of each is done a second, all at a time."""
    began = clock()

    def run(work: _Work) -> float:
        done = work.run(lambda: clock() - began > SLICE_S)
        return done / (clock() - began)

    with ThreadPoolExecutor(len(works)) as several:
        return list(several.map(run, works))


# ---- memory and products


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


def median_s(call: Callable[[], None], clock: Clock) -> float:
    """The median time of a few calls: the least one is what a machine with others on it does not keep up."""
    taken = list[float]()
    for _ in range(REPEATS):
        began = clock()
        call()
        taken.append(clock() - began)
    return median(taken)
