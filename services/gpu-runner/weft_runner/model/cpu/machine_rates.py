"""The constants of the offload cost model, measured on this machine with what the cpu executor itself uses.

The disk is read and written past the page cache, in the blocks and by the threads of the weight stream. Products are
those of the native library on packed matrices of the model's largest shape, more of them than caches hold. Attention
reads KV as fast as threads read memory; prompts' attention runs at a quarter of the kernels' peak. Torch is not needed.
"""

import ctypes
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from weft.domain.model.config import ModelSpec
from weft.domain.model.packed import stacked_shapes
from weft_kernels.cpu.library import Library, load
from weft_kernels.cpu.memory import MappedMemory
from weft_kernels.cpu.pool import ThreadPool
from weft_kernels.cpu.structs import BF16, FP32, INT4, INT8, Matrix
from weft_runner.errors import DiskUnusable
from weft_runner.model.cpu.direct_io import BLOCK, DirectFile
from weft_runner.model.cpu.weight_stream import THREADS
from weft_runner.offload.machine import MachineRates, Table, check_machine, rising

KINDS = {"bf16": BF16, "fp32": FP32, "int8": INT8, "int4": INT4}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DISK_BYTES = 256 << 20
CACHE_BYTES = 96 << 20  # of packed matrices: beyond what a core's share of the last cache holds
REPEATS = 3
PROMPT_ATTENTION = 0.25  # of the kernels' peak

Clock = Callable[[], float]


def measure_rates(
    folder: Path, spec: ModelSpec, formats: Sequence[str], threads: int | None = None, clock: Clock = time.perf_counter
) -> MachineRates:
    """A few seconds, and `DISK_BYTES` of the disk meanwhile. Raises DiskUnusable, NativeUnavailable, MachineInvalid."""
    library = load()
    write, read = disk_rates(folder, clock)
    with library.pool(threads) as pool:
        memory = library.read_bandwidth(pool, 256 << 20, REPEATS)
        rates = MachineRates(
            disk_read=read,
            disk_write=write,
            to_device=(copy := _copy_rate(library, pool, clock)),
            to_host=copy,
            memory_read=memory,
            attention=memory,
            host_attention=memory,
            attention_flops_per_s=PROMPT_ATTENTION * library.peak(pool, 1 << 20),
            products={name: _products(library, pool, spec, KINDS[name], clock) for name in formats},
        )
    check_machine(rates)
    return rates


def disk_rates(folder: Path, clock: Clock = time.perf_counter, n_bytes: int = DISK_BYTES) -> tuple[float, float]:
    """Bytes a second written and read, in order, in a file that is deleted again. Raises DiskUnusable."""
    try:
        handle, name = tempfile.mkstemp(prefix=".weft-rates-", dir=folder)
    except OSError as error:
        raise DiskUnusable(f"{folder}: {error}") from error
    os.close(handle)
    try:
        return _sweep(Path(name), os.O_RDWR, n_bytes, clock), _sweep(Path(name), os.O_RDONLY, n_bytes, clock)
    except OSError as error:
        raise DiskUnusable(f"{folder}: {error}") from error
    finally:
        Path(name).unlink()


def _sweep(path: Path, flags: int, n_bytes: int, clock: Clock) -> float:
    """The best of a few sweeps over the file; a file is written once."""
    writes = flags != os.O_RDONLY
    buffers = [MappedMemory(BLOCK) for _ in range(THREADS)]
    for buffer in buffers:
        ctypes.memset(buffer.address, 1, BLOCK)
    file = DirectFile(path, flags)
    call = file.write if writes else file.read

    def share(thread: int) -> None:
        for offset in range(thread * BLOCK, n_bytes, THREADS * BLOCK):
            call(buffers[thread].address, min(BLOCK, n_bytes - offset), offset)

    try:
        with ThreadPoolExecutor(THREADS) as several:
            best_s = math.inf
            for _ in range(1 if writes else REPEATS):
                began = clock()
                list(several.map(share, range(THREADS)))
                best_s = min(best_s, clock() - began)
    finally:
        file.close()
    return n_bytes / best_s


def _copy_rate(library: Library, pool: ThreadPool, clock: Clock) -> float:
    pieces, each = 64, 2 << 20
    memory = MappedMemory(2 * pieces * each)
    ctypes.memset(memory.address, 1, memory.n_bytes)
    places = [memory.address + i * each for i in range(2 * pieces)]
    return pieces * each / _best_s(lambda: library.copy(pool, places[:pieces], places[pieces:], each), clock)


def _products(library: Library, pool: ThreadPool, spec: ModelSpec, kind: int, clock: Clock) -> Table:
    """Seconds for each number of a matrix by rows."""
    n_out, n_in = max(stacked_shapes(spec), key=lambda shape: shape[0] * shape[1])
    n_out = min(n_out, max(16, (64 << 20) // (4 * n_in) // 64 * 64))  # the numbers to pack take at most 64 MiB
    generator = np.random.default_rng(0)
    source = generator.standard_normal((n_out, n_in), np.float32)
    size = library.packed_bytes(kind, n_out, n_in)
    several = max(1, -(-CACHE_BYTES // size))
    packed = [MappedMemory(size) for _ in range(several)]
    scale = np.zeros(-(-n_out // 16) * 16, np.float32)
    matrices: list[Matrix] = []
    for memory in packed:
        library.pack(
            pool, source.ctypes.data, FP32, n_in, (n_out, n_in), memory.address, kind,
            scale=scale.ctypes.data if kind == INT8 else None,
        )  # fmt: skip
        used = scale.ctypes.data if kind == INT8 else None
        matrices.append(Matrix(data=memory.address, scale=used, bias=None, n_in=n_in, n_out=n_out, kind=kind))
    x_kind = FP32 if kind == FP32 else BF16
    x = generator.standard_normal((ROWS[-1], n_in), np.float32)
    given = x if x_kind == FP32 else np.ascontiguousarray(x.view(np.uint16)[:, 1::2])
    y = np.zeros((ROWS[-1], n_out), np.float32)

    def multiply(rows: int) -> None:
        for matrix in matrices:
            library.matmul(pool, matrix, given.ctypes.data, x_kind, rows, y.ctypes.data)

    numbers = several * n_out * n_in
    return rising({rows: _best_s(lambda rows=rows: multiply(rows), clock) / numbers for rows in ROWS})


def _best_s(call: Callable[[], None], clock: Clock) -> float:
    best_s = math.inf
    for _ in range(REPEATS):
        began = clock()
        call()
        best_s = min(best_s, clock() - began)
    return best_s
