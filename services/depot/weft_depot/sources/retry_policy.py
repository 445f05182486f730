"""The policy for waits on remote services: durations and numbers of tries."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from weft.artifacts.errors import Unavailable
from weft.wire.upload_rate import GRACE_S, MIN_BYTES_S

T = TypeVar("T")


class TransientError(Exception):
    """A failed try. A retry may succeed."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits on all remote reads. Times are seconds."""

    connect_s: float = 5.0
    read_s: float = 10.0  # without a byte; also the longest delay of a stop
    tries: int = 4  # in a row without a byte of progress
    pause_s: float = 0.2  # before the second try; doubles
    grace_s: float = GRACE_S  # of every file or listing
    min_bytes_s: int = MIN_BYTES_S  # after the grace: a slower server is given up
    now: Callable[[], float] = time.monotonic
    stopping: threading.Event = field(default_factory=threading.Event)

    def patience_s(self, size_bytes: int) -> float:
        """Return the maximum total seconds for `size_bytes` bytes."""
        return self.grace_s + size_bytes / self.min_bytes_s

    def retry(self, about: str, call: Callable[[], T]) -> T:
        """Call `call`, with at most `tries` tries. Raises Unavailable, and errors of `call`."""
        for failed in range(1, self.tries + 1):
            try:
                return call()
            except TransientError as error:
                if failed == self.tries or self.stopping.is_set():
                    raise Unavailable(f"{about}: {error}") from error
            self.pause(failed)
        raise AssertionError("tries is at least 1")

    def pause(self, tries: int) -> None:
        """Pause before the next try after `tries` failed tries. It ends early when the process stops."""
        self.stopping.wait(self.pause_s * 2 ** (tries - 1))
