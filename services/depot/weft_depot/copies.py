"""Files on their way into the blob folder, and files that are there: both are `Files`."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import BinaryIO

from weft.artifacts.blobs import BlobStore, BlobWriter, Lease
from weft.artifacts.digest import FileEntry, Kind, Manifest, build_manifest, from_hex, hex_of
from weft.artifacts.errors import Reason, Refused
from weft_depot.sources import Files

CHUNK_BYTES = 1 << 20


class Selection:
    """Some files of a snapshot."""

    def __init__(self, files: Files, names: Iterable[str]) -> None:
        self._files = files
        self._sizes = {name: files.sizes[name] for name in names}

    @property
    def sizes(self) -> Mapping[str, int]:
        return self._sizes

    def open(self, name: str) -> BinaryIO:
        return self._files.open(name)


class BlobFiles:
    """The files of an artifact in the blob folder."""

    def __init__(self, store: BlobStore, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self._sizes = {entry.name: entry.size_bytes for entry in manifest.files}

    @property
    def sizes(self) -> Mapping[str, int]:
        return self._sizes

    def open(self, name: str) -> BinaryIO:
        return self._store.open(self._manifest.file(name).digest)


class Copies:
    """Copied, fsynced, not yet visible. A context manager: what is not published goes away."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._writers: dict[str, BlobWriter] = {}
        self._stack = contextlib.ExitStack()

    @property
    def sizes(self) -> Mapping[str, int]:
        return {name: writer.size_bytes for name, writer in self._writers.items()}

    def open(self, name: str) -> BinaryIO:
        return self._writers[name].path.open("rb")

    def take(self, files: Files, name: str, tick: Callable[[], None], promised: str | None = None) -> None:
        """Copy one file, at most one byte beyond the size it had (a file that grew is noticed, not followed).

        With the hex SHA-256 that its source promises, a copy that was broken off is gone on with.
        """
        writer = self._stack.enter_context(self._store.writer(from_hex(promised) if promised else None))
        if writer.size_bytes > files.sizes[name]:
            writer.restart()
        left = files.sizes[name] + 1 - writer.size_bytes
        with files.open(name) as file:
            if writer.size_bytes:
                file.seek(writer.size_bytes)
            while left and (chunk := file.read(min(CHUNK_BYTES, left))):
                tick()
                writer.write(chunk)
                left -= len(chunk)
        writer.finish()
        self._writers[name] = writer

    def check_promised(self, promised: Mapping[str, str]) -> bool:
        """What arrived is what the source said it is. Raises Refused(DigestMismatch).

        False: what was left of an earlier copy is damaged; without it, another try may do.
        """
        for name, writer in self._writers.items():
            actual = hex_of(writer.finish())
            if promised.get(name, actual) != actual:
                if writer.resumed_bytes:
                    return False
                why = f"{name}: the source promised sha256:{promised[name]} and sent sha256:{actual}"
                raise Refused(Reason.DIGEST_MISMATCH, why)
        return True

    def manifest(self, kind: Kind) -> Manifest:
        files = [FileEntry(name, hex_of(w.finish()), w.size_bytes) for name, w in self._writers.items()]
        return build_manifest(kind, files)

    def publish(self, manifest: Manifest, lease: Lease) -> None:
        """Make the files visible, then the manifest: a visible manifest is whole."""
        lease.name(manifest.digest, *(entry.digest for entry in manifest.files))
        self._store.publish_all(self._writers.values())
        self._store.put(manifest.to_bytes())

    def __enter__(self) -> "Copies":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
