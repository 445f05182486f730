"""Range headers: one range of bytes or the whole, never anything outside."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_depot.core.ranges import Span, parse_range


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, (0, 10)),
        ("bytes=0-", (0, 10)),
        ("bytes=3-", (3, 10)),
        ("bytes=3-5", (3, 6)),
        ("bytes=3-99", (3, 10)),
        ("bytes=-4", (6, 10)),
        ("bytes=-99", (0, 10)),
        ("bytes=10-", None),
        ("bytes=99-100", None),
        ("bytes=-0", None),
        ("bytes=5-3", (0, 10)),
        ("bytes=0-1,3-4", (0, 10)),
        ("lines=1-2", (0, 10)),
        ("bytes=-", (0, 10)),
        ("bytes=a-b", (0, 10)),
        ("bytes=" + "9" * 5000 + "-", (0, 10)),
    ],
)
def test_a_range_is_as_the_rfc_says(header: str | None, expected: tuple[int, int] | None) -> None:
    span = parse_range(header, 10)
    assert (span and (span.start, span.end)) == expected


def test_an_empty_blob_has_no_ranges() -> None:
    assert parse_range(None, 0) == Span(0, 0, 0)
    assert parse_range("bytes=0-", 0) is None
    assert parse_range("bytes=-1", 0) is None


@given(st.text(max_size=30) | st.from_regex(r"bytes=\d{0,4}-\d{0,4}"), st.integers(0, 1000))
def test_no_header_leads_outside_the_blob(header: str, total: int) -> None:
    span = parse_range(header, total)
    assert span is None or 0 <= span.start <= span.end <= total
    assert span is None or span.whole or span.start < span.end
