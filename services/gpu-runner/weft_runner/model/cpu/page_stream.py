"""KV on a disk passes through memory while layers compute: threads load what comes next and store what was written.

A **piece** is one layer of one micro-batch: the pages on disk that its rows read or write. Pieces come in the order in
which they are computed and lie in a ring of page slots. The next ones are loaded while one is computed with, and what
it wrote is stored while the next ones are computed with: FlexGen's KV load and KV store (section 4.1). A piece that
reads what an earlier one writes (a prompt that is cut between two micro-batches) is loaded after that one is stored.
A page whose first token is yet to be written is not loaded: it is zeros, as a page in memory is when it is granted.
"""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from weft_runner.errors import DiskUnusable, ExecutorLost
from weft_runner.model.cpu.direct_io import BLOCK
from weft_runner.model.cpu.kv_file import KvFile
from weft_runner.model.step import Ints, StepArrays
from weft_runner.offload.residency import Ring

THREADS = 2  # so that one transfers while the other gets its next run


@dataclass(frozen=True, slots=True)
class SlotRun:
    """`count` slots of a piece from `slot` on, and as many extents of the file."""

    slot: int
    extent: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class DiskPages:
    """What a micro-batch reads and writes on disk. Slots [0, n) have a page each, in the order of their extents.

    `columns`: places in the step's list of pages that refer to one, `slots`: to which. `clears`: pages that begin.
    """

    n: int
    columns: Ints
    slots: Ints
    loads: tuple[SlotRun, ...]
    clears: tuple[SlotRun, ...]
    stores: tuple[SlotRun, ...]
    reads: frozenset[int]  # extents
    writes: frozenset[int]


def disk_pages(rows: Ints, arrays: StepArrays, places: Ints, page_tokens: int) -> DiskPages | None:
    """Of rows [R, 4] (start, end, position, where its pages begin in `arrays.pages`). None: they have none on disk."""
    position, end = rows[:, 2], rows[:, 2] + rows[:, 1] - rows[:, 0]
    used = -(-end // page_tokens)
    of_row = np.repeat(np.arange(len(rows)), used)
    index = np.arange(len(of_row)) - np.repeat(np.cumsum(used) - used, used)
    columns = rows[of_row, 3] + index
    place = places[arrays.pages[columns]]
    on_disk = place < 0
    if not on_disk.any():
        return None
    columns, of_row, index = columns[on_disk], of_row[on_disk], index[on_disk]
    extents, slots = np.unique(~place[on_disk], return_inverse=True)
    begins, is_written = np.zeros(len(extents), bool), np.zeros(len(extents), bool)
    begins[slots[index * page_tokens >= position[of_row]]] = True
    is_written[slots[index >= position[of_row] // page_tokens]] = True
    return DiskPages(
        len(extents), columns, slots.astype(np.int32), _runs(extents, ~begins), _runs(extents, begins),
        _runs(extents, is_written), frozenset(extents[~begins].tolist()), frozenset(extents[is_written].tolist()),
    )  # fmt: skip


def _runs(extents: Ints, wanted: npt.NDArray[np.bool_]) -> tuple[SlotRun, ...]:
    """Slots that are wanted, in runs of neighbours in the file."""
    (slots,) = np.nonzero(wanted)
    cuts = np.flatnonzero(np.diff(extents[slots]) != 1) + 1
    return tuple(SlotRun(int(run[0]), int(extents[run[0]]), len(run)) for run in np.split(slots, cuts) if len(run))


@dataclass(slots=True)
class DiskKvFigures:
    """Since start: bytes loaded and stored, and for how long computing waited for them."""

    read_bytes: int = 0
    written_bytes: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A layer of a micro-batch."""

    layer: int
    pages: DiskPages


class _Kind(Enum):
    CLEAR, LOAD, STORE = range(3)


@dataclass(slots=True, eq=False)
class _Held:
    """A piece in the ring, from `slot` on. `left`: runs that are not there yet; once computed, not stored yet."""

    piece: Piece
    slot: int
    todo: deque[tuple[_Kind, SlotRun]]
    left: int
    computed: bool = False

    @property
    def done(self) -> bool:
        return self.computed and not self.left


@dataclass(frozen=True, slots=True, eq=False)
class _Transfer:
    held: _Held
    kind: _Kind
    run: SlotRun


class PageStream:
    """`address`: of a ring of `slots` slots. The engine's thread calls it."""

    def __init__(self, file: KvFile, address: int, slots: int) -> None:
        self.figures = DiskKvFigures()
        self._file, self._address, self._ring = file, address, Ring(slots)
        self._most = max(1, BLOCK // file.layer_bytes)  # slots that a thread transfers at a time
        self._changed = threading.Condition()
        self._coming: deque[Piece] = deque()
        self._held: deque[_Held] = deque()  # oldest first: those that are computed come before those that are not
        self._busy = 0  # threads that transfer
        self._failed: DiskUnusable | None = None
        self._closing = False
        self._threads = [threading.Thread(target=self._transfer_on, name="kv", daemon=True) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def begin(self, pieces: Iterable[Piece]) -> None:
        """Those of a pass, in the order in which they are acquired. Raises ExecutorLost."""
        self.drain()
        with self._changed:
            self._coming.extend(pieces)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all that was computed is stored; what a pass that was given up has left is dropped.

        Raises ExecutorLost.
        """
        with self._changed:
            self._coming.clear()
            for held in self._held:
                if not held.computed:
                    held.todo.clear()
            self._changed.wait_for(
                lambda: self._failed or not (self._busy or any(held.computed for held in self._held))
            )
            self._check()
            self._held.clear()
            self._ring.clear()

    def acquire(self) -> int:
        """The first slot of the next piece, which is complete; it stays until `release`. Raises ExecutorLost."""
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._failed or ((held := self._current()) and not held.left))
            self.figures.waited_s += time.perf_counter() - began
            self._check()
            held = self._current()
            assert held is not None, "pieces are acquired in the order of `begin`"
            return held.slot

    def release(self) -> None:
        """The piece that was acquired is computed: what it wrote is stored from now on."""
        with self._changed:
            held = self._current()
            assert held is not None, "it was acquired"
            held.todo.extend((_Kind.STORE, part) for run in held.piece.pages.stores for part in self._parts(run))
            held.left, held.computed = len(held.todo), True
            self._free()
            self._changed.notify_all()

    def close(self) -> None:
        """After the transfers under way."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _current(self) -> _Held | None:
        return next((held for held in self._held if not held.computed), None)

    def _check(self) -> None:
        if self._failed is not None:
            raise ExecutorLost(f"KV is lost: {self._failed}") from self._failed

    def _free(self) -> None:
        while self._held and self._held[0].done:
            self._held.popleft()
            self._ring.release()

    def _parts(self, run: SlotRun) -> Iterator[SlotRun]:
        for done in range(0, run.count, self._most):
            yield SlotRun(run.slot + done, run.extent + done, min(self._most, run.count - done))

    # ---- the threads

    def _transfer_on(self) -> None:
        while True:
            with self._changed:
                transfer = self._changed.wait_for(lambda: self._closing or self._failed or self._take())
                if not isinstance(transfer, _Transfer):
                    return
            try:
                self._do(transfer)
            except DiskUnusable as error:
                with self._changed:
                    self._failed = error
                    self._changed.notify_all()
                return
            self._end(transfer)

    def _take(self) -> _Transfer | None:
        """Of the oldest piece that has anything to do; None while there is nothing, or no room."""
        held = next((one for one in self._held if one.todo and not self._waits(one)), None) or self._append()
        if held is None or self._waits(held):
            return None
        self._busy += 1
        return _Transfer(held, *held.todo.popleft())

    def _waits(self, held: _Held) -> bool:
        """An earlier piece is yet to store what this one reads."""
        if held.computed:
            return False
        before = takewhile(lambda one: one is not held, self._held)
        layer, reads = held.piece.layer, held.piece.pages.reads
        return any(
            one.piece.layer == layer and not one.done and not one.piece.pages.writes.isdisjoint(reads) for one in before
        )

    def _append(self) -> _Held | None:
        """The next piece, if the ring has room for it."""
        if not self._coming or (slot := self._ring.take(self._coming[0].pages.n)) is None:
            return None
        piece = self._coming.popleft()
        runs = ((_Kind.CLEAR, piece.pages.clears), (_Kind.LOAD, piece.pages.loads))
        todo = deque((kind, part) for kind, of_kind in runs for run in of_kind for part in self._parts(run))
        held = _Held(piece, slot, todo, len(todo))
        self._held.append(held)
        return held

    def _do(self, transfer: _Transfer) -> None:
        """Raises DiskUnusable."""
        layer, run = transfer.held.piece.layer, transfer.run
        address = self._address + (transfer.held.slot + run.slot) * self._file.layer_bytes
        if transfer.kind is _Kind.CLEAR:
            ctypes.memset(address, 0, run.count * self._file.layer_bytes)
        elif transfer.kind is _Kind.LOAD:
            self._file.read(address, layer, run.extent, run.count)
        else:
            self._file.write(address, layer, run.extent, run.count)

    def _end(self, transfer: _Transfer) -> None:
        n_bytes = transfer.run.count * self._file.layer_bytes
        with self._changed:
            self._busy -= 1
            transfer.held.left -= 1
            self.figures.read_bytes += n_bytes * (transfer.kind is _Kind.LOAD)
            self.figures.written_bytes += n_bytes * (transfer.kind is _Kind.STORE)
            self._free()
            self._changed.notify_all()
