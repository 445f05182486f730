"""`s3://bucket/prefix`: the objects directly below a prefix, of AWS or of any server with the S3 protocol (`endpoint`).

An object is identified by its listed ETag, size and time. Every range is requested under the ETag, so the read detects
an object replaced during the read. The listing at the end detects any further change.
"""

import contextlib
import hashlib
import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from weft.artifacts.depot_api import ResolveRequest
from weft.artifacts.digest import TEMPLATES_FOLDER, is_file_name
from weft.artifacts.errors import Reason, Refused, Unavailable
from weft.domain.text import quoted
from weft_depot.credentials import Secret
from weft_depot.files import FileFilter
from weft_depot.sources.ranged import open_ranged, trimmed
from weft_depot.sources.retry_policy import RetryPolicy, TransientError
from weft_depot.sources.s3_client import Clients, Endpoints, answer_of, s3_errors
from weft_depot.sources.source import relative_parts

MAX_ENTRIES, MAX_LIST_PAGES = 10_000, 200
PAGE = 250  # entries; a server may give fewer
READ_BYTES = 1 << 20
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)


@dataclass(frozen=True, slots=True)
class Listed:
    """An object, as listed."""

    key: str
    size_bytes: int
    etag: str
    modified: str


@dataclass(frozen=True, slots=True)
class Place:
    """A bucket and a prefix in it. The prefix is empty or ends with a slash."""

    bucket: str
    prefix: str

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


class S3Source:
    """Buckets of the allowed endpoints."""

    accepted_options = frozenset(("endpoint", "credentialsRef"))
    remote = True

    def __init__(self, endpoints: Endpoints, policy: RetryPolicy) -> None:
        self._endpoints, self._policy = endpoints, policy
        self._clients = Clients(policy)

    def host(self, request: ResolveRequest) -> str:
        try:
            return f"s3 {self._endpoints.parse(request.endpoint or None).host}"
        except Refused:
            return "s3 refused"  # ends at once, by the same check

    @contextlib.contextmanager
    def open(
        self, request: ResolveRequest, secret: Secret | None, file_filter: FileFilter
    ) -> Generator["BucketSnapshot"]:
        """Open a prefix. Raises Refused: BadURI, EndpointNotAllowed, SecretInvalid, SourceNotFound, SourceForbidden,
        TooLarge; Unavailable."""
        place, endpoint = parse_path(request.path), self._endpoints.parse(request.endpoint or None)
        with self._clients.client(endpoint, secret) as client:
            yield BucketSnapshot(client, place, self._policy, file_filter)


class BucketSnapshot:
    """Objects of a place, from a listing."""

    marks = None

    def __init__(self, client: Any, place: Place, policy: RetryPolicy, file_filter: FileFilter) -> None:
        """List the place. Raises Refused (SourceNotFound for an empty place), Unavailable."""
        self._client, self._place, self._policy, self._file_filter = client, place, policy, file_filter
        self._objects = self._list()
        self.sizes: Mapping[str, int] = {name: listed.size_bytes for name, listed in self._objects.items()}
        self.expected_sha256: Mapping[str, str] = {}

    @property
    def signature(self) -> str | None:
        """The names, sizes, ETags and times; None if a server gives no ETags."""
        if not all(listed.etag for listed in self._objects.values()):
            return None
        return hashlib.sha256(repr(sorted(self._objects.items())).encode()).hexdigest()

    def open(self, name: str) -> BinaryIO:
        listed, about = self._objects[name], f"{self._place.uri}/{name}"
        if not listed.etag:
            raise Unavailable(f"{about} has no ETag: a change could not be detected")
        return open_ranged(about, listed.size_bytes, partial(self._fetch, listed), self._policy)

    def unchanged(self, _: bool = False, /) -> bool:
        try:
            return self._list() == self._objects
        except Refused:  # it went away
            return False

    @contextlib.contextmanager
    def _fetch(self, listed: Listed, start: int, end: int) -> Generator[Iterator[bytes]]:
        """Fetch the bytes [start, end) of an unchanged object. See `ranged.Fetch`."""
        about = f"s3://{self._place.bucket}/{listed.key}"
        options = {"Range": f"bytes={start}-{end - 1}", "IfMatch": listed.etag}
        with s3_errors(about):
            answer = answer_of(self._client.get_object, Bucket=self._place.bucket, Key=listed.key, **options)
            with answer["Body"] as raw:
                if answer.get("ETag") != listed.etag:
                    raise Refused(Reason.DIGEST_MISMATCH, f"{about} changed while it was read")
                yield trimmed(_chunks(raw, about), start - _first_byte(answer, start), end - start)

    def _list(self) -> dict[str, Listed]:
        """List the selected files, by plain name."""
        return self._policy.retry(f"{self._place.uri} cannot be listed", self._list_once)

    def _list_once(self) -> dict[str, Listed]:
        """List the objects directly below the prefix, and in the only allowed subfolder of an artifact."""
        uri, prefix = self._place.uri, self._place.prefix
        ends, entries = self._policy.now() + self._policy.grace_s, 0
        objects: dict[str, Listed] = {}
        folders = [prefix]
        for folder in folders:  # at most two
            for page in self._pages(folder, ends):
                rows, below = page.get("Contents", []), page.get("CommonPrefixes", [])
                entries += len(rows) + len(below)
                if entries > MAX_ENTRIES:
                    raise Refused(Reason.TOO_LARGE, f"{uri} holds more than {MAX_ENTRIES} entries")
                for listed in map(_listed, rows):
                    name = listed.key.removeprefix(prefix)
                    if is_file_name(name) and self._file_filter(name):
                        objects[name] = listed
                if len(folders) == 1 and {"Prefix": prefix + TEMPLATES_FOLDER} in below:
                    folders.append(prefix + TEMPLATES_FOLDER)
        if not entries:
            raise Refused(Reason.SOURCE_NOT_FOUND, f"{uri}: nothing is below this prefix")
        return objects

    def _pages(self, prefix: str, ends: float) -> Iterator[Any]:
        """Yield the pages of a listing. It has to end in time and within a number of pages."""
        uri = self._place.uri
        query = {"Bucket": self._place.bucket, "Prefix": prefix, "Delimiter": "/"}
        for _ in range(MAX_LIST_PAGES):
            if self._policy.now() > ends:
                raise Unavailable(f"{uri} cannot be listed: it takes more than {self._policy.grace_s:.0f} s")
            with s3_errors(uri):
                page: Any = answer_of(self._client.list_objects_v2, **query, MaxKeys=PAGE)
            yield page
            if not page.get("IsTruncated"):
                return
            query["ContinuationToken"] = page.get("NextContinuationToken")
            if not query["ContinuationToken"]:
                raise TransientError("its listing continues without a token")
        raise Refused(Reason.TOO_LARGE, f"{uri}: its listing has more than {MAX_LIST_PAGES} pages")


def _listed(row: Mapping[str, Any]) -> Listed:
    """Parse an object of a listing. Raises TransientError for an invalid object."""
    key, size_bytes = row.get("Key"), row.get("Size")
    if not key or size_bytes is None or size_bytes < 0:
        raise TransientError("its listing has an object without a key or a size")
    return Listed(key, size_bytes, row.get("ETag") or "", str(row.get("LastModified") or ""))


def parse_path(path: str) -> Place:
    """Parse `//bucket/prefix`. Raises Refused(BadURI)."""
    uri = f"s3:{path}"
    bucket, _, prefix = path.removeprefix("//").removesuffix("/").partition("/")
    if not path.startswith("//") or not _BUCKET.fullmatch(bucket) or ".." in bucket:
        raise Refused(Reason.BAD_URI, f"{quoted(uri, 200)} does not name a bucket; write s3://BUCKET/PREFIX")
    parts = relative_parts(prefix, uri) if prefix else ()
    return Place(bucket, "".join(f"{part}/" for part in parts))


def _chunks(raw: Any, about: str) -> Iterator[bytes]:
    """Yield chunks as they arrive. Each wait is bounded, and a slow server is detected. Raises TransientError."""
    with s3_errors(about):
        while chunk := raw.read1(READ_BYTES):
            yield chunk


def _first_byte(answer: Any, start: int) -> int:
    """Return the position of the body's first byte. A server without ranges sends the complete object."""
    content_range = str(answer.get("ContentRange") or "bytes 0-")
    first = content_range.removeprefix("bytes ").partition("-")[0]
    if not first.isdigit() or int(first) > start:
        raise TransientError("the range differs from the requested range")
    return int(first)
