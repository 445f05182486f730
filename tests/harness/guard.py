"""Work that leaves no process and no folder behind, whichever process of it is killed.

`guarded` forks: the child does the work, the parent waits for it. Both are subreapers (prctl(2)), so every process that
the work starts stays a descendant of theirs, also one whose own parent is gone. Whoever of the two survives ends all
descendants and removes the folder; the folder that both of them leave when both are killed is removed by the next run.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from weft_devcluster.folders import owned_folder

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STOPPED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 2.0
POLL_S = 0.02


def adopt_orphans() -> None:
    """Have processes below this one, whose own parent is gone, stay below it."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def guarded(prefix: str, work: Callable[[Path], int]) -> int:
    """Return the exit code of `work(folder)`, 128 + N where signal N stopped it. `folder`: new, children's TMPDIR."""
    adopt_orphans()
    if Path(f"/proc/{os.getppid()}/comm").read_text().strip() == "make":
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # a killed `make` ends its run
    with _stoppable(), owned_folder(prefix) as folder:
        folder.chmod(0o755)  # servers that run as another user have folders below it
        try:
            return _wait(_fork(folder, work))
        finally:
            end_descendants()


def descendants(pid: int | None = None) -> list[int]:
    """Return the processes below this one, or below another, nearest first."""
    found, below = [pid or os.getpid()], 0
    while below < len(found):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{found[below]}/task").iterdir():
                found += [int(pid) for pid in (task / "children").read_text().split()]
        below += 1
    return found[1:]


def end_descendants(grace_s: float = GRACE_S) -> None:
    """Send SIGTERM to every process below this one, SIGKILL to those that are there after `grace_s`."""
    _signal(descendants(), signal.SIGTERM)
    until = time.monotonic() + grace_s
    while left := _reaped(descendants()):
        if time.monotonic() > until:
            _signal(left, signal.SIGKILL)
        time.sleep(POLL_S)


def reap_orphans(own: int) -> None:
    """Take the exit codes of processes that were left to this one, all but its `own` child's.

    A PID namespace ends only when all its processes were waited for, and some of a test node's are left to us.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != own:
            os.waitpid(ended.si_pid, os.WNOHANG)


def command_of(pid: int) -> str:
    """Return the command line of a process, for messages; empty for one that has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _fork(folder: Path, work: Callable[[Path], int]) -> int:
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    code = 1
    try:
        os.setsid()  # a Ctrl-C at the terminal reaches the parent, which ends the child in order
        adopt_orphans()
        if os.getppid() == parent:
            code = work(folder)
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    except Exception:  # noqa: BLE001 - told here: os._exit below would hide it
        traceback.print_exc()
    finally:
        for number in STOPPED:
            signal.signal(number, signal.SIG_IGN)
        end_descendants()
        if os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)  # the parent is gone, and nobody else removes the folder
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int) -> int:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _stoppable() -> Generator[None]:
    """Let signals that stop a run raise SystemExit, once: what follows is not interrupted."""
    before = {number: signal.signal(number, _stop) for number in STOPPED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """End all processes first: what the exception passes on its way may wait for one."""
    for other in STOPPED:
        signal.signal(other, signal.SIG_IGN)
    end_descendants()
    raise SystemExit(128 + number)


def _reaped(pids: list[int]) -> list[int]:
    """Return those that still run, and wait for our own that ended: a subreaper buries what was left to it."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return [pid for pid in pids if command_of(pid)]


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
