"""The endpoints and addresses that the depot talks to, and S3 URIs that are URIs."""

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.artifacts.making import refused
from weft.artifacts.errors import Reason, Refused
from weft_depot.sources import (
    Clients,
    Endpoints,
    Origin,
    RetryPolicy,
    S3Endpoint,
    SourceHttp,
    check_address,
    parse_path,
    s3_errors,
    split_url,
)

ALLOWED = Endpoints(("minio.storage:9000", "ceph", "https://secure:8443", "[fd00::1]:9000"), "eu-west-1")


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (None, S3Endpoint(None, "eu-west-1")),
        ("https://s3.us-east-2.amazonaws.com", S3Endpoint(None, "us-east-2")),
        ("https://s3.dualstack.us-east-2.amazonaws.com/", S3Endpoint(None, "us-east-2")),
        ("http://minio.storage:9000", S3Endpoint("http://minio.storage:9000", "eu-west-1")),
        ("https://MINIO.storage:9000/", S3Endpoint("https://MINIO.storage:9000", "eu-west-1")),
        ("http://ceph:1234", S3Endpoint("http://ceph:1234", "eu-west-1")),
        ("ceph", S3Endpoint("https://ceph", "eu-west-1")),
        ("https://secure:8443", S3Endpoint("https://secure:8443", "eu-west-1")),
        ("http://[fd00::1]:9000", S3Endpoint("http://[fd00::1]:9000", "eu-west-1")),
    ],
)
def test_an_endpoint_is_one_of_the_list_or_aws(given_: str | None, expected: S3Endpoint) -> None:
    assert ALLOWED.parse(given_) == expected


@pytest.mark.parametrize(
    "given_",
    [
        *("http://169.254.169.254", "http://minio.storage", "http://minio.storage:9001", "http://secure:8443"),
        *("https://evil", "http://s3.us-east-2.amazonaws.com", "https://s3.us-east-2.amazonaws.com.evil.org"),
        *(
            "https://s3.evil.org/.amazonaws.com",
            "http://minio.storage:9000@evil",
            "http://user:pw@ceph",
            "http://ceph/path",
        ),
        *(
            "ftp://ceph",
            "http://",
            "",
            "http://ceph:99999",
            "http://[::1",
            "http://ceph?x=1",
            "http://ce\nph",
            "127.0.0.1",
        ),
    ],
)
def test_every_other_endpoint_is_refused_by_name(given_: str) -> None:
    with refused(Reason.ENDPOINT_NOT_ALLOWED):
        ALLOWED.parse(given_)


def test_without_a_list_there_is_aws_alone() -> None:
    with pytest.raises(Refused, match="allowed: AWS"):
        Endpoints((), "us-east-1").parse("http://minio:9000")


@pytest.mark.parametrize(
    ("url", "inside", "allowed"),
    [
        ("http://127.0.0.1:9000", True, True),
        ("http://127.0.0.1:9000", False, False),
        ("http://10.1.2.3", False, False),
        ("http://[::1]", False, False),
        ("http://[::ffff:10.1.2.3]", False, False),
        ("https://1.1.1.1", False, True),
        ("http://169.254.169.254", True, False),
        ("http://[::ffff:169.254.169.254]", True, False),
        ("http://[fd00:ec2::254]", True, False),
        ("http://[fd20:ce::254]", True, False),  # Google's
        ("http://168.63.129.16", True, False),  # Azure's, which is global
        ("http://192.0.0.192", True, False),  # Oracle's
        ("http://[64:ff9b::a9fe:a9fe]", True, False),  # by NAT64
        ("http://[2002:a9fe:a9fe::1]", True, False),  # by 6to4
        ("http://[::a9fe:a9fe]", True, False),
        ("http://[64:ff9b::7f00:1]", False, False),
        ("http://[fe80::1]", True, False),
        ("http://224.0.0.1", True, False),
        ("http://2852039166/", True, False),  # 169.254.169.254 as a number
        ("http://0/", True, False),
    ],
)
def test_addresses_that_are_never_asked(url: str, inside: bool, allowed: bool) -> None:
    if allowed:
        check_address(url, inside=inside, subject="it")
        return
    with refused(Reason.ENDPOINT_NOT_ALLOWED):
        check_address(url, inside=inside, subject="it")


def get_by_http(url: str) -> None:
    http = SourceHttp(RetryPolicy(connect_s=1.0))
    with http.get(url, {}, Origin(url, "the server"), lambda _: Refused(Reason.SOURCE_NOT_FOUND, "no")):
        pass


def get_by_s3(url: str) -> None:
    with s3_errors(url), Clients(RetryPolicy(connect_s=1.0)).client(S3Endpoint(url, "us-east-1"), None) as client:
        client.list_objects_v2(Bucket="bucket")


@pytest.mark.parametrize("get", [get_by_http, get_by_s3])
def test_a_name_that_changes_after_the_check_is_not_connected(
    get: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look-ups of the name are the check's. The last belongs to the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        answers: Iterator[str] = iter(("1.1.1.1", "1.1.1.1", "127.0.0.1", "127.0.0.1"))
        if get is get_by_http:
            answers = iter(("1.1.1.1", "1.1.1.1", "1.1.1.1", "127.0.0.1", "127.0.0.1"))
        lookup = socket.getaddrinfo

        def rebinding(host: str, *rest: Any, **options: Any) -> Any:
            return lookup(next(answers) if host == "rebound.example" else host, *rest, **options)

        monkeypatch.setattr(socket, "getaddrinfo", rebinding)
        with pytest.raises(Refused, match=r"rebound\.example' is 127\.0\.0\.1, an address inside"):
            get(f"http://rebound.example:{port}")
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize(
    "path",
    [
        *("", "bucket", "/bucket/a", "//", "//b", "//Bucket/a", "//buck_et/a", "//buc..ket/a", "//169.254.169.254@x/a"),
        *("//bucket/../a", "//bucket/a//b", "//bucket/./a", "//bucket/a\x00", "//bucket\\x/a", "///a"),
    ],
)
def test_what_is_no_s3_uri_is_a_bad_uri(path: str) -> None:
    with refused(Reason.BAD_URI):
        parse_path(path)


@given(st.text(max_size=60))
def test_an_s3_uri_is_a_place_in_its_bucket_or_none(path: str) -> None:
    try:
        place = parse_path(f"//bucket/{path}")
    except Refused as error:
        assert error.reason == Reason.BAD_URI  # noqa: PT017 (either outcome is right)
    else:
        assert place.bucket == "bucket"
        assert ".." not in place.prefix.split("/")
        assert place.prefix in ("", f"{path.removesuffix('/')}/")


@given(st.text(max_size=60))
def test_no_text_becomes_a_host_that_is_not_on_the_list(text: str) -> None:
    try:
        endpoint = ALLOWED.parse(text)
    except Refused as error:
        assert error.reason == Reason.ENDPOINT_NOT_ALLOWED  # noqa: PT017 (either outcome is right)
    else:
        assert endpoint.url is None or split_url(endpoint.url, "it").hostname in (
            "minio.storage",
            "ceph",
            "secure",
            "fd00::1",
        )
