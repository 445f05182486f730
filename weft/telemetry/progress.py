"""Progress of a long piece of work, in bytes: counted by whoever does it, shown to whoever waits."""

import re
import threading

GIB, MIB = 1 << 30, 1 << 20
STEP_PERCENT = 2  # a text changes so often, whatever the size
_PERCENT = re.compile(r"\((\d{1,3}) %\)$")


class ByteProgress:
    """Counts the bytes of one piece of work after the other. Used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subject, self._total, self._done = "", 0, 0

    def begin(self, subject: str, total: int) -> None:
        """Begin the next piece of work, `copying` for example, of `total` bytes."""
        with self._lock:
            self._subject, self._total, self._done = subject, total, 0

    def add(self, count: int) -> None:
        """Count `count` bytes as done."""
        with self._lock:
            self._done += count

    @property
    def now(self) -> tuple[str, int, int]:
        """The piece of work, its bytes done, its bytes in all; done is no more than all, also where a part was read
        twice."""
        with self._lock:
            return self._subject, min(self._done, self._total), self._total

    def __str__(self) -> str:
        """`copying 0.6 of 1.2 GiB (50 %)`, in steps of STEP_PERCENT; only the subject if it has no bytes."""
        return progress_text(*self.now)


def progress_text(subject: str, done: int, total: int) -> str:
    """Write progress for people: `copying 0.6 of 1.2 GiB (50 %)`."""
    if not total:
        return subject
    percent = 100 * done // total // STEP_PERCENT * STEP_PERCENT
    unit, name = (GIB, "GiB") if total >= GIB else (MIB, "MiB")
    return f"{subject} {total * percent / 100 / unit:.1f} of {total / unit:.1f} {name} ({percent} %)"


def percent_of(text: str) -> int | None:
    """Read the percentage from a text of ByteProgress, as readiness answers have it; None: it has none."""
    match = _PERCENT.search(text)
    return int(match[1]) if match else None
