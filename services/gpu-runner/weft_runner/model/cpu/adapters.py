"""Adapters packed for the native kernels, by slot: each in memory of its own, of the size that its true ranks need.

A site's A matrices are stacked, so that a shrink reads its input once; each projection keeps its own B. Blocks follow
each other in one piece of memory, in the order in which a step reads them.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.domain.model.config import ModelSpec
from weft_kernels.cpu.library import Library
from weft_kernels.cpu.memory import MappedMemory
from weft_kernels.cpu.pool import ThreadPool
from weft_kernels.cpu.structs import BF16, FP32, LoraSiteStruct, LoraSliceStruct
from weft_runner.model.adapter_store import DeviceAdapter, HostTensorStore
from weft_runner.model.lora import SITES, LoraPair, Scales, adapter_pairs

N_SITES = len(SITES)
_STORED = {torch.bfloat16: BF16, torch.float32: FP32}
_LINE = 64


@dataclass(frozen=True, slots=True, eq=False)
class CpuAdapter:
    """`sites` [L * 4] point into `memory`. `site_rank` counts each projection's rank rounded up to 2."""

    sites: "ctypes.Array[LoraSiteStruct]"
    memory: MappedMemory
    rank: int
    site_rank: int

    @property
    def n_bytes(self) -> int:
        return self.memory.n_bytes


class CpuAdapterStore(HostTensorStore):
    """The AdapterStore of the native executor. `table`: slot -> address of its sites, which a step reads.

    `pace` is called after each site that was packed, with its bytes: it may make the builder's thread wait.
    """

    def __init__(self, library: Library, spec: ModelSpec, slots: int, kind: int) -> None:
        self.table = (ctypes.c_void_p * slots)()
        self.pace: Callable[[int], None] = lambda _: None
        self._library, self._spec, self._kind = library, spec, kind
        self._pool: ThreadPool = library.pool(1)  # of the builder's thread, so that packing never meets a running step
        self._held: dict[int, CpuAdapter] = {}
        self._sizes: dict[tuple[int, int, int], int] = {}
        self._starts = tuple(_starts(names, spec) for names in SITES)

    @property
    def site_rank(self) -> int:
        """The widest site of all that are here."""
        return max((adapter.site_rank for adapter in self._held.values()), default=0)

    @property
    def page_bytes(self) -> int:
        return 0

    @property
    def slots(self) -> int:
        return len(self.table)

    def needs(self, tensors: Mapping[str, torch.Tensor], scales: Scales) -> int:
        """See `AdapterStore.needs`."""
        return sum(self._site_bytes(site) for layer in adapter_pairs(tensors, scales, self._spec) for site in layer)

    def build(self, tensors: Mapping[str, torch.Tensor], scales: Scales, pages: Sequence[int] = ()) -> CpuAdapter:
        """See `AdapterStore.build`."""
        del pages  # memory of its own: its KV pages stay untouched
        by_site = [site for layer in adapter_pairs(tensors, scales, self._spec) for site in layer]
        n_bytes = [self._site_bytes(site) for site in by_site]
        memory = MappedMemory(sum(n_bytes))
        sites = (LoraSiteStruct * (self._spec.layers * N_SITES))()
        address = memory.address
        for index, site in enumerate(by_site):
            if site:
                sites[index] = self._pack_site(site, self._starts[index % N_SITES], address)
                address += n_bytes[index]
                self.pace(n_bytes[index])
        rank = max(pair.rank for site in by_site for pair in site)
        widest = max(sum(_even(pair.rank) for pair in site) for site in by_site)
        return CpuAdapter(sites, memory, rank=rank, site_rank=widest)

    def put(self, slot: int, adapter: DeviceAdapter) -> None:
        """See `AdapterStore.put`."""
        assert isinstance(adapter, CpuAdapter), adapter
        self._held[slot] = adapter
        self.table[slot] = ctypes.addressof(adapter.sites)

    def clear(self, slot: int) -> None:
        """See `AdapterStore.clear`."""
        self.table[slot] = None
        self._held.pop(slot, None)

    def _site_bytes(self, site: Sequence[LoraPair]) -> int:
        if not site:
            return 0
        return self._a_bytes(site) + sum(self._packed_bytes(pair.n_out, pair.rank, 2) for pair in site)

    def _a_bytes(self, site: Sequence[LoraPair]) -> int:
        return self._packed_bytes(sum(pair.rank for pair in site), site[0].n_in, 32)

    def _packed_bytes(self, n_out: int, n_in: int, pad_in: int) -> int:
        """Whole cache lines. Each size is asked for once: an adapter has hundreds of matrices of a few sizes."""
        size = (n_out, n_in, pad_in)
        if (known := self._sizes.get(size)) is None:
            n_bytes = self._library.packed_bytes(self._kind, n_out, n_in, pad_in=pad_in)
            known = self._sizes[size] = -(-n_bytes // _LINE) * _LINE
        return known

    def _pack_site(self, site: Sequence[LoraPair], starts: Mapping[str, int], address: int) -> LoraSiteStruct:
        packed = LoraSiteStruct(a=address, rank=sum(pair.rank for pair in site), n_slices=len(site))
        self._pack(site[0].a if len(site) == 1 else torch.cat([pair.a for pair in site]), address, pad_in=32)
        address += self._a_bytes(site)
        rank_start = 0
        for i, pair in enumerate(site):
            self._pack(pair.b, address, pad_in=2)
            packed.slice[i] = LoraSliceStruct(
                address, rank_start, pair.rank, starts[pair.projection], pair.n_out, pair.scale
            )
            address += self._packed_bytes(pair.n_out, pair.rank, 2)
            rank_start += pair.rank
        return packed

    def _pack(self, matrix: torch.Tensor, address: int, *, pad_in: int) -> None:
        source = matrix.contiguous() if matrix.dtype in _STORED else matrix.float().contiguous()
        n_out, n_in = source.shape
        self._library.pack(
            self._pool,
            source.data_ptr(),
            _STORED[source.dtype],
            n_in,
            (n_out, n_in),
            address,
            self._kind,
            pad_in=pad_in,
        )


def _even(rank: int) -> int:
    return rank + rank % 2


def _starts(names: Sequence[str], spec: ModelSpec) -> dict[str, int]:
    """Where each projection's columns begin in the site's output."""
    starts: dict[str, int] = {}
    at = 0
    for name in names:
        starts[name] = at
        at += spec.projection(name)[1]
    return starts
