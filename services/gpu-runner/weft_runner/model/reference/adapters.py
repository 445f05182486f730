"""The reference executor's adapters on its device: stacked LoRA sites by slot, as plain torch tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.domain.model.spec import ModelSpec
from weft_kernels.lora import LoraSite, LoraSlice
from weft_runner.model.adapter_store import DeviceAdapter, HostTensorStore
from weft_runner.model.arrays import Array
from weft_runner.model.host_tensors import tensor_of
from weft_runner.model.lora import SITES, AdapterPairs, LoraPair, Scales, adapter_pairs, sites_of
from weft_runner.model.partition import Partition


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """`sites[layer][site]`, None if the adapter leaves a site alone.

    `rank` is the largest true rank, `site_rank` the largest sum of ranks at a stacked site.
    """

    sites: tuple[tuple[LoraSite | None, ...], ...]
    rank: int
    site_rank: int
    n_bytes: int


class TorchAdapterStore(HostTensorStore):
    """An `AdapterStore`. `sites(layer, site)` is what the kernels index by slot. `part`: of the model, if not all."""

    def __init__(self, spec: ModelSpec, slots: int, part: Partition | None = None) -> None:
        self._part, self.slots = part or Partition(spec), slots
        self._table: list[list[list[LoraSite | None]]] = [[[None] * slots for _ in SITES] for _ in self._part.layers]

    def sites(self, layer: int, site: int) -> Sequence[LoraSite | None]:
        return self._table[layer][site]

    @property
    def page_bytes(self) -> int:
        return 0

    def device_bytes(self, tensors: Mapping[str, Array], scales: Scales) -> int:
        pairs = [pair for layer in self._pairs(tensors, scales) for site in layer for pair in site]
        return 4 * sum(pair.a.size + pair.b.size for pair in pairs)

    def build(self, tensors: Mapping[str, Array], scales: Scales, pages: Sequence[int] = ()) -> AdapterWeights:
        del pages  # tensors of its own
        return stack_adapter(self._pairs(tensors, scales), self._part.local)

    def _pairs(self, tensors: Mapping[str, Array], scales: Scales) -> AdapterPairs:
        """This part's. Raises AdapterInvalid."""
        return self._part.pairs(adapter_pairs(tensors, scales, self._part.whole))

    def put(self, slot: int, adapter: DeviceAdapter) -> None:
        assert isinstance(adapter, AdapterWeights), adapter
        for layer, row in enumerate(adapter.sites):
            for site, weights in enumerate(row):
                self._table[layer][site][slot] = weights

    def clear(self, slot: int) -> None:
        for row in self._table:
            for sites in row:
                sites[slot] = None


def stack_adapter(pairs: AdapterPairs, spec: ModelSpec) -> AdapterWeights:
    """Pairs -> stacked sites in fp32, of one device's part or whole. A stage may have none: then its ranks are 0."""
    named = sites_of(spec.family)
    sites = tuple(tuple(_site(site, names, spec) for site, names in zip(layer, named, strict=True)) for layer in pairs)
    present = [site for layer in sites for site in layer if site is not None]
    return AdapterWeights(
        sites=sites,
        rank=max((pair.rank for layer in pairs for site in layer for pair in site), default=0),
        site_rank=max((site.slices[-1].rank_end for site in present), default=0),
        n_bytes=sum(site.n_bytes for site in present),
    )


def _site(pairs: tuple[LoraPair, ...], names: tuple[str, ...], spec: ModelSpec) -> LoraSite | None:
    by_name = {pair.projection: pair for pair in pairs}
    slices: list[LoraSlice] = []
    rank_start = out_start = 0
    for name in names:
        if (pair := by_name.get(name)) is not None:
            b_t, begin = tensor_of(pair.b).float().t().contiguous(), out_start + pair.out_start
            slices.append(LoraSlice(rank_start, rank_start + pair.rank, begin, begin + pair.n_out, b_t, pair.scale))
            rank_start += pair.rank
        out_start += spec.projection(name)[1]
    if not slices:
        return None
    return LoraSite(torch.cat([tensor_of(pair.a).float() for pair in pairs]).t().contiguous(), tuple(slices))
