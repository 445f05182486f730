"""Hidden rows between layers, of which a large pass has more than the GPU holds: FlexGen's activations on the host.

The first device batches of such a pass keep theirs on the device. Those of the others are in pinned memory: after a
layer a batch's rows are copied there, before the next one they come back (section 4.1, activation store and load),
through buffers, while other batches are computed. The first layer of a pass loads nothing, since its rows are
embeddings or another stage's, and the last one stores nothing. A pass that the device holds copies nothing.

A stream copies to the GPU and another one back, as of KV (`host_kv`): events keep the order, nothing waits on the host.
"""

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from weft_runner.model.cuda.device import CopyStream, PinnedMemory
from weft_runner.model.cuda.device_batches import DeviceBatch
from weft_runner.model.step import Ints
from weft_runner.offload.figures import PageFigures
from weft_runner.offload.placement import ActivationSplit


class HostActivations:
    """One owner: the executor, whose thread calls it. Rows are fp32 [n, hidden]."""

    def __init__(self, split: ActivationSplit, at: torch.device) -> None:
        """Raises OutOfMemory: the system pins no more."""
        self.figures, self._split, self._at = PageFigures(), split, at
        self._width = split.row_bytes // 4
        self._memory = torch.empty(split.memory_bytes // 4, device=at)
        self._pinned = PinnedMemory(split.host_bytes, at)
        self._host = self._pinned.tensor.view(torch.float32).view(-1, self._width)
        self._in, self._out = CopyStream(at), CopyStream(at)
        self._stored = self._in.computed()  # comes after all that was stored
        self._batches: Sequence[DeviceBatch] = ()
        self._first = 0  # of the batches, that passes through the buffers
        self._pieces = self._loaded = self._done = 0  # a piece is a layer of such a batch
        self._arrived: deque[torch.cuda.Event | None] = deque()  # of the pieces that are loaded and not done
        self._wanted, self._leaving = np.empty(0, np.int32), torch.empty(0)

    @property
    def pass_bytes(self) -> tuple[int, int]:
        """Loaded and stored in this pass: each row once for each change from one layer to the next."""
        passing = self._batches[self._first :]
        if not passing:
            return 0, 0
        changes = self._pieces // len(passing) - 1
        n_bytes = changes * (passing[-1].end - passing[0].start) * self._split.row_bytes
        return n_bytes, n_bytes

    def begin(self, batches: Sequence[DeviceBatch], n_layers: int, wanted: Ints) -> None:
        """A pass over so many layers. `wanted`: tokens whose rows are read after the last one."""
        if self._arrived:  # of a pass that was given up
            self._stored = self._out.copy((), self._out.computed())
            for event in (*self._arrived, self._stored):
                if event is not None:
                    event.wait()
            self._arrived.clear()
        split, tokens = self._split, batches[-1].end
        in_memory = tokens if tokens <= split.whole_rows else split.memory_rows
        self._batches, self._first = batches, sum(one.end <= in_memory for one in batches)
        self._pieces, self._loaded, self._done = n_layers * (len(batches) - self._first), 0, 0
        self._wanted = wanted
        self._leaving = torch.empty(len(wanted), self._width, device=self._at) if self._pieces else torch.empty(0)
        self._load()

    @contextmanager
    def rows(self, index: int) -> Generator[torch.Tensor]:
        """Of a batch, in a layer, for what is launched in this context: batches in order, layer by layer."""
        batch = self._batches[index]
        if index < self._first:
            yield self._view(batch.start * self._split.row_bytes, batch.end - batch.start)
            return
        arrived, slot = self._arrived[0], self._slot(self._done, batch)
        if arrived is not None:
            arrived.wait()
        try:
            yield slot
        finally:
            self._release(batch, slot)

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
        """After the copies under way."""
        if self._stored is not None:
            self._stored.synchronize()
        self._pinned.close()

    def _load(self) -> None:
        """Launch the copies of all that the buffers have room for. What a first layer begins with is not there."""
        passing = self._batches[self._first :]
        most = self._done + min(self._split.buffers, len(passing))  # a batch's next layer comes after its store
        while self._loaded < min(most, self._pieces):
            batch, slots = passing[self._loaded % len(passing)], list[tuple[torch.Tensor, torch.Tensor]]()
            if self._loaded >= len(passing):
                slots = [(self._slot(self._loaded, batch), self._extent(batch))]
                self.figures.read_bytes += (batch.end - batch.start) * self._split.row_bytes
            self._arrived.append(self._in.copy(slots, self._stored))
            self._loaded += 1

    def _release(self, batch: DeviceBatch, slot: torch.Tensor) -> None:
        """The oldest piece: all that reads and writes it is launched."""
        self._arrived.popleft()
        if self._done < self._pieces - (len(self._batches) - self._first):
            self._stored = self._out.copy([(self._extent(batch), slot)], self._out.computed())
            self.figures.written_bytes += slot.numel() * 4
        else:
            self._leave(slot, batch.start, batch.end)
            self._stored = self._out.copy((), self._out.computed())
        self._done += 1
        self._load()

    def _leave(self, rows: torch.Tensor, start: int, end: int) -> None:
        """Of tokens [start, end)."""
        (places,) = np.nonzero((self._wanted >= start) & (self._wanted < end))
        if len(places):
            of_rows = torch.from_numpy(self._wanted[places] - start).long().to(self._at)
            self._leaving[torch.from_numpy(places).to(self._at)] = rows[of_rows]

    def _slot(self, piece: int, batch: DeviceBatch) -> torch.Tensor:
        split = self._split
        at = split.ring_at + piece % split.buffers * (split.ring_bytes // split.buffers)
        return self._view(at, batch.end - batch.start)

    def _extent(self, batch: DeviceBatch) -> torch.Tensor:
        first = self._batches[self._first].start
        return self._host[batch.start - first : batch.end - first]

    def _view(self, offset: int, n_rows: int) -> torch.Tensor:
        return self._memory[offset // 4 : offset // 4 + n_rows * self._width].view(n_rows, self._width)
