"""A C++ compiler: found, asked what it is, and run with an end.

Every run has a deadline, and whatever it started ends with it: compilers run in sessions of their own.
"""

import os
import shlex
import shutil
import signal
import subprocess
import time
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
