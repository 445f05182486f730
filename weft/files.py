"""Files that are replaced whole. Standard library only: the runner imports it."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes | memoryview, mode: int = 0o600, *, durable: bool = True) -> None:
    """Replace a file, durable when it returns; after a crash it is the old one or the new one, whole.

    Not `durable`: that holds for crashes of the process; after one of the machine it may be gone or damaged.

    One writer of a path at a time: the temporary name is fixed, so that crashes leave at most one behind.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    temporary.replace(path)
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Names that were made or replaced in a folder are durable when it returns."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
