"""A content-addressed folder: `ROOT/sha256/<hex>`. A blob is complete or absent.

A blob is written under `ROOT/partial/`, fsynced, then renamed into place. A process killed at any point leaves at most
a partial file, never a half-written blob. Blobs never change, so readers need no lock: a blob removed during a read
stays readable through the open file.

Disks lose bits, and ends of files. `read`, `manifest` and `verify` compare the content with the digest each time, at
the speed of SHA-256. They trust neither the size nor the time of a file. `open`, `file` and `path` do not compare. A
process that maps a file calls `verify` first, and reads the verified pages as long as they stay in memory. Later damage
to a mapped file is not detected.

`retain` cannot remove blobs named by a lease until the lease closes. `retain` and naming exclude each other. A folder
shared by several processes (`weft.artifacts.sharing`) keeps the blobs that any living process has named or retains.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

from weft.artifacts.digest import MANIFEST_BEGINS, MAX_MANIFEST_BYTES, Digest, Kind, Manifest, from_hex, hex_of
from weft.artifacts.errors import Damaged, Reason, Refused, UnknownDigest
from weft.artifacts.sharing import Needs, SharedUse, Waiting
from weft.files import sync_folder

CHUNK_BYTES = 1 << 20
SPARE = 5  # a fifth of the disk of a shared folder is kept free


class BlobStore:
    """Blobs by digest below a folder. Methods may be called from any thread.

    The folder has one owner process, or several processes with `shared` set.
    """

    def __init__(self, root: Path, *, shared: bool = False) -> None:
        self._root, self._blobs, self._partial = root, root / "sha256", root / "partial"
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._partial.mkdir(exist_ok=True)
        self._sharing = SharedUse(root) if shared else None
        self._retained: set[str] = set()  # artifacts, of a shared folder
        self._lock = threading.Lock()
        self._verifying = threading.Lock()
        self._leased: Counter[str] = Counter()
        self._content = object()  # replaced whenever blobs come or go
        self._counted: tuple[object, tuple[int, int]] = (None, (0, 0))
        # The writer of a blob's part file holds its lock. An entry lives as long as its lock is held or waited for.
        self._downloads: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()

    @property
    def root(self) -> Path:
        return self._root

    def path(self, digest: str) -> Path:
        """Return the path of a blob, existing or not. Raises BadDigest."""
        return self._blobs / hex_of(digest)

    def names(self) -> set[str]:
        """Return the hex digests of all local blobs."""
        return set(os.listdir(self._blobs))  # noqa: PTH208 (names, by the ten thousand)

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def open(self, digest: str) -> BufferedReader:
        """Open a blob to read. Raises UnknownDigest, BadDigest."""
        try:
            return self.path(digest).open("rb")
        except FileNotFoundError as error:
            raise UnknownDigest(digest, "this blob folder") from error

    def read(self, digest: str, *, max_bytes: int) -> bytes:
        """Return the complete blob, verified. Raises UnknownDigest, BadDigest, Damaged, Refused(TooLarge)."""
        with self.open(digest) as file, _read_errors(digest):
            raw = file.read(max_bytes + 1)
        if len(raw) > max_bytes:
            self.verify(digest)  # a grown file is damaged
            raise Refused(Reason.TOO_LARGE, f"{digest} is larger than {max_bytes} bytes")
        _compare(digest, hashlib.sha256(raw).hexdigest())
        return raw

    def verify(self, digest: str, size_bytes: int | None = None, *, alone: bool = True) -> None:
        """Compare a complete blob with its digest, and with its size if given.

        `alone`: verify a single blob at a time, since each keeps a core busy. Raises UnknownDigest, BadDigest, Damaged.
        """
        turn = self._verifying if alone else contextlib.nullcontext()
        with turn, self.open(digest) as file, _read_errors(digest):
            actual_bytes = os.fstat(file.fileno()).st_size
            if size_bytes not in (None, actual_bytes):
                raise Damaged(digest, f"it has {actual_bytes} bytes instead of {size_bytes}")
            _compare(digest, hashlib.file_digest(file, "sha256").hexdigest())

    def discard(self, digest: str) -> None:
        """Remove a damaged blob. It is unlinked, not truncated: processes that have it mapped keep its pages."""
        self.path(digest).unlink(missing_ok=True)
        self._content = object()

    def manifest(self, digest: str) -> Manifest:
        """Return the manifest of an artifact. Raises UnknownDigest, Damaged, Refused(DigestMismatch: not a
        manifest)."""
        return Manifest.from_bytes(self.read(digest, max_bytes=MAX_MANIFEST_BYTES))

    def artifacts(self, kind: Kind) -> list[Digest]:
        """List the artifacts of a kind with a local manifest, least recently used (`mark_used`) first."""
        used_artifacts: list[tuple[int, Digest]] = []
        for name in self.names():
            with contextlib.suppress(Refused):  # most blobs are files, known by their first bytes
                with self.open(from_hex(name)) as file:
                    used_ns, begins = os.fstat(file.fileno()).st_mtime_ns, file.read(len(MANIFEST_BEGINS))
                if begins == MANIFEST_BEGINS and self.manifest(from_hex(name)).kind == kind:
                    used_artifacts.append((used_ns, from_hex(name)))
        return [digest for _, digest in sorted(used_artifacts)]

    def mark_used(self, *digests: str) -> None:
        """Record the present use of blobs, for the order of `artifacts` and `retain`. A missing blob is not an
        error."""
        for digest in digests:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.path(digest))

    def holds(self, digest: str) -> bool:
        """Return whether the manifest and all its files are here."""
        if not self.has(digest):
            return False
        return all(self.has(entry.digest) for entry in self.manifest(digest).files)

    def file(self, manifest: Manifest, name: str) -> Path:
        """Return the path of a file of an artifact. Raises Refused(MissingFile), UnknownDigest."""
        entry = manifest.file(name)
        if not self.has(entry.digest):
            raise UnknownDigest(entry.digest, "this blob folder")
        return self.path(entry.digest)

    def put(self, data: bytes) -> Digest:
        """Store some bytes as a blob."""
        with self.writer() as writer:
            writer.write(data)
            return writer.commit()

    def writer(self, promised: Digest | None = None) -> "BlobWriter":
        """Return a writer of a blob, invisible until `commit`.

        With the promised digest, the writer continues an earlier interrupted writer, also of a dead process. If another
        thread is writing the blob now, the writer starts from nothing instead.
        """
        if promised is not None and (download := self._download(promised)).acquire(blocking=False):
            try:
                return BlobWriter(self, self.part(promised), download)
            except OSError:
                download.release()
                raise
        owner = self._sharing.name if self._sharing else os.getpid()
        return BlobWriter(self, self._partial / f"tmp-{owner}-{os.urandom(8).hex()}")

    def lease(self) -> "Lease":
        """Open a lease. Blobs named by it stay until it closes, regardless of `retain`."""
        return Lease(self._leased, self._lock, self._declare_needs)

    def _declare_needs(self) -> None:
        """Declare the needs of this process to further processes of the folder. The caller holds the lock."""
        if self._sharing:
            self._sharing.needs(Needs(self._leased.keys(), self._retained))

    def part(self, digest: str) -> Path:
        """Return the part file of a blob's download. It survives a restart."""
        return self._partial / f"{hex_of(digest)}.part"

    @contextlib.contextmanager
    def download(self, digest: str, waiting: Waiting = lambda: None) -> Generator[Path]:
        """Own the part file of a blob, a thread at a time. In a shared folder a lease has to name the blob before.

        `waiting` is called repeatedly while another process owns the file. It may raise to give up.
        """
        alone = self._sharing.download(hex_of(digest), waiting) if self._sharing else contextlib.nullcontext()
        with self._download(digest), alone:
            yield self.part(digest)

    def _download(self, digest: str) -> threading.Lock:
        with self._lock:
            return self._downloads.setdefault(digest, threading.Lock())

    def publish(self, *files: tuple[Path, Digest]) -> None:
        """Rename complete, fsynced temporary files into place, with one sync of the folder. A repetition is
        harmless."""
        for temporary, digest in files:
            temporary.replace(self.path(digest))
        self._content = object()
        sync_folder(self._blobs)

    def retain(self, digests: Iterable[str]) -> int:
        """Keep the given artifacts (manifest and files) and leased blobs. Remove the rest. Return the number of blobs
        removed.

        In a shared folder, blobs unneeded by living processes are removed only until a fifth of the disk is free, least
        recently used first: the next runner may need them. An unknown digest is not an error: the caller's list may be
        ahead of this folder.
        """
        retained = {hex_of(digest) for digest in digests}
        with self._lock:
            self._retained = retained
            self._declare_needs()
            with self._removing() as (other_needs, _):
                keep = self._files_of(retained | other_needs.artifacts) | set(self._leased) | other_needs.blobs
                removed = [path for path in self._blobs.iterdir() if path.name not in keep]
                removed += [path for path in self._partial.glob("*.part") if path.stem not in keep]
                if self._sharing:
                    self._sharing.forget_locks(keep)
                    removed = list(self._until_spare(removed))
                else:
                    for path in removed:
                        path.unlink(missing_ok=True)
            self._content = object()
        return len(removed)

    def _until_spare(self, paths: Iterable[Path]) -> Generator[Path]:
        """Remove and yield the paths, until there is enough room."""
        for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns):
            usage = shutil.disk_usage(self._root)
            if usage.free >= usage.total // SPARE:
                return
            path.unlink(missing_ok=True)
            yield path

    def _removing(self) -> contextlib.AbstractContextManager[tuple[Needs, set[str]]]:
        """Lock the folder for removal. Yield the needs of further processes of a shared folder, and the names of all
        processes."""
        return self._sharing.removing() if self._sharing else contextlib.nullcontext((Needs(), set[str]()))

    def clean(self) -> int:
        """At start, remove half-written files of killed processes. Return their number. Downloads stay: they resume."""
        with self._lock, self._removing() as (_, alive):
            owned = tuple(f"tmp-{name}-" for name in alive)
            left = [path for path in self._partial.glob("tmp-*") if not path.name.startswith(owned)]
            for path in left:
                path.unlink(missing_ok=True)
        return len(left)

    def sweep(self, before_unix_s: float) -> int:
        """Remove interrupted downloads without a lease whose last byte was written before `before_unix_s`. Return their
        number."""
        removed = 0
        with self._lock:
            at_work = {hex_of(digest) for digest in self._downloads} | set(self._leased)
            for path in self._partial.glob("*.part"):
                if path.stem not in at_work and path.stat().st_mtime < before_unix_s:
                    path.unlink()
                    removed += 1
        return removed

    def usage(self) -> tuple[int, int]:
        """Return the number of blobs and their bytes. They are counted again after a change through this object."""
        content = self._content
        if self._counted[0] is not content:
            count = size_bytes = 0
            for entry in os.scandir(self._blobs):
                with contextlib.suppress(FileNotFoundError):  # `retain` removes concurrently
                    size_bytes += entry.stat().st_size
                    count += 1
            self._counted = content, (count, size_bytes)
        return self._counted[1]

    def _files_of(self, names: Iterable[str]) -> set[str]:
        keep: set[str] = set()
        for name in names:
            keep.add(name)
            with contextlib.suppress(Refused):  # missing, or the blob of a file
                keep |= {entry.sha256 for entry in self.manifest(from_hex(name)).files}
        return keep


class Lease:
    """Blobs that have to stay. Name a digest before the check for its blob. A context manager."""

    def __init__(self, leased: Counter[str], lock: "threading.Lock", changed: Callable[[], None]) -> None:
        self._leased, self._lock, self._changed = leased, lock, changed  # shared with the store
        self._names: set[str] = set()

    def name(self, *digests: str) -> None:
        with self._lock:
            for name in set(map(hex_of, digests)) - self._names:
                self._names.add(name)
                self._leased[name] += 1
            self._changed()

    def close(self) -> None:
        with self._lock:
            for name in self._names:
                self._leased[name] -= 1
                if not self._leased[name]:
                    del self._leased[name]
            self._names.clear()
            self._changed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class BlobWriter:
    """Bytes on their way to a blob. A context manager: without `commit` only the start of a promised blob stays."""

    def __init__(self, store: BlobStore, path: Path, download: "threading.Lock | None" = None) -> None:
        """Open the file at `path`. With the lock of a download it may hold the start of the blob, and is kept if the
        rest does not arrive."""
        self._store, self.path, self._download = store, path, download
        self._file = path.open("ab" if download else "xb")
        self._sha256 = hashlib.sha256()
        self.size_bytes = self.resumed_bytes = self._take_in() if download else 0

    def _take_in(self) -> int:
        with self.path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                self._sha256.update(chunk)
            return file.tell()

    def restart(self) -> None:
        """Discard the bytes so far."""
        self._file.truncate(0)
        self._sha256 = hashlib.sha256()
        self.size_bytes = self.resumed_bytes = 0

    def write(self, chunk: bytes) -> None:
        self._file.write(chunk)
        self._sha256.update(chunk)
        self.size_bytes += len(chunk)

    def finish(self) -> Digest:
        """Write the complete blob to the disk. It may be read at `path`, and is not yet visible."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return from_hex(self._sha256.hexdigest())

    def commit(self) -> Digest:
        """Make the complete blob visible."""
        digest = self.finish()
        self._store.publish((self.path, digest))
        return digest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        finished, full = self._file.closed, kind is not None and issubclass(kind, OSError)
        self._file.close()
        if self._download is None or finished or full:  # finished: published, or not the promised content
            self.path.unlink(missing_ok=True)
        if self._download is not None:
            self._download.release()
            self._download = None


@contextlib.contextmanager
def _read_errors(digest: str) -> Generator[None]:
    """Raise Damaged for data that the disk cannot read (EIO). Further errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise Damaged(digest, f"it cannot be read: {error.strerror}") from error


def _compare(digest: str, actual: str) -> None:
    if actual != hex_of(digest):
        raise Damaged(digest, f"its content is sha256:{actual}")
