"""Weights that come from disk while layers compute: threads read ahead into a ring, in the order of steps.

A group is what one layer, or a piece of the head, has on disk (`offload.residency`). While one is computed with,
the next ones are read, layer 0 of the next step behind the last one of this; the disk is idle only while the ring is
full.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft_kernels.cpu.memory import MappedMemory
from weft_runner.errors import DiskUnusable, ExecutorLost
from weft_runner.model.tiers.direct_io import BLOCK, DirectFile
from weft_runner.offload.figures import StreamFigures
from weft_runner.offload.residency import GroupRing

THREADS = 4  # so that the disk has reads under way while threads wait for a processor


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of the file; offset and size are whole pages."""

    offset: int
    n_bytes: int


@dataclass(slots=True, eq=False)
class _Held:
    """A group in the ring. `left`: bytes that are not there yet."""

    group: int
    address: int
    left: int
    blocks: deque[tuple[int, Extent]] = field(default_factory=deque[tuple[int, Extent]])  # (address, what) to be read
    reading: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """What a thread reads at a time."""

    held: _Held
    address: int
    extent: Extent


class WeightStream:
    """`groups`: the extents of each, in the order of a step, none of them empty. One thread calls it."""

    def __init__(self, file: DirectFile, groups: Sequence[Sequence[Extent]], memory: MappedMemory) -> None:
        """`memory`: the ring's."""
        self._file, self._groups = file, groups
        sizes = [sum(extent.n_bytes for extent in extents) for extents in groups]
        self._memory, self._ring = memory, GroupRing(sizes, memory.n_bytes)
        self._changed = threading.Condition()
        self._held: deque[_Held] = deque()  # oldest first
        self._failed: DiskUnusable | None = None
        self._closing = False
        self._readers, self._since = 0, 0.0
        self.figures = StreamFigures()
        self._threads = [threading.Thread(target=self._read_on, name="weights", daemon=True) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def begin(self, groups: int) -> None:
        """A step that needs the first so many: after them come those of the next step."""
        with self._changed:
            self._ring.begin(groups)
            self._changed.notify_all()

    def acquire(self, group: int) -> int:
        """The address of a group that is complete; it stays until `release`. Raises ExecutorLost.

        Another one than was expected to come next is read now, and what was read ahead is dropped.
        """
        began = time.perf_counter()
        with self._changed:
            if (self._held[0].group if self._held else self._ring.following) != group:
                self._seek(group)
            self._changed.wait_for(lambda: self._failed or (self._held and not self._held[0].left))
            self.figures.waited_s += time.perf_counter() - began
            if self._failed is not None:
                raise ExecutorLost(f"weights are lost: {self._failed}") from self._failed
            return self._held[0].address

    def release(self) -> None:
        """The group that was acquired."""
        with self._changed:
            self._held.popleft()
            self._ring.release()
            self._changed.notify_all()

    def close(self) -> None:
        """After the reads under way."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._file.close()

    def _seek(self, group: int) -> None:
        for held in self._held:
            held.blocks.clear()
        self._changed.wait_for(lambda: self._failed or not any(held.reading for held in self._held))
        self._held.clear()
        self._ring.seek(group)
        self._changed.notify_all()

    # ---- the readers

    def _read_on(self) -> None:
        while True:
            with self._changed:
                block = self._changed.wait_for(lambda: self._closing or self._failed or self._take())
                if not isinstance(block, _Block):
                    return
            held, extent = block.held, block.extent
            try:
                self._file.read(block.address, extent.n_bytes, extent.offset)
            except DiskUnusable as error:
                self._end(held, 0)
                with self._changed:
                    self._failed = error
                    self._changed.notify_all()
                return
            self._end(held, extent.n_bytes)

    def _take(self) -> "_Block | None":
        """The next block to read; None while the ring is full."""
        held = next((one for one in self._held if one.blocks), None) or self._append()
        if held is None:
            return None
        block = _Block(held, *held.blocks.popleft())
        held.reading += 1
        if not self._readers:
            self._since = time.perf_counter()
        self._readers += 1
        return block

    def _append(self) -> _Held | None:
        """The next group, if the ring has room for it."""
        if (taken := self._ring.take()) is None:
            return None
        group, extents, at = taken[0], self._groups[taken[0]], self._memory.address + taken[1]
        held = _Held(group, at, sum(extent.n_bytes for extent in extents))
        for extent in extents:
            for done in range(0, extent.n_bytes, BLOCK):
                held.blocks.append((at + done, Extent(extent.offset + done, min(BLOCK, extent.n_bytes - done))))
            at += extent.n_bytes
        self._held.append(held)
        return held

    def _end(self, held: _Held, n_bytes: int) -> None:
        with self._changed:
            held.reading -= 1
            held.left -= n_bytes
            self.figures.read_bytes += n_bytes
            self._readers -= 1
            if not self._readers:
                self.figures.reading_s += time.perf_counter() - self._since
            if not held.left or not held.reading:
                self._changed.notify_all()
