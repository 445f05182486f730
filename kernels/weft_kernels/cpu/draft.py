"""`DraftSearch`: drafts of what sequences go on with, found in texts by the native library (`src/weft_draft.h`).

Pointers are ints; no torch. Nothing is kept between calls: a text may grow or be cut as its owner likes. Structs are
read as ints: for a call of a few queries, views of numpy would take longer than the search.
"""

import ctypes
import struct
from collections.abc import Sequence
from ctypes import c_double, c_int32

import numpy as np

from weft_kernels.cpu.errors import CallRefused
from weft_kernels.cpu.structs import CODES

MAX_MATCH = 64
MAX_PLACES = 256
MAX_DRAFT = 32
GUESS_LENGTHS = 7
GUESS_CLASSES = 4 * GUESS_LENGTHS
_CODES = {**CODES, -2: f"a length is negative, or max_tokens is not one of 0 to {MAX_DRAFT}"}

DRAFT_QUERY = np.dtype(  # `weft_draft_query`
    [
        ("text", np.uintp), ("length", np.int64), ("tail", np.uintp), ("tail_length", np.int64), ("shares", np.uintp),
        ("min_gain", np.float64), ("max_tokens", np.int32),
    ],
    align=True,
)  # fmt: skip
_QUERY = struct.Struct("@" + "".join(DRAFT_QUERY[name].char for name in DRAFT_QUERY.names or ()) + "0q")


class DraftFoundStruct(ctypes.Structure):
    """`weft_draft_found`."""

    _fields_ = [
        ("n_tokens", c_int32), ("found", c_int32), ("tokens", c_int32 * MAX_DRAFT), ("classes", c_int32 * MAX_DRAFT),
        ("gains", c_double * MAX_DRAFT),
    ]  # fmt: skip


FOUND_INTS, CLASSES_AT = ctypes.sizeof(DraftFoundStruct) // 4, 2 + MAX_DRAFT
GAINS_AT = (CLASSES_AT + MAX_DRAFT) // 2
DraftAddresses = tuple[int, int, int, int, int, float, int]
DraftFound = tuple[Sequence[int], Sequence[int], Sequence[float]]
NOTHING: DraftFound = (), (), ()


class DraftSearch:
    """One caller at a time: it owns the memory of queries, and of what was found."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._draft = library.weft_draft
        self._draft.argtypes, self._draft.restype = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p], ctypes.c_int32
        self._grow(1)

    def find(self, queries: Sequence[DraftAddresses]) -> list[DraftFound]:
        """Find what follows each query's tail: tokens, the class of each, the chance that it and all before are right.

        A query is the address and length of a text of int32 tokens, those of the tail whose end is looked for, the
        address of GUESS_CLASSES doubles (how many guesses of each class are right), the chance below which a draft
        ends, and how many tokens are wanted at most. Where not even the first guess is likely enough there is no token,
        and one class. The queries' memory lives until this returns. Raises CallRefused.
        """
        if len(queries) > self._capacity:
            self._grow(len(queries))
        for at, query in enumerate(queries):
            _QUERY.pack_into(self._queries, at * _QUERY.size, *query)
        code = self._draft(self._queries_at, len(queries), self._found_at)
        if code:
            raise CallRefused("weft_draft", code, _CODES[code])
        found, ints, doubles = list[DraftFound](), self._ints, self._doubles
        for at in range(0, len(queries) * FOUND_INTS, FOUND_INTS):
            n, some = ints[at], ints[at + 1]
            if not some:
                found.append(NOTHING)
                continue
            tokens, classes, gains = at + 2, at + CLASSES_AT, at // 2 + GAINS_AT
            found.append(
                (
                    ints[tokens : tokens + n].tolist(),
                    ints[classes : classes + (n or 1)].tolist(),
                    doubles[gains : gains + n].tolist(),
                )
            )
        return found

    def _grow(self, capacity: int) -> None:
        self._capacity = capacity
        self._queries, out = bytearray(_QUERY.size * capacity), (DraftFoundStruct * capacity)()
        whole = memoryview(out).cast("B")
        self._ints, self._doubles = whole.cast("i"), whole.cast("d")
        self._queries_at, self._found_at = (
            ctypes.addressof(ctypes.c_char.from_buffer(self._queries)),
            ctypes.addressof(out),
        )
