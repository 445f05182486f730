"""The public operator: `add_lora`, y += scale * (x A^T) B^T for each segment of a plan.

Two launches, as in Punica (arXiv 2310.18547, section 4): **shrink** (h_in -> r) and **expand** (r -> h_out).
Projections that read the same input (q|k|v, gate|up) are stacked into one *site*: one shrink reads x once for all of
them, one expand writes each projection's own columns. Ranks are true ranks: nothing is padded to a maximum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weft_kernels import reference
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


class Implementation(Protocol):
    """What a device provides. Both read the plan's segments; `v` is the implementation's own intermediate."""

    def shrink(self, x: torch.Tensor, sites: Sequence[LoraSite | None], plan: SegmentPlan) -> object: ...
    def expand(self, y: torch.Tensor, v: object, sites: Sequence[LoraSite | None], plan: SegmentPlan) -> None: ...


def add_lora(y: torch.Tensor, x: torch.Tensor, sites: Sequence[LoraSite | None], plan: SegmentPlan) -> None:
    """Add every segment's adapter to y in place.

    y: [plan.rows, h_out], x: [plan.rows, h_in], `sites[slot]` the weights of a slot at this site (None: that adapter
    does not touch it). y's columns may be a view of a wider tensor.
    """
    assert x.shape[0] == y.shape[0] == plan.rows, (x.shape, y.shape, plan.rows)
    reference.expand(y, reference.shrink(x, sites, plan), sites, plan)
