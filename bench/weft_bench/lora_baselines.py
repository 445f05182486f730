"""What Punica's operator was compared with, on plain matrices: a loop over adapters; gather, then a batched product.

Both as they are best: the projections of a site share one product with x, and weights lie in one piece.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import torch

Weights = tuple[torch.Tensor, list[torch.Tensor]]  # A of all slices [R, n_in]; of each slice B^T [r, width]
Adding = Callable[[torch.Tensor, torch.Tensor], None]  # y, x -> y += what the adapters make of x


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Rows [start, end) of one adapter."""

    start: int
    end: int
    a: torch.Tensor
    b: list[torch.Tensor]
    scale: float

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """y[rows, columns of each slice] += scale * (x A^T) B^T, in y's dtype."""
        v = x[self.start : self.end] @ self.a.t().to(x.dtype)
        rank = column = 0
        for b in self.b:
            part = v[:, rank : rank + len(b)]
            y[self.start : self.end, column : column + b.shape[1]].addmm_(part, b.to(x.dtype), alpha=self.scale)
            rank, column = rank + len(b), column + b.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """Adapters as plain matrices. `index`: of each row its adapter."""

    adapters: Sequence[Weights]
    segments: list[Segment]
    index: torch.Tensor
    scale: float

    @classmethod
    def of(cls, adapters: Sequence[Weights], rows: Sequence[int | None], scale: float, device: torch.device) -> Self:
        """`rows`: the adapter of each row, those of one beside each other."""
        segments, start = list[Segment](), 0
        for number, group in groupby(rows):
            end = start + len(list(group))
            if number is not None:
                segments.append(Segment(start, end, *adapters[number], scale))
            start = end
        return cls(adapters, segments, torch.tensor([row or 0 for row in rows], device=device), scale)


def loop(dense: Dense) -> Adding:
    """One adapter after the other."""

    def add(y: torch.Tensor, x: torch.Tensor) -> None:
        for segment in dense.segments:
            segment.add_to(y, x)

    return add


def gather(dense: Dense) -> Adding:
    """Each row gets its adapter's matrices, copied, and then all are multiplied at once (of one rank alone)."""
    all_a = torch.stack([a for a, _ in dense.adapters])
    all_b = [torch.stack(slices) for slices in zip(*(b for _, b in dense.adapters), strict=True)]

    def add(y: torch.Tensor, x: torch.Tensor) -> None:
        v = torch.bmm(all_a[dense.index], x[:, :, None]).transpose(1, 2)
        rank = column = 0
        for b in all_b:
            part = torch.bmm(v[:, :, rank : rank + b.shape[1]], b[dense.index]).squeeze(1)
            y[:, column : column + b.shape[2]].add_(part, alpha=dense.scale)
            rank, column = rank + b.shape[1], column + b.shape[2]

    return add
