"""What a benchmark gets from the command that runs it: origin of its lines, messages, progress."""

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from weft_stage.lines import Line, Origin, append, newest, read, told, write
from weft_stage.machine import origin

LINE_S = 60.0  # between two messages of progress where standard error is no terminal


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the benchmark `name`. Its figures are kept in `docs`."""

    name: str
    docs: Path
    lines: list[Line] = field(default_factory=list[Line])

    @property
    def raw(self) -> Path:
        """Return the file of the benchmark's raw lines."""
        return self.docs / "raw" / f"{self.name}.jsonl"

    def origin(self, *packages: str) -> Origin:
        """Return the origin of this run's lines. `packages`: further packages whose versions it names."""
        return origin(*packages)

    def say(self, text: str) -> None:
        """Print a message on standard error."""
        print(text, file=sys.stderr, flush=True)

    @contextmanager
    def progress(self, label: str, length: int) -> Generator[Callable[[int], None]]:
        """Show progress on standard error: a line that is written over, or a line a minute where that is no terminal.

        Yields the function to call with each advance, in the units of `length`.
        """
        done, shown_at, terminal = 0, -LINE_S, sys.stderr.isatty()

        def advance(count: int) -> None:
            nonlocal done, shown_at
            done += count
            now = time.monotonic()
            if terminal or now >= shown_at + LINE_S:
                shown_at = now
                print(f"{label}: {done} of {length}", end="\r" if terminal else "\n", file=sys.stderr, flush=True)

        advance(0)
        yield advance
        if terminal:
            print(f"{label}: {done} of {length}", file=sys.stderr, flush=True)

    def keep(self, line: Line) -> None:
        """Append a line to the raw file at once, so that an interrupted run loses nothing, and print it."""
        append(self.raw, [line])
        self.lines.append(line)
        print(told(line), flush=True)

    def compact(self) -> None:
        """Keep the newest line of each figure in the raw file. Git has the older lines."""
        if self.raw.exists():
            write(self.raw, newest(read(self.raw)))
