"""Keys of a command that follows something on a terminal."""

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Self

QUIT = b"q"
NAP_S = 0.25  # a Ctrl-C that comes just before a sleep ends it this late


class Keyboard:
    """Standard input without echo and without lines, restored at the end. Where it is no terminal: no keys."""

    def __enter__(self) -> Self:
        self._input = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else None
        if self._input is not None:
            self._modes = termios.tcgetattr(self._input)
            tty.setcbreak(self._input)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._input is not None:
            termios.tcsetattr(self._input, termios.TCSAFLUSH, self._modes)

    def quits_within(self, seconds: float) -> bool:
        """Wait; returns True at once when `q` is pressed, or when the terminal is gone."""
        if self._input is None:
            rest(seconds)
            return False
        ends = time.monotonic() + seconds
        while True:
            left = max(ends - time.monotonic(), 0.0)
            if select.select([self._input], [], [], min(left, NAP_S))[0]:
                pressed = os.read(self._input, 1024)
                if not pressed or QUIT in pressed:
                    return True
            if not left:
                return False


def rest(seconds: float) -> None:
    """Sleep in naps, so that Ctrl-C ends it within one nap."""
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0:
        time.sleep(min(left, NAP_S))
