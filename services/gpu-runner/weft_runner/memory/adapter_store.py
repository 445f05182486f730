"""The seam between the adapter pool and an executor: adapters in the form that it computes with, by slot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weft_runner.memory.adapter_files import bytes_of, copied
from weft_runner.model.lora import Scales


class DeviceAdapter(Protocol):
    """An adapter in the form that an executor computes with."""

    @property
    def rank(self) -> int:
        """The largest true rank of a projection."""
        ...

    @property
    def site_rank(self) -> int:
        """The largest sum of ranks at a stacked site: what the step's workspace has to hold."""
        ...

    @property
    def n_bytes(self) -> int:
        """What it takes on the device, exactly; fixed for an artifact, so that it is known before the next load."""
        ...


class HostAdapter(Protocol):
    """An adapter in host memory, for the store that made it. The builder's thread."""

    @property
    def n_bytes(self) -> int:
        """In host memory."""
        ...

    def complete(self) -> None:
        """From here on nothing is read of what it was made from."""
        ...

    def needs(self) -> int:
        """See `AdapterStore.needs`."""
        ...

    def build(self, pages: Sequence[int], /) -> DeviceAdapter:
        """See `AdapterStore.build`."""
        ...


class AdapterStore(Protocol):
    """An executor's adapters by slot. The builder's thread calls `needs`, `build` and `copy`, the engine's the others.

    `page_bytes`: adapters live in pages of this size, those that the book lends them; 0: they have memory of their own.
    """

    @property
    def page_bytes(self) -> int: ...

    def needs(self, tensors: Mapping[str, torch.Tensor], scales: Scales, /) -> int:
        """The bytes that `build` will take on the device, exactly. Raises AdapterInvalid."""
        ...

    def build(self, tensors: Mapping[str, torch.Tensor], scales: Scales, pages: Sequence[int], /) -> DeviceAdapter:
        """PEFT's tensors -> device form, at true ranks. Raises AdapterInvalid.

        It runs beside a step and touches nothing that one reads. `tensors` may be views of a mapped file. `pages`: of
        a store whose adapters live in pages, as many as `needs` says.
        """
        ...

    def copy(self, tensors: Mapping[str, torch.Tensor], scales: Scales, /) -> HostAdapter:
        """What to keep of it in host memory: from that it is built soonest. Raises AdapterInvalid."""
        ...

    def put(self, slot: int, adapter: DeviceAdapter, /) -> None:
        """It is in that slot from the next step on. Between two steps; must be quick: pointers, no copies."""
        ...

    def clear(self, slot: int, /) -> None:
        """The slot is empty and its memory given back. Between two steps; an empty slot may be cleared again."""
        ...


@dataclass(frozen=True, slots=True)
class Tensors:
    """A HostAdapter as its file has it: views of the mapping, or copies of them."""

    store: AdapterStore
    tensors: Mapping[str, torch.Tensor]
    scales: Scales

    @property
    def n_bytes(self) -> int:
        return bytes_of(self.tensors)

    def complete(self) -> None:
        """It is, where the tensors are copies."""

    def needs(self) -> int:
        return self.store.needs(self.tensors, self.scales)

    def build(self, pages: Sequence[int]) -> DeviceAdapter:
        return self.store.build(self.tensors, self.scales, pages)


class KeepsTensors:
    """A store whose host copies are the tensors themselves."""

    def copy(self: AdapterStore, tensors: Mapping[str, torch.Tensor], scales: Scales) -> HostAdapter:
        """See `AdapterStore.copy`."""
        return Tensors(self, copied(tensors), scales)
