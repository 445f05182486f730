"""Log files of the components and of the controller: bounded in size, read by tail, followed without polling.

At `limit_bytes` the file becomes NAME.log.1, which replaces the older NAME.log.1, and a new file begins. So a component
takes at most twice the limit. If the disk refuses lines, they are lost: no work waits for a log. Once the disk takes
lines again, the first new line reports the lost bytes and the cause.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from weft.telemetry.logs import TextFormatter

LIMIT_BYTES = 8 << 20
CHUNK_BYTES = 64 << 10
MAX_FOLLOW_BYTES = 1 << 20  # a follower further back skips to the present


class LogFile:
    """A log file with a single writer and any number of followers. Writes go straight to the file: a crash loses
    nothing.
    """

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path, self._limit_bytes = path, limit_bytes
        self._fd: int | None = None
        self._size = 0
        self._lost_bytes, self._lost_why = 0, ""
        self._followers: set[Follower] = set()

    @property
    def path(self) -> Path:
        return self._path

    def write(self, data: bytes) -> None:
        """Append data, and hand it to the followers. Never raises."""
        try:
            fd = self._opened() if self._fd is None else self._fd
            if self._size + len(data) > self._limit_bytes and self._size:
                fd = self._rotate()
            if self._lost_bytes:
                self._append(fd, f"--- {self._lost_bytes} bytes of this log are lost: {self._lost_why}\n".encode())
                self._lost_bytes = 0
            self._append(fd, data)
        except OSError as error:
            self._lost_bytes += len(data)
            self._lost_why = error.strerror or str(error)
        for follower in self._followers:
            follower.put(data)

    def _append(self, fd: int, data: bytes) -> None:
        """Append all of the data. Raises OSError."""
        while data:
            written = os.write(fd, data)
            self._size += written
            data = data[written:]

    def close(self) -> None:
        """End the log: followers end, and no more lines come."""
        self._close()
        for follower in self._followers:
            follower.put(None)

    def tail(self, lines: int | None) -> list[str]:
        """Read the last lines; None: all kept lines."""
        return last_lines(self._path, lines)

    @contextmanager
    def follow(self) -> Generator["Follower"]:
        """Follow new data until the file is closed."""
        follower = Follower()
        self._followers.add(follower)
        try:
            yield follower
        finally:
            self._followers.discard(follower)

    def _opened(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._fd).st_size
        return self._fd

    def _rotate(self) -> int:
        self._path.replace(_old(self._path))
        self._close()
        return self._opened()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None


def last_lines(path: Path, lines: int | None) -> list[str]:
    """Read the last lines of a log file, from the old file too if the new file is short; None: all of both."""
    tail: deque[str] = deque(maxlen=lines)
    for part in (_old(path), path):
        if part.exists():
            with part.open(errors="replace") as file:
                tail.extend(line.rstrip("\n") for line in file)
    return list(tail)


def _old(path: Path) -> Path:
    return path.with_name(path.name + ".1")


class Follower:
    """A bounded buffer of lines unread by a follower. `get()` is None at the end."""

    def __init__(self) -> None:
        self._pending: deque[bytes | None] = deque()
        self._bytes = 0
        self._wake = asyncio.Event()

    def put(self, data: bytes | None) -> None:
        self._pending.append(data)
        self._bytes += len(data or b"")
        while self._bytes > MAX_FOLLOW_BYTES and (oldest := self._pending.popleft()) is not None:
            self._bytes -= len(oldest)
        self._wake.set()

    async def get(self) -> bytes | None:
        while not self._pending:
            self._wake.clear()
            await self._wake.wait()
        data = self._pending.popleft()
        self._bytes -= len(data or b"")
        return data


CONTROLLER = "controller"
QUIET = ("httpx2", "httpcore2", "uvicorn.error")  # a line for each request, or each start


@contextmanager
def logging_to(logfile: LogFile, level: str) -> Generator[None]:
    """Send this process's log to a file for as long as the context lasts."""
    handler = _LogFileHandler(logfile)
    handler.setFormatter(TextFormatter(CONTROLLER))
    root = logging.getLogger()
    old_level = root.level
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(old_level)


class _LogFileHandler(logging.Handler):
    def __init__(self, logfile: LogFile) -> None:
        super().__init__()
        self._logfile = logfile

    def emit(self, record: logging.LogRecord) -> None:
        self._logfile.write(self.format(record).encode() + b"\n")
