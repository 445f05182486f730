"""Weights on their way to a GPU while layers compute: a thread copies groups into a ring there, in the order of steps.

A group is what one layer, or a piece of the head, has outside of the device (`offload.residency`): matrices in pinned
memory of the host, and others that come from the disk into a ring of such memory first (`tiers.weight_stream`). Copies
run on a stream of their own. Events keep the order: a group is copied over one that was released after what was
launched with that, and what is launched with a group comes after its copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from weft_runner.model.cuda.device import CopyStream
from weft_runner.model.tiers.read_ahead import ReadAhead, SlowTier, TierTransfer


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


class HostWeights(SlowTier[int]):
    """`groups`: in the order of a step, none empty. `memory`: the ring's, uint8; `staging`: that of `disk`."""

    def __init__(
        self, device: CopyStream, groups: Sequence[Group], memory: torch.Tensor, staging: torch.Tensor,
        disk: ReadAhead[int] | None,
    ) -> None:  # fmt: skip
        self._device, self._groups, self._memory, self._staging, self._disk = device, groups, memory, staging, disk
        self._released = device.computed()

    def size(self, item: int) -> int:
        return sum(map(_bytes_of, self._groups[item]))

    def load(self, item: int, at: int) -> list[TierTransfer]:
        return [TierTransfer(self.size(item), partial(self._copy, item, at, self._released))]

    def store(self, item: int, at: int) -> tuple[TierTransfer, ...]:
        """Weights are as they were. What is copied over them comes after all that was launched until now."""
        del item, at
        self._released = self._device.computed()
        return ()

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()

    def _copy(self, group: int, at: int, released: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """The host's ring is given back once nothing reads it. Raises ExecutorLost."""
        pieces, begins = self._groups[group], 0
        from_disk = [piece.group for piece in pieces if isinstance(piece, FromDisk)]
        if self._disk is not None and from_disk:
            begins = self._disk.acquire(from_disk[0])
        pairs = list[tuple[torch.Tensor, torch.Tensor]]()
        for piece in pieces:
            n_bytes = _bytes_of(piece)
            if isinstance(piece, FromHost):
                source = piece.source
            else:
                source = self._staging[begins : begins + n_bytes]
                begins += n_bytes
            pairs.append((self._memory[at : at + n_bytes], source))
            at += n_bytes
        arrived = self._device.copy(pairs, released)
        if self._disk is not None and from_disk:
            if arrived is not None:
                arrived.synchronize()
            self._disk.release()
        return arrived


def _bytes_of(piece: Piece) -> int:
    return piece.n_bytes if isinstance(piece, FromDisk) else piece.source.numel()
