"""Pages on a disk, which pass through memory while layers compute: FlexGen's load and store (section 4.1).

A file of this process has them, and vanishes with it: KV [layers][extents], a layer of a page each, or the activations
of one layer, whose pages are blocks of the disk. Neighbours of a layer lie side by side, so that the pages of a
sequence are few reads. What a layer of a page takes is rounded up to whole blocks of the disk; where that adds
anything, reads and writes pass through a buffer.
"""

import ctypes
import errno
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from weft_kernels.cpu.memory import MappedMemory
from weft_runner.errors import DiskUnusable
from weft_runner.model.tiers.direct_io import BLOCK, PAGE, DirectFile, IoQueue, Requests, round_up_to_page
from weft_runner.model.tiers.outside_pages import PageTier, Piece, SlotRun, count_extents
from weft_runner.model.tiers.read_ahead import ReadAhead, TierTransfer
from weft_runner.offload.sizes import BOUNCE

THREADS = 2  # so that a piece is loaded while another one is stored

Copy = tuple[int, int]  # address of a slot, and of its place in a buffer


class PageFile:
    """Any thread may call it. Raises DiskUnusable."""

    def __init__(self, folder: Path, layers: int, extents: int, layer_bytes: int, what: str = "KV") -> None:
        """Put all of its bytes on the disk, zeros. `what` lies there."""
        self.layer_bytes, self.extents = layer_bytes, extents
        self._stride = round_up_to_page(layer_bytes)
        self.n_bytes = layers * extents * self._stride
        self._own, self._queues = threading.local(), list[IoQueue]()
        path = folder / f"{tempfile.gettempprefix()}-{what.lower()}-{os.getpid()}-{id(self)}.pages"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = DirectFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            raise DiskUnusable(f"{path}: {error}") from error
        try:
            path.unlink()
            os.posix_fallocate(self._file.fd, 0, self.n_bytes)
        except OSError as error:
            self._file.close()
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise DiskUnusable(
                    f"{folder} has no room for {self.n_bytes} bytes of {what}: {error.strerror}"
                ) from error
            raise DiskUnusable(f"{path}: {error}") from error

    def read(self, address: int, layer: int, runs: Sequence[SlotRun]) -> None:
        """Read runs of a layer to the slots from `address` on."""
        for requests, copies in self._batches(address, layer, runs):
            self._queue.read(self._file, requests)
            for slot, bounce in copies:
                ctypes.memmove(slot, bounce, self.layer_bytes)

    def write(self, address: int, layer: int, runs: Sequence[SlotRun]) -> None:
        """Write runs of a layer from the slots from `address` on."""
        for requests, copies in self._batches(address, layer, runs):
            for slot, bounce in copies:
                ctypes.memmove(bounce, slot, self.layer_bytes)
            self._queue.write(self._file, requests)

    def close(self) -> None:
        """Nothing reads or writes any more."""
        for queue in self._queues:
            queue.close()
        self._file.close()

    @property
    def _queue(self) -> IoQueue:
        """Each thread has its own."""
        if not hasattr(self._own, "queue"):
            self._own.queue = IoQueue()
            self._queues.append(self._own.queue)
        return self._own.queue

    def _batches(self, address: int, layer: int, runs: Sequence[SlotRun]) -> Iterator[tuple[Requests, list[Copy]]]:
        """Requests that are made at a time, at most BLOCK bytes each; copies of slots to and from a buffer."""
        aligned = self._stride == self.layer_bytes and address % PAGE == 0
        bounce = 0 if aligned else self._bounce()
        most = max(1, (BLOCK if aligned else BOUNCE) // self._stride)
        requests, copies, held = list[tuple[int, int, int]](), list[Copy](), 0
        for run in chain.from_iterable(run.parts(most) for run in runs):
            if not aligned and held + run.count > most:
                yield np.array(requests, np.int64), copies
                requests, copies, held = [], [], 0
            at, offset = address + run.slot * self.layer_bytes, (layer * self.extents + run.extent) * self._stride
            if not aligned:
                copies += [
                    (at + i * self.layer_bytes, bounce + (held + i) * self._stride) for i in range(run.count)
                ]  # fmt: skip
                at = bounce + held * self._stride
            requests.append((at, run.count * self._stride, offset))
            held += run.count
        if requests:
            yield np.array(requests, np.int64), copies

    def _bounce(self) -> int:
        """Each thread has its own."""
        memory: MappedMemory | None = getattr(self._own, "memory", None)
        if memory is None:
            memory = self._own.memory = MappedMemory(bounce_bytes(self.layer_bytes))
        return round_up_to_page(memory.address)


class DiskPages(PageTier):
    """Layers of a micro-batch's pages in a file. `address`: of a ring of slots, a layer of a page each."""

    def __init__(self, file: PageFile, address: int) -> None:
        self._file, self._address = file, address

    def load(self, item: Piece, at: int) -> list[TierTransfer]:
        """A page whose first token is yet to be written is zeros, as a page in memory is when it is granted."""
        layer_bytes = self._file.layer_bytes
        address, pages = self._address + at * layer_bytes, item.pages

        def load() -> None:
            for run in pages.clears:
                ctypes.memset(address + run.slot * layer_bytes, 0, run.count * layer_bytes)
            self._file.read(address, item.layer, pages.loads)

        return [TierTransfer(count_extents(pages.loads) * layer_bytes, load)]

    def store(self, item: Piece, at: int) -> list[TierTransfer]:
        stores, layer_bytes = item.pages.stores, self._file.layer_bytes
        n_bytes = count_extents(stores) * layer_bytes
        write = partial(self._file.write, self._address + at * layer_bytes, item.layer, stores)
        return [TierTransfer(n_bytes, write)] if n_bytes else []

    def close(self) -> None:
        self._file.close()

    def read_ahead(self, slots: int, what: str) -> ReadAhead[Piece]:
        """The ring, of `slots`."""
        return ReadAhead(self, slots, what, threads=THREADS)


def bounce_bytes(layer_bytes: int) -> int:
    """What the buffer of a thread takes."""
    return 0 if layer_bytes % PAGE == 0 else max(BOUNCE, round_up_to_page(layer_bytes)) + PAGE
