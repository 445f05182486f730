"""Drafts from texts by the native library: `core.drafts` asks, `weft_kernels.cpu.draft` finds."""

import ctypes
from collections.abc import Sequence

from weft_kernels.cpu.draft import DraftSearch
from weft_runner.core.drafts.acceptance import MIN_GAIN, Draft
from weft_runner.core.drafts.drafter import DraftQuery
from weft_runner.core.drafts.recent_answers import TOKEN_BYTES


class NativeSearch:
    """A `Search`. Owned by the engine's thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._search = DraftSearch(library)

    def __call__(self, queries: Sequence[DraftQuery]) -> list[Draft]:
        """Find the draft of each query."""
        asked: list[tuple[int, int, int, int, int, float, int]] = []
        for text, tail, shares, most, first in queries:
            address, length = text.buffer_info()
            at, size = tail.buffer_info()
            asked.append(
                (address + TOKEN_BYTES * first, length - first, at, size, shares.buffer_info()[0], MIN_GAIN, most)
            )
        return [Draft(*one) for one in self._search.find(asked)]
