"""Files on their way into the blob folder, and files already in it: both are `Files`."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import BinaryIO

from weft.artifacts.blobs import BlobStore, BlobWriter, Lease
from weft.artifacts.digest import FileEntry, Kind, Manifest, build_manifest, from_hex, hex_of
from weft.artifacts.errors import Reason, Refused
from weft_depot.files import Files

CHUNK_BYTES = 1 << 20


class FileSubset:
    """Some files of a snapshot."""

    def __init__(self, files: Files, names: Iterable[str]) -> None:
        self._files = files
        self.sizes: Mapping[str, int] = {name: files.sizes[name] for name in names}

    def open(self, name: str) -> BinaryIO:
        return self._files.open(name)


class BlobFiles:
    """The files of an artifact in the blob folder."""

    def __init__(self, store: BlobStore, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self.sizes: Mapping[str, int] = {entry.name: entry.size_bytes for entry in manifest.files}

    def open(self, name: str) -> BinaryIO:
        return self._store.open(self._manifest.file(name).digest)


class StagedFiles:
    """Fsynced copies of files, not yet visible. A context manager: unpublished files are removed."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._writers: dict[str, BlobWriter] = {}
        self._stack = contextlib.ExitStack()

    @property
    def sizes(self) -> Mapping[str, int]:
        return {name: writer.size_bytes for name, writer in self._writers.items()}

    def open(self, name: str) -> BinaryIO:
        return self._writers[name].path.open("rb")

    def copy(self, files: Files, name: str, step: Callable[[int], None], expected_sha256: str | None = None) -> None:
        """Copy a file, at most one byte beyond its listed size (a growing file is detected, not followed).

        With the hex SHA-256 given by its source, an interrupted copy is continued. `step` is called with the size of
        each chunk, and of the bytes already here. It may raise to stop.
        """
        writer = self._stack.enter_context(self._store.writer(from_hex(expected_sha256) if expected_sha256 else None))
        if writer.size_bytes > files.sizes[name]:
            writer.restart()
        left = files.sizes[name] + 1 - writer.size_bytes
        with files.open(name) as file:
            if writer.size_bytes:
                file.seek(writer.size_bytes)
                step(writer.size_bytes)
            while left and (chunk := file.read(min(CHUNK_BYTES, left))):
                step(len(chunk))
                writer.write(chunk)
                left -= len(chunk)
        writer.finish()
        self._writers[name] = writer

    def writer(self, name: str) -> BlobWriter:
        """Return a writer of a further file, with bytes from the caller."""
        writer = self._writers[name] = self._stack.enter_context(self._store.writer())
        return writer

    def finish(self) -> None:
        """Make sure that every file is on the disk."""
        for writer in self._writers.values():
            writer.finish()

    def check_expected(self, expected_sha256: Mapping[str, str]) -> bool:
        """Compare the copies with the hashes given by the source.

        Return False if the remains of an earlier copy are damaged: a retry without them may succeed. Raises
        Refused(DigestMismatch).
        """
        for name, writer in self._writers.items():
            actual = hex_of(writer.finish())
            if expected_sha256.get(name, actual) != actual:
                if writer.resumed_bytes:
                    return False
                reason = f"{name}: the source promised sha256:{expected_sha256[name]} and sent sha256:{actual}"
                raise Refused(Reason.DIGEST_MISMATCH, reason)
        return True

    def manifest(self, kind: Kind) -> Manifest:
        files = [FileEntry(name, hex_of(w.finish()), w.size_bytes) for name, w in self._writers.items()]
        return build_manifest(kind, files)

    def publish(self, manifest: Manifest, lease: Lease) -> None:
        """Make the files visible, then the manifest: a visible manifest has all its files."""
        lease.name(manifest.digest, *(entry.digest for entry in manifest.files))
        self._store.publish(*((writer.path, writer.finish()) for writer in self._writers.values()))
        self._store.put(manifest.to_bytes())

    def __enter__(self) -> "StagedFiles":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
