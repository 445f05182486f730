"""Heads of requests that two parsers could read differently, and heads that offer another protocol."""

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus

from httptools import HttpRequestParser

from weft_gateway.errors import BadRequest

_SINGLE = b"host", b"authorization", b"x-api-key"
MAX_SHOWN = 100  # bytes of a wrong value
_HOST = re.compile(rb"[^\s,/?#@\\]*[ \t]*")


def check_head(
    parser: HttpRequestParser, headers: Sequence[tuple[bytes, bytes]], fields: Mapping[bytes, bytes]
) -> None:
    """Check what the parser lets pass. `fields`: the last of `headers` by name. Raises BadRequest."""
    if (version := parser.get_http_version()) not in ("1.1", "1.0"):
        message = f"Expected HTTP/1.1 or HTTP/1.0, got HTTP/{version}; configure the client for HTTP/1.1."
        status = HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
        raise BadRequest(message, code="unsupported_http_version", status=status)
    coding, codings = fields.get(b"transfer-encoding"), 1
    if len(fields) != len(headers):
        names = [name for name, _ in headers]
        codings = names.count(b"transfer-encoding")
        for name in _SINGLE:
            if names.count(name) > 1:
                raise BadRequest(f"Expected the header {name.decode()} once, got it again; send it once.")
    host = fields.get(b"host")
    if (host is None and version == "1.1") or not _HOST.fullmatch(host or b""):
        shown = "none" if host is None else repr(host[:MAX_SHOWN].decode("latin-1"))
        raise BadRequest(f"Expected one name or address in the header host, got {shown}; correct it.")
    if coding is not None and (codings > 1 or coding.rstrip(b" ").lower() != b"chunked"):
        message = "Expected the transfer-encoding chunked alone, got another; compress with content-encoding: gzip."
        raise BadRequest(message, code="unsupported_transfer_encoding", status=HTTPStatus.NOT_IMPLEMENTED)


def without_offer(parser: HttpRequestParser, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the head that the parser has just read, without an offer of another protocol."""
    line = parser.get_method(), url, parser.get_http_version().encode()
    fields = b"".join(b"%b: %b\r\n" % field for field in headers if field[0] != b"upgrade")
    return b"%b %b HTTP/%b\r\n%b\r\n" % (*line, fields)
