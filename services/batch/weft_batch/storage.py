"""Storage of files' bytes, by names of ours (ids with 128 random bits), in a folder or on S3. Blocking: called in
threads.

A file is there whole or not at all: a writer that is not closed leaves nothing that `read` finds.
"""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO, Protocol

from weft.files import is_disk_full, sync_folder
from weft_batch.errors import BytesMissing, StorageFull, StorageUnavailable

TEMPORARY = ".tmp"


class FileWriter(Protocol):
    """A writer of one file, used by one thread at a time. Every method raises StorageUnavailable."""

    def write(self, chunk: bytes) -> None: ...

    def close(self) -> None:
        """Make the file whole, and durable when this returns."""
        ...

    def abandon(self) -> None:
        """Leave nothing of the file. Raises nothing: `delete` is called again later."""
        ...


class FileStorage(Protocol):
    """A storage of files' bytes."""

    def writer(self, name: str) -> FileWriter:
        """Make a writer that has not touched the storage: its first `write` or `close` does."""
        ...

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Read a part of a file; fewer bytes at its end. Raises BytesMissing, StorageUnavailable."""
        ...

    def delete(self, name: str) -> None:
        """Delete the file, and what a writer that was killed left of it. Raises StorageUnavailable."""
        ...

    def clean(self) -> int:
        """Remove, at the start, what writers of a killed process left. Returns how many. Raises StorageUnavailable."""
        ...


class FolderStorage:
    """A folder of one process."""

    def __init__(self, folder: Path) -> None:
        """Make the folder. Raises StorageUnavailable."""
        self._folder = folder
        with _storage_errors():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def writer(self, name: str) -> "FolderWriter":
        return FolderWriter(self._folder / name)

    def read(self, name: str, offset: int, length: int) -> bytes:
        with _storage_errors(), (self._folder / name).open("rb") as file:
            return os.pread(file.fileno(), length, offset)

    def delete(self, name: str) -> None:
        with _storage_errors():
            for path in (self._folder / name, _temporary(self._folder / name)):
                path.unlink(missing_ok=True)

    def clean(self) -> int:
        with _storage_errors():
            left = list(self._folder.glob(f"*{TEMPORARY}"))
            for path in left:
                path.unlink(missing_ok=True)
        return len(left)


class FolderWriter:
    """A writer beside the name, which takes the name once everything is on the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def write(self, chunk: bytes) -> None:
        with _storage_errors():
            self._opened().write(chunk)

    def close(self) -> None:
        with _storage_errors():
            file = self._opened()
            file.flush()
            os.fsync(file.fileno())
            file.close()
            _temporary(self._path).replace(self._path)
            sync_folder(self._path.parent)

    def abandon(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):  # a full disk refuses what is still buffered
            self._file.close()
        with contextlib.suppress(OSError):
            _temporary(self._path).unlink(missing_ok=True)

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = _temporary(self._path).open("wb")
        return self._file


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + TEMPORARY)


@contextlib.contextmanager
def _storage_errors() -> Generator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise BytesMissing("the file's bytes are not in storage") from error
    except OSError as error:
        kind = StorageFull if is_disk_full(error) else StorageUnavailable
        raise kind(f"file storage: {error.strerror or error}") from error
