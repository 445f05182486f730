"""Lines of an input file: JSON objects {custom_id, method, url, body}, judged separately.

An unrunnable line fails by itself, with the codes of OpenAI's API. The batch fails if the file has no line, no runnable
line, more lines than the quota, or more empty lines than `MAX_BLANK_LINES`. Empty lines have no number.

Memory: a line, and 16 bytes of hash for each custom_id. Different ids share a hash with a probability of 2^-94 in a
file of 100,000 lines.
"""

import json
import re
import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

from weft.domain.batch import MAX_BATCH_ERRORS, MAX_FILE_BYTES, BatchError
from weft.domain.strict_json import MAX_CONTAINERS, JsonError, JsonObject, parse_object, too_many_containers
from weft.domain.text import quoted

BLOCK_BYTES = 256 << 10
_MARK = struct.Struct("<IQ")

MAX_CUSTOM_ID = 512  # characters
MAX_BLANK_LINES = 10_000  # of a file: they cost time, and the limit of lines does not count them
_BLANKS = re.compile(rb"(?:\r?\n)++")
BOM = b"\xef\xbb\xbf"
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}


class LineIndex:
    """An index of line starts in a file: any line is found by a read of one block of `BLOCK_BYTES`.

    A mark is a line's number (from 1), and an offset at or before its first byte, with only empty lines in between. A
    mark has 12 bytes, and 200 MB of lines take 10 KB. The index grows while the file is read. Its last mark is the end:
    the line number after the last line, and the file's length.
    """

    def __init__(self) -> None:
        self._lines: list[int] = []
        self._offsets: list[int] = []

    def add(self, line: int, offset: int, *, blanks: int = 0, alone: bool = False) -> None:
        """Record that a line begins at `offset`, after `blanks` bytes of empty lines.

        The mark is kept if the last mark is a block away, or with `alone`.
        """
        if alone or not self._offsets or offset + blanks - self._offsets[-1] >= BLOCK_BYTES:
            self.mark(line, offset)

    def mark(self, line: int, offset: int) -> None:
        """Append a mark."""
        self._lines.append(line)
        self._offsets.append(offset)

    def block(self, line: int) -> tuple[int, int, int]:
        """Return (first line, its offset, end offset) of the block with a line."""
        at = bisect_right(self._lines, line) - 1
        assert 0 <= at < len(self._lines) - 1, f"line {line} is not in the file"
        return self._lines[at], self._offsets[at], self._offsets[at + 1]

    def to_bytes(self) -> bytes:
        return b"".join(map(_MARK.pack, self._lines, self._offsets))

    @classmethod
    def from_bytes(cls, packed: bytes) -> "LineIndex":
        """Parse an index. Raises ValueError."""
        if len(packed) % _MARK.size:
            raise ValueError(f"{len(packed)} bytes are not a sequence of marks")
        index = cls()
        for line, offset in _MARK.iter_unpack(packed):
            index.mark(line, offset)
        return index


@dataclass(frozen=True, slots=True)
class GoodLine:
    """A runnable line. `body`: JSON of the request."""

    custom_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class BadLine:
    """An unrunnable line. `custom_id`: None if it has none."""

    custom_id: str | None
    code: str
    message: str
    param: str = ""


def compression(start: bytes) -> str | None:
    """Return the compression format of a file from its first bytes. None: it may be text."""
    return next((name for magic, name in COMPRESSED.items() if start.startswith(magic)), None)


def read_line(raw: bytes, endpoint: str, max_line_bytes: int) -> GoodLine | BadLine:
    """Parse a line, without its line end."""
    if len(raw) > max_line_bytes:
        return BadLine(None, "line_too_long", f"the line is longer than {max_line_bytes} bytes")
    if too_many_containers(raw):
        message = f"expected at most {MAX_CONTAINERS} arrays and objects; each [ and {{ counts, also inside of texts"
        return BadLine(None, "too_many_values", message)
    try:
        record = parse_object(raw, max_bytes=max_line_bytes)
    except JsonError as error:
        return BadLine(None, "invalid_json_line", f"the line is not a JSON object: {error}")
    custom_id = record.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return BadLine(None, "missing_required_parameter", "custom_id must be a non-empty string", "custom_id")
    if len(custom_id) > MAX_CUSTOM_ID:
        reason = f"custom_id has {len(custom_id)} characters, at most {MAX_CUSTOM_ID} are allowed"
        return BadLine(custom_id[:MAX_CUSTOM_ID], "invalid_custom_id", reason, "custom_id")
    return _request(custom_id, record, endpoint)


def _request(custom_id: str, record: JsonObject, endpoint: str) -> GoodLine | BadLine:
    if record.get("method") != "POST":
        return BadLine(custom_id, "invalid_method", f"method is {quoted(record.get('method'))}, not 'POST'", "method")
    if record.get("url") != endpoint:
        reason = f"url is {quoted(record.get('url'))}, the batch's endpoint is {endpoint!r}"
        return BadLine(custom_id, "invalid_url", reason, "url")
    body = record.get("body")
    if not isinstance(body, dict):
        return BadLine(custom_id, "missing_required_parameter", "body has to be an object", "body")
    if not isinstance(body.get("model"), str) or not body["model"]:  # pyright: ignore[reportUnknownMemberType]
        return BadLine(custom_id, "missing_required_parameter", "body.model has to name a model", "body.model")
    try:
        return GoodLine(custom_id, json.dumps(body, ensure_ascii=False, allow_nan=False).encode())
    except ValueError:  # 1e999 is read as infinity
        return BadLine(custom_id, "invalid_json_line", "body holds too large a number", "body")


class LineSplitter:
    """A splitter of blocks of bytes into lines, numbered from `first`, without line ends. Empty lines have no number.

    A line longer than `max_line_bytes` is cut one byte after this length. After `max_blank_lines` empty lines the rest
    is not read.
    """

    def __init__(
        self, max_line_bytes: int, *, first: int = 1, offset: int = 0, max_blank_lines: int = MAX_FILE_BYTES
    ) -> None:
        self._keep, self._max_blank_lines = max_line_bytes + 1, max_blank_lines
        self.next_line = first
        self.blank_lines = 0
        self.index = LineIndex()
        self._rest = b""  # start of the current line; at most `_keep` bytes
        self._line_at = self._read = offset  # offset of the current line, offset of the reader

    @property
    def too_many_blank_lines(self) -> bool:
        return self.blank_lines > self._max_blank_lines

    def feed(self, block: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the lines ending in this block."""
        start, at = 0, self._read
        self._read += len(block)
        while not self.too_many_blank_lines and (end := block.find(b"\n", start)) >= 0:
            yield from self._line(self._rest + block[start : min(end, start + self._keep)])
            self._rest, start = b"", end + 1
            if blanks := _BLANKS.match(block, start):
                self.index.add(self.next_line, at + start, blanks=blanks.end() - start)
                self.blank_lines += block.count(b"\n", start, blanks.end())
                start = blanks.end()
            self._line_at = at + start
        if not self.too_many_blank_lines:
            self._rest = (self._rest + block[start : start + self._keep])[: self._keep]

    def finish(self) -> Iterator[tuple[int, bytes]]:
        """Yield the last line if no line end follows it."""
        if self._rest:
            yield from self._line(self._rest)
            self._rest = b""
        self.index.mark(self.next_line, self._read)

    def _line(self, raw: bytes) -> Iterator[tuple[int, bytes]]:
        if self._line_at == 0:
            raw = raw.removeprefix(BOM)
        too_long = len(raw) >= self._keep
        self.index.add(self.next_line, self._line_at, alone=too_long)
        if too_long or raw.strip():
            self.next_line += 1
            yield self.next_line - 1, raw[: self._keep].removesuffix(b"\r")
        else:
            self.blank_lines += 1


class InputReader:
    """A judge of an input file in blocks. `feed` each block, then `finish`. Then `failure()` and `total` are valid."""

    def __init__(
        self, endpoint: str, *, max_lines: int, max_line_bytes: int, max_blank_lines: int = MAX_BLANK_LINES
    ) -> None:
        self._endpoint, self._max_lines, self._max_line_bytes = endpoint, max_lines, max_line_bytes
        self._max_blank_lines = max_blank_lines
        self._lines = LineSplitter(max_line_bytes, max_blank_lines=max_blank_lines)
        self.total = self.good = 0
        self._too_many = False
        self._first_errors: list[BatchError] = []
        self._ids: dict[bytes, int] = {}

    @property
    def index(self) -> LineIndex:
        return self._lines.index

    @property
    def too_many(self) -> bool:
        """Whether the file has too many lines or empty lines. The rest of it is ignored."""
        return self._too_many or self._lines.too_many_blank_lines

    def feed(self, block: bytes) -> Iterator[tuple[int, BadLine]]:
        """Yield the bad lines ending in this block, with their numbers."""
        return self._judged(self._lines.feed(block))

    def finish(self) -> Iterator[tuple[int, BadLine]]:
        """Yield the last line if it is bad."""
        yield from self._judged(self._lines.finish())
        self._ids = {}

    def failure(self) -> list[BatchError]:
        """Return the reasons if no line can run; empty: lines can run."""
        if self._too_many:
            reason = f"the file has more than {self._max_lines} lines"
            return [BatchError("too_many_lines", reason, self._max_lines + 1)]
        if self._lines.too_many_blank_lines:
            message = f"the file has more than {self._max_blank_lines} empty lines; remove them"
            return [BatchError("too_many_blank_lines", message, self._lines.next_line)]
        if not self.total:
            return [BatchError("empty_file", "the file has no line")]
        return [] if self.good else self._first_errors

    def _judged(self, lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, BadLine]]:
        for line, raw in lines:
            if line > self._max_lines:
                self._too_many = True
                return
            self.total = line
            read = self._unique(line, read_line(raw, self._endpoint, self._max_line_bytes))
            if isinstance(read, GoodLine):
                self.good += 1
                continue
            if len(self._first_errors) < MAX_BATCH_ERRORS:
                self._first_errors.append(BatchError(read.code, read.message, line, read.param))
            yield line, read

    def _unique(self, line: int, read: GoodLine | BadLine) -> GoodLine | BadLine:
        """Refuse the later of two lines with the same custom_id."""
        if read.custom_id is None:
            return read
        earlier = self._ids.setdefault(blake2b(read.custom_id.encode(), digest_size=16).digest(), line)
        if earlier == line or isinstance(read, BadLine):
            return read
        reason = f"custom_id {quoted(read.custom_id)} is already in use by line {earlier}"
        return BadLine(read.custom_id, "duplicate_custom_id", reason, "custom_id")
