"""Progress lines and bars at the terminal of `weft up`, and Ctrl-C."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.telemetry.progress import percent_of
from weft_cli.output import note
from weft_operator.local.processes import ProcessState

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from weft_operator.local.stack import Stack

SHOWN = ("Ready", "Backoff")
SHORT_S, LINE_S = 1.0, 10.0  # work that ends within that time has no bar; without a terminal a line this often


class Signals:
    """The signals of `weft up`: SIGTERM stops `stack` in order, Ctrl-C too but for streams, which it cuts; a second
    signal kills.

    The first one kills, too, while there is no stack yet.
    """

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop, self._main = stop, asyncio.current_task()
        self.stack: Stack | None = None
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._received, signum)

    def _received(self, signum: signal.Signals) -> None:
        if self.stack and not self._stop.is_set():
            self.stack.interrupted = signum is signal.SIGINT
            self._stop.set()
        elif self._main:
            self._main.cancel()


@dataclass(slots=True)
class ProgressTask:
    """Something that takes long."""

    began: float
    text: str = ""
    bar: "TaskID | None" = None
    printed: float = 0.0

    def __post_init__(self) -> None:
        self.printed = self.began


class Progress:
    """A line for each state of a task, and a bar for long tasks; in colour on a terminal."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seen: dict[str, str] = {}
        self._work: dict[str, ProgressTask] = {}
        self._bars: Bars | None = None
        self.moved = time.monotonic()  # when something last got somewhere
        self._fancy = sys.stderr.isatty() and "NO_COLOR" not in os.environ

    def __call__(self, name: str, state: ProcessState) -> None:
        if state.phase == "Starting":
            self.doing(name, state.detail if percent_of(state.detail) is not None else "")
        else:
            self.doing(name, "")
        if state.phase in SHOWN and self._seen.get(name) != state.phase:
            self._seen[name] = state.phase
            self.line(name, "ready" if state.phase == "Ready" else f"ended, starts again: {state.detail}")

    def doing(self, key: str, text: str) -> None:
        """Show how far something is, as ByteProgress writes it; "": it is over."""
        now, work = time.monotonic(), self._work.get(key)
        if not text:
            if work and work.bar is not None and self._bars:
                self._bars.remove_task(work.bar)
            self._work.pop(key, None)
            return
        if work is None:
            work = self._work[key] = ProgressTask(now)
        if work.text != text:
            work.text, self.moved = text, now
        if now - work.began >= SHORT_S and self._fancy:
            self._draw(key, work)
        elif now - work.printed >= LINE_S and not self._fancy:
            work.printed = now
            self.line(key, text)

    def _draw(self, key: str, work: "ProgressTask") -> None:
        if self._bars is None:
            from rich.console import Console
            from rich.progress import BarColumn, SpinnerColumn, TextColumn
            from rich.progress import Progress as Bars

            columns = (
                SpinnerColumn(),
                TextColumn("{task.fields[what]:<36}"),
                BarColumn(),
                TextColumn("{task.description}"),
            )
            self._bars = Bars(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
            self._bars.start()
        if work.bar is None:
            work.bar = self._bars.add_task("", total=100, what=key)
        self._bars.update(work.bar, description=work.text, completed=percent_of(work.text) or 0)

    def close(self) -> None:
        """Remove the bars."""
        if self._bars:
            self._bars.stop()
            self._bars = None
        self._work.clear()

    def line(self, key: str, state: str) -> None:
        """Print the new state of a task."""
        self.moved = time.monotonic()
        mark = "ok " if state == "ready" else ".. "
        if self._fancy:
            mark = f"\x1b[32m{mark}\x1b[0m" if state == "ready" else f"\x1b[33m{mark}\x1b[0m"
        with contextlib.suppress(BrokenPipeError):
            note(f"{time.monotonic() - self._began:5.1f} s  {key:<36} {state}", mark)
