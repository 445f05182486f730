"""`https://HOST/FOLDER`: the files of a folder on an allowed web server.

Web servers have neither listings nor versions. Each possible name of an artifact's file is requested separately. The
resource names the content by its `digest`.
"""

import contextlib
import hashlib
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, cast
from urllib.parse import quote, unquote

import httpx2

from weft.artifacts.depot_api import ResolveRequest
from weft.artifacts.digest import is_file_name
from weft.artifacts.errors import ArtifactError, Reason, Refused, Unavailable
from weft.domain.strict_json import JsonError, parse_object
from weft.domain.text import quoted
from weft_depot.artifact_layout import MAX_TEXT_BYTES, MAX_WEIGHT_FILES, MODEL_INDEX, NAMED_FILES
from weft_depot.credentials import Secret
from weft_depot.files import FileFilter
from weft_depot.sources.http import AGAIN, Origin, SourceHttp, byte_range, range_of, retry_after, size_of, too_many
from weft_depot.sources.ranged import open_ranged
from weft_depot.sources.retry_policy import RetryPolicy, TransientError
from weft_depot.sources.source import relative_parts


@dataclass(frozen=True, slots=True)
class WebFile:
    """A file, as described by the server. `etag`: identifies its content; empty: the server does not say."""

    url: str
    size_bytes: int
    etag: str


class HttpsSource:
    """Folders of the allowed servers."""

    accepted_options = frozenset[str]()
    remote = True

    def __init__(self, hosts: tuple[str, ...], policy: RetryPolicy) -> None:
        """`hosts`: HOST or HOST:PORT; `*.DOMAIN` is every host below a domain."""
        self._hosts, self._policy, self._http = hosts, policy, SourceHttp(policy)

    def host(self, request: ResolveRequest) -> str:
        return f"https {request.path.removeprefix('//').partition('/')[0].lower()[:253]}"

    @contextlib.contextmanager
    def open(self, request: ResolveRequest, _: Secret | None, file_filter: FileFilter, /) -> Generator["WebSnapshot"]:
        """Open a folder. Raises Refused: BadURI, EndpointNotAllowed, SourceNotFound, SourceForbidden, TooLarge;
        Unavailable."""
        url = folder_url(request.path)
        host = url.removeprefix("https://").partition("/")[0]
        if not any(_allows(entry.lower(), host.lower()) for entry in self._hosts):
            allowed = ", ".join(self._hosts)
            reason = f"the server {quoted(host, 200)} is not allowed here; allowed: {allowed}"
            raise Refused(Reason.ENDPOINT_NOT_ALLOWED, f"{reason} (--https-hosts of the depot)")
        yield WebSnapshot(WebFolder(self._http, Origin(f"https://{host}", host), url), self._policy, file_filter)


class WebSnapshot:
    """The files of the folder at the time of the opening."""

    marks = None
    expected_sha256: Mapping[str, str] = {}

    def __init__(self, folder: "WebFolder", policy: RetryPolicy, file_filter: FileFilter) -> None:
        self._folder, self._policy = folder, policy
        names = [name for name in sorted(NAMED_FILES) if file_filter(name)]
        self._files = self._described(names)
        if MODEL_INDEX in self._files:
            self._files |= self._described(self._shards(file_filter))
        if not self._files:
            raise Refused(Reason.SOURCE_NOT_FOUND, f"{folder.url} has none of {', '.join(names)}")
        self.sizes: Mapping[str, int] = {name: file.size_bytes for name, file in self._files.items()}

    @property
    def signature(self) -> str | None:
        """Names, sizes and entity tags; None if a file has no strong tag."""
        if any(not file.etag or file.etag.startswith("W/") for file in self._files.values()):
            return None
        return hashlib.sha256(repr(sorted(self._files.items())).encode()).hexdigest()

    def open(self, name: str) -> BinaryIO:
        file = self._files[name]
        return open_ranged(file.url, file.size_bytes, partial(self._folder.fetch, file), self._policy)

    def unchanged(self, _: bool = False, /) -> bool:
        return True  # changed content does not match the requested digest

    def _described(self, names: list[str]) -> dict[str, WebFile]:
        files = {
            name: self._policy.retry(f"{self._folder.url}{name}", partial(self._folder.describe, name))
            for name in names
        }
        return {name: file for name, file in files.items() if file}

    def _shards(self, file_filter: FileFilter) -> list[str]:
        """List the weights named by a model's index. Raises Refused: ConfigInvalid, TooLarge."""
        with self.open(MODEL_INDEX) as file:
            raw = file.read(MAX_TEXT_BYTES + 1)
        try:
            weight_map = parse_object(raw, max_bytes=MAX_TEXT_BYTES).get("weight_map")
        except JsonError as error:
            raise Refused(Reason.CONFIG_INVALID, f"{MODEL_INDEX}: {error}") from error
        values = cast("dict[str, Any]", weight_map).values() if isinstance(weight_map, dict) else ()
        names = {str(name) for name in values}
        if len(names) > MAX_WEIGHT_FILES:
            raise Refused(Reason.TOO_LARGE, f"{MODEL_INDEX} names {len(names)} files, the limit is {MAX_WEIGHT_FILES}")
        return sorted(name for name in names if is_file_name(name) and file_filter(name))


@dataclass(frozen=True, slots=True)
class WebFolder:
    """A folder's URL, with a slash at its end, and the client for it."""

    _http: SourceHttp
    _origin: Origin
    url: str

    def describe(self, name: str) -> WebFile | None:
        """Request the description of a file. Return None if it does not exist. Raises TransientError, Refused,
        Unavailable."""
        url = f"{self.url}{name}"
        try:
            with self._http.get(url, byte_range(0, 1), self._origin, _meaning) as response:
                size = size_of(response)
                if size is None:
                    raise Unavailable(f"{url}: the server does not say how large it is")
                return WebFile(url, size, response.headers.get("etag", "")[:1000])
        except _Absent:
            return None

    @contextlib.contextmanager
    def fetch(self, file: WebFile, start: int, end: int) -> Generator[Iterator[bytes]]:
        """Fetch the bytes [start, end). See `ranged.Fetch`."""
        with self._http.get(file.url, byte_range(start, end), self._origin, _meaning) as response:
            yield range_of(response, file.size_bytes, start, end)


class _Absent(Refused):
    """The server answered 404 or 410."""

    def __init__(self, url: str) -> None:
        super().__init__(Reason.SOURCE_NOT_FOUND, f"{url} is not there")


def folder_url(path: str) -> str:
    """Return the URL of `//HOST[:PORT]/FOLDER`, with a slash at the end. Raises Refused(BadURI)."""
    uri = f"https:{path}"
    host, _, folder = path.removeprefix("//").partition("/")
    folder = unquote(folder.removesuffix("/"))
    try:
        base = httpx2.URL(f"https://{host}/")
        usable = (
            path.startswith("//") and bool(base.host) and not base.userinfo and base.netloc.decode() == host.lower()
        )
    except httpx2.InvalidURL:
        usable = False
    if not usable or any(sign in folder for sign in "?#%"):
        raise Refused(Reason.BAD_URI, f"{quoted(uri, 200)} is not a folder; write https://HOST/FOLDER, without a query")
    parts = relative_parts(folder, uri) if folder else ()
    return f"https://{host.lower()}/" + "".join(f"{quote(part)}/" for part in parts)


def _meaning(response: httpx2.Response) -> ArtifactError | TransientError:
    status, url = response.status_code, str(response.url.copy_with(query=None))
    if status in (404, 410):
        return _Absent(url)
    if status == 429:
        return too_many(url, retry_after(response))
    if status == 416 or status not in AGAIN:
        return Refused(
            Reason.SOURCE_FORBIDDEN if status in (401, 403) else Reason.SOURCE_NOT_FOUND, f"{url} answered {status}"
        )
    return TransientError(f"status {status}")


def _allows(entry: str, host: str) -> bool:
    return entry == host or (entry.startswith("*.") and host.endswith(entry[1:]) and ":" not in host)
