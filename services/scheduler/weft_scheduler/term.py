"""The scheduler's term: a counter in the data directory, raised and durable before the first order under it."""

from pathlib import Path

from weft.files import write_atomically
from weft_scheduler.errors import TermNotDurable


class TermFile:
    """`DIR/term`. The process owns the directory (`weft.process.owned`), so nobody else writes it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "term"

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
        try:
            write_atomically(self._path, b"%d\n" % term)
        except OSError as error:
            raise TermNotDurable(f"term {term} was not written to {self._path}: {error}") from error
