"""Drafts from texts by the native library: `core.drafts` asks, `weft_kernels.cpu.draft` finds."""

import ctypes
from collections.abc import Sequence

from weft_kernels.cpu.draft import DraftSearch
from weft_runner.core.drafts.acceptance import Draft
from weft_runner.core.drafts.drafter import DraftQuery


class NativeSearch:
    """A `Search`. Owned by the engine's thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._search = DraftSearch(library)

    def __call__(self, queries: Sequence[DraftQuery]) -> list[Draft]:
        """Find the draft of each query."""
        found = self._search.find([(*text.buffer_info(), *tail.buffer_info(), most) for text, tail, most in queries])
        return [Draft(*one) for one in found]
