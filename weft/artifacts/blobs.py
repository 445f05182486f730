"""A content-addressed folder: `ROOT/sha256/<hex>`, each blob whole or not there at all.

A blob is written under `ROOT/partial/`, fsynced, then renamed into place, so a process killed at any point leaves at
most a partial file, never a half-written blob. Blobs never change, so readers need no lock: one that is removed while
it is read stays readable through the open file.

Disks do lose bits, and ends of files. `read`, `manifest` and `verify` compare the content with the digest each time, at
the speed of SHA-256; neither size nor time of a file is taken for its content. `open`, `file` and `path` do not: who
maps a file calls `verify` first, and reads the pages that were verified as long as they stay in memory. What the disk
does to a file that a process has mapped is beyond this.

What a lease has named cannot be removed by `retain` until the lease closes; `retain` and naming exclude each other.
A folder that several processes share (`weft.artifacts.sharing`) keeps what any living one of them has named or retains.
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
    """Blobs by digest below one folder. Methods may be called from any thread.

    The folder has one owning process, or is `shared` by several that all say so.
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
        self._content = object()  # another one whenever blobs come or go
        self._counted: tuple[object, tuple[int, int]] = (None, (0, 0))
        # Who writes the part file of a blob has its lock; an entry lives as long as somebody has or wants it.
        self._downloads: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()

    @property
    def root(self) -> Path:
        return self._root

    def path(self, digest: str) -> Path:
        """The path that the blob has, or would have. Raises BadDigest."""
        return self._blobs / hex_of(digest)

    def names(self) -> set[str]:
        """The hex digests of all blobs here."""
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
        """The whole blob, verified. Raises UnknownDigest, BadDigest, Damaged, Refused(TooLarge)."""
        with self.open(digest) as file, _read_errors(digest):
            raw = file.read(max_bytes + 1)
        if len(raw) > max_bytes:
            self.verify(digest)  # what has grown is damaged
            raise Refused(Reason.TOO_LARGE, f"{digest} is larger than {max_bytes} bytes")
        _compare(digest, hashlib.sha256(raw).hexdigest())
        return raw

    def verify(self, digest: str, size_bytes: int | None = None, *, alone: bool = True) -> None:
        """Read the whole blob and compare it with its digest, and with its size where that is known.

        `alone`: one blob at a time, since each keeps a core busy. Raises UnknownDigest, BadDigest, Damaged.
        """
        turn = self._verifying if alone else contextlib.nullcontext()
        with turn, self.open(digest) as file, _read_errors(digest):
            actual_bytes = os.fstat(file.fileno()).st_size
            if size_bytes not in (None, actual_bytes):
                raise Damaged(digest, f"it has {actual_bytes} bytes instead of {size_bytes}")
            _compare(digest, hashlib.file_digest(file, "sha256").hexdigest())

    def discard(self, digest: str) -> None:
        """Throw away a blob that is damaged. It is removed and not cut: who has mapped it keeps what was there."""
        self.path(digest).unlink(missing_ok=True)
        self._content = object()

    def manifest(self, digest: str) -> Manifest:
        """The manifest of an artifact. Raises UnknownDigest, Damaged, Refused(DigestMismatch: it is no manifest)."""
        return Manifest.from_bytes(self.read(digest, max_bytes=MAX_MANIFEST_BYTES))

    def artifacts(self, kind: Kind) -> list[Digest]:
        """The artifacts of a kind whose manifest is here, the one that was used (`mark_used`) longest ago first."""
        used_artifacts: list[tuple[int, Digest]] = []
        for name in self.names():
            with contextlib.suppress(Refused):  # most blobs are files, whose first bytes tell
                with self.open(from_hex(name)) as file:
                    used_ns, begins = os.fstat(file.fileno()).st_mtime_ns, file.read(len(MANIFEST_BEGINS))
                if begins == MANIFEST_BEGINS and self.manifest(from_hex(name)).kind == kind:
                    used_artifacts.append((used_ns, from_hex(name)))
        return [digest for _, digest in sorted(used_artifacts)]

    def mark_used(self, *digests: str) -> None:
        """Note that these blobs were used now: `artifacts` and `retain` go by that. One that has gone is no error."""
        for digest in digests:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.path(digest))

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
        end of the process; unless another thread is writing it now, then it is one more.
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
        """Open a lease: what it names stays until it closes, whatever `retain` keeps."""
        return Lease(self._leased, self._lock, self._declare_needs)

    def _declare_needs(self) -> None:
        """Write down what this process needs, for the other processes of the folder. The caller holds the lock."""
        if self._sharing:
            self._sharing.needs(Needs(self._leased.keys(), self._retained))

    def part(self, digest: str) -> Path:
        """The file in which a download of this blob gathers; it survives a restart."""
        return self._partial / f"{hex_of(digest)}.part"

    @contextlib.contextmanager
    def download(self, digest: str, waiting: Waiting = lambda: None) -> Generator[Path]:
        """Own the part file of a blob, of a shared folder one that a lease has named: one thread at a time.

        `waiting` is called again and again while another process owns it, and ends that by raising.
        """
        alone = self._sharing.download(hex_of(digest), waiting) if self._sharing else contextlib.nullcontext()
        with self._download(digest), alone:
            yield self.part(digest)

    def _download(self, digest: str) -> threading.Lock:
        with self._lock:
            return self._downloads.setdefault(digest, threading.Lock())

    def publish(self, *files: tuple[Path, Digest]) -> None:
        """Rename whole, fsynced temporary files into place, with one sync of the folder. Twice is harmless."""
        for temporary, digest in files:
            temporary.replace(self.path(digest))
        self._content = object()
        sync_folder(self._blobs)

    def retain(self, digests: Iterable[str]) -> int:
        """Keep these artifacts (manifest and files) and what is leased, remove all else; returns the blobs removed.

        Of a shared folder what no living process needs is removed too, but only until a fifth of the disk is free, and
        what was used longest ago first: the next runner may need it. A digest that is not here is no error: the
        caller's list may be ahead of us.
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
        """Remove the paths one by one, and yield each, until there is room enough."""
        for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns):
            usage = shutil.disk_usage(self._root)
            if usage.free >= usage.total // SPARE:
                return
            path.unlink(missing_ok=True)
            yield path

    def _removing(self) -> contextlib.AbstractContextManager[tuple[Needs, set[str]]]:
        """Lock the folder for removal; gives what the other processes of a shared folder need, and the names of all."""
        return self._sharing.removing() if self._sharing else contextlib.nullcontext((Needs(), set[str]()))

    def clean(self) -> int:
        """At start, remove what a killed process left half-written; returns how many. Downloads stay: they resume."""
        with self._lock, self._removing() as (_, alive):
            owned = tuple(f"tmp-{name}-" for name in alive)
            left = [path for path in self._partial.glob("tmp-*") if not path.name.startswith(owned)]
            for path in left:
                path.unlink(missing_ok=True)
        return len(left)

    def sweep(self, before_unix_s: float) -> int:
        """Remove broken-off downloads that no lease names and whose last byte came before this time (of the files)."""
        removed = 0
        with self._lock:
            at_work = {hex_of(digest) for digest in self._downloads} | set(self._leased)
            for path in self._partial.glob("*.part"):
                if path.stem not in at_work and path.stat().st_mtime < before_unix_s:
                    path.unlink()
                    removed += 1
        return removed

    def usage(self) -> tuple[int, int]:
        """Blobs here and their bytes; counted again when some have come or gone through this object."""
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
            with contextlib.suppress(Refused):  # not here, or a file's blob and no manifest
                keep |= {entry.sha256 for entry in self.manifest(from_hex(name)).files}
        return keep


class Lease:
    """Names blobs that have to stay. Name a digest before asking whether the blob is there. A context manager."""

    def __init__(self, leased: Counter[str], lock: "threading.Lock", changed: Callable[[], None]) -> None:
        self._leased, self._lock, self._changed = leased, lock, changed  # the store's own
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
    """Bytes on their way to a blob. A context manager: without `commit` nothing stays, but a promised beginning."""

    def __init__(self, store: BlobStore, path: Path, download: "threading.Lock | None" = None) -> None:
        """With the lock of a download `path` may hold the beginning of the blob, and is kept when the rest does not
        come."""
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
        """Forget what was there."""
        self._file.truncate(0)
        self._sha256 = hashlib.sha256()
        self.size_bytes = self.resumed_bytes = 0

    def write(self, chunk: bytes) -> None:
        self._file.write(chunk)
        self._sha256.update(chunk)
        self.size_bytes += len(chunk)

    def finish(self) -> Digest:
        """Write the blob to the disk, whole; it may be read at `path` and is not yet visible."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return from_hex(self._sha256.hexdigest())

    def commit(self) -> Digest:
        """Make the blob visible, whole."""
        digest = self.finish()
        self._store.publish((self.path, digest))
        return digest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        finished, full = self._file.closed, kind is not None and issubclass(kind, OSError)
        self._file.close()
        if self._download is None or finished or full:  # whole: published, or not what it was wanted for
            self.path.unlink(missing_ok=True)
        if self._download is not None:
            self._download.release()
            self._download = None


@contextlib.contextmanager
def _read_errors(digest: str) -> Generator[None]:
    """Raise Damaged for what the disk cannot read back; no other error means that."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise Damaged(digest, f"it cannot be read: {error.strerror}") from error


def _compare(digest: str, actual: str) -> None:
    if actual != hex_of(digest):
        raise Damaged(digest, f"its content is sha256:{actual}")
