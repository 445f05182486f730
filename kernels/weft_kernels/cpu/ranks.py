"""The slots through which the tensor ranks of a stage exchange what they computed (`weft_ranks` of weft_cpu.h).

Sums over slots are taken natively, in the order of the ranks, so that the bits are the same whatever carries the slots:
memory that the ranks share, or a callback that fetches those of the others.
"""

import ctypes
import mmap
import os
from collections.abc import Callable
from ctypes import byref

from weft_kernels.cpu.memory import MappedMemory
from weft_kernels.cpu.structs import Exchange, RanksStruct

LINE = 64  # bytes
HALVES = 2


def slots_bytes(size: int, slot_bytes: int) -> int:
    """The bytes of the shared memory of `size` ranks."""
    return -(-((size + 1) * LINE + HALVES * size * slot_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedSlots:
    """A rank's view of a file in memory that all ranks of its stage map. `struct` lives as long as this."""

    def __init__(
        self, native: ctypes.CDLL, file: int, offset: int, *, rank: int, size: int, slot_bytes: int, patience_s: float
    ) -> None:
        """Map this stage's part of the file, whole pages from `offset` on; the file grows to it with zeros."""
        assert slot_bytes % LINE == 0, slot_bytes
        n_bytes = slots_bytes(size, slot_bytes)
        os.posix_fallocate(file, offset + n_bytes - 1, 1)  # unlike ftruncate never shrinks what another stage grew
        self._native, self._map = native, mmap.mmap(file, n_bytes, mmap.MAP_SHARED, offset=offset)
        self._bytes = (ctypes.c_char * n_bytes).from_buffer(self._map)
        begin = ctypes.addressof(self._bytes)
        self.struct = RanksStruct(
            rank=rank, size=size, slots=begin + (size + 1) * LINE, slot_bytes=slot_bytes, meeting=begin,
            patience_s=patience_s,
        )  # fmt: skip
        self.error: BaseException | None = None

    def end(self) -> None:
        """End all waiting between ranks, for good: a step that waits is refused. Any thread."""
        self._native.weft_end_ranks(byref(self.struct))


class FetchedSlots:
    """Slots of this process's own, which `fetch` fills. `views`: the addresses of the ranks' slots.

    `error`: what `fetch` raised; the step was refused for it.
    """

    def __init__(self, *, rank: int, size: int, slot_bytes: int) -> None:
        assert slot_bytes % LINE == 0, slot_bytes
        self._memory = MappedMemory(HALVES * size * slot_bytes)
        self._size, self._slot_bytes = size, slot_bytes
        self.fetch: Callable[[list[int], int, bool], None] | None = None
        self.error: BaseException | None = None
        self._callback = Exchange(self._exchange)
        self.struct = RanksStruct(
            rank=rank, size=size, slots=self._memory.address, slot_bytes=slot_bytes, exchange=self._callback
        )

    def end(self) -> None:
        """Do nothing: what ends a fetch is the transport's business."""

    def _exchange(self, context: int | None, half: int, n_bytes: int, to_root: int) -> int:
        """Fetch the other ranks' slots. A C callback cannot raise: the error waits for the step's end."""
        del context
        assert self.fetch is not None
        begin = self._memory.address + half * self._size * self._slot_bytes
        try:
            self.fetch([begin + rank * self._slot_bytes for rank in range(self._size)], n_bytes, bool(to_root))
        except BaseException as error:  # noqa: BLE001 (raised by who runs the step)
            self.error = error
            return -1
        return 0
