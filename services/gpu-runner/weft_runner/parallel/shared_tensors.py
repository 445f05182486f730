"""An adapter's tensors in a file in memory, for other processes: one copy, whatever the number of ranks.

Rank 0 hands out the bytes, not a path: what it builds may be a host copy whose file has left the disk meanwhile.
"""

import mmap
import os
from collections.abc import Mapping
from typing import Any

import torch

from weft_runner.model.lora import DTYPES, Scales
from weft_runner.parallel.ipc import memfd

ALIGNED = 64  # bytes
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


class RecordedScales:
    """Another's scales, and which were asked for: `told` by module."""

    def __init__(self, scales: Scales) -> None:
        self._scales = scales
        self.told: dict[str, float] = {}

    def scale_of(self, module: str, /) -> float:
        scale = self._scales.scale_of(module)
        self.told[module] = scale
        return scale


class FixedScales:
    """What was noted."""

    def __init__(self, told: Mapping[str, float]) -> None:
        self._told = told

    def scale_of(self, module: str, /) -> float:
        return self._told[module]


def share_tensors(tensors: Mapping[str, torch.Tensor]) -> tuple[int, list[list[Any]]]:
    """A file with all of them, and where each is: name, dtype, shape, offset. The caller closes the file."""
    table: list[list[Any]] = []
    end = 0
    for name, tensor in tensors.items():
        table.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end])
        end += -(-tensor.nbytes // ALIGNED) * ALIGNED
    file = memfd("weft-adapter")
    os.ftruncate(file, end)
    memory = mmap.mmap(file, end)
    for view, tensor in zip(_views(memory, table).values(), tensors.values(), strict=True):
        view.copy_(tensor)
    return file, table


def open_shared(file: int, table: list[list[Any]]) -> dict[str, torch.Tensor]:
    """Views of the file, which lives as long as one of them. Closes `file`."""
    memory = mmap.mmap(file, 0)
    os.close(file)
    return _views(memory, table)


def _views(memory: mmap.mmap, table: list[list[Any]]) -> dict[str, torch.Tensor]:
    def view(dtype: torch.dtype, shape: list[int], offset: int) -> torch.Tensor:
        return torch.frombuffer(memory, dtype=dtype, count=torch.Size(shape).numel(), offset=offset).view(shape)

    return {name: view(_NAMES[dtype], shape, offset) for name, dtype, shape, offset in table}
