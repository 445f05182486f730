# pyright: reportUnusedImport=false
"""The CPU kernels: C++ behind a C ABI, built by whatever compiler is there, called through ctypes.

`load()` gives a `Library`, or says in `NativeUnavailable` why this machine has none. Nothing here imports more than the
standard library: wheels are built by it. What needs numpy (`draft`, `memory`, `ranks`, `sampling`) is taken as a
module.
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
from weft_kernels.cpu.compiler import (
    ZIG_LOCK,
    Compiler,
    FetchedZig,
    Limit,
    find_compiler,
    find_or_fetch,
    run_all,
    trimmed,
    zig_compiler,
)
from weft_kernels.cpu.errors import CallRefused, LevelUnusable, NativeUnavailable, NoCompiler
from weft_kernels.cpu.library import LEVEL_VARIABLE, SIGNATURES, Library, load
from weft_kernels.cpu.sources import FLAGS, LEVELS, PORTABLE, SOURCES, Sources, for_this_cpu
from weft_kernels.cpu.structs import ABI, BF16, CODES, FP32, INT4, INT8, KINDS, Matrix, ModelStruct, StepStruct
from weft_kernels.cpu.threads import ThreadPool, cgroup_cpu_limits, cpu_quota
