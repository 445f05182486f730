"""An index of where lines begin in an input file: one mark for every 256 KiB, so that any line is found by reading one
block.

A mark is a line's number (from 1), and an offset at or before its first byte, with only empty lines between. 12 bytes
each, 10 KB for 200 MB of lines.
"""

import struct
from bisect import bisect_right

BLOCK_BYTES = 256 << 10
_MARK = struct.Struct("<IQ")


class LineIndex:
    """The marks of a file. It grows while the file is read; the last mark is the end: one line behind the last, and the
    file's length."""

    def __init__(self) -> None:
        self._lines: list[int] = []
        self._offsets: list[int] = []

    def add(self, line: int, offset: int, *, alone: bool = False) -> None:
        """Note that a line begins there. It is kept where the last mark is a block away; `alone`: in any case."""
        if alone or not self._offsets or offset - self._offsets[-1] >= BLOCK_BYTES:
            self.mark(line, offset)

    def mark(self, line: int, offset: int) -> None:
        """Keep this mark."""
        self._lines.append(line)
        self._offsets.append(offset)

    def block(self, line: int) -> tuple[int, int, int]:
        """Find (first line, its offset, end offset) of the block that holds a line."""
        at = bisect_right(self._lines, line) - 1
        assert 0 <= at < len(self._lines) - 1, f"line {line} is not in the file"
        return self._lines[at], self._offsets[at], self._offsets[at + 1]

    def to_bytes(self) -> bytes:
        return b"".join(map(_MARK.pack, self._lines, self._offsets))

    @classmethod
    def from_bytes(cls, packed: bytes) -> "LineIndex":
        """Read an index. Raises ValueError."""
        if len(packed) % _MARK.size:
            raise ValueError(f"{len(packed)} bytes are no marks")
        index = cls()
        for line, offset in _MARK.iter_unpack(packed):
            index.mark(line, offset)
        return index
