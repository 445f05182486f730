"""Pages on a disk: a file of this process, which vanishes with it. Of KV [layers][extents], a layer of a page each.

Activations lie in a file of one layer, whose pages are blocks of the disk.

Neighbours of a layer lie side by side, so that the pages of a sequence are few reads. What a layer of a page takes is
rounded up to whole blocks of the disk; where that adds anything, reads and writes pass through a buffer.
"""

import ctypes
import errno
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from weft_kernels.cpu.memory import MappedMemory
from weft_runner.errors import DiskUnusable
from weft_runner.model.tiers.direct_io import BLOCK, PAGE, DirectFile, IoQueue, Requests, up
from weft_runner.model.tiers.outside_pages import SlotRun
from weft_runner.offload.sizes import BOUNCE

Copy = tuple[int, int]  # address of a slot, and of its place in a buffer


class PageFile:
    """Any thread may call it. Raises DiskUnusable."""

    def __init__(self, folder: Path, layers: int, extents: int, layer_bytes: int, what: str = "KV") -> None:
        """Has all of its bytes on disk when it is made, zeros. `what`: lies there."""
        self.layer_bytes, self.extents = layer_bytes, extents
        self._stride = up(layer_bytes)
        self.n_bytes = layers * extents * self._stride
        self._own = threading.local()
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

    def read(self, queue: IoQueue, address: int, layer: int, runs: Sequence[SlotRun]) -> None:
        """Runs of a layer, to the slots from `address` on."""
        for requests, copies in self._batches(address, layer, runs):
            queue.read(self._file, requests)
            for slot, bounce in copies:
                ctypes.memmove(slot, bounce, self.layer_bytes)

    def write(self, queue: IoQueue, address: int, layer: int, runs: Sequence[SlotRun]) -> None:
        """And from there."""
        for requests, copies in self._batches(address, layer, runs):
            for slot, bounce in copies:
                ctypes.memmove(bounce, slot, self.layer_bytes)
            queue.write(self._file, requests)

    def close(self) -> None:
        self._file.close()

    def _batches(self, address: int, layer: int, runs: Sequence[SlotRun]) -> Iterator[tuple[Requests, list[Copy]]]:
        """Requests that are made at a time, of at most BLOCK bytes each; copies of slots to and from a buffer."""
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
        """Of this thread."""
        memory: MappedMemory | None = getattr(self._own, "memory", None)
        if memory is None:
            memory = self._own.memory = MappedMemory(bounce_bytes(self.layer_bytes))
        return up(memory.address)


def bounce_bytes(layer_bytes: int) -> int:
    """Of the buffer of a thread."""
    return 0 if layer_bytes % PAGE == 0 else max(BOUNCE, up(layer_bytes)) + PAGE
