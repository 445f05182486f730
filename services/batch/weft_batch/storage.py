"""Storage of files' bytes in a folder or on S3, under generated names (ids with 128 random bits). Blocking: call it in
threads.

A file is complete or absent: an unclosed writer leaves nothing that `read` finds.
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
    """A writer of a file, used by one thread at a time. Every method raises StorageUnavailable."""

    def write(self, chunk: bytes) -> None: ...

    def close(self) -> None:
        """Complete the file. It is durable on return."""
        ...

    def abandon(self) -> None:
        """Remove the incomplete file. Raises nothing: `delete` is called again later."""
        ...


class FileStorage(Protocol):
    """A storage of files' bytes."""

    def writer(self, name: str) -> FileWriter:
        """Return a writer. Storage is touched only by its first `write` or `close`."""
        ...

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Read a part of a file; fewer bytes at its end. Raises BytesMissing, StorageUnavailable."""
        ...

    def delete(self, name: str) -> None:
        """Delete the file, and the remains of a killed writer. Raises StorageUnavailable."""
        ...

    def clean(self) -> int:
        """At start, remove the remains of a killed process's writers. Return their number. Raises
        StorageUnavailable."""
        ...


class FolderStorage:
    """A folder used by a single process."""

    def __init__(self, folder: Path) -> None:
        """Create the folder. Raises StorageUnavailable."""
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
    """A writer to a temporary file, renamed once everything is on the disk."""

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
        with contextlib.suppress(OSError):  # a full disk refuses the buffered bytes
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
