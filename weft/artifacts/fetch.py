"""Download an artifact from the depot into a blob folder, completely or not at all.

Every SHA-256 is checked, also of local blobs: a damaged copy is discarded and downloaded again. Broken downloads resume
with a range. Retries and pauses are bounded. The functions block: call them from a thread. Two threads may fetch the
same digest into the same folder, as may two processes if it is shared. Each blob is downloaded once.
"""

import contextlib
import hashlib
import http.client
import logging
import os
import ssl
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from weft.artifacts.blobs import BlobStore, Lease
from weft.artifacts.digest import MAX_MANIFEST_BYTES, Digest, FileEntry, Manifest, hex_of, parse_digest
from weft.artifacts.errors import Damaged, Reason, Refused, Unavailable, UnknownDigest
from weft.telemetry.logs import kv
from weft.telemetry.progress import ByteProgress

CONNECT_S = 3.0  # to an address
MISMATCH_HEADER = "weft-mismatch"  # asks the depot to verify its copy: the last download did not match its digest
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits on the cost of a fetch."""

    max_bytes: int = 1 << 42  # of all files together
    tries: int = 6  # per blob; a retry continues the download
    timeout_s: float = 15.0  # of a wait on the network
    pause_s: float = 0.1  # before the second try; doubles, up to `max_pause_s`
    max_pause_s: float = 2.0
    chunk_bytes: int = 1 << 20
    stalled_s: float = 120.0  # the longest time without a byte of a download by another process of a shared folder


class Stopped(Exception):
    """The caller asked to stop. The downloaded bytes are kept for the next fetch."""


def fetch(
    depot_url: str,
    digest: str,
    blobs: BlobStore,
    *,
    limits: FetchLimits | None = None,
    pause: Callable[[float], None] = time.sleep,
    stopping: Callable[[], bool] = lambda: False,
    context: ssl.SSLContext | None = None,
    on_damaged: Callable[[], None] = lambda: None,
    threads: int = 1,
    progress: ByteProgress | None = None,
    lease: Lease | None = None,
) -> Manifest:
    """Download the missing parts of `digest`. Files are then at `blobs.file(manifest, name)`. Return the manifest.

    `context` is for an https:// depot. `on_damaged` is called for each local blob that did not match its digest.
    `threads` is the number of threads that compare and download files, each a file at a time. A single thread leaves
    cores to a serving process. `lease` names all blobs before they are looked up, and stays open for readers of a
    folder cleared by other processes. `progress` counts the bytes compared or downloaded. The manifest's blob becomes
    visible last: `blobs.has(digest)` means that every file is there. OSError of the local disk passes through.

    Raises BadDigest, UnknownDigest (the depot does not have it), Refused(DigestMismatch: not a manifest, TooLarge),
    Unavailable (retries used up, also if the depot's copy stayed damaged), Stopped.
    """
    limits = limits or FetchLimits()
    depot, artifact = _Depot(depot_url, limits.timeout_s, context), parse_digest(digest)
    progress = progress or ByteProgress()
    download = _Download(depot, artifact, blobs, limits, pause, stopping, on_damaged, progress, alone=threads == 1)
    with blobs.lease() if lease is None else contextlib.nullcontext(lease) as named:
        named.name(artifact)
        manifest = download.manifest()
        named.name(*(entry.digest for entry in manifest.files))
        if manifest.size_bytes > limits.max_bytes:
            problem = f"{artifact} has {manifest.size_bytes} bytes, the limit here is {limits.max_bytes}"
            raise Refused(Reason.TOO_LARGE, problem)
        progress.begin("fetching", manifest.size_bytes)
        if threads == 1:
            for entry in manifest.files:
                download.file(entry)
        else:  # the first error is raised once the current files have ended
            with ThreadPoolExecutor(threads, thread_name_prefix="fetch") as pool:
                list(pool.map(download.file, manifest.files))
        if not blobs.has(artifact):
            blobs.put(manifest.to_bytes())
    return manifest


class _Broken(Exception):
    """A failed try. A retry may succeed."""


@dataclass(frozen=True, slots=True)
class _Download:
    depot: "_Depot"
    artifact: Digest
    blobs: BlobStore
    limits: FetchLimits
    pause: Callable[[float], None]
    stopping: Callable[[], bool]
    on_damaged: Callable[[], None]
    progress: ByteProgress
    alone: bool  # compare a single blob of the store at a time
    mismatched: set[str] = field(default_factory=set[str])  # blobs received completely with wrong content

    def manifest(self) -> Manifest:
        """Read the local manifest, or download it. The downloaded manifest is not yet visible."""
        with self._unless_damaged("manifest", self.artifact):
            return self.blobs.manifest(self.artifact)
        with self.blobs.download(self.artifact, self._other_source(self.artifact)) as part:
            with self._unless_damaged("manifest", self.artifact):  # another process may have finished the download
                return self.blobs.manifest(self.artifact)
            self._tries(self.artifact, lambda: self._resume(part, self.artifact, None))
            manifest = Manifest.from_bytes(part.read_bytes())
            part.unlink()
        return manifest

    def file(self, entry: FileEntry) -> None:
        """Download a file of the artifact unless it is here, complete and visible."""
        self._check_stopping()  # verifying a large file takes seconds
        digest = entry.digest
        with contextlib.suppress(UnknownDigest, Damaged):  # many may verify at once; only the lock's holder discards
            self._verify(entry)
            return
        with self.blobs.download(digest, self._other_source(digest)) as part:
            with self._unless_damaged(entry.name, digest):
                self._verify(entry)
                return
            self._tries(digest, lambda: self._resume(part, digest, entry.size_bytes))
            self.blobs.publish((part, digest))

    def _verify(self, entry: FileEntry) -> None:
        """Check a local file. Raises UnknownDigest, Damaged."""
        self.blobs.verify(entry.digest, entry.size_bytes, alone=self.alone)
        self.progress.add(entry.size_bytes)

    def _other_source(self, digest: Digest) -> Callable[[], None]:
        """Return the function to call while another process downloads. It pauses as long as bytes arrive. It raises
        Unavailable, Stopped."""
        part, had, idle_s = self.blobs.part(digest), -1, 0.0

        def wait() -> None:
            nonlocal had, idle_s
            self._check_stopping()
            have = _size(part)
            idle_s = 0.0 if have != had else idle_s + self.limits.pause_s
            if idle_s >= self.limits.stalled_s:
                problem = f"another process has held it for {self.limits.stalled_s:g} s without a new byte"
                raise Unavailable(f"{digest} from {self.depot.url}: {problem}")
            had = have
            self.pause(self.limits.pause_s)

        return wait

    @contextlib.contextmanager
    def _unless_damaged(self, name: str, digest: Digest) -> Generator[None]:
        """Ignore a missing blob. Discard a damaged blob, and before it the manifest."""
        try:
            yield
        except UnknownDigest:
            pass
        except Damaged as error:
            self.blobs.discard(self.artifact)
            self.blobs.discard(digest)
            fields = kv(file=name, digest=digest, artifact=self.artifact, difference=error.difference)
            log.error("damaged file thrown away", extra=fields)
            self.on_damaged()

    def _tries(self, digest: Digest, attempt: Callable[[], None]) -> None:
        pause_s = self.limits.pause_s
        for left in reversed(range(self.limits.tries)):
            self._check_stopping()
            try:
                return attempt()
            except _Broken as error:
                log.warning("download broke", extra=kv(digest=digest, error=error, tries_left=left))
                if not left:
                    raise Unavailable(f"{digest} from {self.depot.url}: {error}") from error
            self.pause(pause_s)
            pause_s = min(pause_s * 2, self.limits.max_pause_s)
        raise AssertionError("tries is at least 1")

    def _resume(self, part: Path, digest: Digest, size_bytes: int | None) -> None:
        """Complete the file `part`, fsynced and checked. `size_bytes` is None for a manifest."""
        limit = MAX_MANIFEST_BYTES if size_bytes is None else size_bytes
        with part.open("ab") as file:
            have = file.tell()
            if have > limit or size_bytes is None:
                file.truncate(0)
                have = 0
            if have != size_bytes:
                self._append(file, digest, have, limit)
            os.fsync(file.fileno())
        self._check_content(part, digest, size_bytes, resumed_bytes=have)

    def _append(self, file: BinaryIO, digest: Digest, have: int, limit: int) -> None:
        with self.depot.get(f"/v1/blobs/{digest}", start=have, mismatched=digest in self.mismatched) as response:
            if response.status == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                file.truncate(0)
                self.mismatched.add(digest)
                raise _Broken(f"the depot's copy ends before byte {have}")
            if have and response.status == http.HTTPStatus.OK:  # ranges are not supported: restart
                file.truncate(0)
                have = 0
            self.progress.add(have)
            for chunk in _chunks(response, self.limits.chunk_bytes):
                have += len(chunk)
                self.progress.add(len(chunk))
                if have > limit:
                    raise Refused(Reason.TOO_LARGE, f"the depot sends more than the {limit} bytes of {digest}")
                file.write(chunk)
                self._check_stopping()
            file.flush()

    def _check_content(self, part: Path, digest: Digest, size_bytes: int | None, *, resumed_bytes: int) -> None:
        if size_bytes is not None and part.stat().st_size < size_bytes:
            raise _Broken(f"ended at {part.stat().st_size} of {size_bytes} bytes")
        with part.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != hex_of(digest):
            part.unlink()
            if resumed_bytes:
                raise _Broken(f"the {resumed_bytes} local bytes, or the downloaded bytes, are damaged")
            self.mismatched.add(digest)
            raise _Broken(f"the depot sent content of sha256:{actual}")

    def _check_stopping(self) -> None:
        if self.stopping():
            raise Stopped


class _Connection(http.client.HTTPConnection):
    """A connection that soon tries the depot's next address, since the address of a lost machine does not answer."""

    def connect(self) -> None:
        timeout_s = self.timeout
        self.timeout = CONNECT_S if timeout_s is None else min(timeout_s, CONNECT_S)
        super().connect()
        self.sock.settimeout(timeout_s)


class _TlsConnection(http.client.HTTPSConnection, _Connection):
    """A connection whose TLS handshake has the full timeout."""


class _Depot:
    """The HTTP client of a depot."""

    def __init__(self, url: str, timeout_s: float, context: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Refused(Reason.BAD_URI, f"the depot's URL {url[:200]!r} is not http://HOST:PORT")
        self.url, self._parts, self._timeout_s, self._context = url, parts, timeout_s, context

    @contextlib.contextmanager
    def get(self, path: str, *, start: int, mismatched: bool) -> Generator[http.client.HTTPResponse]:
        """Request a path. Yield a response with content, or 416. Raises _Broken, UnknownDigest, Refused."""
        connection = self._connection()
        headers = {"Range": f"bytes={start}-"} if start else {}
        if mismatched:
            headers[MISMATCH_HEADER] = "1"
        try:
            with _network():
                connection.request("GET", path, headers=headers)
                response = connection.getresponse()
            with contextlib.closing(response):  # it owns the socket if the server closes the connection
                self._check_status(response, path)
                yield response
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        host, port, timeout_s = self._parts.hostname, self._parts.port, self._timeout_s
        assert host
        if self._parts.scheme == "https":
            return _TlsConnection(host, port, timeout=timeout_s, context=self._context)
        return _Connection(host, port, timeout=timeout_s)

    def _check_status(self, response: http.client.HTTPResponse, path: str) -> None:
        match response.status:
            case 200 | 206 | 416:
                return
            case 404:
                raise UnknownDigest(path.rpartition("/")[2], f"the depot at {self.url}")
            case status if status >= 500 or status in (408, 429):
                raise _Broken(f"status {status}")
            case status:
                raise Refused(Reason.SOURCE_UNREACHABLE, f"{self.url}{path} answered {status} {response.reason}")


def _chunks(response: http.client.HTTPResponse, chunk_bytes: int) -> Iterator[bytes]:
    while True:
        with _network():
            chunk = response.read(chunk_bytes)
        if not chunk:
            return
        yield chunk


@contextlib.contextmanager
def _network() -> Generator[None]:
    """Turn errors of the network into _Broken. Errors of the local disk are raised outside this block."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(f"{type(error).__name__}: {error}") from error


def _size(part: Path) -> int:
    """Return the bytes of a file, or 0 if it is missing, as after a rename."""
    try:
        return part.stat().st_size
    except FileNotFoundError:
        return 0
