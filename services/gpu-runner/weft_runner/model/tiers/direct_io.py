"""Reads and writes of a file that go past the page cache, whose memory is not within anybody's budget.

Addresses, offsets and sizes are multiples of `PAGE`. Blocks of 1 MiB keep a disk busy by themselves, since the kernel
splits each into as many requests as the device takes at a time; larger ones make small requests wait, which come behind
them in the device's queue. Many small ones of a thread are under way at a time (`IoQueue`).
"""

import ctypes
import errno
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft_runner.errors import DiskUnusable

PAGE = 4096
BLOCK = 1 << 20
# Of an `IoQueue`, that are under way at a time, at most. What a disk reads in some milliseconds, for which a thread may
# wait for a processor that computes.
DEPTH, DEPTH_BYTES = 64, 16 << 20  # requests, bytes

Requests = npt.NDArray[np.int64]  # [n, 3]: address, bytes, offset in the file


def round_up_to_page(n_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-n_bytes // PAGE) * PAGE


class DirectFile:
    """A file `path` opened with O_DIRECT. Calls release the GIL; any thread may make them. Raises DiskUnusable."""

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        """Open it. Raises DiskUnusable if the file system has no direct I/O; OSError."""
        self.path = path
        try:
            self.fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise DiskUnusable(f"{path.parent} is on a file system without direct I/O (O_DIRECT)") from error

    def read(self, address: int, n_bytes: int, offset: int) -> None:
        """Read all of it. Raises DiskUnusable: the disk failed, or the file ends before."""
        self._transfer(os.preadv, "read", address, n_bytes, offset)

    def write(self, address: int, n_bytes: int, offset: int) -> None:
        """Write all of it. Raises DiskUnusable."""
        self._transfer(os.pwritev, "written", address, n_bytes, offset)

    def close(self) -> None:
        os.close(self.fd)

    def _transfer(self, call: Callable[..., int], participle: str, address: int, n_bytes: int, offset: int) -> None:
        done = 0
        while done < n_bytes:
            try:
                got = call(self.fd, [(ctypes.c_char * (n_bytes - done)).from_address(address + done)], offset + done)
            except OSError as error:
                raise DiskUnusable(f"{self.path} cannot be {participle} at byte {offset + done}: {error}") from error
            if got == 0:
                raise DiskUnusable(f"{self.path} ends at byte {offset + done}: it was cut short")
            done += got


class IoQueue:
    """Requests of one thread, many of them under way at a time (Linux AIO). Where the kernel has none, one by one."""

    def __init__(self) -> None:
        self._libc, self._numbers = ctypes.CDLL(None, use_errno=True), SYSCALLS.get(platform.machine())
        self._libc.syscall.restype = ctypes.c_long
        self._context = ctypes.c_ulong(0)
        if self._numbers is not None and self._call("setup", DEPTH, ctypes.byref(self._context)) < 0:
            self._numbers = None
        self._events = np.zeros(DEPTH, EVENT)

    def read(self, file: DirectFile, requests: Requests) -> None:
        """Serve all of the requests. Raises DiskUnusable."""
        for i in self._unfinished(file, requests, READ):
            file.read(*map(int, requests[i]))

    def write(self, file: DirectFile, requests: Requests) -> None:
        """Serve all of the requests, in any order. Raises DiskUnusable."""
        for i in self._unfinished(file, requests, WRITE):
            file.write(*map(int, requests[i]))

    def close(self) -> None:
        if self._numbers is not None:
            self._call("destroy", self._context)
            self._numbers = None

    def _unfinished(self, file: DirectFile, requests: Requests, operation: int) -> list[int]:
        """Make requests; return those that failed or ended early, to be made again alone. Nothing is under way then."""
        n = len(requests)
        if self._numbers is None or n < 2:
            return list(range(n))
        blocks = np.zeros(n, CONTROL)
        blocks["data"], blocks["operation"], blocks["fd"] = np.arange(n), operation, file.fd
        blocks["address"], blocks["n_bytes"], blocks["offset"] = requests.T
        addresses = blocks.ctypes.data + CONTROL.itemsize * np.arange(n, dtype=np.uint64)
        until = np.cumsum(requests[:, 1])
        unfinished, sent, ended, ended_bytes = list[int](), 0, 0, 0
        while ended < n:
            limit = int(np.searchsorted(until, ended_bytes + DEPTH_BYTES, "right"))
            limit = min(n, ended + DEPTH, max(limit, ended + 1))
            if sent < limit:
                got = self._call("submit", self._context, limit - sent, int(addresses.ctypes.data) + 8 * sent)
                sent += max(0, got)
                if got <= 0 and sent == ended:  # refused, and nothing is under way
                    unfinished.append(sent)
                    ended_bytes += int(requests[sent, 1])
                    sent, ended = sent + 1, ended + 1
                    continue
            got = self._call("getevents", self._context, 1, DEPTH, self._events.ctypes.data, None)
            if got < 0 and ctypes.get_errno() != errno.EINTR:
                raise DiskUnusable(f"{file.path}: {os.strerror(ctypes.get_errno())}")
            for number, done in self._events[["data", "result"]][: max(0, got)].tolist():
                ended_bytes += int(requests[number, 1])
                if done != requests[number, 1]:
                    unfinished.append(number)
            ended += max(0, got)
        return unfinished

    def _call(self, name: str, *arguments: Any) -> int:
        assert self._numbers is not None
        number = self._numbers[CALLS.index(name)]
        return self._libc.syscall(
            ctypes.c_long(number), *(ctypes.c_long(one) if isinstance(one, int) else one for one in arguments)
        )


CALLS = ("setup", "destroy", "getevents", "submit")
SYSCALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}  # of CALLS
READ, WRITE = 0, 1
CONTROL = np.dtype(  # linux/aio_abi.h on a little-endian machine
    [
        ("data", "<u8"), ("key", "<u4"), ("rw_flags", "<i4"), ("operation", "<u2"), ("priority", "<i2"), ("fd", "<u4"),
        ("address", "<u8"), ("n_bytes", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("flags", "<u4"),
        ("notified", "<u4"),
    ]
)  # fmt: skip
EVENT = np.dtype([("data", "<u8"), ("control", "<u8"), ("result", "<i8"), ("more", "<i8")])
