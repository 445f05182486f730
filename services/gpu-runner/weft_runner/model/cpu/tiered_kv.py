"""KV of an executor whose pages lie in memory and on a disk. Rows on disk pass through a ring behind the frames.

A layer of a page takes the same bytes wherever it is, so that one base address and numbers of such layers name frames
and ring slots alike: frame f's layer l is number f * L + l, and slot s is number frames * L + s. Native steps of one
layer take these numbers for page numbers.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from weft_kernels.cpu.memory import MappedMemory
from weft_kernels.cpu.structs import ATTENTION_BLOCK
from weft_runner.errors import DiskUnusable, ExecutorLost
from weft_runner.model.cpu.page_file import DiskPages, PageFile
from weft_runner.model.step import Ints, StepArrays
from weft_runner.model.tiers.micro_batches import MicroBatch
from weft_runner.model.tiers.outside_pages import LayerPages, OutsidePages, SlotRun, layer_pages, pieces
from weft_runner.offload.figures import TierFigures
from weft_runner.offload.page_places import PagePlaces
from weft_runner.offload.placement import KvSplit


class TieredKv:
    """`memory`: the frames, then the ring. One owner: the executor."""

    def __init__(
        self, folder: Path, memory: MappedMemory, split: KvSplit, page_tokens: int, windows: Sequence[int]
    ) -> None:
        """`windows`: of each layer. Raises DiskUnusable."""
        self._memory, self._split, self._page_tokens, self._windows = memory, split, page_tokens, windows
        self._places = PagePlaces(split.pages, split.frames)
        self._file = PageFile(folder, split.layers, split.outside_pages, split.layer_bytes)
        ring = memory.address + split.frames * split.page_bytes
        self._ahead = DiskPages(self._file, ring).read_ahead(split.ring_slots, "KV is")

    @property
    def version(self) -> int:
        """A number of where pages lie: another one after pages have moved."""
        return self._places.version

    @property
    def figures(self) -> TierFigures:
        return self._ahead.figures

    def on_disk(self, arrays: StepArrays) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """Marks the pages of a step that are on the disk."""
        return self._places.places[arrays.pages] < 0

    def begin(self, arrays: StepArrays, batches: Sequence[MicroBatch], layers: range) -> LayerPages:
        """Begin a pass, whose pages on disk in each layer's window are loaded from now on. Raises ExecutorLost."""
        windows = {layer: self._windows[layer] for layer in layers}
        found = layer_pages(batches, arrays, self._places.places, self._page_tokens, windows, ATTENTION_BLOCK)
        self._ahead.begin(pieces(found))
        return found

    def frames(self, arrays: StepArrays) -> Ints:
        """The page table of rows that have nothing on disk."""
        return self._places.places[arrays.pages]

    def acquire(self, arrays: StepArrays, layer: int, pages: OutsidePages) -> Ints:
        """The next micro-batch's page table of this layer, whose pages are in memory until `release`."""
        slot, layers = self._ahead.acquire(), self._split.layers
        table = self._places.places[arrays.pages] * np.int32(layers) + np.int32(layer)
        table[pages.columns] = pages.slots + (self._split.frames * layers + slot)
        return table

    def release(self) -> None:
        self._ahead.release()

    def clear(self, pages: Sequence[int]) -> None:
        """Pages change hands. Those on disk begin with zeros when their first token is written."""
        for frame in self._places.grant(pages):
            self._memory.clear(frame * self._split.page_bytes, self._split.page_bytes)

    def take(self, pages: Sequence[int]) -> None:
        """Give pages to adapters, which have memory of their own: frames lose as much. Raises ExecutorLost."""
        self._ahead.drain()
        page_bytes, layer_bytes = self._split.page_bytes, self._split.layer_bytes
        for spill in self._places.take(pages):
            for layer in range(self._split.layers):
                address = self._memory.address + spill.frame * page_bytes + layer * layer_bytes
                try:
                    self._file.write(address, layer, [SlotRun(0, spill.extent, 1)])
                except DiskUnusable as error:
                    raise ExecutorLost(f"KV is lost: {error}") from error
        for page in pages:
            self._memory.discard(self._places.frame_taken_by(page) * page_bytes, page_bytes)

    def close(self) -> None:
        self._ahead.close()
