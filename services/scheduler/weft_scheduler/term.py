"""The scheduler's term: a counter in the data directory, raised and durable before the first order under it."""

import fcntl
import os
from pathlib import Path

from weft_scheduler.errors import TermNotDurable


class TermFile:
    """`DIR/term`. One process owns the directory (a lock on `DIR/lock`), until `close()` or its end."""

    def __init__(self, directory: Path) -> None:
        """Raises TermNotDurable where the directory cannot be used or another process has it."""
        self._path = directory / "term"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TermNotDurable(f"{directory} cannot be used: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise TermNotDurable(f"{directory} belongs to another scheduler") from error

    def read(self) -> int:
        """The highest term used, 0 before the first. Raises TermNotDurable for a file that is no number."""
        try:
            return int(self._path.read_text())
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            raise TermNotDurable(f"{self._path} is not readable as a number: {error}") from error

    def write(self, term: int) -> None:
        """Durable when it returns: a crash leaves the old number or the new one. Raises TermNotDurable."""
        temporary = self._path.with_suffix(".new")
        try:
            with temporary.open("w") as file:
                file.write(f"{term}\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
            _sync(self._path.parent)
        except OSError as error:
            raise TermNotDurable(f"term {term} was not written to {self._path}: {error}") from error

    def close(self) -> None:
        """Let the directory go."""
        os.close(self._lock)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
