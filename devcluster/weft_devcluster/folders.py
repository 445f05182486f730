"""A temporary folder that a killed owner does not leave for ever: the next one to ask for a folder sweeps it."""

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import IO

LOCK = "owner.lock"


@contextlib.contextmanager
def owned_folder(prefix: str, parent: Path | None = None) -> Generator[Path, None, None]:
    """Make a new folder below `parent` (the system's for temporary files), gone at the end. `prefix` names its kind."""
    parent = parent or Path(tempfile.gettempdir())
    for left in parent.glob(f"{prefix}*/{LOCK}"):
        if _is_abandoned(left):
            shutil.rmtree(left.parent, ignore_errors=True)  # somebody else may be sweeping it too
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as made, _own(Path(made)):
        yield Path(made)


@contextlib.contextmanager
def _own(folder: Path) -> Generator[None, None, None]:
    """Hold the folder's lock; the file gets its name once it is locked, so nobody ever sees it free while we live."""
    unnamed = folder / f".{LOCK}"
    with unnamed.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        unnamed.rename(folder / LOCK)
        yield


def _is_abandoned(lock: Path) -> bool:
    try:
        file: IO[str] = lock.open("r+")
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
