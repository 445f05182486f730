"""Adapters on disk: where they come from, and their tensors as views of the mapped file."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from weft.domain.model.errors import Refused
from weft.domain.model.safetensors import MAX_ADAPTER_HEADER_BYTES, check_dtype
from weft_runner.errors import AdapterInvalid
from weft_runner.model.checkpoint import MappedTensor, map_safetensors
from weft_runner.model.lora import Scales


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter on disk: its safetensors and what its configuration says about scales."""

    tensors: Path
    scales: Scales


class Source(Protocol):
    """Where adapters come from, by digest. Called from the loader's threads, several at a time; may block."""

    def adapter(self, digest: str, /) -> AdapterFiles:
        """On disk now, fetched if need be. Raises ArtifactUnknown, ArtifactUnreachable, AdapterInvalid."""
        ...

    def retain(self, digests: frozenset[str], /) -> None:
        """Everything else may leave the disk."""
        ...

    def on_disk(self, digests: Iterable[str], /) -> frozenset[str]:
        """Which of them are whole on disk."""
        ...


def map_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file as views of its mapping, which lives as long as one of them. AdapterInvalid.

    A file may be unlinked meanwhile, as the blob store does; blobs are never written to again, and the source has
    compared the whole file with its digest, its length included.
    """
    try:
        header, file = map_safetensors(path, MAX_ADAPTER_HEADER_BYTES)
        for info in header.tensors.values():
            check_dtype(info)
    except Refused as error:  # an OSError is this machine's trouble, not the artifact's
        raise AdapterInvalid(f"{path.name}: {error.message}") from error
    return {name: MappedTensor(file, info).view() for name, info in header.tensors.items()}


def copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same in memory of their own."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
