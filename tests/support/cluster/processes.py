"""Processes of a test cluster: a log each, and an end with their owner."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cluster.errors import StartFailed, ToolMissing

TAIL_CHARS = 3000
WAIT_S = 15.0
POLL_S = 0.02


class Process:
    """One process from start to end.

    The kernel kills it when the thread that started it ends (`setpriv --pdeathsig`), so nothing is left behind a
    test run that is killed: start clusters from a thread that lives as long as they shall. It has a session of its
    own: Ctrl-C reaches the owner, which ends it in order.
    """

    def __init__(self, name: str, command: Sequence[str | Path], folder: Path, env: Mapping[str, str] | None = None):
        self.name, self.log_path = name, folder / f"{name}.log"
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            raise ToolMissing("setpriv is not there: install util-linux")
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [setpriv, "--pdeathsig", "KILL", "--", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises StartFailed when it has ended by itself."""
        code = self._process.poll()
        if code is not None:
            raise StartFailed(f"{self.name} ended with exit code {code}:\n{self.tail()}")

    def tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-TAIL_CHARS:]

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def end(self) -> None:
        """SIGKILL: whatever it would still write is thrown away with the cluster. An ended one stays ended."""
        self.signal(signal.SIGKILL)
        self._process.wait()


def has_ended(pid: int) -> bool:
    """Is it gone, or dead and not yet buried by its parent? For processes that are not our own children."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait for what the kernel or another process does without telling us: asked again. Raises StartFailed."""
    until = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > until:
            raise StartFailed(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(POLL_S)


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Ports that the kernel just had free; for programs that cannot be told "any"."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((address, 0))) for _ in range(count)]
        return [opened.getsockname()[1] for opened in sockets]
