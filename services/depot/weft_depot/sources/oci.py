"""`oci://HOST/REPOSITORY[:TAG][@sha256:HEX]`: the files of an image manifest in a registry, as `oras push` writes them.

Each layer is a file. Its name is the layer's annotation `org.opencontainers.image.title` (ORAS' layout). A tag is
resolved to a manifest once for each snapshot, and everything is read under the manifest's digests. Protocol: the OCI
distribution specification 1.1. Authentication: the token flow of Docker's registry, or Basic.
"""

import base64
import binascii
import contextlib
import hashlib
import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, cast

import httpx2

from weft.artifacts.depot_api import ResolveRequest
from weft.artifacts.digest import MAX_FILE_BYTES, is_file_name
from weft.artifacts.errors import ArtifactError, Reason, Refused, Unavailable
from weft.domain.strict_json import JsonError, parse_object
from weft.domain.text import quoted
from weft_depot.credentials import Secret
from weft_depot.files import FileFilter
from weft_depot.sources.http import AGAIN, Origin, SourceHttp, byte_range, range_of, retry_after, too_many
from weft_depot.sources.ranged import open_ranged
from weft_depot.sources.retry_policy import RetryPolicy, TransientError

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
TITLE = "org.opencontainers.image.title"
DOCKER_CONFIG = ".dockerconfigjson"  # the key of Secrets of type kubernetes.io/dockerconfigjson
MAX_MANIFEST_BYTES = 4 << 20  # the limit of registries
MAX_TOKEN_BYTES = 64 << 10
MAX_IMAGE_LAYERS = 10_000
_NAME = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"//(?P<host>[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{{1,5}})?)/(?P<repository>{_NAME}(?:/{_NAME})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)
_SHA256 = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)
_CHALLENGE = re.compile(r'([a-z]+)="([^"]{0,2000})"', re.ASCII)
_DOCKER_HUB = {"docker.io": "registry-1.docker.io"}  # common name: actual host


@dataclass(frozen=True, slots=True)
class Reference:
    """The tag or digest of a repository in a URI, `latest` if it has neither."""

    host: str
    repository: str
    tag: str | None
    digest: str | None

    @property
    def uri(self) -> str:
        tag, digest = f":{self.tag}" if self.tag else "", f"@{self.digest}" if self.digest else ""
        return f"oci://{self.host}/{self.repository}{tag}{digest}"

    @property
    def version(self) -> str:
        return self.digest or self.tag or "latest"


@dataclass(frozen=True, slots=True)
class FileLayer:
    """A file: the digest and the size of its content."""

    sha256: str
    size_bytes: int


class OciSource:
    """Repositories of the allowed registries."""

    accepted_options = frozenset(("credentialsRef",))
    remote = True

    def __init__(self, registries: tuple[str, ...], policy: RetryPolicy) -> None:
        """`registries`: HOST, HOST:PORT or a URL (http:// without TLS)."""
        self._policy, self._http = policy, SourceHttp(policy)
        self._origins: dict[str, Origin] = {}
        for entry in registries:
            scheme, _, host = entry.rpartition("://")
            url = f"{scheme or 'https'}://{_DOCKER_HUB.get(host, host)}"
            self._origins[host.lower()] = Origin(url, f"oci: {host}")

    def host(self, request: ResolveRequest) -> str:
        try:
            return f"oci {parse_reference(request.path).host.lower()}"
        except Refused:
            return "oci refused"  # ends at once, by the same check

    @contextlib.contextmanager
    def open(self, request: ResolveRequest, secret: Secret | None, file_filter: FileFilter) -> Generator["OciSnapshot"]:
        """Open a manifest. Raises Refused: BadURI, EndpointNotAllowed, SecretInvalid, SourceNotFound, SourceForbidden,
        TooLarge, MissingFile; Unavailable."""
        reference = parse_reference(request.path)
        origin = self._origins.get(reference.host.lower())
        if origin is None:
            allowed = ", ".join(sorted(self._origins)) or "none"
            reason = f"the registry {quoted(reference.host, 200)} is not allowed here; allowed: {allowed}"
            raise Refused(Reason.ENDPOINT_NOT_ALLOWED, f"{reason} (--oci-registries of the depot)")
        keys = basic_credentials(secret, reference.host)
        yield OciSnapshot(Repository(self._http, origin, reference, keys), self._policy, file_filter)


class OciSnapshot:
    """The files of a manifest. They never change."""

    marks = None

    def __init__(self, repository: "Repository", policy: RetryPolicy, file_filter: FileFilter) -> None:
        self._repository, self._policy = repository, policy
        about = repository.reference.uri
        raw = policy.retry(about, repository.manifest)
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        if repository.reference.digest not in (None, digest):
            raise Unavailable(f"{about}: the registry sent a manifest with the digest {digest}")
        self.signature: str | None = digest
        self._layers = parse_manifest(raw, file_filter, about)
        self.sizes: Mapping[str, int] = {name: layer.size_bytes for name, layer in self._layers.items()}
        self.expected_sha256: Mapping[str, str] = {name: layer.sha256 for name, layer in self._layers.items()}

    def open(self, name: str) -> BinaryIO:
        layer, about = self._layers[name], f"{self._repository.reference.uri} {name}"
        return open_ranged(about, layer.size_bytes, partial(self._repository.blob, layer), self._policy)

    def unchanged(self, _: bool = False, /) -> bool:
        return True  # a manifest does not change


@dataclass(slots=True)
class Repository:
    """A repository with the rights of a caller. `keys`: Basic credentials; empty: none."""

    _http: SourceHttp
    _origin: Origin
    reference: Reference
    _keys: str = field(repr=False)
    _authorization: str = field(default="", init=False, repr=False)

    def manifest(self) -> bytes:
        """Read the manifest. Raises Refused, Unavailable, TransientError."""
        with self._get(f"manifests/{self.reference.version}", {"Accept": MANIFEST}) as response:
            return self._http.body(response, MAX_MANIFEST_BYTES, f"the manifest of {self.reference.uri}")

    @contextlib.contextmanager
    def blob(self, layer: FileLayer, start: int, end: int) -> Generator[Iterator[bytes]]:
        """Fetch the bytes [start, end) of a layer. See `ranged.Fetch`."""
        with self._get(f"blobs/sha256:{layer.sha256}", byte_range(start, end)) as response:
            yield range_of(response, layer.size_bytes, start, end)

    @contextlib.contextmanager
    def _get(self, path: str, headers: Mapping[str, str]) -> Generator[httpx2.Response]:
        """Make a request with the authorization that the registry asks for. The authorization is reused until it is
        refused."""
        repository = self.reference.repository
        if self._origin.url.endswith("//" + _DOCKER_HUB["docker.io"]) and "/" not in repository:
            repository = f"library/{repository}"
        url = f"{self._origin.url}/v2/{repository}/{path}"
        with contextlib.ExitStack() as stack:
            try:
                response = stack.enter_context(self._http.get(url, self._headers(headers), self._origin, self._meaning))
            except _Unauthorized as first:
                self._authorization = self._authorize(first.challenge)
                try:
                    response = stack.enter_context(
                        self._http.get(url, self._headers(headers), self._origin, self._meaning)
                    )
                except _Unauthorized:
                    raise self._forbidden() from None
            yield response

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        return {**headers, "Authorization": self._authorization} if self._authorization else {**headers}

    def _authorize(self, challenge: str) -> str:
        """Return the Authorization for a `WWW-Authenticate` header. Raises Refused(SourceForbidden), TransientError."""
        scheme, _, rest = challenge.strip().partition(" ")
        if scheme.lower() == "basic" and self._keys:
            return self._keys
        parameters = dict(_CHALLENGE.findall(rest)) if scheme.lower() == "bearer" else {}
        if "realm" not in parameters:
            raise self._forbidden()
        try:
            query = {name: parameters[name] for name in ("service", "scope") if name in parameters}
            url = str(httpx2.URL(parameters["realm"]).copy_merge_params(query))
        except (httpx2.InvalidURL, ValueError):
            raise self._forbidden() from None
        headers = {"Authorization": self._keys} if self._keys else {}
        try:
            with self._http.get(url, headers, self._origin, self._meaning) as response:
                answer = parse_object(
                    self._http.body(response, MAX_TOKEN_BYTES, "the registry's token"), max_bytes=MAX_TOKEN_BYTES
                )
        except _Unauthorized:
            raise self._forbidden() from None
        except JsonError as error:
            raise TransientError("the registry's token is not JSON") from error
        token = answer.get("token") or answer.get("access_token")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise TransientError("the registry's answer has no token")
        return f"Bearer {token}"

    def _meaning(self, response: httpx2.Response) -> "ArtifactError | TransientError | _Unauthorized":
        status, about = response.status_code, f"{self.reference.uri}"
        if status == 401:
            return _Unauthorized(response.headers.get("www-authenticate", "")[:4096])
        if status == 429:
            return too_many(about, retry_after(response))
        if status in AGAIN:
            return TransientError(f"status {status}")
        if status == 403:
            return self._forbidden()
        return Refused(Reason.SOURCE_NOT_FOUND, f"{about}: the registry answered {status}; correct the URI")

    def _forbidden(self) -> Refused:
        remedy = "give the Secret of credentialsRef credentials with the right to pull"
        if not self._keys:
            remedy = "then name a Secret with credentials in credentialsRef"
        reason = f"{self.reference.uri} does not exist, or is private: {remedy}"
        return Refused(Reason.SOURCE_FORBIDDEN, reason)


class _Unauthorized(TransientError):
    """The registry answered 401, with its challenge."""

    def __init__(self, challenge: str) -> None:
        super().__init__("not authorized")
        self.challenge = challenge


def parse_reference(path: str) -> Reference:
    """Parse `//HOST/REPOSITORY...`. Raises Refused(BadURI)."""
    match = _REFERENCE.fullmatch(path)
    if match is None:
        reason = f"{quoted(f'oci:{path}', 200)} does not name a repository; write oci://HOST/REPOSITORY:TAG"
        raise Refused(Reason.BAD_URI, reason)
    return Reference(**match.groupdict())


def parse_manifest(raw: bytes, file_filter: FileFilter, about: str) -> dict[str, FileLayer]:
    """Read the selected files, by plain name.

    Raises Refused: MissingFile if no layer has a name, TooLarge, ConfigInvalid if it is not an image manifest.
    """
    try:
        value = parse_object(raw, max_bytes=MAX_MANIFEST_BYTES)
    except JsonError as error:
        raise Refused(Reason.CONFIG_INVALID, f"{about}: the manifest is not JSON: {error}") from error
    layers = value.get("layers")
    if not isinstance(layers, list):
        media_type = quoted(value.get("mediaType", "of an unknown type"), 100)
        raise Refused(
            Reason.CONFIG_INVALID, f"{about} is {media_type}; expected an image manifest with layers ({MANIFEST})"
        )
    rows = cast("list[Any]", layers)
    if len(rows) > MAX_IMAGE_LAYERS:
        raise Refused(Reason.TOO_LARGE, f"{about} has {len(rows)} layers, the limit is {MAX_IMAGE_LAYERS}")
    named = [(title, row) for row in rows if (title := _title(row))]
    if not named:
        reason = f"{about}: no layer has a file name ({TITLE}); push the files with `oras push`"
        raise Refused(Reason.MISSING_FILE, reason)
    files: dict[str, FileLayer] = {}
    for title, row in named:
        if not is_file_name(title) or not file_filter(title):
            continue
        if title in files:
            raise Refused(Reason.CONFIG_INVALID, f"{about}: two layers are the file {title}")
        files[title] = _layer(row, about)
    return files


def _title(row: Any) -> str:
    annotations = cast("dict[str, Any]", row).get("annotations") if isinstance(row, dict) else None
    title = cast("dict[str, Any]", annotations).get(TITLE) if isinstance(annotations, dict) else None
    return title if isinstance(title, str) else ""


def _layer(row: dict[str, Any], about: str) -> FileLayer:
    digest, size = row.get("digest"), row.get("size")
    sha256 = _SHA256.fullmatch(digest) if isinstance(digest, str) else None
    if sha256 is None or not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_FILE_BYTES:
        raise Refused(Reason.CONFIG_INVALID, f"{about}: a layer has no size or no SHA-256 digest")
    return FileLayer(sha256[1], size)


def basic_credentials(secret: Secret | None, host: str) -> str:
    """Return the Basic header for a registry, from `username` and `password`, or from Docker's configuration.

    Raises Refused(SecretInvalid).
    """
    if secret is None:
        return ""
    username, password = secret.text("username"), secret.text("password")
    if username and password:
        return _basic(f"{username}:{password}")
    raw = secret.values.get(DOCKER_CONFIG)
    if raw is None:
        raise secret.invalid(f"it has neither username and password nor {DOCKER_CONFIG}; oci: needs either")
    try:
        entries = parse_object(raw, max_bytes=len(raw)).get("auths")
    except JsonError as error:
        raise secret.invalid(f"{DOCKER_CONFIG} is not JSON") from error
    by_registry = cast("dict[str, Any]", entries) if isinstance(entries, dict) else {}
    entry = next((by_registry[name] for name in _docker_names(host) if isinstance(by_registry.get(name), dict)), None)
    if entry is None:
        raise secret.invalid(f"{DOCKER_CONFIG} has nothing for {quoted(host, 200)}")
    if isinstance(entry.get("username"), str) and isinstance(entry.get("password"), str):
        return _basic(f"{entry['username']}:{entry['password']}")
    try:
        return _basic(base64.b64decode(str(entry.get("auth", "")), validate=True).decode())
    except (binascii.Error, UnicodeDecodeError) as error:
        raise secret.invalid(f"{DOCKER_CONFIG}: the entry of {quoted(host, 200)} cannot be read") from error


def _docker_names(host: str) -> tuple[str, ...]:
    """Return the names that Docker's configuration may have for a registry."""
    hub = ("https://index.docker.io/v1/", "index.docker.io") if host == "docker.io" else ()
    return (host, f"https://{host}", f"http://{host}", *hub)


def _basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"
