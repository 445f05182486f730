"""A command on a terminal of its own: what it shows is read, keys are pressed."""

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from harness import processes
from harness.waiting import PATIENCE_S

CTRL_C, CTRL_D = b"\x03", b"\x04"
# Standard input becomes the controlling terminal, so that Ctrl-C is a signal to the command. And one that it hears:
# what a shell starts in the background ignores it, and so would all that it starts.
OWN_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
_UNHEARD_S = 0.5
_ROWS, _COLUMNS = 40, 160


class Terminal:
    """`weft ARGUMENTS` from enter to exit. `until` goes on from where it was found last."""

    def __init__(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._command = [sys.executable, "-m", "weft_cli", *arguments]
        self._environment = {**os.environ, "TERM": "xterm", **(environment or {})}
        self._seen, self.text = 0, ""

    def __enter__(self) -> Self:
        self._terminal, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
        self._process = processes.start(
            *(sys.executable, "-I", "-S", "-c", OWN_TERMINAL, *self._command),
            stdin=child,
            stdout=child,
            stderr=child,
            env=self._environment,
            start_new_session=True,
        )
        os.close(child)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        processes.end(self._process)
        os.close(self._terminal)

    def write(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def takes_lines(self) -> bool:
        """Whether a shell could go on: keys are echoed, and lines are edited."""
        lines = termios.ECHO | termios.ICANON
        return termios.tcgetattr(self._terminal)[3] & lines == lines

    def until(self, needle: str) -> None:
        """Read until it is there."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._found(needle):
            assert self._read(deadline), f"no {needle!r} in {self.text!r}"

    def press(self, key: bytes, until: str) -> None:
        """Press a key until something is there: one between a prompt and the wait for a line goes unheard."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.write(key)
            while self._ready(_UNHEARD_S):
                assert self._read(deadline), f"no {until!r} in {self.text!r}"
                if self._found(until):
                    return
        raise AssertionError(f"no {until!r} in {self.text!r}")

    def exit_code(self) -> int:
        """Read to the end."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read(deadline):
            pass
        return self._process.wait(PATIENCE_S)

    def _found(self, needle: str) -> bool:
        at = self.text.find(needle, self._seen)
        self._seen = self._seen if at < 0 else at + len(needle)
        return at >= 0

    def _ready(self, seconds: float) -> bool:
        return bool(select.select([self._terminal], [], [], max(0.0, seconds))[0])

    def _read(self, deadline: float) -> bool:
        """More text; False when the other side is closed."""
        assert self._ready(deadline - time.monotonic()), f"nothing came in time after {self.text!r}"
        try:
            data = os.read(self._terminal, 65536)
        except OSError:
            return False
        self.text += data.decode(errors="replace")
        return bool(data)
