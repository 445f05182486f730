"""Hidden rows between layers of which a large pass has more than memory holds: FlexGen's activations on the disk.

The first micro-batches of such a pass keep theirs in memory. Those of the others are in a file: after a layer a
micro-batch's rows are stored, before the next one they are loaded (section 4.1, activation store and load), through a
ring, while other micro-batches are computed (`read_ahead`). The first layer of a pass loads nothing, since its rows
are embeddings or the caller's, and the last one stores nothing. A pass that memory and ring hold touches no disk.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft_kernels.cpu.memory import MappedMemory
from weft_runner.model.cpu.page_file import DiskPages, PageFile
from weft_runner.model.step import Ints
from weft_runner.model.tiers.direct_io import PAGE
from weft_runner.model.tiers.micro_batches import MicroBatch
from weft_runner.model.tiers.outside_pages import Piece, row_pieces, transfer_bytes
from weft_runner.offload.figures import TierFigures
from weft_runner.offload.placement import ActivationSplit

Floats = npt.NDArray[np.float32]


class DiskActivations:
    """`rows` [`whole_rows`, hidden]: of a pass that fits, or of those in memory. One owner: the executor."""

    def __init__(self, folder: Path, split: ActivationSplit) -> None:
        """Set memory and file aside. Raises DiskUnusable."""
        self._split, self._memory = split, MappedMemory(split.memory_bytes)
        self._numbers = self._memory.array().view(np.float32)
        self.rows = self._view(0, split.whole_rows)
        pages = DiskPages(
            PageFile(folder, 1, split.disk_bytes // PAGE, PAGE, "activations"), self._memory.address + split.ring_at
        )
        self._ahead = pages.read_ahead(split.ring_bytes // PAGE, "activations are")
        self._in_memory, self._done = 0, 0
        self._passing: list[MicroBatch] = []
        self._pieces: list[Piece] = []
        self._entering: Floats | None = None
        self._wanted, self._leaving = np.empty(0, np.int32), np.empty((0, 0), np.float32)
        self._loaded = self._leaving

    @property
    def figures(self) -> TierFigures:
        return self._ahead.figures

    @property
    def pass_bytes(self) -> tuple[int, int]:
        """The bytes read and written in this pass."""
        return transfer_bytes(self._pieces, PAGE)

    def begin(
        self, batches: Sequence[MicroBatch], layers: range, entering: npt.ArrayLike | None, wanted: Ints
    ) -> list[bool]:
        """Begin a pass: say which micro-batches' rows are on disk, which are loaded from now on.

        `entering` [T, hidden]: what the first layer begins with, where that is not embeddings. `wanted`: rows that the
        caller reads after the last layer. Raises ExecutorLost.
        """
        split = self._split
        fits = batches[-1].end <= split.whole_rows
        on_disk = [not fits and batch.end > split.memory_rows for batch in batches]
        self._passing = [batch for batch, passes in zip(batches, on_disk, strict=True) if passes]
        self._in_memory = self._passing[0].start if self._passing else batches[-1].end
        counts = [-(-batch.n_tokens * split.row_bytes // PAGE) for batch in self._passing]
        self._pieces = row_pieces(counts, len(layers))
        self._ahead.begin(self._pieces)
        self._done, self._wanted = 0, wanted
        self._entering = None if entering is None else np.asarray(entering, np.float32)
        self._leaving = np.empty((len(wanted), self.rows.shape[1]), np.float32)
        if self._entering is not None:
            self.rows[: self._in_memory] = self._entering[: self._in_memory]
        return on_disk

    def acquire(self) -> int:
        """Return the address of the next such micro-batch's rows, in memory until `release`. Raises ExecutorLost."""
        batch, at = self._current, self._split.ring_at + self._ahead.acquire() * PAGE
        self._loaded = self._view(at, batch.n_tokens)
        if self._entering is not None and self._done < len(self._passing):
            self._loaded[:] = self._entering[batch.start : batch.end]
        return self._memory.address + at

    def release(self) -> None:
        """Store the rows that were acquired and are computed now."""
        batch = self._current
        if self._done >= len(self._pieces) - len(self._passing):
            self._leave(self._loaded, batch.start, batch.end)
        self._ahead.release()
        self._done += 1

    def leaving(self) -> Floats:
        """Return the rows that are wanted, after the last layer."""
        self._leave(self.rows, 0, self._in_memory)
        return self._leaving

    def close(self) -> None:
        self._ahead.close()

    @property
    def _current(self) -> MicroBatch:
        return self._passing[self._done % len(self._passing)]

    def _leave(self, rows: Floats, start: int, end: int) -> None:
        """Keep the wanted rows of tokens [start, end)."""
        (places,) = np.nonzero((self._wanted >= start) & (self._wanted < end))
        self._leaving[places] = rows[self._wanted[places] - start]

    def _view(self, offset: int, n_rows: int) -> Floats:
        width = self._split.row_bytes // 4
        return self._numbers[offset // 4 : offset // 4 + n_rows * width].reshape(n_rows, width)
