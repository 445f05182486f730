"""Clients of S3: AWS, or any server that speaks S3.

Credentials are a Secret's entries, or there are none (public buckets). Where a tenant named the bucket they are never
the environment's, a profile's or an instance's metadata's: those are the process's rights. Its own bucket a process
may use with them (its pod's identity).
"""

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from botocore import UNSIGNED
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import Session
from urllib3 import HTTPConnectionPool

ANSWER_BYTES, ANSWER_S = 2 << 20, 60.0  # of a listing or an error; objects have their own bounds
PIECE_BYTES = 64 << 10
KEYS = ("accessKeyId", "secretAccessKey", "sessionToken")  # of a Secret; the last one for temporary credentials


def missing_keys(names: Collection[str]) -> list[str]:
    """List the keys missing in a Secret with these entries."""
    return [key for key in KEYS[:2] if key not in names]


def s3_client(
    session: Session, url: str | None, region: str, keys: Mapping[str, str] | None, *, connect_s: float, read_s: float,
    tries: int, connections: int,
) -> Any:  # fmt: skip
    """Make a client of a server or of AWS.

    `url`: of the server; None: AWS in that region. `keys`: by `KEYS`; empty: requests are not signed; None: they are
    signed with what the process has by its environment or its pod's identity.
    """
    settings = keys or {}
    bounded = Config(
        signature_version=None if settings or keys is None else UNSIGNED,
        connect_timeout=connect_s,
        read_timeout=read_s,
        retries={"total_max_attempts": tries, "mode": "standard"},
        s3={"addressing_style": "path" if url else "auto"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        ignore_configured_endpoint_urls=True,
        max_pool_connections=connections,
    )
    client: Any = session.create_client(
        "s3",
        region_name=region,
        endpoint_url=url,
        aws_access_key_id=settings.get("accessKeyId"),
        aws_secret_access_key=settings.get("secretAccessKey"),
        aws_session_token=settings.get("sessionToken"),
        config=bounded,
    )
    client._endpoint.http_session = _BoundedSession(client._endpoint.http_session)  # botocore reads an answer whole
    return client


class AnswerWithoutEnd(BotoCoreError):
    """A server sends more of a listing or an error than such a thing has, or drips."""

    fmt = f"the answer has more than {ANSWER_BYTES} bytes, or takes longer than {ANSWER_S:.0f} s"


class _BoundedSession:
    """A session that sends as the one it has; an answer that is read whole has ANSWER_BYTES and ANSWER_S at most."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def connect_with(self, pools: Mapping[str, type[HTTPConnectionPool]]) -> None:
        """Use urllib3's pools of these classes, by scheme, for connections without a proxy."""
        self._session._manager.pool_classes_by_scheme = pools

    def send(self, request: AWSPreparedRequest) -> AWSResponse:
        is_buffered, request.stream_output = (
            not request.stream_output,
            True,
        )  # else it is read in there, without a bound
        answer = self._session.send(request)
        answer.raw = _BoundedBody(answer.raw)
        if is_buffered:
            _ = answer.content
        return answer

    def close(self) -> None:
        self._session.close()


class _BoundedBody:
    """A body whose `stream`, by which botocore reads all of it, ends with AnswerWithoutEnd. The rest is as it was."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def stream(self) -> Iterator[bytes]:
        left, ends = ANSWER_BYTES, time.monotonic() + ANSWER_S
        while piece := self._raw.read1(PIECE_BYTES):  # what has come: a server that drips is noticed
            left -= len(piece)
            if left < 0 or time.monotonic() > ends:
                self._raw.close()
                raise AnswerWithoutEnd
            yield piece

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


def error_code(error: ClientError) -> str:
    """The server's error code, "" without one."""
    answer: Any = error.response
    return str(answer.get("Error", {}).get("Code", ""))
