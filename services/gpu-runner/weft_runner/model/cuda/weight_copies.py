"""Weights on their way to a GPU while layers compute: a thread copies groups into a ring there, in the order of steps.

A group is what one layer, or a piece of the head, has outside of the device (`offload.residency`): matrices in pinned
memory of the host, and others that come from the disk into a ring of such memory first (`tiers.weight_stream`). Copies
run on a stream of their own. Events keep the order: a group is copied over one that was released after what was
launched with that, and what is launched with a group comes after its copies.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from weft_runner.errors import ExecutorLost
from weft_runner.model.cuda.device import CopyStream
from weft_runner.model.tiers.weight_stream import WeightStream
from weft_runner.offload.figures import StreamFigures
from weft_runner.offload.residency import GroupRing


@dataclass(frozen=True, slots=True, eq=False)
class FromHost:
    """Bytes of a matrix in pinned memory: uint8 [n]."""

    source: torch.Tensor


@dataclass(frozen=True, slots=True)
class FromDisk:
    """`group`: of the stream; the bytes come one after the other in it."""

    group: int
    n_bytes: int


Piece = FromHost | FromDisk
Group = Sequence[Piece]  # in the order in which they lie in the ring; those of the disk side by side in the stream


@dataclass(slots=True, eq=False)
class _Held:
    """A group in the ring. `copied`: its copies are launched, `arrived` comes after them."""

    group: int
    offset: int
    copied: bool = False
    arrived: torch.cuda.Event | None = None


class WeightCopies:
    """`groups`: in the order of a step, none empty. The engine's thread calls it, on its device."""

    def __init__(
        self, device: CopyStream, groups: Sequence[Group], ring_bytes: int, staging: torch.Tensor | None,
        disk: WeightStream | None,
    ) -> None:  # fmt: skip
        """`staging`: the memory of `disk`, uint8."""
        self._device, self._groups, self._staging, self._disk = device, groups, staging, disk
        self.memory = torch.zeros(ring_bytes, dtype=torch.uint8, device=device.at)
        self._ring = GroupRing([sum(map(_bytes_of, group)) for group in groups], ring_bytes)
        self._released = device.computed()
        self._changed = threading.Condition()
        self._held: deque[_Held] = deque()  # oldest first
        self._failed: Exception | None = None
        self._closing = self._copying = False
        self._waited_s, self._copied_bytes = 0.0, 0
        self._thread = threading.Thread(target=self._copy_on, name="weight copies", daemon=True)
        self._thread.start()

    @property
    def figures(self) -> StreamFigures:
        """Any thread. Waiting is that of the engine's thread, for the disk or for copies to be launched."""
        of_disk = StreamFigures() if self._disk is None else self._disk.figures
        return replace(of_disk, waited_s=self._waited_s, copied_bytes=self._copied_bytes)

    def begin(self, groups: int) -> None:
        """A step that needs the first so many: after them come those of the next step."""
        with self._changed:
            self._ring.begin(groups)
            self._changed.notify_all()

    def acquire(self, group: int) -> int:
        """Where in the ring a group begins that what is launched from now on may read, until `release`.

        Another one than was expected to come next is copied now, and what was copied ahead is dropped. Raises
        ExecutorLost.
        """
        began = time.perf_counter()
        with self._changed:
            if (self._held[0].group if self._held else self._ring.following) != group:
                self._seek(group)
            self._changed.wait_for(lambda: self._failed or (self._held and self._held[0].copied))
            self._waited_s += time.perf_counter() - began
            if self._failed is not None:
                raise ExecutorLost(f"weights are lost: {self._failed}") from self._failed
            held = self._held[0]
        if held.arrived is not None:
            held.arrived.wait()
        return held.offset

    def release(self) -> None:
        """The group that was acquired: all that reads it is launched."""
        computed = self._device.computed()
        with self._changed:
            self._released = computed
            self._held.popleft()
            self._ring.release()
            self._changed.notify_all()

    def close(self) -> None:
        """After the copies under way."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._disk is not None:
            self._disk.close()

    def _seek(self, group: int) -> None:
        for held in self._held:
            held.group = -1  # one that waits for its copies is not looked at any more
        self._changed.wait_for(lambda: self._failed or not self._copying)
        self._held.clear()
        self._ring.seek(group)
        self._changed.notify_all()

    # ---- the thread that copies

    def _copy_on(self) -> None:
        while True:
            with self._changed:
                held = self._changed.wait_for(lambda: self._closing or self._append())
                if not isinstance(held, _Held):
                    return
                released = self._released
            try:
                arrived = self._copy(held, released)
            except (ExecutorLost, RuntimeError) as error:
                with self._changed:
                    self._failed, self._copying = error, False
                    self._changed.notify_all()
                return
            with self._changed:
                held.arrived, held.copied, self._copying = arrived, True, False
                self._changed.notify_all()

    def _append(self) -> _Held | None:
        """The next group, if the ring has room for it."""
        if (taken := self._ring.take()) is None:
            return None
        held = _Held(*taken)
        self._held.append(held)
        self._copying = True
        return held

    def _copy(self, held: _Held, released: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """The host's ring is given back once nothing reads it. Raises ExecutorLost."""
        pieces, at = self._groups[held.group], held.offset
        from_disk = [piece for piece in pieces if isinstance(piece, FromDisk)]
        begins = 0
        if from_disk:
            assert self._disk is not None
            assert self._staging is not None
            begins = self._disk.acquire(from_disk[0].group) - self._staging.data_ptr()
        pairs = list[tuple[torch.Tensor, torch.Tensor]]()
        for piece in pieces:
            n_bytes = _bytes_of(piece)
            if isinstance(piece, FromHost):
                source = piece.source
            else:
                assert self._staging is not None
                source = self._staging[begins : begins + n_bytes]
                begins += n_bytes
            pairs.append((self.memory[at : at + n_bytes], source))
            at += n_bytes
        arrived = self._device.copy(pairs, released)
        if from_disk and self._disk is not None:
            if arrived is not None:
                arrived.synchronize()
            self._disk.release()
        self._copied_bytes += at - held.offset
        return arrived


def _bytes_of(piece: Piece) -> int:
    return piece.n_bytes if isinstance(piece, FromDisk) else piece.source.numel()
