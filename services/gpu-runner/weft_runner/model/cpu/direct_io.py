"""Reads and writes of a file that go past the page cache, whose memory is not within anybody's budget.

Addresses, offsets and sizes are multiples of `PAGE`; blocks of 4 MiB keep a disk busy by themselves, since the kernel
splits each into as many requests as the device takes at a time.
"""

import ctypes
import errno
import os
from pathlib import Path

from weft_runner.errors import DiskUnusable

PAGE = 4096
BLOCK = 4 << 20


def up(n_bytes: int) -> int:
    """To whole pages."""
    return -(-n_bytes // PAGE) * PAGE


class DirectFile:
    """`path`, opened with O_DIRECT. Calls release the GIL; any thread may make them. Raises DiskUnusable."""

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        """Raises DiskUnusable where the file system has no direct I/O; OSError."""
        self.path = path
        try:
            self.fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise DiskUnusable(f"{path.parent} is on a file system without direct I/O (O_DIRECT)") from error

    def read(self, address: int, n_bytes: int, offset: int) -> None:
        """All of it, or DiskUnusable: the disk failed, or the file ends before."""
        done = 0
        while done < n_bytes:
            try:
                got = os.preadv(self.fd, [_memory(address + done, n_bytes - done)], offset + done)
            except OSError as error:
                raise DiskUnusable(f"{self.path} cannot be read at byte {offset + done}: {error}") from error
            if got == 0:
                raise DiskUnusable(f"{self.path} ends at byte {offset + done}: it was cut short")
            done += got

    def write(self, address: int, n_bytes: int, offset: int) -> None:
        """All of it."""
        done = 0
        while done < n_bytes:
            try:
                done += os.pwritev(self.fd, [_memory(address + done, n_bytes - done)], offset + done)
            except OSError as error:
                raise DiskUnusable(f"{self.path} cannot be written at byte {offset + done}: {error}") from error

    def close(self) -> None:
        os.close(self.fd)


def _memory(address: int, n_bytes: int) -> "ctypes.Array[ctypes.c_char]":
    return (ctypes.c_char * n_bytes).from_address(address)
