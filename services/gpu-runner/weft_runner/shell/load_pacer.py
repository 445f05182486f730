"""Loads yield to steps: beside steps they work in slices, within a budget of bytes a second.

Where the device's memory is this machine's, an adapter is packed on cores that steps compute on, and a step is as slow
as its slowest thread: a load at full speed doubles the steps beside it. A slice is a site of a layer, a fraction of a
millisecond; what follows it waits until the budget has caught up. With no step running a load waits for nothing.
"""

import os
import sys
import threading
import time
from collections.abc import Callable

BYTES_PER_S = 68 << 20  # beside steps; where these use every core a load gets about half of it (docs/benchmarks/cpu.md)
PAUSE_S = 0.002  # the shortest pause: after each one the thread waits for the interpreter's lock again
CREDIT_S = 0.05  # of budget that a thread which got no core may catch up on
NICE = 10  # of threads that load: a step's thread gets nine tenths of a core that both want


class LoadPacer:
    """Called after each slice with its bytes, by the thread that loads. `stepping`: steps run now; any thread."""

    def __init__(
        self, stepping: Callable[[], bool], bytes_per_s: float = BYTES_PER_S,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._stepping, self._bytes_per_s, self._clock, self._sleep = stepping, bytes_per_s, clock, sleep
        self._due = 0.0  # when the next slice may begin

    def __call__(self, n_bytes: int) -> None:
        """So many bytes were packed: wait until the next may be."""
        now = self._clock()
        self._due = max(self._due, now - CREDIT_S) + n_bytes / self._bytes_per_s
        if not self._stepping():
            self._due = now
        elif self._due > now + PAUSE_S:
            self._sleep(self._due - now)


def lower_priority() -> None:
    """Of the calling thread alone, where the system can (Linux gives each thread its own)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
