"""Adapters in scattered pages of an arena that is NaN everywhere else, and what they add, in fp64."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft_kernels.triton import lora, packing, tables
from weft_stage.gpu_device import Gpu

PAGE_ROWS = 4  # longest rows of a page: adapters take several, and rows that do not fit leave a gap

Slots = Sequence[int | None]
Ranks = Sequence[Sequence[int | None]]  # of each adapter, of each slice of a site


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """Adapter i in slot i, the same in every layer; each site has the ranks that it has slices for."""

    gpu: Gpu
    tables: tables.LoraTables
    adapters: list[packing.Adapter]

    @classmethod
    def made(cls, gpu: Gpu, layout: tables.Layout, ranks: Ranks, dtype: torch.dtype) -> "Loaded":
        adapters = [_adapter(layout, seed, each, dtype) for seed, each in enumerate(ranks)]
        page = PAGE_ROWS * layout.row_length
        images = [packing.plan_image(adapter, layout, page // tables.UNIT) for adapter in adapters]
        free = list(range(sum(image.n_pages for image in images) + 3))
        random.Random(0).shuffle(free)
        arena = torch.full((len(free), page), math.nan, dtype=dtype, device=gpu.device)
        slots = tables.LoraTables(arena, layout, len(adapters))
        for slot, (adapter, image) in enumerate(zip(adapters, images, strict=True)):
            pages = [free.pop() for _ in range(image.n_pages)]
            filled = torch.full((image.n_pages, page), math.nan, dtype=dtype)
            for layer in range(layout.layers):
                packing.fill_layer(filled.unbind(), image, adapter, layout, layer)
            arena[pages] = filled.to(gpu.device)
            slots.put(slot, image.on_pages(pages))
        return cls(gpu, slots, adapters)

    def shrunk(
        self, x: torch.Tensor, chunked: lora.ChunkTable, layer: int, site: int, parts: int = 0
    ) -> lora.PartialSums:
        """Shrink in `parts` parts, or as many as the engine makes of it, on planes that were NaN."""
        tables = self.tables.at(layer, site)
        usual = lora.planes_of(tables, chunked.chunks, chunked.block_m, len(x), self.gpu.sms)
        _, tokens, ranks = usual.tensor.shape
        planes = (parts or usual.parts) * usual.share
        partials = lora.PartialSums(torch.full((planes, tokens, ranks), math.nan, device=x.device), usual.share)
        lora.prepare_shrink(partials, x, tables, chunked)(partials.tensor, x, tables.shrinks)
        return partials

    def dense(self, y: torch.Tensor, x: torch.Tensor, slots: Slots, layer: int, site: int) -> torch.Tensor:
        """Return y with each row's adapter added, in fp64. Rows beyond the slots have none."""
        out, widths = y.double(), self.tables.layout.sites[site].widths
        for slot in sorted({slot for slot in slots if slot is not None}):
            rows = torch.tensor([row for row, used in enumerate(slots) if used == slot], device=x.device)
            for each in self.adapters[slot][layer][site]:
                a, b = (matrix.double().to(x.device) for matrix in (each.a, each.b))
                columns = sum(widths[: each.slice]) + torch.arange(len(b), device=x.device)
                out[rows[:, None], columns] += each.scale * (x[rows].double() @ a.t()) @ b.t()
        return out


def _adapter(layout: tables.Layout, seed: int, ranks: Sequence[int | None], dtype: torch.dtype) -> packing.Adapter:
    generator = torch.Generator().manual_seed(seed)

    def projection(index: int, rank: int, n_in: int, width: int) -> packing.Projection:
        a, b = torch.randn(rank, n_in, generator=generator), torch.randn(width, rank, generator=generator)
        return packing.Projection(index, (a / n_in**0.5).to(dtype), b.to(dtype), 0.5 + index)

    def site(shape: tables.SiteShape) -> list[packing.Projection]:
        found = zip(range(3), ranks, shape.widths, strict=False)
        return [projection(i, rank, shape.n_in, width) for i, rank, width in found if rank]

    return [[site(shape) for shape in layout.sites]] * layout.layers
