"""A depot as a process."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2

from harness import processes
from harness.waiting import PATIENCE_S


class Process:
    """`python -m weft_depot` on a port of the kernel's choice; made when it is ready, or has ended."""

    def __init__(self, *flags: str | Path, env: dict[str, str] | None = None) -> None:
        self.popen = processes.start(
            *(sys.executable, "-m", "weft_depot", "--http", "127.0.0.1:0", *flags),
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.lines: list[str] = []
        self.url, self._silent = "", False
        self._heard = threading.Condition()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        self.says("listen=")

    def _read(self) -> None:
        """Read all it says, to the end: a pipe that nobody empties stops the process."""
        for line in self.popen.stderr or ():
            if found := re.search(r"listen=(\S+)", line):
                self.url = f"http://{found[1]}"
            with self._heard:
                self.lines.append(line)
                self._heard.notify_all()
        with self._heard:
            self._silent = True  # it ended, and its lines say why
            self._heard.notify_all()

    def says(self, text: str) -> bool:
        """Wait until a line has it. False: it has ended without."""
        with self._heard:
            assert self._heard.wait_for(lambda: self._said(text) or self._silent, PATIENCE_S), self.lines
        return self._said(text)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.popen.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Return the process's exit code, once it has said everything."""
        self._reading.join(PATIENCE_S)
        return self.popen.wait(PATIENCE_S)

    def close(self) -> None:
        """End the process, whether it has ended or not."""
        self.popen.kill()
        self._reading.join()
        processes.end(self.popen)

    def submit(self, **body: Any) -> str:
        """Ask for a resolve; returns its operation."""
        with self._http() as http:
            return http.post("/v1/resolve", json={"namespace": "default", **body}).json()["operation"]

    def resolve(self, **body: Any) -> dict[str, Any]:
        operation = self.submit(**body)
        with self._http() as http:
            while True:
                found = http.get(f"/v1/operations/{operation}", params={"wait_s": 20}).json()
                if found["state"] in ("Fetched", "Failed"):
                    return found

    def _said(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def _http(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, trust_env=False, timeout=PATIENCE_S)
