"""Weights that come from a disk while layers compute: threads read ahead into a ring, in the order of steps.

A group is what one layer, or a piece of the head, has outside (`offload.residency`). While one is computed with, the
next ones are read, layer 0 of the next step behind the last one of this; the disk is idle only while the ring is full.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from weft_kernels.cpu.memory import MappedMemory
from weft_runner.model.tiers.direct_io import BLOCK, DirectFile
from weft_runner.model.tiers.packed_file import Region
from weft_runner.model.tiers.read_ahead import ReadAhead, SlowTier, TierTransfer
from weft_runner.offload.figures import TierFigures
from weft_runner.offload.residency import offsets

THREADS = 4  # so that the disk has reads under way while threads wait for a processor


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of the file; offset and size are whole pages."""

    offset: int
    n_bytes: int


class DiskWeights(SlowTier[int]):
    """`groups`: the extents of each, in the order of a step, none of them empty. `memory`: the ring's."""

    def __init__(self, file: DirectFile, groups: Sequence[Sequence[Extent]], memory: MappedMemory) -> None:
        self._file, self._groups, self._memory = file, groups, memory

    def size(self, item: int) -> int:
        return sum(extent.n_bytes for extent in self._groups[item])

    def load(self, item: int, at: int) -> list[TierTransfer]:
        """Read in blocks, several at a time."""
        work, to = list[TierTransfer](), self._memory.address + at
        for extent in self._groups[item]:
            for done in range(0, extent.n_bytes, BLOCK):
                n_bytes = min(BLOCK, extent.n_bytes - done)
                work.append(TierTransfer(n_bytes, partial(self._file.read, to + done, n_bytes, extent.offset + done)))
            to += extent.n_bytes
        return work

    def close(self) -> None:
        self._file.close()

    def read_ahead(self) -> ReadAhead[int]:
        """The ring of these groups, which is read into from now on."""
        groups = range(len(self._groups))
        return ReadAhead(self, self._memory.n_bytes, "weights are", threads=THREADS, repeated=groups)


class StreamedGroups:
    """The regions of each group that come through a ring; those that stay are not among them."""

    def __init__(self, coming: Sequence[Sequence[Region]], layers: int, ahead: ReadAhead[int] | None) -> None:
        """`coming`: of each of `layers`, then of the head's pieces. `ahead`: of those that are not empty."""
        self._coming, self._ahead = coming, ahead
        self._places = offsets([bool(group) for group in coming])
        self._all, self._of_layers = (sum(map(bool, groups)) for groups in (coming, coming[:layers]))

    @property
    def figures(self) -> TierFigures:
        return TierFigures() if self._ahead is None else self._ahead.figures

    def comes(self, group: int) -> bool:
        """Whether anything of it does."""
        return bool(self._coming[group])

    def begin(self, *, samples: bool) -> None:
        """Begin a step; the head is needed where it samples."""
        if self._ahead is not None:
            self._ahead.repeat(self._all if samples else max(1, self._of_layers))

    @contextmanager
    def acquire(self, group: int) -> Generator[list[tuple[Region, int]]]:
        """What comes of this group, each with its place in the ring, while the block runs. Raises ExecutorLost."""
        coming = self._coming[group]
        if self._ahead is None or not coming:
            yield []
            return
        at = self._ahead.acquire(self._places[group])
        try:
            yield [(one, at + begin) for one, begin in zip(coming, offsets([r.n_bytes for r in coming]), strict=True)]
        finally:
            self._ahead.release()

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
