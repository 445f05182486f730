"""Pages and rows on their way between a ring on a GPU and pinned memory of its host: FlexGen's load and store (4.1).

A stream copies to the GPU and another one back. Events keep the order: what computes with a piece comes after its load,
its store after that, and a load after all that was stored before it was launched. Nothing waits on the host.
"""

from collections.abc import Iterable

import torch

from weft_runner.model.cuda.device import CopyStream, PinnedMemory
from weft_runner.model.tiers.outside_pages import PageTier, Piece, SlotRun, count_extents
from weft_runner.model.tiers.read_ahead import TierTransfer

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]  # (to, source)


class HostPages(PageTier):
    """Extents of each of `layers` on the host, as large as slots of the ring. The executor's thread calls it."""

    def __init__(self, ring: torch.Tensor, host: PinnedMemory, layers: int) -> None:
        """`ring`: [slots, numbers], on the device."""
        self._ring, self._pinned, self._extent_bytes = ring, host, ring.shape[1] * ring.element_size()
        extents = host.n_bytes // self._extent_bytes // layers
        self.extents = host.tensor.view(ring.dtype).view(layers, extents, ring.shape[1])
        self._in, self._out = CopyStream(ring.device), CopyStream(ring.device)
        self._stored = self._in.computed()  # comes after all that used the ring, and all that was stored

    def load(self, item: Piece, at: int) -> list[TierTransfer]:
        loads, layer = item.pages.loads, item.layer
        pairs = [(self._slots(run, at), self._host(run, layer)) for run in loads]
        return [TierTransfer(count_extents(loads) * self._extent_bytes, lambda: self._in.copy(pairs, self._stored))]

    def store(self, item: Piece, at: int) -> list[TierTransfer]:
        """What is loaded later comes after it, and after what computes, also where nothing is stored."""
        stores, layer = item.pages.stores, item.layer
        pairs = [(self._host(run, layer), self._slots(run, at)) for run in stores]
        return [TierTransfer(count_extents(stores) * self._extent_bytes, lambda: self.copy_out(pairs))]

    def copy_out(self, pairs: Pairs) -> torch.cuda.Event | None:
        """Copy to the host after all that was launched to compute; loads come after that."""
        self._stored = self._out.copy(pairs, self._out.computed())
        return self._stored

    def close(self) -> None:
        """Wait for the copies under way."""
        if self._stored is not None:
            self._stored.synchronize()
        self._pinned.close()

    def _slots(self, run: SlotRun, at: int) -> torch.Tensor:
        return self._ring[at + run.slot : at + run.slot + run.count]

    def _host(self, run: SlotRun, layer: int) -> torch.Tensor:
        return self.extents[layer, run.extent : run.extent + run.count]
