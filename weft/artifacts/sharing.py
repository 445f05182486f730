"""Coordination of processes that share a blob folder: needed blobs and downloads. Nothing outlives a process.

- `ROOT/users/<name>`: the blobs that a process needs, and the artifacts with their files, as lines. The process holds a
lock on the file for its life. A file without a lock belongs to a dead process, and the next reader removes it.
- `ROOT/lock`: shared while a process writes its needs, exclusive while a process removes blobs. So all needs are known
before a removal, and a removal is complete before anybody looks for a blob.
- `ROOT/locks/<hex>`: held by the process that downloads the blob, into its only part file.

The locks are flock's: of one machine, and of network file systems with support for them (NFS 4). The kernel releases
them when a process ends, in any way.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Generator, Set
from pathlib import Path
from typing import NamedTuple

Waiting = Callable[[], None]  # called while another process downloads; pauses, and raises after too long a wait


class Needs(NamedTuple):
    """Blobs and artifacts to keep, as hex digests. An artifact includes all its files."""

    blobs: Set[str] = frozenset()
    artifacts: Set[str] = frozenset()


class SharedUse:
    """The part of a process in a shared folder. Not thread-safe: the store holds its lock around `needs` and
    `removing`."""

    def __init__(self, root: Path) -> None:
        self._users, self._locks, self._lock = root / "users", root / "locks", root / "lock"
        self._users.mkdir(exist_ok=True)
        self._locks.mkdir(exist_ok=True)
        self.name = f"{os.getpid()}-{os.urandom(8).hex()}"
        with _locked(self._lock, fcntl.LOCK_SH):  # keeps others from removing the file before it is locked
            self._file = os.open(self._users / self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def needs(self, needs: Needs) -> None:
        """Declare the needs of this process, in place of its previous needs. No process may remove them."""
        words = [*(f"blob {name}\n" for name in needs.blobs), *(f"artifact {name}\n" for name in needs.artifacts)]
        lines = "".join(words).encode()
        with _locked(self._lock, fcntl.LOCK_SH):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, lines, 0)

    @contextlib.contextmanager
    def removing(self) -> Generator[tuple[Needs, set[str]]]:
        """Exclude other processes during a removal of blobs. Yield the needs of living processes, and their names."""
        with _locked(self._lock, fcntl.LOCK_EX):
            words, alive = list[list[str]](), {self.name}
            for path in self._users.iterdir():
                if path.name != self.name and (lines := _lines_of_living(path)) is not None:
                    alive.add(path.name)
                    words += [line.split() for line in lines]
            yield Needs(*({name for tag, name in words if tag == kind} for kind in ("blob", "artifact"))), alive

    @contextlib.contextmanager
    def download(self, name: str, waiting: Waiting) -> Generator[None]:
        """Exclude other processes from writing the part file of a blob declared in `needs`."""
        descriptor = os.open(self._locks / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while not _try_lock(descriptor, fcntl.LOCK_EX):
                waiting()
            yield
        finally:
            os.close(descriptor)

    def forget_locks(self, keep: set[str]) -> None:
        """Remove, inside `removing`, the locks of blobs outside of `keep`: an unneeded blob is not being downloaded."""
        for path in self._locks.iterdir():
            if path.name not in keep:
                path.unlink(missing_ok=True)


def _lines_of_living(path: Path) -> list[str] | None:
    """Return the needs of a living process. For a dead process, remove its file and return None."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not _try_lock(descriptor, fcntl.LOCK_SH):
            return file.read().decode().splitlines()
        path.unlink(missing_ok=True)
        return None


def _try_lock(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path, operation: int) -> Generator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)
