"""Hidden rows between layers, of which a large pass has more than the GPU holds: FlexGen's activations on the host.

The first device batches of such a pass keep theirs on the device. Those of the others are in pinned memory: after a
layer a batch's rows are copied there, before the next one they come back (section 4.1, activation store and load),
through buffers, while other batches are computed (`host_pages`). The first layer of a pass loads nothing, since its
rows are embeddings or another stage's, and the last one stores nothing. A pass that the device holds copies nothing.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from weft_runner.model.cuda.device import PinnedMemory
from weft_runner.model.cuda.device_batches import DeviceBatch
from weft_runner.model.cuda.host_pages import HostPages
from weft_runner.model.step import Ints
from weft_runner.model.tiers.outside_pages import Piece, row_pieces, transfer_bytes
from weft_runner.model.tiers.read_ahead import ReadAhead
from weft_runner.offload.figures import TierFigures
from weft_runner.offload.placement import ActivationSplit


class HostActivations:
    """One owner: the executor, whose thread calls it. Rows are fp32 [n, hidden]."""

    def __init__(self, split: ActivationSplit, at: torch.device) -> None:
        """Raises OutOfMemory: the system pins no more."""
        self._split, self._at, self._width = split, at, split.row_bytes // 4
        self._memory = torch.empty(split.memory_bytes // 4, device=at)
        self._buffer_rows = split.ring_bytes // split.buffers // split.row_bytes
        self._ring = self._view(split.ring_at, split.buffers * self._buffer_rows)
        self._host = HostPages(self._ring, PinnedMemory(split.host_bytes, at), 1)
        self._ahead = ReadAhead(self._host, len(self._ring), "activations are")
        self._batches: Sequence[DeviceBatch] = ()
        self._first = 0  # of the batches, that passes through the ring
        self._pieces: list[Piece] = []
        self._done = 0  # pieces
        self._wanted, self._leaving = np.empty(0, np.int32), torch.empty(0)

    @property
    def figures(self) -> TierFigures:
        return self._ahead.figures

    @property
    def pass_bytes(self) -> tuple[int, int]:
        """Loaded and stored in this pass: each row once for each change from one layer to the next."""
        return transfer_bytes(self._pieces, self._split.row_bytes)

    def begin(self, batches: Sequence[DeviceBatch], n_layers: int, wanted: Ints) -> None:
        """Begin a pass over `n_layers`. `wanted`: tokens whose rows are read after the last one."""
        if dropped := self._ahead.drain():  # of a pass that was given up: rows of another one may lie over the ring
            for event in (*dropped, self._host.copy_out(())):
                if event is not None:
                    event.wait()
        split, tokens = self._split, batches[-1].end
        in_memory = tokens if tokens <= split.whole_rows else split.memory_rows
        self._batches, self._first = batches, sum(one.end <= in_memory for one in batches)
        counts = [one.end - one.start for one in batches[self._first :]]
        self._pieces, self._done = row_pieces(counts, n_layers, self._buffer_rows), 0
        self._wanted = wanted
        self._leaving = torch.empty(len(wanted), self._width, device=self._at) if self._pieces else torch.empty(0)
        self._ahead.begin(self._pieces)

    @contextmanager
    def rows(self, index: int) -> Generator[torch.Tensor]:
        """The rows of a batch in a layer, for what is launched in this context: batches in order, layer by layer."""
        batch = self._batches[index]
        if index < self._first:
            yield self._view(batch.start * self._split.row_bytes, batch.end - batch.start)
            return
        at = self._ahead.acquire()
        slots = self._ring[at : at + batch.end - batch.start]
        try:
            yield slots
        finally:
            if not self._pieces[self._done].pages.stores:
                self._leave(slots, batch.start, batch.end)
            self._done += 1
            self._ahead.release()

    def leaving(self) -> torch.Tensor:
        """The rows that are wanted, after the last layer."""
        if not self._first:
            return self._leaving
        in_memory = self._batches[self._first - 1].end
        rows = self._view(0, in_memory)
        if not self._pieces:
            every = len(self._wanted) == in_memory
            return rows if every else rows[torch.from_numpy(self._wanted).long().to(self._at)]
        self._leave(rows, 0, in_memory)
        return self._leaving

    def close(self) -> None:
        """Wait for the copies under way."""
        self._ahead.close()

    def _leave(self, rows: torch.Tensor, start: int, end: int) -> None:
        """Keep the wanted rows of tokens [start, end)."""
        (places,) = np.nonzero((self._wanted >= start) & (self._wanted < end))
        if len(places):
            of_rows = torch.from_numpy(self._wanted[places] - start).long().to(self._at)
            self._leaving[torch.from_numpy(places).to(self._at)] = rows[of_rows]

    def _view(self, offset: int, n_rows: int) -> torch.Tensor:
        return self._memory[offset // 4 : offset // 4 + n_rows * self._width].view(n_rows, self._width)
