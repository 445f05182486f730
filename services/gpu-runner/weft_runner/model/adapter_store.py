"""Adapters as files, as host copies and by slot on the device: the seam between the adapter pool and an executor."""

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Protocol

import numpy as np

from weft.domain.model.errors import Refused
from weft.domain.model.safetensors import MAX_ADAPTER_HEADER_BYTES, Header, check_dtype, read_header
from weft_runner.errors import AdapterInvalid
from weft_runner.model.arrays import Array
from weft_runner.model.checkpoint import MappedTensor, map_file
from weft_runner.model.lora import Scales

MAX_LAYOUTS = 16  # that are remembered; a header has some 50 KB, at most 1 MiB


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter on disk: its safetensors file and the scales of its configuration."""

    tensors: Path
    scales: Scales


class Source(Protocol):
    """Source of adapters, by digest. Called from the loader's threads, several at a time; may block."""

    def adapter(self, digest: str, /) -> AdapterFiles:
        """Have an adapter on disk, fetched if need be. Raises ArtifactUnknown, ArtifactUnreachable, AdapterInvalid."""
        ...

    def retain(self, digests: frozenset[str], /) -> None:
        """Let everything else leave the disk."""
        ...

    def on_disk(self) -> tuple[str, ...]:
        """The adapters that an earlier process left on disk, the one that was used longest ago first."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FileLayout:
    """The header of adapters' files: one object for all that have the same, among those that were mapped of late."""

    header: Header


class MappedTensors(Mapping[str, Array]):
    """The tensors of a safetensors file, each a view of its mapping, which lives as long as this or one of them.

    `address`: where the file's first byte is.
    """

    def __init__(self, layout: FileLayout, file: mmap.mmap) -> None:
        self.layout, self.n_bytes = layout, len(file)
        self.address = np.frombuffer(file, np.uint8, 1).ctypes.data
        self._file = file

    def __getitem__(self, name: str) -> Array:
        return MappedTensor(self._file, self.layout.header.tensors[name]).view()

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.header.tensors)

    def __len__(self) -> int:
        return len(self.layout.header.tensors)


def map_tensors(path: Path) -> MappedTensors:
    """Map all tensors of an adapter's file.

    The blob store may unlink the file while it is mapped; blobs are never written to again, and the source has
    compared the whole file with its digest, its length included. Raises AdapterInvalid.
    """
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            text = file.read(min(int.from_bytes(prefix, "little"), MAX_ADAPTER_HEADER_BYTES))
            layout = _layout(prefix + text, path.stat().st_size)
            return MappedTensors(layout, map_file(file))
    except Refused as error:  # an OSError is this machine's trouble, not the artifact's
        raise AdapterInvalid(f"{path.name}: {error.message}") from error


@lru_cache(maxsize=MAX_LAYOUTS)
def _layout(begin: bytes, file_bytes: int) -> FileLayout:
    """Return the layout of a file that begins with these bytes. Raises Refused."""
    header = read_header(BytesIO(begin), file_bytes, max_bytes=MAX_ADAPTER_HEADER_BYTES)
    for info in header.tensors.values():
        check_dtype(info)
    return FileLayout(header)


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
        """The bytes that it takes in host memory."""
        ...

    def complete(self) -> None:
        """Read what is left of the tensors that it was made from: they may go then."""
        ...

    def build(self, pages: Sequence[int], /) -> DeviceAdapter: ...


class AdapterStore(Protocol):
    """An executor's adapters by slot. The builder's thread measures, builds and copies; the engine's does the rest.

    `page_bytes`: adapters live in pages of this size, allocated by the page table; 0: they have memory of their own.
    `slots`: how many it has a place for.
    """

    @property
    def page_bytes(self) -> int: ...

    @property
    def slots(self) -> int: ...

    def device_bytes(self, tensors: Mapping[str, Array], scales: Scales, /) -> int:
        """Return the bytes that `build` will take on the device, exactly. Raises AdapterInvalid."""
        ...

    def build(self, tensors: Mapping[str, Array], scales: Scales, pages: Sequence[int], /) -> DeviceAdapter:
        """Convert PEFT's tensors to the device form, at true ranks.

        It runs beside a step and touches nothing that one reads. `tensors` may be views of a mapped file. `pages`: of
        a store whose adapters live in pages, as many as `device_bytes` says. Raises AdapterInvalid.
        """
        ...

    def copy(self, tensors: Mapping[str, Array], scales: Scales, /) -> HostAdapter:
        """Make what is kept of it in host memory: from that it is built soonest. Raises AdapterInvalid."""
        ...

    def put(self, slot: int, adapter: DeviceAdapter, /) -> None:
        """Put the adapter into a slot from the next step on. Between two steps; must be quick: pointers, no copies."""
        ...

    def clear(self, slot: int, /) -> None:
        """Empty a slot and give its memory back. Between two steps; an empty slot may be cleared again."""
        ...


@dataclass(frozen=True, slots=True)
class HostTensors:
    """A HostAdapter as its file has it: views of the mapping, or copies of them."""

    store: AdapterStore
    tensors: Mapping[str, Array]
    scales: Scales

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def complete(self) -> None:
        """Do nothing: the adapter is complete where the tensors are copies."""

    def build(self, pages: Sequence[int]) -> DeviceAdapter:
        return self.store.build(self.tensors, self.scales, pages)


class HostTensorStore:
    """A store whose host copies are the tensors themselves."""

    def copy(self: AdapterStore, tensors: Mapping[str, Array], scales: Scales) -> HostAdapter:
        return HostTensors(self, {name: tensor.copy() for name, tensor in tensors.items()}, scales)
