"""LoRA over a segment plan in plain torch, the oracle of the native and the Triton kernels: y += scale * (x A^T) B^T.

Two launches, as in Punica (arXiv 2310.18547, section 4): **shrink** (h_in -> r) and **expand** (r -> h_out).
Projections that read the same input (q|k|v, gate|up) are stacked into one *site*: one shrink reads x once for all of
them, one expand writes each projection's own columns. Ranks are true ranks: nothing is padded to a maximum. The other
implementations have interfaces of their own: `cpu` computes whole steps, `triton.lora` reads tables on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft_kernels.plan import SegmentPlan


@dataclass(frozen=True, slots=True, eq=False)
class LoraSlice:
    """One projection inside a site: which rows of the stacked A it owns, which columns of y it writes.

    `b_t`: [rank, out_end - out_start], B transposed (a view is fine).
    """

    rank_start: int
    rank_end: int
    out_start: int
    out_end: int
    b_t: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class LoraSite:
    """One adapter's weights at one site. `a_t`: [h_in, sum of the slices' ranks], stacked A transposed."""

    a_t: torch.Tensor
    slices: tuple[LoraSlice, ...]

    @property
    def n_bytes(self) -> int:
        tensors = (self.a_t, *(piece.b_t for piece in self.slices))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def add_lora(y: torch.Tensor, x: torch.Tensor, sites: Sequence[LoraSite | None], plan: SegmentPlan) -> None:
    """Add every segment's adapter to y in place.

    y: [plan.rows, h_out], x: [plan.rows, h_in], `sites[slot]` the weights of a slot at this site (None: that adapter
    does not touch it). y's columns may be a view of a wider tensor.
    """
    assert x.shape[0] == y.shape[0] == plan.rows, (x.shape, y.shape, plan.rows)
    expand(y, shrink(x, sites, plan), sites, plan)


def shrink(x: torch.Tensor, sites: Sequence[LoraSite | None], plan: SegmentPlan) -> list[torch.Tensor | None]:
    """Compute v_i = x[s_i:e_i] @ A_i^T for each segment: [its rows, sum of ranks]; None: the site has no weights."""
    return [
        None if (site := sites[segment.slot]) is None else torch.mm(x[segment.start : segment.end], site.a_t)
        for segment in plan.segments
    ]


def expand(
    y: torch.Tensor, v: Sequence[torch.Tensor | None], sites: Sequence[LoraSite | None], plan: SegmentPlan
) -> None:
    """Add to y[s_i:e_i, columns] scale * v_i[:, ranks] @ B_i^T, for each segment and each slice of its site."""
    for segment, shrunk in zip(plan.segments, v, strict=True):
        site = sites[segment.slot]
        if shrunk is None or site is None:
            continue
        for piece in site.slices:
            rows = y[segment.start : segment.end, piece.out_start : piece.out_end]
            rows.addmm_(shrunk[:, piece.rank_start : piece.rank_end], piece.b_t, alpha=piece.scale)
