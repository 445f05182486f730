"""Images of adapters: every row where its place says, whole, on one page, whatever the ranks and the size of a page."""

from collections.abc import Iterator

import torch
from hypothesis import given
from hypothesis import strategies as st

from weft_kernels.triton import packing, tables

LAYOUT = tables.Layout(2, (tables.SiteShape(80, (48, 16, 16)), tables.SiteShape(64, (128,))), max_rank=9)
RANKS = st.lists(st.none() | st.integers(1, 9), min_size=8, max_size=8)  # of each layer's projections


def made(ranks: list[int | None]) -> packing.Adapter:
    generator, left = torch.Generator().manual_seed(0), iter(ranks)

    def part(index: int, rank: int, n_in: int, width: int) -> packing.Projection:
        a, b = torch.randn(rank, n_in, generator=generator), torch.randn(width, rank, generator=generator)
        return packing.Projection(index, a, b, 1.0)

    def site(shape: tables.SiteShape) -> list[packing.Projection]:
        found = [(i, next(left), width) for i, width in enumerate(shape.widths)]
        return [part(i, rank, shape.n_in, width) for i, rank, width in found if rank]

    return [[site(shape) for shape in LAYOUT.sites] for _ in range(LAYOUT.layers)]


def placed(adapter: packing.Adapter, plan: packing.PackedImage) -> Iterator[tuple[int, torch.Tensor]]:
    """(place, row) of all rows of A and of B transposed."""
    for layer, sites in enumerate(adapter):
        for index, projections in enumerate(sites):
            first = LAYOUT.first(index) * LAYOUT.max_rank
            for half, row_offsets in enumerate(plan.entry.row_offsets[layer, :, first:].tolist()):
                rows = [row for p in projections for row in (p.b.t() if half else p.a)]
                yield from zip(row_offsets, rows, strict=False)


@given(RANKS, st.integers(2, 7))
def test_every_row_is_read_back_from_pages_that_are_memory_of_their_own(
    ranks: list[int | None], page_units: int
) -> None:
    """Also those that follow, on the next page, a row that ended with its page."""
    adapter = made(ranks)
    plan = packing.plan_image(adapter, LAYOUT, page_units)
    pages = [torch.zeros(page_units * tables.UNIT) for _ in range(plan.n_pages)]
    for layer in range(LAYOUT.layers):
        packing.fill_layer(pages, plan, adapter, LAYOUT, layer)
    taken: set[int] = set()
    for place, row in placed(adapter, plan):
        page, at = divmod(place, page_units)
        assert torch.equal(pages[page][at * tables.UNIT :][: len(row)], row)
        own = {*range(place, place + tables.units(len(row)))}
        assert not taken & own
        taken |= own
    assert len(taken) == sum(tables.units(len(row)) for _, row in placed(adapter, plan))
