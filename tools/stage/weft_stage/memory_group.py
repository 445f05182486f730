"""A memory control group for a process under measurement: what it takes, the page cache included, is bounded.

Both versions of Linux's control groups; making one needs the rights of the machine's administrator. Pages of files
count for the group that first reads them: what is cached already is nobody's, so files are forgotten beforehand.
"""

import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weft_stage.errors import NoGroup

ROOT = Path("/sys/fs/cgroup")
LIMIT, PEAK = ("memory.limit_in_bytes", "memory.max"), ("memory.max_usage_in_bytes", "memory.peak")  # by version


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """Exists while `memory_group`'s block runs."""

    path: Path

    def command(self, command: Sequence[str]) -> list[str]:
        """The same, begun inside the group."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"), *command]

    @property
    def peak_bytes(self) -> int:
        """Most that it has taken so far."""
        return next(int((self.path / name).read_text()) for name in PEAK if (self.path / name).exists())


@contextmanager
def memory_group(limit_bytes: int, root: Path = ROOT) -> Generator[MemoryGroup]:
    """All of its processes have ended when the block is left. Raises NoGroup if none can be made."""
    first = root / "memory"
    path = (first if first.is_dir() else root) / f"weft-bench-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        raise NoGroup(f"no memory control group can be made: {error}; it takes an administrator's rights") from error
    try:
        limit = next((path / name for name in LIMIT if (path / name).exists()), None)
        if limit is None:
            raise NoGroup(f"{path} bounds no memory: the controller is not enabled there")
        limit.write_text(str(limit_bytes))
        yield MemoryGroup(path)
    finally:
        path.rmdir()


def forget(paths: Iterable[Path]) -> None:
    """What the page cache has of these files."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
