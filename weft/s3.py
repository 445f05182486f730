"""Clients of S3: AWS, or any server that speaks S3.

Credentials are a Secret's entries, or there are none (public buckets). Where a tenant named the bucket they are never
the environment's, a profile's or an instance's metadata's: those are the process's rights. Its own bucket a process
may use with them (its pod's identity).
"""

from collections.abc import Collection, Mapping
from typing import Any

from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.session import Session

KEYS = ("accessKeyId", "secretAccessKey", "sessionToken")  # of a Secret; the last one for temporary credentials


def missing_keys(found: Collection[str]) -> list[str]:
    """What a Secret with these entries lacks."""
    return [key for key in KEYS[:2] if key not in found]


def s3_client(
    session: Session, url: str | None, region: str, keys: Mapping[str, str] | None, *, connect_s: float, read_s: float,
    tries: int, connections: int,
) -> Any:  # fmt: skip
    """`url`: of the server; None: AWS in that region. `keys`: by `KEYS`; empty: requests are not signed; None: they are
    signed with what the process has by its environment or its pod's identity."""
    given = keys or {}
    bounded = Config(
        signature_version=None if given or keys is None else UNSIGNED,
        connect_timeout=connect_s,
        read_timeout=read_s,
        retries={"total_max_attempts": tries, "mode": "standard"},
        s3={"addressing_style": "path" if url else "auto"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        ignore_configured_endpoint_urls=True,
        max_pool_connections=connections,
    )
    return session.create_client(
        "s3",
        region_name=region,
        endpoint_url=url,
        aws_access_key_id=given.get("accessKeyId"),
        aws_secret_access_key=given.get("secretAccessKey"),
        aws_session_token=given.get("sessionToken"),
        config=bounded,
    )


def error_code(error: ClientError) -> str:
    """The server's word for it, "" without one."""
    answer: Any = error.response
    return str(answer.get("Error", {}).get("Code", ""))
