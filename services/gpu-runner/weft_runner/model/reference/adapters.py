"""The reference executor's adapters on its device: stacked LoRA sites by slot, as plain torch tensors."""

from collections.abc import Mapping, Sequence

import torch

from weft.domain.model.config import ModelSpec
from weft_kernels.lora import LoraSite
from weft_runner.model.adapter_store import DeviceAdapter, HostTensorStore
from weft_runner.model.lora import SITES, AdapterPairs, AdapterWeights, Scales, adapter_pairs, stack_adapter
from weft_runner.model.partition import Partition


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

    def needs(self, tensors: Mapping[str, torch.Tensor], scales: Scales) -> int:
        """See `AdapterStore.needs`."""
        pairs = [pair for layer in self._pairs(tensors, scales) for site in layer for pair in site]
        return 4 * sum(pair.a.numel() + pair.b.numel() for pair in pairs)

    def build(self, tensors: Mapping[str, torch.Tensor], scales: Scales, pages: Sequence[int] = ()) -> AdapterWeights:
        """See `AdapterStore.build`."""
        del pages  # tensors of its own
        return stack_adapter(self._pairs(tensors, scales), self._part.local)

    def _pairs(self, tensors: Mapping[str, torch.Tensor], scales: Scales) -> AdapterPairs:
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
