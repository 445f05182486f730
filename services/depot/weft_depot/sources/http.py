"""GET requests to servers that sources lead to: redirects by hand, bounded bodies, nothing to addresses inside.

One client asks for every tenant: what a server hands to one (a session) is not carried to the next, and credentials
stay at the origin that they were given for.
"""

import contextlib
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpcore2
import httpx2

from weft.artifacts.errors import ArtifactError, Reason, Refused, Unavailable
from weft.domain.text import quoted
from weft.trust import accept_private_authorities
from weft_depot.sources.addresses import check_address, checked_addresses, is_inside
from weft_depot.sources.ranged import trimmed
from weft_depot.sources.retry_policy import RetryPolicy, TransientError

MAX_REDIRECTS = 5
AGAIN = frozenset((408, 416, 425, 500, 502, 503, 504))  # statuses that another try may mend
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,15})-([0-9]{1,15})/([0-9]{1,15})", re.ASCII)

# The error that an answer without content stands for.
Meaning = Callable[[httpx2.Response], ArtifactError | TransientError]


@dataclass(frozen=True, slots=True)
class Origin:
    """The first server of a source, as SCHEME://HOST[:PORT], and its name in messages.

    Redirects of one with TLS keep TLS. Only one that is itself inside may lead to addresses inside.
    """

    url: str
    name: str

    @property
    def inside(self) -> bool:
        """Whether the server is in a private network or on this machine."""
        return is_inside(self.url)

    def check(self, url: httpx2.URL) -> None:
        """Check a URL's address. Raises Refused(EndpointNotAllowed)."""
        subject = f"{self.name} leads to"
        if self.url.startswith("https:") and url.scheme != "https":
            raise Refused(
                Reason.ENDPOINT_NOT_ALLOWED, f"{subject} {quoted(str(url.host), 200)} without TLS: not followed"
            )
        check_address(str(url.copy_with(query=None, fragment=None)), inside=self.inside, subject=subject)


class SourceHttp:
    """A client of such servers, used from any thread."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        timeout = httpx2.Timeout(policy.read_s, connect=policy.connect_s)
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))
        context = accept_private_authorities(httpx2.create_ssl_context())
        self._clients: dict[bool, httpx2.Client] = {}
        """The clients of origins outside (False) and inside (True), so that they share no connection."""
        for inside in (False, True):
            client = httpx2.Client(timeout=timeout, follow_redirects=False, cookies=no_cookies, verify=context)
            # httpx2 takes a backend only with a transport, and then ignores the proxies of the environment
            client._transport._pool._network_backend = _CheckedBackend(inside)  # pyright: ignore
            self._clients[inside] = client

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    @contextlib.contextmanager
    def get(self, url: str, headers: Mapping[str, str], origin: Origin, meaning: Meaning) -> Generator[httpx2.Response]:
        """Get a response with content (200, 206), behind redirects. Raises TransientError and what `meaning` gives."""
        client = self._clients[origin.inside]
        request = client.build_request("GET", url, headers={**headers, "Accept-Encoding": "identity"})
        with network_errors():
            for _ in range(MAX_REDIRECTS + 1):
                origin.check(request.url)
                response = client.send(request, stream=True)
                with contextlib.closing(response):
                    if response.next_request is None:
                        if response.status_code not in (200, 206):
                            raise meaning(response)
                        yield response
                        return
                request = response.next_request  # without credentials where it leaves the origin
            raise TransientError(f"more than {MAX_REDIRECTS} redirects")

    def body(self, response: httpx2.Response, max_bytes: int, about: str) -> bytes:
        """Read a whole body. Raises Refused(TooLarge), TransientError."""
        deadline, raw = self._policy.now() + self._policy.grace_s, bytearray()
        for chunk in chunks(response):
            raw += chunk
            if len(raw) > max_bytes:
                raise Refused(Reason.TOO_LARGE, f"{about} has more than {max_bytes} bytes")
            if self._policy.now() > deadline:
                raise TransientError(f"not whole within {self._policy.grace_s:.0f} s")
        return bytes(raw)


class _CheckedBackend(httpcore2.SyncBackend):
    """Connects to addresses that `checked_addresses` allows. The name stays the name for TLS."""

    def __init__(self, inside: bool) -> None:
        self._inside = inside

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        """Connect to the first address that answers. Raises Refused(EndpointNotAllowed), httpcore2.ConnectError."""
        error = httpcore2.ConnectError(f"the name {host} is unknown")
        for address in checked_addresses(host, port, inside=self._inside, subject="the name"):
            try:
                return super().connect_tcp(address, port, timeout, local_address, socket_options)
            except httpcore2.ConnectError as refused:
                error = refused
        raise error


def byte_range(start: int, end: int) -> dict[str, str]:
    """Make the header that asks for the bytes [start, end)."""
    return {"Range": f"bytes={start}-{end - 1}"}


def range_of(response: httpx2.Response, size_bytes: int, start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes [start, end) of a file of `size_bytes`; a server may send the whole. See `ranged.Fetch`."""
    skip = start - _first_byte(response, size_bytes)
    if skip < 0:
        raise TransientError("another range than was asked for")
    return trimmed(chunks(response), skip, end - start)


def size_of(response: httpx2.Response) -> int | None:
    """Read the bytes of the whole file from the answer to a request for a range of it."""
    if match := _CONTENT_RANGE.fullmatch(response.headers.get("content-range", "")):
        return int(match[3])
    length = response.headers.get("content-length", "")
    has_size = response.status_code == 200 and "content-encoding" not in response.headers
    return int(length) if has_size and length.isascii() and length.isdigit() and len(length) < 16 else None


def chunks(response: httpx2.Response) -> Iterator[bytes]:
    """Yield chunks as they arrive; reading them is outside of the block that asked for them. Raises TransientError."""
    with network_errors():
        yield from response.iter_bytes()


@contextlib.contextmanager
def network_errors() -> Generator[None]:
    """Turn what another try may mend into TransientError. Our own errors and the local disk's pass."""
    try:
        yield
    except httpx2.HTTPError as error:
        raise TransientError(f"{type(error).__name__}: {error}") from error


def retry_after(response: httpx2.Response) -> int | None:
    """The seconds that the server asks to wait."""
    delay = response.headers.get("retry-after", "")
    return int(delay) if delay.isascii() and delay.isdigit() and len(delay) < 7 else None


def too_many(about: str, seconds: int | None) -> Unavailable:
    """Make the error of an answer 429."""
    wait = f", for another {seconds} s" if seconds else ""
    return Unavailable(f"{about}: too many requests{wait}; it is asked again later", retry_after_s=seconds or 0)


def _first_byte(response: httpx2.Response, size_bytes: int) -> int:
    """Find where the body starts in the file. Raises TransientError for another size."""
    if response.status_code == 200:
        length = response.headers.get("content-length", "")
        if length and "content-encoding" not in response.headers and length != str(size_bytes):
            raise TransientError(f"{quoted(length)} bytes instead of {size_bytes}")
        return 0
    match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    if not match or int(match[3]) != size_bytes:
        raise TransientError(f"a range of another file: {quoted(response.headers.get('content-range', 'none'))}")
    return int(match[1])
