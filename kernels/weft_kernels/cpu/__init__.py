# pyright: reportUnusedImport=false
"""The CPU kernels: C++ behind a C ABI, built by whatever compiler is there, called through ctypes.

`load()` gives a `Library`, or says in `NativeUnavailable` why this machine has none. Nothing here imports more than the
standard library: wheels are built by it. What needs numpy (`memory`, `ranks`, `sampling`) is imported by its module.
"""

from weft_kernels.cpu.build import AT_ONCE, CHECKSUM, LIBRARY, LIMIT_S, Built, build_library, checksum, compile_all
from weft_kernels.cpu.build_cache import (
    KEPT,
    Cache,
    FolderUnusable,
    cache_folders,
    cache_key,
    is_intact,
    untrusted_reason,
)
from weft_kernels.cpu.compiler import Compiler, Limit, find_compiler, run_all, trimmed
from weft_kernels.cpu.errors import CallRefused, LevelUnusable, NativeUnavailable, NoCompiler
from weft_kernels.cpu.library import LEVEL_VARIABLE, SIGNATURES, Library, load
from weft_kernels.cpu.pool import ThreadPool
from weft_kernels.cpu.sources import FLAGS, LEVELS, PORTABLE, SOURCES, Sources, for_this_cpu
from weft_kernels.cpu.structs import ABI, BF16, CODES, FP32, INT4, INT8, KINDS, Matrix, ModelStruct, StepStruct
from weft_kernels.cpu.threads import cgroup_cpu_limits, cpu_quota
from weft_kernels.cpu.zig import LOCK, FetchedZig, find_or_fetch, zig_compiler
