"""Adapters packed for the native kernels, by slot: each in memory of its own, of the size that its true ranks need.

A site's A matrices are stacked, so that a shrink reads its input once; each projection keeps its own B. Blocks follow
each other in one piece of memory, in the order in which a step reads them.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weft_kernels.cpu.library import Library
from weft_kernels.cpu.memory import Memory
from weft_kernels.cpu.pool import Pool
from weft_kernels.cpu.structs import BF16, FP32, LoraSite, LoraSlice
from weft_runner.memory.adapter_store import DeviceAdapter
from weft_runner.model.lora import SITES, LoraPair, Scales, adapter_pairs
from weft_runner.model.spec import ModelSpec

N_SITES = len(SITES)
_STORED = {torch.bfloat16: BF16, torch.float32: FP32}
_LINE = 64


@dataclass(frozen=True, slots=True, eq=False)
class NativeAdapter:
    """`sites` [L * 4] point into `memory`. `site_rank` counts each projection's rank rounded up to 2."""

    sites: "ctypes.Array[LoraSite]"
    memory: Memory
    rank: int
    site_rank: int

    @property
    def n_bytes(self) -> int:
        return self.memory.n_bytes


class NativeStore:
    """The AdapterStore of the native executor. `table`: slot -> address of its sites, which a step reads."""

    def __init__(self, library: Library, spec: ModelSpec, slots: int, kind: int) -> None:
        self.table = (ctypes.c_void_p * slots)()
        self._library, self._spec, self._kind = library, spec, kind
        self._pool: Pool = library.pool(1)  # of the builder's thread, so that packing never meets a running step
        self._held: dict[int, NativeAdapter] = {}

    @property
    def site_rank(self) -> int:
        """The widest site of all that are here."""
        return max((adapter.site_rank for adapter in self._held.values()), default=0)

    def build(self, tensors: Mapping[str, torch.Tensor], scales: Scales) -> NativeAdapter:
        """See `AdapterStore.build`."""
        layers = adapter_pairs(tensors, scales, self._spec)
        pairs = [pair for layer in layers for site in layer for pair in site]
        memory = Memory(sum(self._site_bytes(site) for layer in layers for site in layer))
        sites = (LoraSite * (self._spec.layers * N_SITES))()
        offset = 0
        for index, site in enumerate(site for layer in layers for site in layer):
            if site:
                sites[index] = self._pack_site(site, SITES[index % N_SITES], memory.address + offset)
                offset += self._site_bytes(site)
        widest = max(sum(_even(pair.rank) for pair in site) for layer in layers for site in layer)
        return NativeAdapter(sites, memory, rank=max(pair.rank for pair in pairs), site_rank=widest)

    def put(self, slot: int, adapter: DeviceAdapter) -> None:
        """See `AdapterStore.put`."""
        assert isinstance(adapter, NativeAdapter), adapter
        self._held[slot] = adapter
        self.table[slot] = ctypes.addressof(adapter.sites)

    def clear(self, slot: int) -> None:
        """See `AdapterStore.clear`."""
        self.table[slot] = None
        self._held.pop(slot, None)

    def _site_bytes(self, site: Sequence[LoraPair]) -> int:
        if not site:
            return 0
        return self._a_bytes(site) + sum(self._b_bytes(pair) for pair in site)

    def _a_bytes(self, site: Sequence[LoraPair]) -> int:
        rank = sum(pair.rank for pair in site)
        return _lines(self._library.packed_bytes(self._kind, rank, site[0].a.shape[1]))

    def _b_bytes(self, pair: LoraPair) -> int:
        return _lines(self._library.packed_bytes(self._kind, pair.b.shape[0], pair.rank, pad_in=2))

    def _pack_site(self, site: Sequence[LoraPair], names: Sequence[str], address: int) -> LoraSite:
        packed = LoraSite(a=address, rank=sum(pair.rank for pair in site), n_slices=len(site))
        self._pack(torch.cat([pair.a for pair in site]), address, pad_in=32)
        address += self._a_bytes(site)
        starts = self._starts(names)
        rank_start = 0
        for i, pair in enumerate(site):
            self._pack(pair.b, address, pad_in=2)
            packed.slice[i] = LoraSlice(
                b=address, rank_start=rank_start, rank=pair.rank, out_start=starts[pair.projection],
                n_out=pair.b.shape[0], scale=pair.scale,
            )  # fmt: skip
            address += self._b_bytes(pair)
            rank_start += pair.rank
        return packed

    def _starts(self, names: Sequence[str]) -> dict[str, int]:
        """Where each projection's columns begin in the site's output."""
        starts: dict[str, int] = {}
        at = 0
        for name in names:
            starts[name] = at
            at += self._spec.projection(name)[1]
        return starts

    def _pack(self, matrix: torch.Tensor, address: int, *, pad_in: int) -> None:
        source = matrix.contiguous() if matrix.dtype in _STORED else matrix.float().contiguous()
        self._library.pack(
            self._pool, source.data_ptr(), _STORED[source.dtype], source.shape[1], (source.shape[0], source.shape[1]),
            address, self._kind, pad_in=pad_in,
        )  # fmt: skip


def _even(rank: int) -> int:
    return rank + rank % 2


def _lines(n_bytes: int) -> int:
    return -(-n_bytes // _LINE) * _LINE
