"""The two calls of a Hugging Face hub that the depot makes: what is in a revision, and a range of a file.

`huggingface_hub` names URLs and headers; its own downloads are not used: they keep a cache of links, try again for as
long as a server asks them to, and share one client. Redirects are followed by hand: the token stays at the hub, and
nothing leads to addresses inside.
"""

import contextlib
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any
from urllib.parse import quote

import httpx2
from huggingface_hub import hf_hub_url
from huggingface_hub.utils import build_hf_headers, parse_ratelimit_headers

from weft.artifacts.errors import ArtifactError, Reason, Refused, Unavailable
from weft.domain.strict_json import JsonError, parse_object
from weft.domain.text import quoted
from weft_depot.sources.addresses import check_address, is_inside, split_url
from weft_depot.sources.ranged import trimmed
from weft_depot.sources.retry_policy import RetryPolicy, TransientError

MAX_LISTING_BYTES = 32 << 20
MAX_REDIRECTS = 5
_AGAIN = frozenset((408, 425, 500, 502, 503, 504))
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,15})-([0-9]{1,15})/([0-9]{1,15})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Repo:
    """A repository, as one caller sees it."""

    name: str
    token: str | None = field(default=None, repr=False)


class Hub:
    """One endpoint. Used from any thread."""

    def __init__(self, endpoint: str, policy: RetryPolicy) -> None:
        """Raises Refused(EndpointNotAllowed) for what is no URL."""
        parts = split_url(endpoint, "the hub")
        self.endpoint, self.host = endpoint.rstrip("/"), parts.netloc
        self._secure, self._policy = parts.scheme == "https", policy
        timeout = httpx2.Timeout(policy.read_s, connect=policy.connect_s)
        # One client asks for every tenant: what a hub hands to one (a session) is not carried to the next.
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))
        self._http = httpx2.Client(timeout=timeout, follow_redirects=False, cookies=no_cookies)

    def close(self) -> None:
        self._http.close()

    def revision(self, repo: Repo, revision: str) -> dict[str, Any]:
        """A revision as the hub describes it: `sha` and `siblings` with sizes and content ids.

        Raises Refused (SourceNotFound, SourceForbidden, TooLarge), Unavailable.
        """
        url = f"{self.endpoint}/api/models/{repo.name}/revision/{quote(revision, safe='')}?blobs=true"
        return self._policy.retried(f"hf:{repo.name}: {self.host}", lambda: self._object(url, repo))

    @contextlib.contextmanager
    def fetch(
        self, repo: Repo, path: str, sha: str, size_bytes: int, start: int, end: int
    ) -> Generator[Iterator[bytes]]:
        """The bytes [start, end) of a commit's file that has `size_bytes`. See `ranged.Fetch`."""
        url = hf_hub_url(repo.name, path, revision=sha, endpoint=self.endpoint)
        with _network_errors(), self._get(url, repo, {"Range": f"bytes={start}-{end - 1}"}) as response:
            skip = start - _first_byte(response, size_bytes)
            if skip < 0:
                raise TransientError("another range than was asked for")
            yield trimmed(_chunks(response), skip, end - start)

    def _object(self, url: str, repo: Repo) -> dict[str, Any]:
        deadline, raw = self._policy.now() + self._policy.grace_s, bytearray()
        with _network_errors(), self._get(url, repo, {}) as response:
            for chunk in _chunks(response):
                raw += chunk
                if len(raw) > MAX_LISTING_BYTES:
                    raise Refused(
                        Reason.TOO_LARGE, f"hf:{repo.name} lists more than {MAX_LISTING_BYTES} bytes of files"
                    )
                if self._policy.now() > deadline:
                    raise TransientError(f"no whole listing within {self._policy.grace_s:.0f} s")
        try:
            return parse_object(bytes(raw), max_bytes=MAX_LISTING_BYTES)
        except JsonError as error:
            raise TransientError(f"the listing is no JSON: {error}") from error

    @contextlib.contextmanager
    def _get(self, url: str, repo: Repo, headers: dict[str, str]) -> Generator[httpx2.Response]:
        """A response with content, behind redirects. Raises TransientError, Refused, Unavailable, httpx2.HTTPError."""
        given = build_hf_headers(token=repo.token or False, library_name="weft-depot", headers=headers)
        request = self._http.build_request("GET", url, headers={**given, "Accept-Encoding": "identity"})
        for _ in range(MAX_REDIRECTS + 1):
            self._check_target(request.url)
            response = self._http.send(request, stream=True)
            with contextlib.closing(response):
                if response.next_request is None:
                    if response.status_code not in (200, 206):
                        raise _meaning(response, repo, f"hf:{repo.name} at {self.host}")
                    yield response
                    return
            request = response.next_request  # without the token where it leaves the hub's origin
        raise TransientError(f"more than {MAX_REDIRECTS} redirects")

    def _check_target(self, url: httpx2.URL) -> None:
        what = f"hf: {self.host} leads to"
        if self._secure and url.scheme != "https":
            raise Refused(Reason.ENDPOINT_NOT_ALLOWED, f"{what} {quoted(str(url.host), 200)} without TLS: not followed")
        check_address(str(url.copy_with(query=None, fragment=None)), inside=is_inside(self.endpoint), what=what)


def _meaning(response: httpx2.Response, repo: Repo, about: str) -> ArtifactError | TransientError:
    """The error that a hub's answer stands for: Refused, Unavailable (429), TransientError."""
    status, code = response.status_code, response.headers.get("x-error-code", "")
    if status == 429:
        return Unavailable(f"{about}: too many requests{_wait_of(response)}; it is asked again later")
    if status in _AGAIN or status == 416:
        return TransientError(f"status {status}")
    if code == "GatedRepo":
        return Refused(Reason.SOURCE_FORBIDDEN, f"{about} is gated; accept its terms there, and {_token(repo)}")
    if code in ("RevisionNotFound", "EntryNotFound"):
        what = "revision" if code == "RevisionNotFound" else "file"
        return Refused(Reason.SOURCE_NOT_FOUND, f"{about} has no such {what}")
    if status in (401, 403) and code != "RepoNotFound":
        return Refused(Reason.SOURCE_FORBIDDEN, f"{about} answered {status}; {_token(repo)}")
    if status in (401, 404):
        return Refused(Reason.SOURCE_NOT_FOUND, f"{about} does not exist, or is private: then {_token(repo)}")
    return Refused(Reason.SOURCE_NOT_FOUND, f"{about} answered {status}: correct the URI or the revision")


def _token(repo: Repo) -> str:
    if repo.token:
        return "give the Secret of credentialsRef a token that may read it"
    return "name a Secret with a token in credentialsRef"


def _wait_of(response: httpx2.Response) -> str:
    after = response.headers.get("retry-after", "")
    limit = parse_ratelimit_headers(response.headers)
    seconds = int(after) if after.isascii() and after.isdigit() and len(after) < 7 else limit and limit.reset_in_seconds
    return f", for another {seconds} s" if seconds else ""


def _first_byte(response: httpx2.Response, size_bytes: int) -> int:
    """Where the body starts in the file; a server may send the whole. Raises TransientError for another size."""
    if response.status_code == 200:
        length = response.headers.get("content-length", "")
        if length and "content-encoding" not in response.headers and length != str(size_bytes):
            raise TransientError(f"{quoted(length)} bytes instead of {size_bytes}")
        return 0
    match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    if not match or int(match[3]) != size_bytes:
        raise TransientError(f"a range of another file: {quoted(response.headers.get('content-range', 'none'))}")
    return int(match[1])


def _chunks(response: httpx2.Response) -> Iterator[bytes]:
    """As they arrive. Raises TransientError where they are read: that is outside of the block that asked for them."""
    with _network_errors():
        yield from response.iter_bytes()


@contextlib.contextmanager
def _network_errors() -> Generator[None]:
    """What another try may mend. Our own errors and the local disk's pass."""
    try:
        yield
    except httpx2.HTTPError as error:
        raise TransientError(f"{type(error).__name__}: {error}") from error
