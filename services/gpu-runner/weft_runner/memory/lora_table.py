"""The reference executor's adapters on its device: stacked LoRA sites by slot, as plain torch tensors."""

from collections.abc import Mapping, Sequence

import torch

from weft_kernels.lora import LoraSite
from weft_runner.memory.adapter_store import DeviceAdapter
from weft_runner.model.lora import SITES, AdapterWeights, Scales, build_adapter
from weft_runner.model.spec import ModelSpec


class LoraTable:
    """An `AdapterStore`. `sites(layer, site)` is what the kernels index by slot."""

    def __init__(self, spec: ModelSpec, slots: int) -> None:
        self._spec = spec
        self._table: list[list[list[LoraSite | None]]] = [[[None] * slots for _ in SITES] for _ in range(spec.layers)]

    def sites(self, layer: int, site: int) -> Sequence[LoraSite | None]:
        return self._table[layer][site]

    def build(self, tensors: Mapping[str, torch.Tensor], scales: Scales) -> AdapterWeights:
        """See `AdapterStore.build`."""
        return build_adapter(tensors, scales, self._spec)

    def put(self, slot: int, adapter: DeviceAdapter) -> None:
        assert isinstance(adapter, AdapterWeights), adapter
        for layer, row in enumerate(adapter.sites):
            for site, weights in enumerate(row):
                self._table[layer][site][slot] = weights

    def clear(self, slot: int) -> None:
        for row in self._table:
            for sites in row:
                sites[slot] = None
