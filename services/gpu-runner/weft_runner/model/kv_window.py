"""KV pages as a stream between two runners sees them: bytes of some layers of some pages, to be sent or received."""

from collections.abc import Sequence
from typing import Any, Protocol

from weft_runner.model.arrays import Bytes


class KvWindow(Protocol):
    """One direction of one stream: a thread of its own uses it, for one piece at a time, of `piece_bytes` at most.

    A piece is layers [first_layer, first_layer + layers) of some pages, page by page. `fence`: of `KvMemory.fence`.
    """

    layers: int
    layer_bytes: int  # of one layer of one page
    piece_bytes: int

    def outgoing(self, pages: Sequence[int], first_layer: int, layers: int, fence: Any) -> list[memoryview]:
        """The bytes of a piece, in order, in as few parts as they lie in."""
        ...

    def incoming(self, pages: Sequence[int], first_layer: int, layers: int) -> list[memoryview]:
        """Return the memory that the bytes of a piece are to be written to."""
        ...

    def arrived(self, pages: Sequence[int], first_layer: int, layers: int, fence: Any) -> None:
        """Note that the piece is written: when this returns, steps read it."""
        ...


PIECE_BYTES = 4 << 20  # pass in some milliseconds: what is dropped meanwhile is noticed behind one piece


class DirectKvWindow:
    """Pages in this process's memory, [pages, page bytes]: they are sent from and received to where they lie."""

    def __init__(self, pages: Bytes, layers: int) -> None:
        self.layers, self._page_bytes = layers, pages.shape[1]
        self.layer_bytes = self._page_bytes // layers
        self.piece_bytes = max(PIECE_BYTES, self.layer_bytes)
        self._bytes = pages.reshape(-1).data

    def outgoing(self, pages: Sequence[int], first_layer: int, layers: int, fence: Any) -> list[memoryview]:
        del fence
        return self.incoming(pages, first_layer, layers)

    def incoming(self, pages: Sequence[int], first_layer: int, layers: int) -> list[memoryview]:
        if layers == self.layers:
            return [self._part(first, count * self._page_bytes) for first, count in _runs(pages, self._page_bytes)]
        skipped, size = first_layer * self.layer_bytes, layers * self.layer_bytes
        return [self._part(page * self._page_bytes + skipped, size) for page in pages]

    def arrived(self, pages: Sequence[int], first_layer: int, layers: int, fence: Any) -> None:
        pass

    def _part(self, begin: int, size: int) -> memoryview:
        return self._bytes[begin : begin + size]


def _runs(pages: Sequence[int], page_bytes: int) -> list[tuple[int, int]]:
    """Neighbours in memory that are neighbours in the sequence, as (first byte, pages)."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and runs[-1][0] + runs[-1][1] * page_bytes == page * page_bytes:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((page * page_bytes, 1))
    return runs
