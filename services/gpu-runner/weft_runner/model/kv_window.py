"""KV pages as a stream between two runners sees them: bytes of some layers of some pages, to be sent or received."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]


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
        """Where the bytes of a piece are to be written."""
        ...

    def arrived(self, pages: Sequence[int], first_layer: int, layers: int, fence: Any) -> None:
        """They are written: when this returns, steps read them."""
        ...


PIECE_BYTES = 4 << 20  # so many pass in some milliseconds: what is dropped meanwhile is noticed behind one piece


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


class StagedKvWindow:
    """Pages of a device, [pages, layers, bytes]: they pass through pinned memory, on a stream of their own."""

    def __init__(self, pages: torch.Tensor) -> None:
        self.layers, self.layer_bytes = pages.shape[1], pages.shape[2]
        self.piece_bytes = max(PIECE_BYTES, self.layer_bytes)
        self._pages, on_gpu = pages, pages.is_cuda
        self._staging = torch.empty(self.piece_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._bytes: memoryview = self._staging.numpy().data
        self._copies = torch.cuda.Stream(pages.device) if on_gpu else None

    def outgoing(self, pages: Sequence[int], first_layer: int, layers: int, fence: Any) -> list[memoryview]:
        with torch.inference_mode(), torch.cuda.stream(self._copies):
            self._after(fence)
            for staged, page in zip(self._staged(len(pages), layers), pages, strict=True):
                staged.copy_(self._pages[page, first_layer : first_layer + layers], non_blocking=True)
        self._complete()
        return self.incoming(pages, first_layer, layers)

    def incoming(self, pages: Sequence[int], first_layer: int, layers: int) -> list[memoryview]:
        del first_layer
        return [self._bytes[: len(pages) * layers * self.layer_bytes]]

    def arrived(self, pages: Sequence[int], first_layer: int, layers: int, fence: Any) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._copies):
            self._after(fence)
            for staged, page in zip(self._staged(len(pages), layers), pages, strict=True):
                self._pages[page, first_layer : first_layer + layers].copy_(staged, non_blocking=True)
        self._complete()

    def _staged(self, pages: int, layers: int) -> torch.Tensor:
        """[pages, layers, bytes] of the staging memory."""
        return self._staging[: pages * layers * self.layer_bytes].view(pages, layers, self.layer_bytes)

    def _after(self, fence: Any) -> None:
        if self._copies is not None:
            self._copies.wait_event(fence)

    def _complete(self) -> None:
        if self._copies is not None:
            self._copies.synchronize()


def _runs(pages: Sequence[int], page_bytes: int) -> list[tuple[int, int]]:
    """Neighbours in memory that are neighbours in the sequence, as (first byte, pages)."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and runs[-1][0] + runs[-1][1] * page_bytes == page * page_bytes:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((page * page_bytes, 1))
    return runs
