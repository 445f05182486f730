"""A library with Weft's C ABI that compiles in a second: for tests of building, keeping and loading, not of kernels."""

import shutil
from pathlib import Path

from weft_kernels.cpu import ABI, LEVELS, SOURCES, Sources

_SHARED = """
// An inline function that every unit has: the linker keeps one of them.
inline __attribute__((noinline)) const char* compiled_for() {
#if defined(__AMX_BF16__)
  return "amx_bf16";
#elif defined(__AVX512BF16__)
  return "avx512_bf16";
#elif defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#else
  return "portable";
#endif
}
"""
_LEVEL = """
#include "shared.h"
const char* used_by_%(level)s() { return compiled_for(); }
"""
_COMMON = """
#include <stdlib.h>
#include "shared.h"
#include "weft_cpu.h"
const char* used_by_portable();
#pragma GCC visibility push(default)
extern "C" {
int32_t weft_compiled_levels(void);
const char* linked(void) { return used_by_portable(); }
int32_t weft_abi(void) { return %(abi)d; }
int32_t weft_levels(void) { return %(usable)s; }
weft_pool* weft_pool_new(int32_t threads) { return threads > 64 ? nullptr : (weft_pool*)malloc(64); }
void weft_pool_free(weft_pool* pool) { free(pool); }
int64_t weft_workspace_bytes(const weft_model*, int32_t n_tokens, int32_t, int32_t) { return 64 * n_tokens; }
int32_t weft_run(int32_t, weft_pool*, const weft_model*, const weft_step* step) {
  if (step->workspace_bytes < 64) return WEFT_E_WORKSPACE;
  for (int32_t i = step->first; i < step->last; i++)
    if (step->layer_done) step->layer_done(i);
  return 0;
}
void weft_end_ranks(const weft_ranks*) {}
int64_t weft_layers_done(const int64_t* counter) { return *counter; }
int64_t weft_await_layers(const int64_t* counter, int64_t, int64_t) { return *counter; }
int64_t weft_packed_bytes(int32_t kind, int64_t n_out, int64_t n_in, int32_t) {
  return kind > WEFT_INT4 ? WEFT_E_SIZE : n_out * n_in;
}
int32_t weft_pack(weft_pool*, const void*, int32_t, int64_t, int64_t, int64_t, int32_t, void*, int32_t, float*) {
  return 0;
}
int32_t weft_pack_jobs(weft_pool*, const weft_pack_job*, int32_t, int32_t) { return 0; }
void weft_touch(const weft_pack_job*, int32_t, int32_t) {}
void weft_copy(weft_pool*, void* const*, const void* const*, int64_t, int64_t) {}
int32_t weft_lora(int32_t, weft_pool*, const weft_model*, const weft_step*, int32_t, int32_t, int32_t, const float*,
                  float*) {
  return 0;
}
int32_t weft_matmul(int32_t, weft_pool*, const weft_matrix*, const void*, int32_t, int32_t, float*) { return 0; }
double weft_read_seconds(int32_t, weft_pool*, const void*, int64_t, int32_t) { return 0.5; }
double weft_peak_seconds(int32_t, weft_pool*, int64_t) { return 0.25; }
}
#pragma GCC visibility pop
"""

_STUB = """#!/bin/sh
echo "$@" >> "%(calls)s"
for out; do :; done
case "$*" in
  -v) echo "stub version 1" ;;
  *-shared*) seq 10000 > "$out" ;;
  *) : > "$out" ;;
esac
"""


def small_sources(folder: Path, *, abi: int = ABI, usable: str = "weft_compiled_levels()") -> Sources:
    """Units of every level; `usable` is a C expression of the levels that this machine is to have."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("weft_cpu.h", "version.cpp"):
        shutil.copy(SOURCES.folder / name, folder)
    (folder / "shared.h").write_text(_SHARED)
    (folder / "common.cpp").write_text(_COMMON % {"abi": abi, "usable": usable})
    for level in LEVELS:
        (folder / f"level_{level}.cpp").write_text(_LEVEL % {"level": level})
    return Sources(folder)


def compiler_script(path: Path, first: str) -> Path:
    """A compiler that runs shell commands first, and then the real one."""
    path.write_text(f'#!/bin/sh\n{first}\nexec {shutil.which("g++")} "$@"\n')
    path.chmod(0o755)
    return path


def compiler_stub(path: Path, calls: Path) -> Path:
    """A compiler that writes down its calls, and always the same text as a library, which nothing can load."""
    path.write_text(_STUB % {"calls": calls})
    path.chmod(0o755)
    return path
