"""S3 for tenants: which endpoint, whose credentials (those of the request's Secret, or none), what an error means."""

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult

import urllib3
from botocore.awsrequest import AWSHTTPConnection, AWSHTTPConnectionPool, AWSHTTPSConnection, AWSHTTPSConnectionPool
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from botocore.session import Session

from weft.artifacts.errors import ArtifactError, Reason, Refused, Unavailable
from weft.domain.text import quoted
from weft.s3 import KEYS, error_code, missing_keys, s3_client
from weft_depot.credentials import Secret
from weft_depot.sources.addresses import check_address, checked_addresses, is_inside, split_url
from weft_depot.sources.retry_policy import RetryPolicy, TransientError

_AWS = re.compile(
    r"s3[.-](?:(?:dualstack|fips)\.)?(?P<region>[a-z]{2}(?:-[a-z0-9]+)+)\.amazonaws\.com(?:\.cn)?", re.ASCII
)
_AGAIN = frozenset((408, 425, 429, 500, 502, 503, 504))
_DENIED = frozenset(("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken")) | {
    "XAdminUserNotFound"  # versitygw's InvalidAccessKeyId, a 404
}
_SLOW = frozenset(("SlowDown", "ServiceUnavailable", "RequestTimeout", "Throttling", "TooManyRequestsException"))


@dataclass(frozen=True, slots=True)
class S3Endpoint:
    """The server of requests: a URL, or (None) AWS in a region."""

    url: str | None
    region: str

    @property
    def host(self) -> str:
        return self.url or f"AWS {self.region}"


class Endpoints:
    """The endpoints allowed in requests. Without a list only AWS is allowed."""

    def __init__(self, allowed: tuple[str, ...], region: str) -> None:
        """Read the list. `allowed` are HOST, HOST:PORT or a URL; what an entry leaves out may be anything."""
        self._allowed, self._region = allowed, region

    def parse(self, text: str | None) -> S3Endpoint:
        """Read `source.endpoint`. Raises Refused(EndpointNotAllowed)."""
        if text is None:
            return S3Endpoint(None, self._region)
        parts = split_url(text if "://" in text else f"https://{text}", "the endpoint")
        if parts.path.strip("/") or parts.query or parts.fragment:
            raise Refused(
                Reason.ENDPOINT_NOT_ALLOWED, f"the endpoint {quoted(text, 200)} has a path; write the bucket in the URI"
            )
        if parts.scheme == "https" and (aws := _AWS.fullmatch(parts.hostname or "")):
            return S3Endpoint(None, aws["region"])
        if not any(_allows(entry, parts) for entry in self._allowed):
            allowed = f"AWS{''.join(f', {entry}' for entry in self._allowed)} (--s3-endpoints of the depot)"
            message = f"the endpoint {quoted(text, 200)} is not allowed here; allowed: {allowed}"
            raise Refused(Reason.ENDPOINT_NOT_ALLOWED, message)
        return S3Endpoint(f"{parts.scheme}://{parts.netloc}", self._region)


class Clients:
    """A maker of clients, one at a time, of one session: its models take long to read."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._session = Session()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def client(self, endpoint: S3Endpoint, secret: Secret | None) -> Generator[Any]:
        """Make a client. Raises Refused: SecretInvalid, EndpointNotAllowed."""
        keys = keys_of(secret)
        inside = endpoint.url is None or is_inside(endpoint.url)  # AWS may have a private endpoint in the network
        if endpoint.url:
            check_address(endpoint.url, inside=inside, subject="the endpoint")
        policy = self._policy
        with self._lock:
            client = s3_client(
                self._session, endpoint.url, endpoint.region, keys, connect_s=policy.connect_s, read_s=policy.read_s,
                tries=1, connections=4,  # tries are counted by who calls
            )  # fmt: skip
        client._endpoint.http_session.connect_with(_POOLS[inside])
        with contextlib.closing(client):
            yield client


class _Checked:
    """A connection of urllib3 to an address allowed by `checked_addresses`. It resolves the name only once."""

    inside = False
    _dns_host: str
    port: int

    def _new_conn(self) -> socket.socket:
        name = self._dns_host
        error = urllib3.exceptions.NewConnectionError(self, f"the name {name} is unknown")  # pyright: ignore
        for address in checked_addresses(name, self.port, inside=self.inside, subject="the endpoint"):
            self._dns_host = address
            try:
                return super()._new_conn()  # pyright: ignore
            except (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError) as failed:
                error = failed
            finally:
                self._dns_host = name  # TLS checks the certificate of the name
        raise error


def _pools(inside: bool) -> dict[str, type[urllib3.HTTPConnectionPool]]:
    plain = type("Connection", (_Checked, AWSHTTPConnection), {"inside": inside})
    tls = type("TlsConnection", (_Checked, AWSHTTPSConnection), {"inside": inside})
    return {
        "http": type("Pool", (AWSHTTPConnectionPool,), {"ConnectionCls": plain}),
        "https": type("TlsPool", (AWSHTTPSConnectionPool,), {"ConnectionCls": tls}),
    }


_POOLS = {inside: _pools(inside) for inside in (False, True)}


def keys_of(secret: Secret | None) -> dict[str, str]:
    """Read the keys of a Secret. Raises Refused(SecretInvalid)."""
    if secret is None:
        return {}
    parts = {key: value for key in KEYS if (value := secret.text(key)) is not None}
    if missing := missing_keys(parts):
        raise secret.invalid(
            f"it has no key {' and no key '.join(map(repr, missing))}; s3: expects accessKeyId, secretAccessKey and, "
            "for temporary credentials, sessionToken"
        )
    return parts


def answer_of(call: Callable[..., Any], **arguments: Any) -> Any:
    """Make a call, whatever its server sends: numbers and dates in it raise what `int` and `dateutil` raise.

    Raises TransientError for an answer that cannot be read, and botocore's errors.
    """
    try:
        return call(**arguments)
    except (ResponseParserError, ValueError, ArithmeticError, RuntimeError) as error:
        raise TransientError(f"its answer is not S3's ({type(error).__name__})") from error


@contextlib.contextmanager
def s3_errors(about: str) -> Generator[None]:
    """Turn botocore's errors into ours. Raises Refused, TransientError for what another try may mend."""
    try:
        yield
    except ClientError as error:
        raise _meaning(error, about) from None  # its text may quote what was signed
    except (BotoCoreError, urllib3.exceptions.HTTPError) as error:
        if isinstance(error.__context__, Refused):  # from `_Checked`, which botocore wraps
            raise error.__context__ from None
        raise TransientError(f"{type(error).__name__}") from error


def _meaning(error: ClientError, about: str) -> ArtifactError | TransientError:
    answer: Any = error.response
    code = error_code(error)
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in _SLOW or status in _AGAIN:
        return TransientError(f"{quoted(code)}, status {status}")
    if code == "PreconditionFailed" or status == 412:
        return Refused(Reason.DIGEST_MISMATCH, f"{about} changed while it was read")
    if code in _DENIED or status in (401, 403):
        help_ = "give a Secret in credentialsRef that may list and get it, or correct the Secret's keys"
        return Refused(Reason.SOURCE_FORBIDDEN, f"{about} answered {quoted(code)}; {help_}")
    if code in ("NoSuchBucket", "NoSuchKey", "InvalidBucketName") or status == 404:
        return Refused(Reason.SOURCE_NOT_FOUND, f"{about}: {quoted(code)}; correct the URI or the endpoint")
    if status in (301, 307, 400) and code in ("PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed"):
        help_ = "the bucket is in another region; set source.endpoint to https://s3.REGION.amazonaws.com"
        return Refused(Reason.SOURCE_NOT_FOUND, f"{about}: {help_}")
    return Unavailable(f"{about} answered {quoted(code)}, status {status}")


def _allows(entry: str, parts: SplitResult) -> bool:
    scheme, separator, rest = entry.rpartition("://")
    host, colon, port = rest.rpartition(":") if not rest.endswith("]") else (rest, "", "")
    if not colon:
        host = rest
    default = 443 if parts.scheme == "https" else 80
    return (
        (not separator or scheme == parts.scheme)
        and host.strip("[]").lower() == (parts.hostname or "")
        and (not colon or port == str(parts.port or default))
    )
