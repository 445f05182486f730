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
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile

from weft_runner.errors import DiskUnusable, ExecutorLost
from weft_runner.model.cpu.page_file import PageFile
from weft_runner.model.tiers.direct_io import IoQueue
from weft_runner.model.tiers.outside_pages import Piece
from weft_runner.offload.figures import PageFigures
from weft_runner.offload.residency import Ring

THREADS = 2  # so that a piece is loaded while another one is stored


class _State(Enum):
    """Of a piece in the ring, in this order."""

    WAITS, LOADS, LOADED, COMPUTED, STORES, DONE = range(6)


@dataclass(slots=True, eq=False)
class _Held:
    """A piece in the ring, from `slot` on."""

    piece: Piece
    slot: int
    state: _State = _State.WAITS

    @property
    def computed(self) -> bool:
        return self.state.value >= _State.COMPUTED.value


class PageStream:
    """`address`: of a ring of `slots` slots. The engine's thread calls it."""

    def __init__(self, file: PageFile, address: int, slots: int, lost: str = "KV is") -> None:
        """`lost`: what is, in the words of an error, where the disk fails."""
        self.figures = PageFigures()
        self._file, self._address, self._ring, self._lost = file, address, Ring(slots), lost
        self._changed = threading.Condition()
        self._coming: deque[Piece] = deque()
        self._held: deque[_Held] = deque()  # oldest first: those that are computed come before those that are not
        self._busy = 0  # threads that transfer
        self._dropped = False  # what is not loaded yet is not needed
        self._failed: DiskUnusable | None = None
        self._closing = False
        self._threads = [threading.Thread(target=self._transfer_on, name="kv", daemon=True) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def begin(self, pieces: Iterable[Piece]) -> None:
        """Those of a pass, in the order in which they are acquired. Raises ExecutorLost."""
        with self._changed:
            if self._coming or self._current():  # of a pass that was given up
                self.drain()
            self._check()
            self._coming.extend(pieces)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all that was computed is stored; what a pass that was given up has left is dropped.

        Raises ExecutorLost.
        """
        with self._changed:
            self._coming.clear()
            self._dropped = True
            self._changed.wait_for(
                lambda: self._failed or not (self._busy or any(held.computed for held in self._held))
            )
            self._dropped = False
            self._check()
            self._held.clear()
            self._ring.clear()

    def acquire(self) -> int:
        """The first slot of the next piece, which is complete; it stays until `release`. Raises ExecutorLost."""
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._failed or ((held := self._current()) and held.state is _State.LOADED))
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
            held.state = _State.COMPUTED if held.piece.pages.stores else _State.DONE
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
            raise ExecutorLost(f"{self._lost} lost: {self._failed}") from self._failed

    def _free(self) -> None:
        while self._held and self._held[0].state is _State.DONE:
            self._held.popleft()
            self._ring.release()

    # ---- the threads

    def _transfer_on(self) -> None:
        queue = IoQueue()
        try:
            while isinstance(held := self._next(), _Held):
                self._do(queue, held)
                self._end(held)
        except DiskUnusable as error:
            with self._changed:
                self._failed = error
                self._changed.notify_all()
        finally:
            queue.close()

    def _next(self) -> "_Held | bool | DiskUnusable | None":
        """A piece that is to be loaded or stored; something else at the end."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closing or self._failed or self._take())

    def _take(self) -> _Held | None:
        """The oldest piece that has anything to do; None while there is nothing, or no room."""
        held = next((one for one in self._held if one.state in (_State.WAITS, _State.COMPUTED)), None) or self._append()
        if held is None or (held.state is _State.WAITS and (self._dropped or self._waits(held))):
            return None
        held.state = _State.STORES if held.computed else _State.LOADS
        self._busy += 1
        return held

    def _waits(self, held: _Held) -> bool:
        """An earlier piece is yet to store what this one reads or writes."""
        before = takewhile(lambda one: one is not held, self._held)
        return any(one.state is not _State.DONE and held.piece.waits_for(one.piece) for one in before)

    def _append(self) -> _Held | None:
        """The next piece, if the ring has room for it."""
        if not self._coming or (slot := self._ring.take(self._coming[0].pages.n)) is None:
            return None
        held = _Held(self._coming.popleft(), slot)
        self._held.append(held)
        return held

    def _do(self, queue: IoQueue, held: _Held) -> None:
        """Raises DiskUnusable."""
        layer, pages, layer_bytes = held.piece.layer, held.piece.pages, self._file.layer_bytes
        address = self._address + held.slot * layer_bytes
        if held.state is _State.STORES:
            self._file.write(queue, address, layer, pages.stores)
            return
        for run in pages.clears:
            ctypes.memset(address + run.slot * layer_bytes, 0, run.count * layer_bytes)
        self._file.read(queue, address, layer, pages.loads)

    def _end(self, held: _Held) -> None:
        stored, pages = held.state is _State.STORES, held.piece.pages
        n_bytes = self._file.layer_bytes * sum(run.count for run in (pages.stores if stored else pages.loads))
        with self._changed:
            self._busy -= 1
            held.state = _State.DONE if stored else _State.LOADED
            self.figures.read_bytes += n_bytes * (not stored)
            self.figures.written_bytes += n_bytes * stored
            self._free()
            self._changed.notify_all()
