"""How processes share a blob folder: who needs what, who downloads what. None of it outlives a process.

- `ROOT/users/<name>`: the blobs that one process needs, and the artifacts with their files, as lines. The process holds
  a lock on the file for its life; a file that nobody holds is a dead process's, and is removed by whoever finds it.
- `ROOT/lock`: shared while a process writes down what it needs, exclusive while one removes blobs. So what is needed is
  known before anything is removed, and what is being removed is gone before anybody asks whether it is there.
- `ROOT/locks/<hex>`: held by who downloads that blob, into the one part file that it has.

The locks are flock's: of one machine, and of network file systems that pass them on (NFS 4). The kernel lets go of them
when a process ends, however it ends.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Generator, Set
from pathlib import Path
from typing import NamedTuple

Waiting = Callable[[], None]  # called while another process downloads; pauses, and raises when that takes too long


class Needs(NamedTuple):
    """What is not to be removed, as hex digests: blobs, and artifacts with all their files."""

    blobs: Set[str] = frozenset()
    artifacts: Set[str] = frozenset()


class SharedUse:
    """One process's part of a folder. Not thread-safe: its store's lock is held around `needs` and `removing`."""

    def __init__(self, root: Path) -> None:
        self._users, self._locks, self._lock = root / "users", root / "locks", root / "lock"
        self._users.mkdir(exist_ok=True)
        self._locks.mkdir(exist_ok=True)
        self.name = f"{os.getpid()}-{os.urandom(8).hex()}"
        with _locked(self._lock, fcntl.LOCK_SH):  # nobody looks for dead users between the file and its lock
            self._file = os.open(self._users / self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def needs(self, needs: Needs) -> None:
        """Name what no process may remove from now on, in place of what this one has named before."""
        words = [*(f"blob {name}\n" for name in needs.blobs), *(f"artifact {name}\n" for name in needs.artifacts)]
        lines = "".join(words).encode()
        with _locked(self._lock, fcntl.LOCK_SH):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, lines, 0)

    @contextlib.contextmanager
    def removing(self) -> Generator[tuple[Needs, set[str]]]:
        """Exclude other processes while blobs are removed; gives what the living ones need, and their names."""
        with _locked(self._lock, fcntl.LOCK_EX):
            words, alive = list[list[str]](), {self.name}
            for path in self._users.iterdir():
                if path.name != self.name and (lines := _lines_of_living(path)) is not None:
                    alive.add(path.name)
                    words += [line.split() for line in lines]
            yield Needs(*({name for tag, name in words if tag == kind} for kind in ("blob", "artifact"))), alive

    @contextlib.contextmanager
    def download(self, name: str, waiting: Waiting) -> Generator[None]:
        """Exclude other processes from writing the part file of a blob that this one has named in `needs`."""
        descriptor = os.open(self._locks / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while not _try_lock(descriptor, fcntl.LOCK_EX):
                waiting()
            yield
        finally:
            os.close(descriptor)

    def forget_locks(self, keep: set[str]) -> None:
        """Remove, inside `removing`, the locks of blobs outside of `keep`: nobody downloads what nobody needs."""
        for path in self._locks.iterdir():
            if path.name not in keep:
                path.unlink(missing_ok=True)


def _lines_of_living(path: Path) -> list[str] | None:
    """Read what a living process needs; remove the file of a dead one."""
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
