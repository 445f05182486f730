"""The shared library: found or built, loaded, and called.

`load()` takes the library that came with the wheel when it was built from these very sources; else the one in the
cache, which the first process on a machine compiles, of every level. One with the best level of this machine suffices
(`make up` builds that, in half of the time), unless another level is asked for. All pointers are addresses as
ints, and the caller keeps what they lead to alive. Calls release the GIL.

The best usable instruction level is taken unless the caller or $WEFT_CPU_LEVEL names another.
"""

import ctypes
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL, POINTER, byref, c_char_p, c_double, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, TypeVar

from weft_kernels.cpu import sources
from weft_kernels.cpu.build import LIBRARY
from weft_kernels.cpu.build_cache import FolderUnusable, cache_folders, is_intact
from weft_kernels.cpu.compiler import find_or_fetch
from weft_kernels.cpu.errors import CallRefused, LevelUnusable, NativeUnavailable
from weft_kernels.cpu.sources import SOURCES, Sources
from weft_kernels.cpu.structs import ABI, CODES, LayerDone, Matrix, ModelStruct, RanksStruct, StepStruct
from weft_kernels.cpu.threads import ThreadPool, cpu_quota

LEVEL_VARIABLE = "WEFT_CPU_LEVEL"
PACKAGED = Path(__file__).with_name(LIBRARY)
BLOCK_FLOP = 2 * 16 * 16 * 32  # of `weft_peak_seconds`

Number = TypeVar("Number", int, float)

log = logging.getLogger(__name__)

SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "weft_abi": (c_int32, ()),
    "weft_source_hash": (c_char_p, ()),
    "weft_compiled_levels": (c_int32, ()),
    "weft_levels": (c_int32, ()),
    "weft_pool_new": (c_void_p, (c_int32,)),
    "weft_pool_free": (None, (c_void_p,)),
    "weft_workspace_bytes": (c_int64, (POINTER(ModelStruct), c_int32, c_int32, c_int32)),
    "weft_run": (c_int32, (c_int32, c_void_p, POINTER(ModelStruct), POINTER(StepStruct))),
    "weft_end_ranks": (None, (POINTER(RanksStruct),)),
    "weft_layers_done": (c_int64, (c_void_p,)),
    "weft_await_layers": (c_int64, (c_void_p, c_int64, c_int64)),
    "weft_packed_bytes": (c_int64, (c_int32, c_int64, c_int64, c_int32)),
    "weft_pack": (
        c_int32,
        (c_void_p, c_void_p, c_int32, c_int64, c_int64, c_int64, c_int32, c_void_p, c_int32, c_void_p),
    ),
    "weft_pack_jobs": (c_int32, (c_void_p, c_void_p, c_int32, c_int32)),
    "weft_touch": (None, (c_void_p, c_int32, c_int32)),
    "weft_copy": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_int64)),
    "weft_matmul": (c_int32, (c_int32, c_void_p, POINTER(Matrix), c_void_p, c_int32, c_int32, c_void_p)),
    "weft_lora": (
        c_int32,
        (c_int32, c_void_p, POINTER(ModelStruct), POINTER(StepStruct), c_int32, c_int32, c_int32, c_void_p, c_void_p),
    ),
    "weft_read_seconds": (c_double, (c_int32, c_void_p, c_void_p, c_int64, c_int32)),
    "weft_peak_seconds": (c_double, (c_int32, c_void_p, c_int64)),
}


def load(
    level: str | None = None,
    *,
    what: Sources = SOURCES,
    packaged: Path = PACKAGED,
    environment: Mapping[str, str] = os.environ,
    here: bool = False,
    every: bool = False,
) -> "Library":
    """Load the library at an instruction level (default: $WEFT_CPU_LEVEL, else the best one).

    `here`: of a library that has to be compiled, the best level of this machine alone, and the portable one; `every`:
    one that has these alone does not suffice. Raises NativeUnavailable where there is none, LevelUnusable for a level
    that is unknown or not usable here.
    """
    given = level or environment.get(LEVEL_VARIABLE)
    own = None if given or every else sources.for_this_cpu(what)
    path, native = _packaged(packaged, what) or _cached(what, environment, own, here=here)
    levels = _names(native.weft_levels())
    asked = given or levels[0]
    if asked not in levels:
        raise LevelUnusable(asked, _unsupported_reason(asked, native), levels)
    log.info("CPU kernels loaded", extra={"kv": {"level": asked, "path": str(path)}})
    return Library(path, native, asked, levels)


class LayerCounter:
    """Counts the layers that the steps given its `address` as `layers_done` have completed, one after the other.

    Let it be n before a step. Once it is n + k, every thread of this process may read the keys and values of the first
    k layers that this step ran: they were written before the count was raised (release), and `count` and `wait_for`
    read it before they return (acquire). It says nothing of `hidden`, nor of pages that another step writes. The step
    takes no GIL to raise it.
    """

    def __init__(self, native: CDLL) -> None:
        self._native, self._value = native, ctypes.c_int64(0)
        self.address = ctypes.addressof(self._value)

    @property
    def count(self) -> int:
        """The number of layers that are complete. Any thread."""
        return self._native.weft_layers_done(self.address)

    def wait_for(self, count: int, timeout_s: float) -> bool:
        """Wait until `count` layers are complete, at most `timeout_s`; returns whether they are. Any thread; the GIL is
        free meanwhile."""
        return self._native.weft_await_layers(self.address, count, int(timeout_s * 1e6)) >= count


class Library:
    """The loaded library at one level. `levels`: usable here, best first; `native`: for functions without a method."""

    def __init__(self, path: Path, native: CDLL, level: str, levels: tuple[str, ...]) -> None:
        self.path, self.native, self.level, self.levels = path, native, level, levels
        self.level_number = list(sources.LEVELS).index(level)

    def pool(self, threads: int | None = None) -> ThreadPool:
        """Make a pool of `threads` threads, the caller's included (default: as many as may work at a time)."""
        return ThreadPool(self.native, cpu_quota() if threads is None else threads)

    def packed_bytes(self, kind: int, n_out: int, n_in: int, pad_in: int = 32) -> int:
        """The bytes of a packed matrix [n_out, n_in]. Raises CallRefused for a kind or a size that is not supported."""
        return _checked("weft_packed_bytes", self.native.weft_packed_bytes(kind, n_out, n_in, pad_in))

    def pack(
        self,
        pool: ThreadPool,
        source: int,
        source_kind: int,
        stride: int,
        shape: tuple[int, int],
        to: int,
        kind: int,
        *,
        pad_in: int = 32,
        scale: int | None = None,
    ) -> None:
        """Pack row-major [n_out, n_in] = `shape` (BF16 or FP32, row stride in elements) into `to`, 64-byte aligned.

        INT8 also writes `scale`: float32, n_out rounded up to 16. Raises CallRefused.
        """
        with pool.lock:
            code = self.native.weft_pack(pool.handle, source, source_kind, stride, *shape, pad_in, to, kind, scale)
        _checked("weft_pack", code)

    def pack_jobs(self, pool: ThreadPool, jobs: int, n_jobs: int, kind: int) -> None:
        """Pack an array of `PackJob` to `kind` BF16 or FP32. Raises CallRefused."""
        with pool.lock:
            code = self.native.weft_pack_jobs(pool.handle, jobs, n_jobs, kind)
        _checked("weft_pack_jobs", code)

    def touch(self, jobs: int, n_jobs: int, kind: int) -> None:
        """Bring all pages that jobs read and write into memory, before they are packed."""
        self.native.weft_touch(jobs, n_jobs, kind)

    def copy(self, pool: ThreadPool, to: Sequence[int], source: Sequence[int], n_bytes: int) -> None:
        """Copy `n_bytes` from each address of `source` to the one of `to` at the same place."""
        addresses = c_void_p * len(to)
        with pool.lock:
            self.native.weft_copy(pool.handle, addresses(*to), addresses(*source), len(to), n_bytes)

    def matmul(self, pool: ThreadPool, matrix: Matrix, x: int, x_kind: int, m: int, y: int) -> None:
        """Multiply y[m, n_out] = x[m, n_in] W^T in float32, as a step computes it. Raises CallRefused."""
        with pool.lock:
            code = self.native.weft_matmul(self.level_number, pool.handle, byref(matrix), x, x_kind, m, y)
        _checked("weft_matmul", code)

    def lora(
        self, pool: ThreadPool, model: ModelStruct, step: StepStruct, site: int, shape: tuple[int, int], x: int, y: int
    ) -> None:
        """Add to y[m, n_out] the adapters of `site` for x[m, n_in], in float32, as a step of one layer adds them.

        `shape`: (n_out, n_in); of `step` n_tokens, segments, slots and workspace are read. Raises CallRefused.
        """
        n_out, n_in = shape
        with pool.lock:
            code = self.native.weft_lora(
                self.level_number, pool.handle, byref(model), byref(step), site, n_in, n_out, x, y
            )
        _checked("weft_lora", code)

    def workspace_bytes(self, model: ModelStruct, n_tokens: int, site_rank: int, n_sampled: int) -> int:
        """The bytes that `StepStruct.workspace` has to have, at most, for steps up to these sizes. Raises
        CallRefused."""
        size = self.native.weft_workspace_bytes(byref(model), n_tokens, site_rank, n_sampled)
        return _checked("weft_workspace_bytes", size)

    def run(
        self, pool: ThreadPool, model: ModelStruct, step: StepStruct, layer_done: Callable[[int], None] | None = None
    ) -> None:
        """Run a step's layers. `layer_done(layer)` is called here, between layers, with the GIL; it calls no pool.

        Raises CallRefused, and what `layer_done` raised: then it is not called again, and the layers ran to the end.
        """
        errors: list[BaseException] = []

        def call_back(layer: int) -> None:
            """Call `layer_done`. C cannot carry an error on: the first one waits for the call's end."""
            if layer_done is not None and not errors:
                try:
                    layer_done(layer)
                except BaseException as error:  # noqa: BLE001 (raised below)
                    errors.append(error)

        step.layer_done = LayerDone() if layer_done is None else LayerDone(call_back)
        with pool.lock:
            code = self.native.weft_run(self.level_number, pool.handle, byref(model), byref(step))
        if errors:
            raise errors[0]
        _checked("weft_run", code)

    def read_bandwidth(self, pool: ThreadPool, n_bytes: int = 512 << 20, repetitions: int = 5) -> float:
        """Measure the bytes/s at which the pool's threads read memory, the best of `repetitions`.

        `n_bytes` has to be beyond the caches, or it is those that are measured.
        """
        buffer = (ctypes.c_char * (n_bytes + 64))()
        aligned = -(-ctypes.addressof(buffer) // 64) * 64
        ctypes.memset(aligned, 1, n_bytes)  # pages that were never written are all one page of zeros
        with pool.lock:
            seconds = self.native.weft_read_seconds(self.level_number, pool.handle, aligned, n_bytes, repetitions)
        return n_bytes / _checked("weft_read_seconds", seconds, sys.float_info.min)

    def peak(self, pool: ThreadPool, blocks: int = 1 << 22) -> float:
        """Measure the FLOP/s of the level's bf16 arithmetic on operands in the core; two for a multiply-add."""
        with pool.lock:
            seconds = self.native.weft_peak_seconds(self.level_number, pool.handle, blocks)
        return blocks * BLOCK_FLOP * pool.threads / _checked("weft_peak_seconds", seconds, sys.float_info.min)


def _packaged(path: Path, what: Sources) -> tuple[Path, CDLL] | None:
    """Open the wheel's library, unless there is none, or not one of these sources."""
    if not path.exists():
        return None
    try:
        if not is_intact(path):
            raise NativeUnavailable("its checksum is another")
        native = _open(path)
        if (native.weft_source_hash() or b"").decode(errors="replace") != what.digest():
            raise NativeUnavailable("it was built from other sources")
    except (NativeUnavailable, OSError) as error:
        log.warning("the packaged CPU kernels are not used", extra={"kv": {"path": str(path), "why": error}})
        return None
    return path, native


def _cached(what: Sources, environment: Mapping[str, str], own: Sources | None, *, here: bool) -> tuple[Path, CDLL]:
    """Open the library of the first folder that can be written to and executed from.

    `own`: what suffices, with the best level of this machine; `here`: it is built, where neither is there.
    """
    compiler = find_or_fetch(environment)
    unusable: list[str] = []
    for cache in cache_folders(environment):
        try:
            if own is not None and cache.find(what, compiler) is None and (here or cache.find(own, compiler)):
                native = _open(path := cache.get(own, compiler))
                if own.only in _names(native.weft_levels()):  # else CPU or compiler do less than the system says
                    return path, native
            path = cache.get(what, compiler)
            return path, _open(path)
        except FolderUnusable as error:
            unusable.append(error.reason)
        except OSError as error:  # such as a file system mounted noexec
            unusable.append(str(error))
    raise NativeUnavailable("; ".join(unusable))


def _open(path: Path) -> CDLL:
    """Open a library. Raises OSError when it cannot be loaded, NativeUnavailable when this code does not know it."""
    native = CDLL(str(path))
    try:
        if (abi := native.weft_abi()) != ABI:
            raise NativeUnavailable(f"{path} speaks ABI {abi}, and this Weft speaks {ABI}: it is another version's")
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(native, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise NativeUnavailable(f"{path} is not Weft's, or another version's: {error}") from error
    return native


def _names(bits: int) -> tuple[str, ...]:
    """The levels of a bit mask, best first."""
    return tuple(name for i, name in reversed(list(enumerate(sources.LEVELS))) if bits & 1 << i)


def _unsupported_reason(level: str, native: CDLL) -> str:
    if level not in sources.LEVELS:
        return "there is no such level"
    if level not in _names(native.weft_compiled_levels()):
        return "it was not compiled in (another architecture, or too old a compiler)"
    return "this CPU lacks it"


def _checked(function: str, value: Number, least: float = 0) -> Number:
    if not value >= least:
        raise CallRefused(function, int(value), CODES.get(int(value), "it failed"))
    return value
