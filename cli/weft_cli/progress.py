"""What a person sees and does at the terminal of `weft up`: progress lines, Ctrl-C."""

import asyncio
import contextlib
import os
import signal
import sys
import time

from weft_cli.output import note
from weft_operator.local.processes import ProcessState

SHOWN = ("Ready", "Backoff")


class Signals:
    """The first Ctrl-C (or SIGTERM) stops in order, or at once while starting; a second one kills."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop, self.graceful = stop, False
        self._main = asyncio.current_task()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._heard)

    def _heard(self) -> None:
        if self.graceful and not self._stop.is_set():
            self._stop.set()
        elif self._main:
            self._main.cancel()


class Progress:
    """A line for each thing that gets somewhere; in colour on a terminal."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seen: dict[str, str] = {}
        self._fancy = sys.stderr.isatty() and "NO_COLOR" not in os.environ

    def __call__(self, name: str, state: ProcessState) -> None:
        if state.phase in SHOWN and self._seen.get(name) != state.phase:
            self._seen[name] = state.phase
            self.line(name, "ready" if state.phase == "Ready" else f"ended, starts again: {state.detail}")

    def line(self, what: str, state: str) -> None:
        """Something has got somewhere."""
        mark = "ok " if state == "ready" else ".. "
        if self._fancy:
            mark = f"\x1b[32m{mark}\x1b[0m" if state == "ready" else f"\x1b[33m{mark}\x1b[0m"
        with contextlib.suppress(BrokenPipeError):
            note(f"{time.monotonic() - self._began:5.1f} s  {what:<36} {state}", mark)
