"""Memory for packed weights, KV pages and workspaces: anonymous, zeroed, on 2 MiB pages where the system gives them.

A decode step reads every weight once: with 4 KiB pages that is a table walk for each 4 KiB streamed.
"""

import ctypes
import mmap
import sys

import numpy as np
import numpy.typing as npt

HUGE = 2 << 20


class MappedMemory:
    """`n_bytes` of zeros at `address`, a multiple of 64 (of 2 MiB where it is at least that large).

    Pages are taken from the system when they are first touched. Lives as long as the object.
    """

    def __init__(self, n_bytes: int) -> None:
        align = HUGE if n_bytes >= HUGE else 64
        self.n_bytes = n_bytes
        # private: shared memory has no large pages where shmem_enabled is `never`, and keeps what is discarded
        self._map = mmap.mmap(-1, max(n_bytes, 1) + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if n_bytes >= HUGE and sys.platform == "linux":
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = (ctypes.c_char * (n_bytes + align)).from_buffer(self._map)
        start = ctypes.addressof(self._bytes)
        self.address = -(-start // align) * align

    def array(self) -> npt.NDArray[np.uint8]:
        """View all bytes as an array; the memory lives as long as that, too."""
        begin = self.address - ctypes.addressof(self._bytes)
        return np.frombuffer(memoryview(self._bytes), np.uint8, self.n_bytes, begin)

    def clear(self, offset: int, n_bytes: int) -> None:
        """Write zeros again."""
        assert 0 <= offset <= offset + n_bytes <= self.n_bytes, (offset, n_bytes, self.n_bytes)
        ctypes.memset(self.address + offset, 0, n_bytes)

    def discard(self, offset: int, n_bytes: int) -> None:
        """Give the system back the whole pages of a part that is not needed any more, until they are touched again."""
        assert 0 <= offset <= offset + n_bytes <= self.n_bytes, (offset, n_bytes, self.n_bytes)
        begin = self.address - ctypes.addressof(self._bytes) + offset
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, (begin + n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and sys.platform == "linux":
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
