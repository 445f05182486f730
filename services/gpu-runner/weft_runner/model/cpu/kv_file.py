"""KV pages on a disk: a file of this process, which vanishes with it. [layers][extents] of one layer of a page each.

Neighbours of a layer lie side by side, so that the pages of a sequence are few reads. What a layer of a page takes is
rounded up to whole blocks of the disk; where that adds anything, reads and writes pass through a buffer.
"""

import ctypes
import errno
import os
import tempfile
import threading
from pathlib import Path

from weft_kernels.cpu.memory import MappedMemory
from weft_runner.errors import DiskUnusable
from weft_runner.model.cpu.direct_io import BLOCK, PAGE, DirectFile, up
from weft_runner.offload.sizes import BOUNCE


class KvFile:
    """Any thread may call it. Raises DiskUnusable."""

    def __init__(self, folder: Path, layers: int, extents: int, layer_bytes: int) -> None:
        """Has all of its bytes on disk when it is made, zeros."""
        self.layer_bytes, self.extents = layer_bytes, extents
        self._stride = up(layer_bytes)
        self.n_bytes = layers * extents * self._stride
        self._own = threading.local()
        path = folder / f"{tempfile.gettempprefix()}-kv-{os.getpid()}-{id(self)}.pages"
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
                raise DiskUnusable(f"{folder} has no room for {self.n_bytes} bytes of KV: {error.strerror}") from error
            raise DiskUnusable(f"{path}: {error}") from error

    def read(self, address: int, layer: int, extent: int, count: int) -> None:
        """`count` extents of a layer, to memory where they follow each other."""
        for at, n_bytes, offset, bounce in self._parts(address, layer, extent, count):
            self._file.read(bounce or at, n_bytes, offset)
            if bounce:
                for i in range(n_bytes // self._stride):
                    ctypes.memmove(at + i * self.layer_bytes, bounce + i * self._stride, self.layer_bytes)

    def write(self, address: int, layer: int, extent: int, count: int) -> None:
        """And from there."""
        for at, n_bytes, offset, bounce in self._parts(address, layer, extent, count):
            if bounce:
                for i in range(n_bytes // self._stride):
                    ctypes.memmove(bounce + i * self._stride, at + i * self.layer_bytes, self.layer_bytes)
            self._file.write(bounce or at, n_bytes, offset)

    def close(self) -> None:
        self._file.close()

    def _parts(self, address: int, layer: int, extent: int, count: int) -> list[tuple[int, int, int, int]]:
        """(address, bytes of the file, offset, buffer or 0) of parts of at most BLOCK bytes."""
        begin = (layer * self.extents + extent) * self._stride
        aligned = self._stride == self.layer_bytes and address % PAGE == 0
        most = max(1, (BLOCK if aligned else BOUNCE) // self._stride)
        bounce = 0 if aligned else self._bounce()
        return [
            (address + done * self.layer_bytes, min(most, count - done) * self._stride,
             begin + done * self._stride, bounce)
            for done in range(0, count, most)
        ]  # fmt: skip

    def _bounce(self) -> int:
        """Of this thread."""
        memory: MappedMemory | None = getattr(self._own, "memory", None)
        if memory is None:
            memory = self._own.memory = MappedMemory(bounce_bytes(self.layer_bytes))
        return up(memory.address)


def bounce_bytes(layer_bytes: int) -> int:
    """Of the buffer of a thread."""
    return 0 if layer_bytes % PAGE == 0 else max(BOUNCE, up(layer_bytes)) + PAGE
