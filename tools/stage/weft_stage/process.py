"""A process of ours that a benchmark starts by itself: its log, its probes, its end."""

import asyncio
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from weft_operator.local.processes import CHILD
from weft_stage.errors import StackFailed
from weft_stage.scrape import Sample, scrape

START_S, STOP_S, POLL_S = 180.0, 15.0, 0.02
LOG_CHARS = 3000


class Process:
    """One of ours, with its log and its probes. It ends with this process, however that ends."""

    def __init__(
        self,
        name: str,
        module: str,
        flags: Mapping[str, object],
        probes: str,
        folder: Path,
        *,
        words: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.probes, self.log = name, probes, folder / f"{name}.log"
        words = [*words, *(word for flag, value in flags.items() for word in (f"--{flag}", str(value)))]
        self.started_at = time.perf_counter()
        with self.log.open("ab") as log:
            command = [sys.executable, "-I", "-S", str(CHILD), str(os.getpid()), sys.executable, "-m", module, *words]
            env = {**os.environ, **(environment or {})}
            self._child = subprocess.Popen(command, stdout=log, stderr=log, env=env)

    def samples(self) -> list[Sample]:
        """Scrape the process's metrics; none while it does not listen. Raises StackFailed when it has ended."""
        self._require_alive()
        try:
            return scrape(self.probes)
        except OSError:
            return []

    def ready(self) -> bool:
        """Return whether it answers /readyz with 200. Raises StackFailed when it has ended."""
        self._require_alive()
        try:
            with urllib.request.urlopen(f"http://{self.probes}/readyz", timeout=5):
                return True
        except OSError:  # an HTTPError is one
            return False

    async def until(self, holds: Callable[[], bool], what: str) -> float:
        """Poll until `holds`; for what a process tells nobody of. Returns when it held. Raises StackFailed."""
        end = time.perf_counter() + START_S
        while not await asyncio.to_thread(holds):
            if time.perf_counter() > end:
                raise StackFailed(f"not within {START_S:.0f} s: {self.name} {what}\n{self._said()}")
            await asyncio.sleep(POLL_S)
        return time.perf_counter()

    def stop(self) -> None:
        """Send SIGTERM and wait for the end; killed when it does not end in time."""
        self._child.terminate()
        try:
            self._child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _require_alive(self) -> None:
        if (code := self._child.poll()) is not None:
            raise StackFailed(f"{self.name} ended with {code}:\n{self._said()}")

    def _said(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_CHARS:]


def status(pid: int) -> dict[str, str]:
    """Return /proc/PID/status, by the names in it. Raises FileNotFoundError, ProcessLookupError."""
    return dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime


def resident_mb(pid: int) -> float:
    """Return a process's resident memory (VmRSS)."""
    return int(status(pid)["VmRSS"].split()[0]) / 1024
