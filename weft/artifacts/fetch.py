"""Take an artifact from the depot into a blob folder, whole or not at all.

Every SHA-256 is checked, also of what is here already: a damaged copy is thrown away and downloaded again. Broken
downloads resume with a range, tries and pauses are bounded. Blocking: call it from a thread. Two threads may fetch the
same digest into the same folder, and so may two processes where it is shared; each blob is downloaded once.
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

CONNECT_S = 3.0  # to one address
MISMATCH_HEADER = "weft-mismatch"  # asks the depot to verify its copy: the last download did not match its digest
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """What a fetch may cost."""

    max_bytes: int = 1 << 42  # of all files together
    tries: int = 6  # per blob; what an earlier try has downloaded is not downloaded again
    timeout_s: float = 15.0  # of one wait on the network
    pause_s: float = 0.1  # before the second try; doubles, up to `max_pause_s`
    max_pause_s: float = 2.0
    chunk_bytes: int = 1 << 20
    stalled_s: float = 120.0  # so long another process may hold a download of a shared folder without a byte of it


class Stopped(Exception):
    """The caller asked to stop; what was downloaded is kept for the next time."""


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
    """Download manifest and files of `digest` unless they are here; files are then at `blobs.file(manifest, name)`.

    `context` is for an https:// depot; `on_damaged` is called for each blob here that did not match its digest.
    `threads` is how many compare and download files, each a file at a time; one alone leaves cores to whoever serves.
    `lease` names all of it before it is looked for, and stays open for whoever reads the files of a folder that others
    clear. `progress` counts the bytes that are compared or downloaded. The manifest's blob is made visible last:
    `blobs.has(digest)` means that every file is there. Raises BadDigest, UnknownDigest (the depot does not have it),
    Refused(DigestMismatch: it is no manifest, TooLarge), Unavailable (tries used up, also where the depot's copy stayed
    damaged), Stopped; OSError of the local disk passes through.
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
        else:  # the first error ends it, once the files under way have ended
            with ThreadPoolExecutor(threads, thread_name_prefix="fetch") as pool:
                list(pool.map(download.file, manifest.files))
        if not blobs.has(artifact):
            blobs.put(manifest.to_bytes())
    return manifest


class _Broken(Exception):
    """One try failed in a way that another may not."""


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
    alone: bool  # one blob of the store is compared at a time
    mismatched: set[str] = field(default_factory=set[str])  # whose content came whole and was another

    def manifest(self) -> Manifest:
        """Read the manifest that is here, else the depot's, which is not yet visible."""
        with self._unless_damaged("manifest", self.artifact):
            return self.blobs.manifest(self.artifact)
        with self.blobs.download(self.artifact, self._another(self.artifact)) as part:
            with self._unless_damaged("manifest", self.artifact):  # another process has brought it meanwhile
                return self.blobs.manifest(self.artifact)
            self._tries(self.artifact, lambda: self._resume(part, self.artifact, None))
            manifest = Manifest.from_bytes(part.read_bytes())
            part.unlink()
        return manifest

    def file(self, entry: FileEntry) -> None:
        """Bring one file of the artifact, whole and visible."""
        self._check_stopping()  # verifying a large one takes seconds
        digest = entry.digest
        with contextlib.suppress(UnknownDigest, Damaged):  # many may verify at once; one alone throws away
            self._verify(entry)
            return
        with self.blobs.download(digest, self._another(digest)) as part:
            with self._unless_damaged(entry.name, digest):
                self._verify(entry)
                return
            self._tries(digest, lambda: self._resume(part, digest, entry.size_bytes))
            self.blobs.publish((part, digest))

    def _verify(self, entry: FileEntry) -> None:
        """Check a file that is here. Raises UnknownDigest, Damaged."""
        self.blobs.verify(entry.digest, entry.size_bytes, alone=self.alone)
        self.progress.add(entry.size_bytes)

    def _another(self, digest: Digest) -> Callable[[], None]:
        """Make the function that is called while another process downloads: it pauses, as long as bytes come. It raises
        Unavailable, Stopped."""
        part, had, idle_s = self.blobs.part(digest), -1, 0.0

        def wait() -> None:
            nonlocal had, idle_s
            self._check_stopping()
            have = _size(part)
            idle_s = 0.0 if have != had else idle_s + self.limits.pause_s
            if idle_s >= self.limits.stalled_s:
                problem = f"another process has held it for {self.limits.stalled_s:g} s without a byte more"
                raise Unavailable(f"{digest} from {self.depot.url}: {problem}")
            had = have
            self.pause(self.limits.pause_s)

        return wait

    @contextlib.contextmanager
    def _unless_damaged(self, name: str, digest: Digest) -> Generator[None]:
        """Pass over a blob that is not here. Throw away a damaged one, and before it the manifest."""
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
        """Bring `part` to the whole blob, fsynced and checked; `size_bytes` is None for a manifest."""
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
            if have and response.status == http.HTTPStatus.OK:  # no range taken: from the start again
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
                raise _Broken(f"the {resumed_bytes} bytes that were here of it, or those that came, are damaged")
            self.mismatched.add(digest)
            raise _Broken(f"the depot sent content of sha256:{actual}")

    def _check_stopping(self) -> None:
        if self.stopping():
            raise Stopped


class _Connection(http.client.HTTPConnection):
    """A connection that soon tries the depot's next address: that of a lost machine does not answer."""

    def connect(self) -> None:
        timeout_s = self.timeout
        self.timeout = CONNECT_S if timeout_s is None else min(timeout_s, CONNECT_S)
        super().connect()
        self.sock.settimeout(timeout_s)


class _TlsConnection(http.client.HTTPSConnection, _Connection):
    """A connection whose TLS handshake has the whole time."""


class _Depot:
    """The depot's HTTP side."""

    def __init__(self, url: str, timeout_s: float, context: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Refused(Reason.BAD_URI, f"the depot's URL {url[:200]!r} is not http://HOST:PORT")
        self.url, self._parts, self._timeout_s, self._context = url, parts, timeout_s, context

    @contextlib.contextmanager
    def get(self, path: str, *, start: int, mismatched: bool) -> Generator[http.client.HTTPResponse]:
        """Ask for a path; gives a response with content, or 416. Raises _Broken, UnknownDigest, Refused."""
        connection = self._connection()
        headers = {"Range": f"bytes={start}-"} if start else {}
        if mismatched:
            headers[MISMATCH_HEADER] = "1"
        try:
            with _network():
                connection.request("GET", path, headers=headers)
                response = connection.getresponse()
            with contextlib.closing(response):  # it has the socket where the server closes the connection
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
    """Turn errors of the network into _Broken; those of the local disk are raised elsewhere."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(f"{type(error).__name__}: {error}") from error


def _size(part: Path) -> int:
    """The bytes of a file; 0 if there is none, also where it was renamed a moment ago."""
    try:
        return part.stat().st_size
    except FileNotFoundError:
        return 0
