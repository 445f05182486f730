"""Processes that end with this one, also where it is killed.

The kernel kills a process when the thread that started it has ended (PR_SET_PDEATHSIG). So one thread starts them all,
which lives as long as this process does: whoever calls may be a thread that ends before.
"""

import contextlib
import shutil
import subprocess
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SETPRIV = shutil.which("setpriv")  # part of util-linux: without it a killed process leaves those that it has started
_starter = ThreadPoolExecutor(1, thread_name_prefix="starter")


def tied(*command: str | Path, user: str = "") -> list[str]:
    """Make the command line of a process that dies with the thread that starts it; of root's as that user."""
    words = [str(word) for word in command]
    who = ["--reuid", user, "--regid", user, "--clear-groups"] if user else []
    return [SETPRIV, *who, "--pdeathsig", "KILL", "--", *words] if SETPRIV else words


def start(*command: str | Path, user: str = "", **options: Any) -> subprocess.Popen[Any]:
    """Start a process that is killed with this one, whichever thread asks for it. `options` are those of Popen."""
    return _starter.submit(subprocess.Popen, tied(*command, user=user), **options).result()


def end(process: subprocess.Popen[Any]) -> None:
    """Send SIGKILL; nobody reads what it had still to say. One that has ended stays ended."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe:
            with contextlib.suppress(BrokenPipeError):  # of what was written and never taken
                pipe.close()


@contextlib.contextmanager
def started(*command: str | Path, **options: Any) -> Generator[subprocess.Popen[Any]]:
    """Run a process for as long as the block runs."""
    process = start(*command, **options)
    try:
        yield process
    finally:
        end(process)
