"""Adapters in KV pages on the device, by slot: KV and adapters share bytes, not only an account of them.

An adapter is packed into an image of its pages in pinned memory, layer by layer, and each layer's pages follow on a
stream of their own while the next layer is packed: loading runs beside steps, and a prompt may begin when layer 0 has
arrived. The image is what stays in host memory, so that the next load only copies. Events keep the order: copies come
after what was launched when the pages were allocated, steps after the layers that they read, and pages are freed after
the last copy into them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weft_kernels.triton.packing import Adapter, PackedImage, Projection, fill_layer, plan_image
from weft_kernels.triton.tables import SLICES, UNIT, Layout, LoraTables, SiteShape, SlotEntry
from weft_runner.errors import AdapterInvalid
from weft_runner.model.adapter_store import DeviceAdapter
from weft_runner.model.arrays import Array
from weft_runner.model.cuda.device import on_device
from weft_runner.model.host_tensors import tensor_of
from weft_runner.model.kv_cache import KvCache
from weft_runner.model.lora import LoraPair, Scales, adapter_pairs, sites_of
from weft_runner.model.partition import Partition
from weft_runner.model.tensor_parallel import ROW_SITES

FramesOf = Callable[[Sequence[int]], Sequence[int]]
TABLE_SHARE = 32  # m135 with ranks to 64: room for adapters down to rank 6, in 3 % of the pages' memory at the most


@dataclass(frozen=True, slots=True, eq=False)
class PagedAdapter:
    """`arrived[layer]`: an event after which its rows of layers up to it are there; empty: all of them are."""

    entry: SlotEntry
    arrived: tuple[torch.cuda.Event, ...]
    rank: int
    site_rank: int
    n_bytes: int


class HostImage:
    """A HostAdapter: the image, packed as far as it was needed, in pinned memory where there is a device.

    Each page is memory of its own: torch keeps freed pinned blocks by size, so the next adapter gets those of one that
    has gone (once no copy reads them), and a page of a power of two wastes nothing.
    """

    def __init__(
        self, store: "PagedAdapterStore", adapter: Adapter, plan: PackedImage, rank: int, site_rank: int
    ) -> None:
        """Take an adapter by layer and site, where its rows go, its largest rank and sum of ranks at a site."""
        self._store, self.plan, self.rank, self.site_rank = store, plan, rank, site_rank
        self.pages: list[torch.Tensor] = []
        self._adapter: Adapter | None = adapter
        self._layers = 0  # that are packed

    @property
    def n_bytes(self) -> int:
        return self.plan.n_pages * self._store.page_bytes

    def build(self, pages: Sequence[int]) -> PagedAdapter:
        return self._store.place(self, pages)

    def complete(self) -> None:
        self.pack(len(self.plan.ends) - 1)

    def pack(self, layer: int) -> None:
        """Pack up to that layer, if it is not yet. What it was made from is let go after the last one."""
        while self._adapter is not None and self._layers <= layer:
            while len(self.pages) < self.plan.ends[self._layers]:
                self.pages.append(self._store.host_page())
            fill_layer(self.pages, self.plan, self._adapter, self._store.tables.layout, self._layers)
            self._layers += 1
            if self._layers == len(self.plan.ends):
                self._adapter = None


class PagedAdapterStore:
    """The AdapterStore of the cuda executor. `tables` is what its kernels look up."""

    def __init__(
        self, part: Partition, kv: KvCache, slots: int, max_rank: int, frames_of: FramesOf = list
    ) -> None:  # fmt: skip
        """Own the adapters of a device whose `part` of the model they are shared out with (`model.tensor_parallel`).

        `frames_of`: where in the cache pages of an adapter are, any thread.
        """
        self._part, self._kv, self._max_rank, self._layers = part, kv, max_rank, part.local.layers
        self._pages = kv.tensor.view(len(kv.tensor), kv.page_bytes // kv.tensor.element_size())
        self.tables, self._frames_of = LoraTables(self._pages, layout_of(part, max_rank), slots), frames_of
        self._arriving: dict[int, PagedAdapter] = {}
        self._bytes: dict[int, int] = {}  # by slot
        self._widths: dict[int, npt.NDArray[np.int32]] = {}  # slot -> [L, sites]
        self.at = kv.tensor.device
        self._copies = torch.cuda.Stream(self.at) if kv.tensor.is_cuda else None
        self._allocated: torch.cuda.Event | None = None

    @property
    def page_bytes(self) -> int:
        return self._kv.page_bytes

    @property
    def slots(self) -> int:
        return self.tables.slots

    def n_bytes(self, slot: int) -> int:
        """Return what the adapter there takes on the device; 0: none was put there."""
        return self._bytes.get(slot, 0)

    def device_bytes(self, tensors: Mapping[str, Array], scales: Scales) -> int:
        return self.copy(tensors, scales).n_bytes

    def build(self, tensors: Mapping[str, Array], scales: Scales, pages: Sequence[int]) -> PagedAdapter:
        return self.place(self.copy(tensors, scales), pages)

    def copy(self, tensors: Mapping[str, Array], scales: Scales) -> HostImage:
        """Make an image, which is packed when it is built for the first time, or completed."""
        pairs = adapter_pairs(tensors, scales, self._part.whole)
        rank = max(pair.rank for layer in pairs for site in layer for pair in site)
        if rank > self._max_rank:
            raise AdapterInvalid(f"rank {rank} is above this runner's --max-rank {self._max_rank}")
        site_rank = max(sum(pair.rank for pair in site) for layer in pairs for site in layer)
        own = self._part.pairs(pairs)
        sites = sites_of(self._part.whole.family)
        adapter = [[_site(site, names) for site, names in zip(layer, sites, strict=True)] for layer in own]
        plan = plan_image(adapter, self.tables.layout, self._pages.shape[1] // UNIT)
        return HostImage(self, adapter, plan, rank, site_rank)

    @on_device
    def place(self, packed: HostImage, pages: Sequence[int]) -> PagedAdapter:
        """Copy an image to these pages. Returns when all copies are under way."""
        pages = self._frames_of(pages)
        try:
            arrived = self._copy(packed, pages)
        except Exception:
            if self._copies is not None:  # its pages get another owner at once
                self._copies.synchronize()
            raise
        entry = packed.plan.on_pages(pages)
        if self._copies is not None:  # what `put` copies must not make the engine wait for the step that runs
            entry = SlotEntry(entry.ends.pin_memory(), entry.scales.pin_memory(), entry.row_offsets.pin_memory())
        return PagedAdapter(entry, arrived, packed.rank, packed.site_rank, packed.n_bytes)

    @on_device
    def put(self, slot: int, adapter: DeviceAdapter) -> None:
        assert isinstance(adapter, PagedAdapter), adapter
        self.tables.put(slot, adapter.entry)
        self._bytes[slot] = adapter.n_bytes
        self._widths[slot] = adapter.entry.ends[:, :, :SLICES].amax(dim=2).numpy()
        if adapter.arrived:
            self._arriving[slot] = adapter

    @on_device
    def clear(self, slot: int) -> None:
        """Empty a slot. Whoever gets its pages writes after what is still being copied into them."""
        self.wait([slot], self._layers - 1)
        self.tables.clear(slot)

    @on_device
    def on_pages_allocated(self) -> None:
        """Let copies into pages that adapters got now wait for steps launched before, which may still touch them."""
        if self._copies is not None:
            self._allocated = torch.cuda.Event()
            self._allocated.record()

    def widths(self, slots: Sequence[int]) -> list[list[int]]:
        """Return, by [layer][site], the ranks of the widest of these adapters there; 0: all of them leave it alone."""
        return np.max([self._widths[slot] for slot in slots], axis=0).tolist()

    def wait(self, slots: Sequence[int], layer: int) -> None:
        """Let what is launched next wait until these slots have arrived up to `layer`; free once all have."""
        if self._arriving:
            self._wait(slots, layer)

    @on_device
    def _wait(self, slots: Sequence[int], layer: int) -> None:
        for slot in slots:
            adapter = self._arriving.get(slot)
            if adapter is not None:
                adapter.arrived[layer].wait()
                if layer == self._layers - 1:
                    del self._arriving[slot]

    # ---- the builder's thread

    def host_page(self) -> torch.Tensor:
        """Return memory for a page of an image."""
        return torch.empty(self._pages.shape[1], dtype=self._pages.dtype, pin_memory=self._copies is not None)

    def _copy(self, packed: HostImage, pages: Sequence[int]) -> tuple[torch.cuda.Event, ...]:
        """Copy a layer at a time, packed if it is not yet; a page that two layers share is copied with both."""
        arrived: list[torch.cuda.Event] = []
        done = 0
        with torch.cuda.stream(self._copies):  # None: where there is no device, nothing
            if self._copies is not None and self._allocated is not None:
                self._copies.wait_event(self._allocated)
            for layer, end in enumerate(packed.plan.ends):
                packed.pack(layer)
                for index in range(done, end):
                    self._pages[pages[index]].copy_(packed.pages[index], non_blocking=True)
                done = max(0, end - 1)
                if self._copies is not None:
                    arrived.append(torch.cuda.Event())
                    arrived[-1].record(self._copies)
        return tuple(arrived)


def layout_of(part: Partition, max_rank: int) -> Layout:
    """Return the sites of a device's part of a model, in the order of `model.lora.sites_of`."""

    def shape(site: int, names: Sequence[str]) -> SiteShape:
        n_in = part.whole.projection(names[0])[0]
        outputs = [part.outputs(name) for name in names]
        return SiteShape(n_in // part.size if site in ROW_SITES else n_in, tuple(o.stop - o.start for o in outputs))

    sites = sites_of(part.whole.family)
    return Layout(part.local.layers, tuple(shape(site, names) for site, names in enumerate(sites)), max_rank)


def slots_beside(part: Partition, pages: int, page_tokens: int, max_rank: int, element_bytes: int) -> int:
    """Count the adapters that pages could hold, as far as the tables stay a small part of the pages' memory.

    All parts of a model that is split have the same number: both follow its layers.
    """
    kv_bytes = pages * element_bytes * part.local.layers * 2 * part.local.kv_heads * page_tokens * part.whole.head_dim
    return min(pages, kv_bytes // TABLE_SHARE // layout_of(part, max_rank).entry_bytes)


def unsupported_in_pages(part: Partition, page_tokens: int, max_rank: int) -> str:
    """Say why adapters of this model cannot live in such pages; empty when they can."""
    page = part.local.layers * 2 * part.local.kv_heads * page_tokens * part.whole.head_dim
    if page % UNIT:
        return f"a KV page of {page} numbers is no multiple of {UNIT}"
    if (row := layout_of(part, max_rank).row_length) > page:
        return f"a row of an adapter takes {row} numbers, and a KV page of {page_tokens} tokens has {page}"
    return ""


def _site(pairs: Sequence[LoraPair], names: Sequence[str]) -> list[Projection]:
    return [
        Projection(names.index(pair.projection), tensor_of(pair.a), tensor_of(pair.b), pair.scale) for pair in pairs
    ]
