"""A content-addressed folder: `ROOT/sha256/<hex>`, each blob whole or not there at all.

A blob is written under `ROOT/partial/`, fsynced, then renamed into place, so a process killed at any point leaves at
most a partial file, never a half-written blob. Blobs never change, so readers need no lock: one that is removed while
it is read stays readable through the open file.

What a lease has named cannot be removed by `retain` until the lease closes; `retain` and naming exclude each other.
"""

import contextlib
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Generator, Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from weft.artifacts.digest import MAX_MANIFEST_BYTES, Digest, Manifest, digest_of, from_hex, hex_of
from weft.artifacts.errors import Reason, Refused, UnknownDigest
from weft.files import sync_folder

CHUNK_BYTES = 1 << 20


class BlobStore:
    """Blobs by digest below one folder, with one owning process. Methods may be called from any thread."""

    def __init__(self, root: Path) -> None:
        self._root, self._blobs, self._partial = root, root / "sha256", root / "partial"
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._partial.mkdir(exist_ok=True)
        self._lock = threading.Lock()
        self._leased: Counter[str] = Counter()
        self._downloads: dict[str, tuple[threading.Lock, int]] = {}  # and how many want it

    @property
    def root(self) -> Path:
        return self._root

    def path(self, digest: str) -> Path:
        """Where the blob is, or would be. Raises BadDigest."""
        return self._blobs / hex_of(digest)

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def open(self, digest: str) -> BinaryIO:
        """Open a blob to read. Raises UnknownDigest, BadDigest."""
        try:
            return self.path(digest).open("rb")
        except FileNotFoundError as error:
            raise UnknownDigest(digest, "this blob folder") from error

    def read(self, digest: str, *, max_bytes: int) -> bytes:
        """The whole blob. Raises UnknownDigest, BadDigest, Refused(TooLarge)."""
        with self.open(digest) as file:
            raw = file.read(max_bytes + 1)
        if len(raw) > max_bytes:
            raise Refused(Reason.TOO_LARGE, f"{digest} is larger than {max_bytes} bytes")
        return raw

    def manifest(self, digest: str) -> Manifest:
        """The manifest of an artifact. Raises UnknownDigest, Refused(DigestMismatch) when the blob is no manifest."""
        raw = self.read(digest, max_bytes=MAX_MANIFEST_BYTES)
        if digest_of(raw) != digest:
            raise Refused(Reason.DIGEST_MISMATCH, f"the blob {digest} is damaged: its content has another SHA-256")
        return Manifest.from_bytes(raw)

    def holds(self, digest: str) -> bool:
        """True when the manifest and every file it lists are here."""
        if not self.has(digest):
            return False
        return all(self.has(entry.digest) for entry in self.manifest(digest).files)

    def file(self, manifest: Manifest, name: str) -> Path:
        """The path of one file of an artifact. Raises Refused(MissingFile), UnknownDigest."""
        entry = manifest.file(name)
        if not self.has(entry.digest):
            raise UnknownDigest(entry.digest, "this blob folder")
        return self.path(entry.digest)

    def put(self, data: bytes) -> Digest:
        """Keep some bytes."""
        with self.writer() as writer:
            writer.write(data)
            return writer.commit()

    def writer(self, promised: Digest | None = None) -> "BlobWriter":
        """A blob to be, invisible until `commit`.

        With the digest that it is going to have, it goes on where an earlier writer of it was broken off, also by the
        end of the process; unless somebody is writing it now, then it is one more.
        """
        if promised is not None and self._claim(promised):
            try:
                return BlobWriter(self, self.part(promised), promised)
            except OSError:
                self.end_claim(promised)
                raise
        return BlobWriter(self, self._partial / f"tmp-{os.getpid()}-{os.urandom(8).hex()}")

    def _claim(self, digest: Digest) -> bool:
        """Own the part file of a blob if nobody does; `end_claim` gives it back."""
        with self._lock:
            if digest in self._downloads:
                return False
            lock = threading.Lock()
            lock.acquire()
            self._downloads[digest] = (lock, 1)
            return True

    def end_claim(self, digest: Digest) -> None:
        """For BlobWriter alone."""
        self._downloads[digest][0].release()
        self._end_download(digest)

    def lease(self) -> "Lease":
        """What is named in the lease stays until it closes, whatever `retain` is told."""
        return Lease(self)

    def part(self, digest: str) -> Path:
        """Where a download of this blob gathers; what is there survives a restart."""
        return self._partial / f"{hex_of(digest)}.part"

    @contextlib.contextmanager
    def download(self, digest: str) -> Generator[Path]:
        """Own the part file of a blob: one thread at a time."""
        with self._lock:
            lock, users = self._downloads.get(digest, (threading.Lock(), 0))
            self._downloads[digest] = (lock, users + 1)
        try:
            with lock:
                yield self.part(digest)
        finally:
            self._end_download(digest)

    def _end_download(self, digest: str) -> None:
        with self._lock:
            lock, users = self._downloads.pop(digest)
            if users > 1:
                self._downloads[digest] = (lock, users - 1)

    def publish(self, temporary: Path, digest: Digest) -> None:
        """Rename a whole, fsynced temporary file into place. Doing it twice is harmless."""
        temporary.replace(self.path(digest))
        sync_folder(self._blobs)

    def retain(self, digests: Iterable[str]) -> int:
        """Keep these artifacts (manifest and files) and what is leased, remove all else; returns the blobs removed.

        A digest that is not here is no error: the caller's list may be ahead of us.
        """
        wanted = [hex_of(digest) for digest in digests]
        with self._lock:
            keep = self._files_of(wanted) | set(self._leased)
            gone = [path for path in self._blobs.iterdir() if path.name not in keep]
            gone += [path for path in self._partial.glob("*.part") if path.stem not in keep]
            for path in gone:
                path.unlink(missing_ok=True)
        return len(gone)

    def clean(self) -> int:
        """At start, remove what a killed process left half-written; returns how many. Downloads stay: they resume."""
        left = list(self._partial.glob("tmp-*"))
        for path in left:
            path.unlink(missing_ok=True)
        return len(left)

    def sweep(self, before: float) -> int:
        """Remove broken-off downloads that no lease names and whose last byte came before this time (of the files)."""
        removed = 0
        with self._lock:
            at_work = {hex_of(digest) for digest in self._downloads} | set(self._leased)
            for path in self._partial.glob("*.part"):
                if path.stem not in at_work and path.stat().st_mtime < before:
                    path.unlink()
                    removed += 1
        return removed

    def usage(self) -> tuple[int, int]:
        """Blobs here and their bytes."""
        sizes = [entry.stat().st_size for entry in os.scandir(self._blobs)]
        return len(sizes), sum(sizes)

    def _files_of(self, wanted: Iterable[str]) -> set[str]:
        keep: set[str] = set()
        for name in wanted:
            keep.add(name)
            with contextlib.suppress(Refused):  # not here, or a file's blob and no manifest
                keep |= {entry.sha256 for entry in self.manifest(from_hex(name)).files}
        return keep

    def name_in_lease(self, names: set[str], digest: str) -> None:
        """For Lease alone: protect one blob."""
        name = hex_of(digest)
        with self._lock:
            if name not in names:
                names.add(name)
                self._leased[name] += 1

    def end_lease(self, names: set[str]) -> None:
        """For Lease alone: protect no longer."""
        with self._lock:
            self._leased -= Counter(names)
            names.clear()


class Lease:
    """Names blobs that have to stay. Name a digest before asking whether the blob is there. A context manager."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._names: set[str] = set()

    def name(self, *digests: str) -> None:
        for digest in digests:
            self._store.name_in_lease(self._names, digest)

    def close(self) -> None:
        self._store.end_lease(self._names)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class BlobWriter:
    """Bytes on their way to a blob. A context manager: without `commit` nothing stays, but a promised beginning."""

    def __init__(self, store: BlobStore, path: Path, promised: Digest | None = None) -> None:
        """With a promised digest `path` may hold the beginning of the blob, and is kept when the rest does not come."""
        self._store, self.path, self._promised = store, path, promised
        self._file = path.open("ab" if promised else "xb")
        self._sha256 = hashlib.sha256()
        self.size_bytes = self.resumed_bytes = self._take_in() if promised else 0

    def _take_in(self) -> int:
        with self.path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                self._sha256.update(chunk)
            return file.tell()

    def restart(self) -> None:
        """Forget what was there."""
        self._file.truncate(0)
        self._sha256 = hashlib.sha256()
        self.size_bytes = self.resumed_bytes = 0

    def write(self, chunk: bytes) -> None:
        self._file.write(chunk)
        self._sha256.update(chunk)
        self.size_bytes += len(chunk)

    def finish(self) -> Digest:
        """Everything is written and on disk; the blob may be read at `path` and is not yet visible."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return from_hex(self._sha256.hexdigest())

    def commit(self) -> Digest:
        """Make the blob visible, whole."""
        digest = self.finish()
        self._store.publish(self.path, digest)
        return digest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        whole, full = self._file.closed, kind is not None and issubclass(kind, OSError)
        self._file.close()
        if self._promised is None or whole or full:  # whole: published, or not what it was wanted for
            self.path.unlink(missing_ok=True)
        if self._promised is not None:
            self._store.end_claim(self._promised)


def check_blobs(store: BlobStore) -> None:
    """Every blob's content has the SHA-256 it is named by. Reads everything: for tests and idle times."""
    for path in sorted((store.path("sha256:" + "0" * 64).parent).iterdir()):
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        assert actual == path.name, f"blob {path.name} holds {actual}"
