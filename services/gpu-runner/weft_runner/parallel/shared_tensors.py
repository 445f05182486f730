"""An adapter's tensors in a file in memory, for other processes: one copy, whatever the number of ranks.

Rank 0 hands out the bytes, not a path: what it builds may be a host copy whose file is no longer on disk.
"""

import mmap
import os
from collections.abc import Mapping
from math import prod

import numpy as np

from weft_runner.model.arrays import Array
from weft_runner.model.lora import DTYPES, Scales

ALIGNED = 64  # bytes
_BY_NAME = {dtype.name: dtype for dtype in DTYPES}
Table = dict[str, tuple[str, tuple[int, ...], int]]  # of each tensor: the dtype's name, the shape, where it begins


class RecordedScales:
    """The scales of a configuration, and the scales read from it: `by_module`."""

    def __init__(self, scales: Scales) -> None:
        self._scales = scales
        self.by_module: dict[str, float] = {}

    def scale_of(self, module: str, rank: int, /) -> float:
        scale = self.by_module[module] = self._scales.scale_of(module, rank)
        return scale


class FixedScales(dict[str, float]):
    """Scales that another process recorded."""

    def scale_of(self, module: str, rank: int, /) -> float:
        del rank
        return self[module]


def share_tensors(tensors: Mapping[str, Array]) -> tuple[int, Table]:
    """A file with all of them, and where each is. The caller closes the file."""
    table: Table = {}
    end = 0
    for name, tensor in tensors.items():
        table[name] = tensor.dtype.name, tensor.shape, end
        end += -(-tensor.nbytes // ALIGNED) * ALIGNED
    file = os.memfd_create("weft-adapter")
    os.ftruncate(file, end)
    for view, tensor in zip(_views(mmap.mmap(file, end), table).values(), tensors.values(), strict=True):
        view[...] = tensor
    return file, table


def open_shared(file: int, table: Table) -> dict[str, Array]:
    """Views of the file, which lives as long as one of them. Closes `file`."""
    memory = mmap.mmap(file, 0)
    os.close(file)
    return _views(memory, table)


def _views(memory: mmap.mmap, table: Table) -> dict[str, Array]:
    return {
        name: np.frombuffer(memory, _BY_NAME[dtype], prod(shape), offset).reshape(shape)
        for name, (dtype, shape, offset) in table.items()
    }
