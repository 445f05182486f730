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


class Process:
    """`python -m weft_depot` on a port of the kernel's choice; made when it is ready, or has ended."""

    def __init__(self, *flags: str | Path, env: dict[str, str] | None = None) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "weft_depot", "--http", "127.0.0.1:0", *map(str, flags)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        assert self._ready.wait(60), self.lines

    def _read(self) -> None:
        """All it says, to the end: a pipe that nobody empties stops the process."""
        assert self.popen.stderr
        for line in self.popen.stderr:
            self.lines.append(line)
            if found := re.search(r"listen=(\S+)", line):
                self.url = f"http://{found[1]}"
                self._ready.set()
        self._ready.set()  # it ended, and its lines say why

    def end(self, number: int = signal.SIGTERM) -> int:
        self.popen.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Its exit code, once it has said everything."""
        self._reading.join(20)
        return self.popen.wait(20)

    def submit(self, **body: Any) -> str:
        """Ask for a resolve; returns its operation."""
        with httpx2.Client(base_url=self.url, trust_env=False, timeout=30) as http:
            return http.post("/v1/resolve", json={"namespace": "default", **body}).json()["operation"]

    def resolve(self, **body: Any) -> dict[str, Any]:
        operation = self.submit(**body)
        with httpx2.Client(base_url=self.url, trust_env=False, timeout=30) as http:
            while True:
                found = http.get(f"/v1/operations/{operation}", params={"wait_s": 20}).json()
                if found["state"] in ("Fetched", "Failed"):
                    return found
