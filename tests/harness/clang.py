"""Clang with its sanitizers, for builds of the native library that look for its faults."""

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from weft_kernels.cpu import Compiler, NativeUnavailable, find_compiler

OLDEST, NEWEST = 14, 25  # versions that have names of their own: clang++-14
FLAGS = ("-g", "-fno-omit-frame-pointer")


def sanitizing(sanitizers: str, *flags: str, environment: Mapping[str, str] = os.environ) -> Compiler:
    """Clang that compiles with such checks (`-fsanitize=`). Raises NativeUnavailable: none, or none with runtimes."""
    path = environment.get("PATH", os.defpath)
    names = ["clang++", *(f"clang++-{version}" for version in range(NEWEST, OLDEST - 1, -1))]
    found = next((name for name in names if shutil.which(name, path=path)), None)
    if found is None:
        raise NativeUnavailable("there is no clang++ (Debian: apt install clang libclang-rt-14-dev)")
    if runtime(found, "asan") is None:
        raise NativeUnavailable(f"{found} has no runtimes of sanitizers (Debian: apt install libclang-rt-14-dev)")
    command = " ".join((found, *FLAGS, f"-fsanitize={sanitizers}", *flags))
    return find_compiler({**environment, "CXX": command})


def runtime(clang: str, name: str) -> Path | None:
    """The shared library of a sanitizer (asan, tsan), which a process preloads that is not built with it."""
    asked = subprocess.run([clang, "-print-resource-dir"], capture_output=True, text=True, check=True)
    files = (Path(asked.stdout.strip()) / "lib").rglob(f"libclang_rt.{name}*.so")
    wanted = {f"libclang_rt.{name}.so", f"libclang_rt.{name}-{platform.machine()}.so"}
    return next((file for file in files if file.name in wanted), None)
