"""An adapter as an image of the pages that it will live in: rows one after the other, none across a page's border.

The image is made on the host, layer by layer, and copied page by page: what is copied first is what a step needs first.
Places in the image do not depend on which pages the adapter gets, so its size is known before any page is.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from weft_kernels.triton.tables import A_ROWS, UNIT, Layout, SlotEntry, empty_entry, units


class Projection(NamedTuple):
    """One projection's adapter: y[columns of that slice of its site] += scale * B (A x).

    With tensor parallelism a device may have some of A's rows only; what they shrink is gathered before the expand.
    """

    slice: int
    a: torch.Tensor  # [r, n_in], any float dtype
    b: torch.Tensor  # [width, r]
    scale: float


TRANSPOSED_ROWS = 16  # at a time: with more, numpy reads each cache line of the matrix more than once

Adapter = Sequence[Sequence[Sequence[Projection]]]  # [layer][site]: projections in the order of the site's slices


@dataclass(frozen=True, slots=True, eq=False)
class PackedImage:
    """The places of an adapter's rows in its image.

    `entry.row_offsets` count from the image's begin; `ends[layer]` is the first page that layers up to it do not need.
    """

    entry: SlotEntry
    n_pages: int
    page_units: int
    ends: tuple[int, ...]

    def on_pages(self, pages: Sequence[int]) -> SlotEntry:
        """Make the entry of this adapter in the first of these pages of the arena."""
        assert len(pages) >= self.n_pages, (len(pages), self.n_pages)
        page, offset = divmod(self.entry.row_offsets.numpy(), self.page_units)
        row_offsets = np.asarray(pages or [0], np.int64)[page] * self.page_units + offset
        assert row_offsets.max(initial=0) < 2**31, "the arena is larger than 32-bit offsets can address"
        return SlotEntry(self.entry.ends, self.entry.scales, torch.from_numpy(row_offsets.astype(np.int32)))


def plan_image(adapter: Adapter, layout: Layout, page_units: int) -> PackedImage:
    """Plan where every row goes. Ranks are at most `layout.max_rank`, a row at most a page."""
    entry, cursor, ends = empty_entry(layout), _Cursor(page_units), list[int]()
    for layer, sites in enumerate(adapter):
        for site, projections in enumerate(sites):
            _plan_site(entry, cursor, layout, layer, site, projections)
        ends.append(cursor.n_pages)
    return PackedImage(entry, cursor.n_pages, page_units, tuple(ends))


def fill_layer(pages: Sequence[torch.Tensor], plan: PackedImage, adapter: Adapter, layout: Layout, layer: int) -> None:
    """Write a layer's rows into the image's pages (each [page elements]), in their dtype."""
    for site, projections in enumerate(adapter[layer]):
        a, b = _site_places(plan.entry, layout, layer, site)
        at_a = at_b = 0
        for projection in projections:
            own, rank = projection.a.shape[0], projection.b.shape[1]
            _fill(pages, plan.page_units, a[at_a : at_a + own], projection.a)
            _fill(pages, plan.page_units, b[at_b : at_b + rank], projection.b.t())
            at_a, at_b = at_a + own, at_b + rank


class _Cursor:
    """The next free place of an image."""

    def __init__(self, page_units: int) -> None:
        self._page_units, self._at = page_units, 0

    @property
    def n_pages(self) -> int:
        return -(-self._at // self._page_units)

    def take(self, count: int, length: int) -> npt.NDArray[np.int64]:
        """Take places of `count` rows of `length` units."""
        assert length <= self._page_units, (length, self._page_units)
        row_offsets = np.empty(count, np.int64)
        done = 0
        while done < count:
            here = min(count - done, (self._page_units - self._at % self._page_units) // length)
            row_offsets[done : done + here] = self._at + length * np.arange(here)
            done, self._at = done + here, self._at + here * length
            if done < count:
                self._at = -(-self._at // self._page_units) * self._page_units
        return row_offsets


def _plan_site(
    entry: SlotEntry, cursor: _Cursor, layout: Layout, layer: int, site: int, projections: Sequence[Projection]
) -> None:
    a, b = _site_places(entry, layout, layer, site)
    shape, at_a, at_b = layout.sites[site], 0, 0
    by_slice = {projection.slice: projection for projection in projections}
    for index, width in enumerate(shape.widths):
        if (projection := by_slice.get(index)) is not None:
            own, rank = projection.a.shape[0], projection.b.shape[1]
            assert 0 < rank <= layout.max_rank, (rank, layout.max_rank)
            a[at_a : at_a + own] = torch.from_numpy(cursor.take(own, units(shape.n_in)))
            b[at_b : at_b + rank] = torch.from_numpy(cursor.take(rank, units(width)))
            at_a, at_b = at_a + own, at_b + rank
            entry.scales[layer, site, index] = projection.scale
        entry.ends[layer, site, index] = at_b
    entry.ends[layer, site, A_ROWS] = at_a


def _site_places(entry: SlotEntry, layout: Layout, layer: int, site: int) -> tuple[torch.Tensor, torch.Tensor]:
    first = layout.first(site) * layout.max_rank
    a, b = entry.row_offsets[layer, :, first : first + layout.most_ranks(site)]
    return a, b


def _fill(pages: Sequence[torch.Tensor], page_units: int, row_offsets: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows [r, n] to their places; those that follow each other in one copy."""
    length = units(rows.shape[1])
    for first, last in _runs(row_offsets.numpy(), length, page_units):
        page, start = divmod(int(row_offsets[first]), page_units)
        run = pages[page][start * UNIT : (start + (last - first) * length) * UNIT]
        _copy(run.view(-1, length * UNIT)[:, : rows.shape[1]], rows[first:last])


def _copy(to: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy rows [r, n], which may be columns of a matrix [n, r]: numpy transposes 16 of them 5 times faster."""
    if rows.stride(1) == 1:
        to.copy_(rows)
        return
    bits = torch.int16 if to.element_size() == 2 else torch.int32
    into, source = to.view(bits).numpy(), rows.to(to.dtype).view(bits).numpy()
    for first in range(0, len(source), TRANSPOSED_ROWS):
        at = slice(first, first + TRANSPOSED_ROWS)
        np.copyto(into[at], source[at])


def _runs(row_offsets: npt.NDArray[np.int32], length: int, page_units: int) -> Iterator[tuple[int, int]]:
    """Yield [first, last) of rows that follow each other on one page."""
    breaks = np.flatnonzero((np.diff(row_offsets) != length) | np.diff(row_offsets // page_units).astype(bool)) + 1
    return itertools.pairwise(sorted({0, *breaks.tolist(), len(row_offsets)}))
