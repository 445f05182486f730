"""An adapter's tensors in a file in memory, for other processes: one copy, whatever the number of ranks.

Rank 0 hands out the bytes, not a path: what it builds may be a host copy whose file is no longer on disk.
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
    """The scales of a configuration, and those that were read: `by_module`."""

    def __init__(self, scales: Scales) -> None:
        self._scales = scales
        self.by_module: dict[str, float] = {}

    def scale_of(self, module: str, /) -> float:
        scale = self._scales.scale_of(module)
        self.by_module[module] = scale
        return scale


class FixedScales:
    """Scales that another process recorded."""

    def __init__(self, by_module: Mapping[str, float]) -> None:
        self._by_module = by_module

    def scale_of(self, module: str, /) -> float:
        return self._by_module[module]


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
