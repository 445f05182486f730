"""`DraftSearch`: drafts of what sequences go on with, found in texts by the native library (`src/weft_draft.h`).

Pointers are ints; no torch. Nothing is kept between calls: a text may grow or be cut as its owner likes. Structs are
read as ints: for a call of a few queries, views of numpy would take longer than the search.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from typing import NamedTuple

from weft_kernels.cpu.errors import CallRefused
from weft_kernels.cpu.structs import CODES

MAX_MATCH = 64
MAX_PLACES = 256
MAX_DRAFT = 32
_CODES = {**CODES, -2: f"a length is negative, or max_tokens is not one of 0 to {MAX_DRAFT}"}


class DraftQueryStruct(ctypes.Structure):
    """`weft_draft_query`."""

    _fields_ = [
        ("text", c_void_p), ("length", c_int64), ("tail", c_void_p), ("tail_length", c_int64), ("max_tokens", c_int32),
        ("reserved", c_int32),
    ]  # fmt: skip


class DraftFoundStruct(ctypes.Structure):
    """`weft_draft_found`."""

    _fields_ = [
        ("matched", c_int32), ("n_tokens", c_int32), ("tokens", c_int32 * MAX_DRAFT), ("agree", c_int32 * MAX_DRAFT),
        ("of", c_int32 * MAX_DRAFT),
    ]  # fmt: skip


INTS = ctypes.sizeof(DraftFoundStruct) // 4


class DraftAddresses(NamedTuple):
    """Addresses of a text of int32 tokens, and of the tail whose end is looked for; `max_tokens`: wanted at most."""

    text: int
    length: int
    tail: int
    tail_length: int
    max_tokens: int


class DraftFound(NamedTuple):
    """Tokens that follow; of `of[i]` places that match so far, `agree[i]` go on with `tokens[i]`."""

    matched: int
    tokens: list[int]
    agree: list[int]
    of: list[int]


class DraftSearch:
    """One caller at a time: it owns the memory of queries, and of what was found."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._draft = library.weft_draft
        self._draft.argtypes, self._draft.restype = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p], ctypes.c_int32
        self._grow(1)

    def find(self, queries: Sequence[DraftAddresses | tuple[int, int, int, int, int]]) -> list[DraftFound]:
        """Find the draft of each query, whose memory lives until this returns. Raises CallRefused."""
        if len(queries) > self._capacity:
            self._grow(len(queries))
        for at, query in enumerate(queries):
            self._queries[at] = query
        code = self._draft(self._queries_at, len(queries), self._found_at)
        if code:
            raise CallRefused("weft_draft", code, _CODES[code])
        found, ints = list[DraftFound](), self._found
        for begin in range(0, len(queries) * INTS, INTS):
            n, at = ints[begin + 1], begin + 2
            parts = [ints[i : i + n].tolist() for i in (at, at + MAX_DRAFT, at + 2 * MAX_DRAFT)]
            found.append(DraftFound(ints[begin], *parts))
        return found

    def _grow(self, capacity: int) -> None:
        self._capacity = capacity
        self._queries, out = (DraftQueryStruct * capacity)(), (DraftFoundStruct * capacity)()
        self._found = memoryview(out).cast("B").cast("i")
        self._queries_at, self._found_at = ctypes.addressof(self._queries), ctypes.addressof(out)
