"""A C++ compiler: found or fetched, asked what it is, and run with an end.

Every run has a deadline, and whatever it started ends with it: compilers run in sessions of their own.

A machine that has none gets zig's, a package that a build fetches and removes again. `zig.lock`, which `make lock`
writes, says which version, and the hashes of its files. pip fetches it, from whichever index it is set up for; where
this Python has no pip, uv runs one. 100 MB are fetched, half of which is unpacked. zig comes with headers of the C
library for every version of glibc, and of C++, but with no library of C++ that is compiled: it would compile one first,
for two minutes. So the kernels use none.
"""

import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from weft_kernels.cpu.errors import NativeUnavailable, NoCompiler

NAMES = ("g++", "clang++", "c++")
INSTALL = "install one, on Debian and Ubuntu with `apt install g++`"
ANSWER_LIMIT_S = 60.0  # for `-v`, which takes milliseconds where nothing else runs
SHOWN_LINES, SHOWN_CHARS = 12, 1500
ZIG_LOCK = Path(__file__).with_name("zig.lock")
ZIG_MACHINES = ("x86_64", "aarch64")
GLIBC = "2.28"  # the oldest that the library runs with, as Python's own binary packages have it
_OF_LIB = (
    "include/", "libc/glibc/", "libc/include/any-linux-any/", "libc/include/generic-glibc/", "libc/include/x86",
    "libc/include/aarch64-linux-", "libc/include/arm-linux-", "libcxx/include/", "libcxxabi/include/",
    "std/std.zig",  # by which zig knows the folder
)  # fmt: skip
UNPACKED = ("ziglang/zig", *(f"ziglang/lib/{name}" for name in _OF_LIB))

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compiler:
    """`command`: what to call, wrapper and options included; `version`: all that it says about itself.

    `link_flags`: options of its own for linking.
    """

    command: tuple[str, ...]
    version: str
    link_flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return next((line.strip() for line in self.version.splitlines() if " version " in line), " ".join(self.command))

    @contextmanager
    def at_hand(self, folder: Path, limit: "Limit") -> Generator["Compiler"]:  # noqa: ARG002
        """Bring the compiler to call in the block, in which `folder` has what it needs. Raises NativeUnavailable."""
        yield self


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a compiler's run. `died`: by a signal or an error of its own, not because of what it read."""

    code: int
    output: str

    @property
    def died(self) -> bool:
        return self.code not in (0, 1) or "signal terminated program" in self.output


class Limit:
    """The time that compilers may take together, from now on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._started = time.monotonic()

    def taken_s(self) -> float:
        return time.monotonic() - self._started

    def remaining_s(self) -> float:
        return max(0.0, self.seconds - self.taken_s())


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedZig(Compiler):
    """A zig that is known by its lock before it is fetched. `environment`: where uv is looked for."""

    lock: Path = ZIG_LOCK
    environment: Mapping[str, str]

    @contextmanager
    def at_hand(self, folder: Path, limit: Limit) -> Generator[Compiler]:
        """Fetch zig into `folder`, and remove it at the end of the block. Raises NoCompiler where it cannot be had."""
        log.warning(
            "there is no C++ compiler: fetching one for this build, zig's (100 MB), which is removed after it; "
            "with `apt install g++` (Debian, Ubuntu) it is quicker"
        )
        place = folder / "zig"
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
                (package,) = place.glob("*.whl")
                with zipfile.ZipFile(package) as archive:
                    archive.extractall(place, [name for name in archive.namelist() if name.startswith(UNPACKED)])
                package.unlink()
                executable = place / "ziglang" / "zig"
                executable.chmod(0o700)
                return executable
            if "No module named pip" not in end.output:
                lines = end.output.strip().splitlines() or ["pip failed"]
                why = next((line for line in reversed(lines) if line.startswith("ERROR: ")), lines[-1])
                why = why.removeprefix("ERROR: ").rstrip(".: ")[:300]
                break
        raise NoCompiler(f"there is no C++ compiler, and none can be fetched ({why}): {INSTALL}")


def find_compiler(environment: Mapping[str, str] = os.environ) -> Compiler:
    """Find $CXX, else the first of NAMES that answers. Raises NativeUnavailable, NoCompiler where none is installed."""
    path = environment.get("PATH", os.defpath)  # links are kept: a wrapper such as ccache goes by its own name
    if given := shlex.split(environment.get("CXX", "")):
        if (found := shutil.which(given[0], path=path)) is None:
            raise NativeUnavailable(f"there is no compiler {given[0]!r}, which $CXX names")
        return _ask((str(Path(found).absolute()), *given[1:]))
    for name in NAMES:
        if found := shutil.which(name, path=path):
            return _ask((str(Path(found).absolute()),))
    raise NoCompiler(f"there is no C++ compiler (looked for $CXX, {', '.join(NAMES)}): {INSTALL}")


def find_or_fetch(environment: Mapping[str, str] = os.environ) -> Compiler:
    """Find the machine's own compiler, else zig's where there is one for it. Raises NativeUnavailable."""
    try:
        return find_compiler(environment)
    except NoCompiler:
        if platform.machine() not in ZIG_MACHINES:
            raise
        return FetchedZig(_zig_command("zig"), ZIG_LOCK.read_text(), environment=environment)


def zig_compiler(executable: Path, cache: Path) -> Compiler:
    """Make the compiler of this zig, which keeps what it compiles in the folder `cache`."""
    caches = (f"ZIG_GLOBAL_CACHE_DIR={cache}/cache", f"ZIG_LOCAL_CACHE_DIR={cache}/cache")
    link_flags = ("-nostdlib++", "-rtlib=none")  # no C++ runtime, and none of zig's own
    return Compiler(("/usr/bin/env", *caches, *_zig_command(str(executable))), ZIG_LOCK.read_text(), link_flags)


def run_all(commands: Sequence[Sequence[str]], folder: Path, *, at_once: int, limit: Limit) -> list[Finished]:
    """Run commands in `folder`, some at once; returns the outcomes in their order.

    Raises NativeUnavailable when the limit is over; nothing they started is left then.
    """
    running: set[subprocess.Popen[str]] = set()
    with ThreadPoolExecutor(at_once) as workers:
        runs = [workers.submit(_run, command, folder, limit, running) for command in commands]
        try:
            return [run.result() for run in runs]
        except BaseException as error:  # ^C too: sessions of their own do not hear the terminal
            workers.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                _end(process)
            if isinstance(error, subprocess.TimeoutExpired):
                command = shlex.join(map(str, error.cmd))[:200]
                raise NativeUnavailable(f"the compiler was ended after {limit.seconds:g} s: {command}") from error
            if isinstance(error, OSError):
                raise NativeUnavailable(f"the compiler cannot be run: {error}") from error
            raise


def trimmed(output: str) -> str:
    """Cut a compiler's message to its first error and some that follow: warnings may come before it."""
    lines = output.strip().splitlines()
    errors = (number for number, line in enumerate(lines) if "error" in line and "ld returned" not in line)
    first = next(errors, 0)
    whole = "\n".join(lines[first:])
    shown = "\n".join(lines[first : first + SHOWN_LINES])[:SHOWN_CHARS]
    return shown if shown == whole else f"{shown}\n..."


def _ask(command: tuple[str, ...]) -> Compiler:
    (answer,) = run_all([(*command, "-v")], Path("/"), at_once=1, limit=Limit(ANSWER_LIMIT_S))
    if answer.code:
        raise NativeUnavailable(f"{' '.join(command)} -v failed: {trimmed(answer.output)}")
    return Compiler(command, answer.output)


def _run(command: Sequence[str], folder: Path, limit: Limit, running: set[subprocess.Popen[str]]) -> Finished:
    if not limit.remaining_s():
        raise subprocess.TimeoutExpired(list(command), limit.seconds)
    with subprocess.Popen(  # noqa: S603 (the compiler that the user has or names)
        command,
        cwd=folder,
        env={**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        running.add(process)
        try:
            output, _ = process.communicate(timeout=limit.remaining_s())
        finally:
            _end(process)
            running.discard(process)
    return Finished(process.returncode, output)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the whole session, unless it has ended: a reaped leader's number is no longer ours to signal."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _zig_command(executable: str) -> tuple[str, ...]:
    """Make the command. Without these options zig compiles for the very CPU that it runs on, and adds checks at -O0."""
    return (executable, "c++", "-target", f"{platform.machine()}-linux-gnu.{GLIBC}", "-g0", "-fno-sanitize=undefined")


def _installers(environment: Mapping[str, str]) -> Sequence[tuple[str, ...]]:
    """List ways to call pip, the likelier first. A build of a wheel hides this Python's packages by variables (-E)."""
    found: list[tuple[str, ...]] = [(sys.executable, "-E", "-m", "pip")]
    given = environment.get("UV") or str(Path(sys.executable).with_name("uv"))  # uv tells what it starts where it is
    if uv := shutil.which(given) or shutil.which("uv", path=environment.get("PATH", os.defpath)):
        found.append((uv, "tool", "run", "--no-cache", "--python", sys.executable, "pip"))
    return found
