"""Adapters without files: places in an arena of random numbers. What lies there is theirs, each its own.

`weft bench gpu --cases streams` measures packing and copying. Here a slot's table is made as for a real adapter, by the
same plan of an image, in pages dealt out at random.
"""

import random
from collections.abc import Sequence

import torch

from weft_kernels.triton.packing import Adapter, Projection, plan_image
from weft_kernels.triton.tables import UNIT, Layout, SlotEntry

SCALE = 0.25  # over sqrt(inputs), so that scale * B A x is about as large as x at the usual rank


class Deck:
    """Pages in random order."""

    def __init__(self, pages: int, seed: int = 0) -> None:
        self._pages = list(range(pages))
        random.Random(seed).shuffle(self._pages)

    def deal(self, count: int) -> list[int]:
        """Take `count` pages. Raises IndexError when fewer are left."""
        return [self._pages.pop() for _ in range(count)]

    def rest(self) -> list[int]:
        """Take all pages that are left."""
        return self.deal(len(self._pages))

    def back(self, pages: Sequence[int]) -> None:
        self._pages.extend(pages)


def shaped(layout: Layout, rank: int) -> Adapter:
    """Return an adapter of this rank on every projection, as far as a plan looks at it: shapes, no numbers."""

    def projection(index: int, n_in: int, width: int) -> Projection:
        a, b = (torch.empty(shape, device="meta") for shape in ((rank, n_in), (width, rank)))
        return Projection(index, a, b, SCALE * n_in**-0.5)

    sites = [[projection(i, site.n_in, width) for i, width in enumerate(site.widths)] for site in layout.sites]
    return [sites] * layout.layers


def row_offsets(layout: Layout, ranks: Sequence[int], page_elements: int, deck: Deck) -> list[SlotEntry]:
    """Return the rows' places of adapters, of which adapter i has rank ranks[i]."""
    images = {rank: plan_image(shaped(layout, rank), layout, page_elements // UNIT) for rank in {*ranks}}
    return [images[rank].on_pages(deck.deal(images[rank].n_pages)) for rank in ranks]


def pages_needed(layout: Layout, rank: int, page_elements: int) -> int:
    """Return how many pages one adapter of this rank needs."""
    return plan_image(shaped(layout, rank), layout, page_elements // UNIT).n_pages
