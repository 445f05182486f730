"""Shrink and expand in plain torch, a segment at a time: the oracle of the other implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from weft_kernels.plan import SegmentPlan

if TYPE_CHECKING:
    from weft_kernels.lora import LoraSite


def shrink(x: torch.Tensor, sites: Sequence[LoraSite | None], plan: SegmentPlan) -> list[torch.Tensor | None]:
    """v_i = x[s_i:e_i] @ A_i^T for each segment: [its rows, sum of ranks]; None where the site has no weights."""
    return [
        None if (site := sites[segment.slot]) is None else torch.mm(x[segment.start : segment.end], site.a_t)
        for segment in plan.segments
    ]


def expand(
    y: torch.Tensor, v: Sequence[torch.Tensor | None], sites: Sequence[LoraSite | None], plan: SegmentPlan
) -> None:
    """y[s_i:e_i, columns] += scale * v_i[:, ranks] @ B_i^T for each segment and each slice of its site."""
    for segment, shrunk in zip(plan.segments, v, strict=True):
        site = sites[segment.slot]
        if shrunk is None or site is None:
            continue
        for piece in site.slices:
            rows = y[segment.start : segment.end, piece.out_start : piece.out_end]
            rows.addmm_(shrunk[:, piece.rank_start : piece.rank_end], piece.b_t, alpha=piece.scale)
