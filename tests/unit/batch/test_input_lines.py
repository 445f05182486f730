"""What the lines of an input file mean, in whatever blocks the file comes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.strict_json import MAX_CONTAINERS
from weft_batch.core import BadLine, GoodLine, InputReader, LineIndex, LineSplitter, compression, input_lines, read_line

ENDPOINT = "/v1/completions"


def line(custom_id: object = "a", **changes: object) -> bytes:
    whole = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"model": "m", "prompt": "p"}} | changes
    return json.dumps(whole).encode()


def judge(*blocks: bytes, max_lines: int = 100, max_line_bytes: int = 1000):
    reader = InputReader(ENDPOINT, max_lines=max_lines, max_line_bytes=max_line_bytes)
    bad = [found for block in blocks for found in reader.feed(block)]
    bad += reader.finish()
    return reader, {number: (found.custom_id, found.code) for number, found in bad}


def test_a_line_that_can_run_keeps_its_request() -> None:
    body, longest = {"model": "é", "prompt": ["x\n", 1.5, 2**70]}, "ü" * 512
    raw = line(longest, body=body)
    read = read_line(raw, ENDPOINT, len(raw))
    assert isinstance(read, GoodLine)
    assert (read.custom_id, json.loads(read.body)) == (longest, body)


@pytest.mark.parametrize(
    ("raw", "custom_id", "code"),
    [
        (b"{", None, "invalid_json_line"),
        (b"[]", None, "invalid_json_line"),
        (b"\xff{}", None, "invalid_json_line"),
        (b'{"custom_id": "a", "custom_id": "b"}', None, "invalid_json_line"),
        (b"[" * 100_000, None, "line_too_long"),
        (b"x" * 1001, None, "line_too_long"),
        (b"{}", None, "missing_required_parameter"),
        (line(7), None, "missing_required_parameter"),
        (line(""), None, "missing_required_parameter"),
        (line("x" * 513), "x" * 512, "invalid_custom_id"),
        (line(method="GET"), "a", "invalid_method"),
        (line(url="/v1/chat/completions"), "a", "invalid_url"),
        (line(body=[]), "a", "missing_required_parameter"),
        (line(body={"prompt": "p"}), "a", "missing_required_parameter"),
        (line(body={"model": 4}), "a", "missing_required_parameter"),
        (line().replace(b'"p"', b"1e999"), "a", "invalid_json_line"),
    ],
)
def test_a_line_that_cannot_run_says_why(raw: bytes, custom_id: str | None, code: str) -> None:
    read = read_line(raw, ENDPOINT, 1000)
    assert isinstance(read, BadLine)
    assert (read.custom_id, read.code) == (custom_id, code)
    assert read.message.isprintable()


def test_a_line_with_as_many_arrays_as_a_request_may_have_runs_and_one_more_fails() -> None:
    lines = [line(body={"model": "m", "prompt": "[" * count}) for count in (MAX_CONTAINERS - 2, MAX_CONTAINERS - 1)]
    runs, fails = (read_line(raw, ENDPOINT, 1 << 20) for raw in lines)
    assert isinstance(runs, GoodLine)
    assert isinstance(fails, BadLine)
    assert fails.code == "too_many_values"


def test_a_bad_line_fails_alone_and_of_two_with_one_id_the_later() -> None:
    reader, bad = judge(b"\n".join([line("a"), b"{", line("b"), line("a"), line("c", method="PUT"), line("c")]))
    assert bad == {
        2: (None, "invalid_json_line"), 4: ("a", "duplicate_custom_id"), 5: ("c", "invalid_method"),
        6: ("c", "duplicate_custom_id"),
    }  # fmt: skip
    assert (reader.total, reader.good, reader.failure()) == (6, 2, [])


def test_empty_lines_are_no_lines() -> None:
    reader, bad = judge(b"\xef\xbb\xbf\n \r\n" + line("a") + b"\r\n\n\n" + line("b") + b"\n\t\n")
    assert (reader.total, reader.good, bad) == (2, 2, {})


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b" "])
def test_a_file_without_a_line_fails_the_batch(content: bytes) -> None:
    reader, _ = judge(content)
    assert [error.code for error in reader.failure()] == ["empty_file"]


def test_a_file_without_a_line_that_can_run_fails_the_batch_with_its_first_errors() -> None:
    reader, bad = judge(b"{\n" * 60)
    assert (len(bad), len(reader.failure()), reader.failure()[49].line) == (60, 50, 50)


def test_more_lines_than_the_quota_fail_the_batch() -> None:
    reader, _ = judge(b"\n".join(line(str(i)) for i in range(4)), max_lines=3)
    [error] = reader.failure()
    assert (error.code, error.line, error.message) == ("too_many_lines", 4, "the file has more than 3 lines")
    assert judge(b"\n".join(line(str(i)) for i in range(3)), max_lines=3)[0].failure() == []


@pytest.mark.parametrize("blank", [b"\n", b"\r\n", b" \n"])
def test_more_empty_lines_than_the_bound_fail_the_batch(blank: bytes) -> None:
    reader, bad = judge(line("a") + b"\n" + blank * 6_000, blank * 4_001 + line("b") + b"\n", blank, line("c"))
    [error] = reader.failure()
    assert (error.code, error.line, error.message) == (
        "too_many_blank_lines", 2, "the file has more than 10000 empty lines; remove them",
    )  # fmt: skip
    assert (reader.too_many, reader.total, bad) == (True, 1, {}), "nothing behind the bound is read"
    assert judge(line("a") + b"\n" + blank * 10_000 + line("b"))[0].failure() == []


def test_a_run_of_line_ends_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, add = list[int](), LineIndex.add
    monkeypatch.setattr(LineIndex, "add", lambda *args, **how: (steps.append(args[2]), add(*args, **how))[1])
    splitter = LineSplitter(1000)
    assert list(splitter.feed(b"a\n" + b"\n" * 100_000 + b"\r\n" * 100_000 + b"b\n")) == [(1, b"a"), (2, b"b")]
    assert (len(steps), splitter.blank_lines) == (3, 200_000)


@pytest.mark.parametrize(("start", "name"), [(b"\x1f\x8b\x08", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"{", None)])
def test_a_packed_file_is_known_by_its_first_bytes(start: bytes, name: str | None) -> None:
    assert compression(start) == name


ANY_LINE = st.binary(max_size=30).map(lambda raw: raw.replace(b"\n", b""))
LINES = st.lists(st.one_of(ANY_LINE, st.sampled_from([b"", b"", b"\r", b" ", b" " * 21])), max_size=30)


@given(lines=LINES, cuts=st.lists(st.integers(0, 900), max_size=10), end=st.booleans(), block=st.integers(1, 50))
def test_lines_are_the_same_in_any_blocks_and_are_found_by_the_index(
    lines: list[bytes], cuts: list[int], end: bool, block: int
) -> None:
    content, most = b"\n".join(lines) + b"\n" * end, 20
    whole = content.removeprefix(b"\xef\xbb\xbf")
    expected = [raw[: most + 1].removesuffix(b"\r") for raw in whole.split(b"\n") if len(raw) > most or raw.strip()]
    previous, input_lines.BLOCK_BYTES = input_lines.BLOCK_BYTES, block
    try:
        splitter, at, found = LineSplitter(most), 0, []
        for cut in [*sorted(cuts), len(content)]:
            found += splitter.feed(content[at:cut])
            at = max(at, cut)
        found += splitter.finish()
    finally:
        input_lines.BLOCK_BYTES = previous
    assert found == list(enumerate(expected, start=1))
    last = content.rpartition(b"\n")[2]
    assert splitter.blank_lines == len(whole.split(b"\n")) - len(expected) - (not last)
    packed, long_lines = splitter.index.to_bytes(), sum(len(raw) > most for raw in lines)
    assert len(packed) <= 12 * (len(content) // block + long_lines + 2), "12 bytes for a block or a long line"
    index = LineIndex.from_bytes(packed)
    for number, raw in found:
        first, start, stop = index.block(number)
        part = LineSplitter(most, first=first, offset=start)
        assert dict([*part.feed(content[start:stop]), *part.finish()])[number] == raw
        assert stop - start <= block + 2 * (most + 2) or len(raw) > most


def test_memory_is_that_of_a_line_whatever_its_length() -> None:
    reader, bad = judge(*[b"x" * 10_000] * 50, b"\n" + line(), max_line_bytes=1000)
    assert (reader.total, bad) == (2, {1: (None, "line_too_long")})
