"""Tables of where each slot's adapter lies on the device, in which shrink and expand look it up.

An adapter is rows: of A [h_in] and of B transposed [h_out], one of each for every rank of every projection. Each row is
contiguous in one tensor, the *arena* (the KV cache: adapters live in pages that the page table allocates to them, after
S-LoRA's unified paging, arXiv 2311.03285, section 5.1, but for every projection and at true ranks). So an adapter needs
no memory of a fixed size, nothing is padded to a largest rank, and ranks may differ from module to module.
"""

from dataclasses import dataclass

import torch

from weft_kernels.triton.entries import HEADER, entry_bytes
from weft_kernels.triton.prepared import Arguments

UNIT = 64  # elements: rows begin at multiples of it, so that every load of 16 bytes is aligned
SLICES = 3  # most projections of one site: q, k and v
A_ROWS = 3  # place of the last one


@dataclass(frozen=True, slots=True)
class SiteShape:
    """A site: projections that read the same input [n_in], and what each of them writes."""

    n_in: int
    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The sites of every layer, and the largest rank of a projection."""

    layers: int
    sites: tuple[SiteShape, ...]
    max_rank: int

    @property
    def projections(self) -> int:
        return sum(len(site.widths) for site in self.sites)

    @property
    def row_length(self) -> int:
        """The elements of the longest row, in whole units."""
        return max(units(max(site.n_in, *site.widths)) for site in self.sites) * UNIT

    @property
    def entry_bytes(self) -> int:
        """The bytes of an adapter's entry in the tables."""
        return entry_bytes(self.layers, len(self.sites), self.projections * self.max_rank)

    def first(self, site: int) -> int:
        """The site's place among the projections."""
        return sum(len(shape.widths) for shape in self.sites[:site])

    def most_ranks(self, site: int) -> int:
        """The most ranks of all projections of a site together."""
        return len(self.sites[site].widths) * self.max_rank


@dataclass(frozen=True, slots=True, eq=False)
class SlotEntry:
    """One adapter's place, on the host, for `LoraTables.put`."""

    ends: torch.Tensor  # int32 [L, sites, HEAD]: where each slice's ranks end in the site's stack; rows of A
    scales: torch.Tensor  # fp32 [L, sites, HEAD]
    row_offsets: torch.Tensor  # int32 [L, 2, projections * max_rank], of A, of B^T: units from the arena's begin


def empty_entry(layout: Layout) -> SlotEntry:
    """An adapter that touches nothing."""
    heads = (layout.layers, len(layout.sites), HEADER)
    row_offsets = (layout.layers, 2, layout.projections * layout.max_rank)
    return SlotEntry(
        torch.zeros(heads, dtype=torch.int32), torch.zeros(heads), torch.zeros(row_offsets, dtype=torch.int32)
    )


@dataclass(frozen=True, slots=True, eq=False)
class SiteTables:
    """One site of one layer, all slots: views of the tables. Strides: of heads and of places, from slot to slot."""

    shape: SiteShape
    most_ranks: int
    arena: torch.Tensor
    shrinks: Arguments  # arena, ends int32 [slots, HEAD], places of rows of A int32 [slots, most_ranks], both strides
    expands: Arguments  # arena, ends, scales fp32 [slots, HEAD], places of rows of B^T, both strides


class LoraTables:
    """The entries of all slots on the device. Changed between two steps only, in stream order."""

    def __init__(self, arena: torch.Tensor, layout: Layout, slots: int) -> None:
        assert arena.is_contiguous(), arena.shape
        self.arena, self.layout, self.slots = arena, layout, slots
        blank = empty_entry(layout)
        self.ends, self.scales, self.row_offsets = (
            torch.zeros((slots, *part.shape), dtype=part.dtype, device=arena.device)
            for part in (blank.ends, blank.scales, blank.row_offsets)
        )
        self._sites = [[self._site(layer, site) for site in range(len(layout.sites))] for layer in range(layout.layers)]

    def at(self, layer: int, site: int) -> SiteTables:
        return self._sites[layer][site]

    def put(self, slot: int, entry: SlotEntry) -> None:
        """Write a slot's entry in stream order: steps that were launched before still see what was there."""
        self.ends[slot].copy_(entry.ends, non_blocking=True)
        self.scales[slot].copy_(entry.scales, non_blocking=True)
        self.row_offsets[slot].copy_(entry.row_offsets, non_blocking=True)

    def clear(self, slot: int) -> None:
        """Clear a slot: without ranks, segments that name it add nothing."""
        self.ends[slot].zero_()

    def _site(self, layer: int, site: int) -> SiteTables:
        first, most = self.layout.first(site) * self.layout.max_rank, self.layout.most_ranks(site)
        a, b = (self.row_offsets[:, layer, half, first : first + most] for half in (0, 1))
        arena, ends, scales = self.arena, self.ends[:, layer, site], self.scales[:, layer, site]
        strides = ends.stride(0), a.stride(0)
        return SiteTables(
            self.layout.sites[site], most, arena,
            Arguments(arena, ends, a, *strides), Arguments(arena, ends, scales, b, *strides),
        )  # fmt: skip


def units(elements: int) -> int:
    """The whole units that `elements` elements take."""
    return -(-elements // UNIT)
