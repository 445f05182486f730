"""A C++ compiler for a machine that has none: zig's, a package that a build fetches and removes again.

`zig.lock`, which `make lock` writes, says which version, and the hashes of its files. pip fetches it, from whichever
index it is set up for; where this Python has no pip, uv runs one. 100 MB are fetched, half of which is unpacked.

zig comes with headers of the C library for every version of glibc, and of C++, but with no library of C++ that is
compiled: it would compile one first, for two minutes. So the kernels use none.
"""

import logging
import os
import platform
import shutil
import sys
import zipfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weft_kernels.cpu.compiler import INSTALL, Compiler, Limit, find_compiler, run_all
from weft_kernels.cpu.errors import NoCompiler

LOCK = Path(__file__).with_name("zig.lock")
MACHINES = ("x86_64", "aarch64")
GLIBC = "2.28"  # the oldest that the library runs with, as Python's own binary packages have it
FOLDER = "zig"
_OF_LIB = (
    "include/", "libc/glibc/", "libc/include/any-linux-any/", "libc/include/generic-glibc/", "libc/include/x86",
    "libc/include/aarch64-linux-", "libc/include/arm-linux-", "libcxx/include/", "libcxxabi/include/",
    "std/std.zig",  # by which zig knows the folder
)  # fmt: skip
UNPACKED = ("ziglang/zig", *(f"ziglang/lib/{name}" for name in _OF_LIB))

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedZig(Compiler):
    """A zig that is known by its lock before it is fetched. `environment`: where uv is looked for."""

    lock: Path = LOCK
    environment: Mapping[str, str]

    @contextmanager
    def at_hand(self, folder: Path, limit: Limit) -> Generator[Compiler]:
        """Fetch zig into `folder`, and remove it at the end of the block. Raises NoCompiler where it cannot be had."""
        log.warning(
            "there is no C++ compiler: fetching one for this build, zig's (100 MB), which is removed after it; "
            "with `apt install g++` (Debian, Ubuntu) it is quicker"
        )
        place = folder / FOLDER
        place.mkdir()
        try:
            yield zig_compiler(self._fetch(place, limit), place)
        finally:
            shutil.rmtree(place)

    def _fetch(self, place: Path, limit: Limit) -> Path:
        """Fetch and unpack; returns zig's executable."""
        why = "neither pip nor uv is here"
        for installer in _installers(self.environment):
            options = ("--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--only-binary=:all:")
            what = ("--require-hashes", "--requirement", str(self.lock), "--dest", str(place))
            (end,) = run_all([(*installer, "download", *options, *what)], place, at_once=1, limit=limit)
            if end.code == 0:
                return _unpack(place)
            if "No module named pip" not in end.output:
                why = _reason(end.output)
                break
        raise NoCompiler(f"there is no C++ compiler, and none can be fetched ({why}): {INSTALL}")


def find_or_fetch(environment: Mapping[str, str] = os.environ) -> Compiler:
    """Find the machine's own compiler, else zig's where there is one for it. Raises NativeUnavailable."""
    try:
        return find_compiler(environment)
    except NoCompiler:
        if platform.machine() not in MACHINES:
            raise
        return FetchedZig(_command("zig"), LOCK.read_text(), environment=environment)


def zig_compiler(executable: Path, cache: Path) -> Compiler:
    """Make the compiler of this zig, which keeps what it compiles in the folder `cache`."""
    caches = (f"ZIG_GLOBAL_CACHE_DIR={cache}/cache", f"ZIG_LOCAL_CACHE_DIR={cache}/cache")
    link_flags = ("-nostdlib++", "-rtlib=none")  # no C++ runtime, and none of zig's own
    return Compiler(("/usr/bin/env", *caches, *_command(str(executable))), LOCK.read_text(), link_flags)


def _command(executable: str) -> tuple[str, ...]:
    """Make the command. Without these options zig compiles for the very CPU that it runs on, and adds checks at -O0."""
    return (executable, "c++", "-target", f"{platform.machine()}-linux-gnu.{GLIBC}", "-g0", "-fno-sanitize=undefined")


def _installers(environment: Mapping[str, str]) -> Sequence[tuple[str, ...]]:
    """List ways to call pip, the likelier first. A build of a wheel hides this Python's packages by variables (-E)."""
    found: list[tuple[str, ...]] = [(sys.executable, "-E", "-m", "pip")]
    given = environment.get("UV") or str(Path(sys.executable).with_name("uv"))  # uv tells what it starts where it is
    if uv := shutil.which(given) or shutil.which("uv", path=environment.get("PATH", os.defpath)):
        found.append((uv, "tool", "run", "--no-cache", "--python", sys.executable, "pip"))
    return found


def _unpack(place: Path) -> Path:
    (package,) = place.glob("*.whl")
    with zipfile.ZipFile(package) as archive:
        archive.extractall(place, [name for name in archive.namelist() if name.startswith(UNPACKED)])
    package.unlink()
    executable = place / "ziglang" / "zig"
    executable.chmod(0o700)
    return executable


def _reason(output: str) -> str:
    """Find what pip says last, in one line."""
    lines = output.strip().splitlines() or ["pip failed"]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR: ")), lines[-1])
    return reason.removeprefix("ERROR: ").rstrip(".: ")[:300]
