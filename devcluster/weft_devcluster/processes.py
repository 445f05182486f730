"""Processes of a test cluster: a log each, and an end with their owner."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import SystemRandom

from weft_devcluster import tied, waiting
from weft_devcluster.errors import StartFailed, ToolMissing
from weft_operator.local.sockets import PortSource

TAIL_CHARS = 3000
_ports = PortSource(SystemRandom())


class Process:
    """One process from start to end.

    It does not outlive this one, also where that is killed. It has a session of its own: Ctrl-C reaches the owner,
    which ends it in order.
    """

    def __init__(self, name: str, command: Sequence[str | Path], folder: Path, env: Mapping[str, str] | None = None):
        self.name, self.log_path = name, folder / f"{name}.log"
        if tied.SETPRIV is None:
            raise ToolMissing("no setpriv: apt-get install util-linux")
        with self.log_path.open("ab") as log:
            self._process = tied.start(
                *command,
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
        """Check that the process has not ended by itself. Raises StartFailed."""
        code = self._process.poll()
        if code is not None:
            raise StartFailed(f"{self.name} ended with exit code {code}:\n{self.tail()}")

    def tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-TAIL_CHARS:]

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def pause(self) -> None:
        """Send SIGSTOP: when this returns every thread stands still, also one that was on another core."""
        self.signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.pid}/task")
        wait_until(
            lambda: all("State:\tT" in (thread / "status").read_text() for thread in threads.iterdir()),
            f"{self.name} stands still",
        )

    def end(self) -> None:
        """Send SIGKILL: whatever it would still write is thrown away with the cluster. An ended one stays ended."""
        self.signal(signal.SIGKILL)
        self._process.wait()


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or dead and not yet reaped; for processes that are not our own children."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Wait for what the kernel or another process does without telling us: asked again. Raises StartFailed."""
    try:
        waiting.wait_until(holds, what)
    except TimeoutError as error:
        raise StartFailed(str(error)) from error


def free_ports(count: int, address: str) -> list[int]:
    """Find ports that are free on this address of the machine, as `weft up` chooses those on loopback."""
    found: list[int] = []
    while len(found) < count:
        (port,) = _ports(1)
        with contextlib.suppress(OSError), socket.create_server((address, port)):
            found += [port] if port not in found else []
    return found
