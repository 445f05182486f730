"""Tensor parallelism inside a layer: what operators do around their products, and what that costs on the wire.

Megatron's split of the base: q|k|v and gate|up by outputs (*column* sites), o and down by inputs (*row* sites), whose
partial sums are added over the ranks. Adapters as in S-LoRA (arXiv 2311.03285, section 6.1), B always by outputs:

- column site: A [R, in] by ranks, row r on device r mod N. x is whole on every device; each shrinks to its ceil(R / N)
  columns, and the gathered rows are whole: any mixture of ranks in a batch gathers alike. B's own outputs follow.
- row site: A by inputs, as the base. The shrunk rows [T, R] are partial sums and are added over the ranks; B's own
  H / N outputs go into the rank's *own partial sum* of the base before that is added up: no traffic of their own.

Embedding and norms are on every device; the head is split by the vocabulary, and rank 0 gathers its logits.

**Bytes that rank p of N sends in a step** of T tokens and S sampled rows, with numbers of e bytes, where R(l, s) is the
widest adapter of the step at site s of layer l (0: none has it), its stacked true ranks:

    sum over layers of   2 * 2 (N - 1) / N * T H e                     the base's two sums
                       + (N - 1) * T ceil(R / N) e                     for QKV, for GATE_UP
                       + 2 (N - 1) / N * T R e                         for OUT, for DOWN
    + S V / N * e  where p > 0                                         logits

So adapters add O(T * R) to the base's O(T * H), whatever their number (S-LoRA, section 6.2). Each term is rounded down.
"""

from typing import Protocol

import torch

from weft_runner.model.lora import DOWN, GATE_UP, OUT, QKV

COLUMN_SITES = (QKV, GATE_UP)
ROW_SITES = (OUT, DOWN)


class ProcessGroup(Protocol):
    """Ranks 0 .. size - 1. What a rank that is lost raises is the transport's own error; the group is over then."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent since it joined."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, the same bits on each; x itself may hold it afterwards."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x of every rank: [size, *x.shape]."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Gather every rank's part on rank 0 (`all_gather`); None on the others."""
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """x of rank 0; the others give one of its shape, which is written to."""
        ...


class SingleProcessGroup:
    """The group of a model that is whole on one device. It has no state."""

    rank, size, sent_bytes = 0, 1, 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        return x[None]

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x


class TensorParallel:
    """What the operators of a rank ask of the others; every rank asks the same in the same order. Alone: nothing."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    @property
    def size(self) -> int:
        return self._group.size

    def own_width(self, width: int, site: int) -> int:
        """How many columns the shrunk rows of adapters of up to `width` ranks have here, before `shrunk`."""
        return -(-width // self.size) if site in COLUMN_SITES else width

    def shrunk(self, v: torch.Tensor, site: int) -> torch.Tensor:
        """Between shrink and expand: this rank's part [T, own_width] -> [T, width or a little more], column r rank r.

        Columns beyond an adapter's ranks are undefined and never read.
        """
        if site in COLUMN_SITES:
            parts = self._group.all_gather(v)  # [N, T, w]: rank r is column r // N of part r % N
            return parts.permute(1, 2, 0).flatten(1)
        return self._group.all_reduce(v)

    def summed(self, y: torch.Tensor, site: int) -> torch.Tensor:
        """After base and adapters: at a row site the sum of the partial sums [T, H]."""
        return self._group.all_reduce(y) if site in ROW_SITES else y

    def logits(self, part: torch.Tensor) -> torch.Tensor:
        """This rank's part of the vocabulary [S, V / N] -> all of it on rank 0; on the others the part."""
        parts = self._group.gather(part)  # [N, S, V / N]
        return part if parts is None else parts.permute(1, 0, 2).flatten(1)
