"""The Range header of a blob request (RFC 9110, section 14): one range of bytes, or the whole."""

import re
from dataclasses import dataclass

_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, end) of a blob of `total` bytes."""

    start: int
    end: int
    total: int

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.end == self.total

    @property
    def content_range(self) -> str:
        return f"bytes {self.start}-{self.end - 1}/{self.total}"


def parse_range(header: str | None, total: int) -> Span | None:
    """The span that a request asks for; None when it lies outside (416).

    What is no single range of bytes is ignored and the whole blob is sent, as the RFC allows.
    """
    whole = Span(0, total, total)
    match = _RANGE.fullmatch(header.strip()) if header else None
    if not match or match[0] == "bytes=-":
        return whole
    first, last = match[1], match[2]
    if not first:  # the last N bytes
        return Span(max(0, total - int(last)), total, total) if int(last) and total else None
    start, end = int(first), int(last) + 1 if last else total
    if end <= start and last:
        return whole
    return Span(start, min(end, total), total) if start < total else None
