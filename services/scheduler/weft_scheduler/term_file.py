"""The scheduler's term: a counter in the data directory, raised and durable before the first order under it.

It has to grow also when the directory was lost, so without a valid file it starts again at a number of
seconds: fewer schedulers start than seconds pass.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from weft.domain.ids import MAX_TERM
from weft.files import write_atomically
from weft.telemetry.logs import kv
from weft_scheduler.errors import TermNotDurable

TERM_EPOCH_S = 1_735_689_600  # 2025-01-01
log = logging.getLogger(__name__)


class TermFile:
    """`DIR/term`. The process owns the directory (`weft.process.lock_data_dir`), so no other process writes it."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = directory / "term", clock

    def next(self, at_least: int = 0) -> int:
        """Return a durable term above all terms used here.

        `at_least` is the term of a Lease, above those of the processes that acted before this one. Raises
        TermNotDurable.
        """
        used = self.read()
        alone = 0 if at_least else max(1, int(self._clock()) - TERM_EPOCH_S)
        term = max(at_least, alone if used is None else used + 1)
        self.write(term)
        return term

    def read(self) -> int | None:
        """Return the highest term used; None before the first, or where the file holds none. Raises TermNotDurable."""
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise TermNotDurable(f"{self._path} is not readable: {error}") from error
        if text.strip().isdigit() and len(text) <= len(f"{MAX_TERM}\n") and int(text) < MAX_TERM:
            return int(text)
        log.error("the file holds no term: terms start again", extra=kv(path=self._path, content=text[:40]))
        return None

    def write(self, term: int) -> None:
        """Write the term, durable by the return: a crash leaves the old or the new number. Raises TermNotDurable."""
        try:
            write_atomically(self._path, b"%d\n" % term)
        except OSError as error:
            raise TermNotDurable(f"term {term} was not written to {self._path}: {error}") from error
