"""Shrink and expand in Triton against dense fp64: ranks, dtypes, popularities, both schedules, pages anywhere."""

import itertools
import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.test_lora_reference import popularity
from weft_kernels.plan import plan_rows
from weft_kernels.triton.chunks import NO_SLOT, PER_ROW, chunk_table
from weft_kernels.triton.lora import ChunkTable, PartialSums, expand, part_length, shrink
from weft_kernels.triton.packing import Adapter, Projection, fill_layer, plan_image
from weft_kernels.triton.tables import UNIT, Layout, LoraTables, SiteShape

LAYOUT = Layout(2, (SiteShape(80, (48, 16, 16)), SiteShape(48, (80,))), max_rank=40)
PAGE = 4 * UNIT  # elements: a page holds two to four rows
# what fp64 of the same inputs may differ by, relative to the largest value
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
MIXED = [(1, 3, 16), (None, 40, None), (17, None, 8), (16, 16, 16), None]


def make_adapter(seed: int, ranks: tuple[int | None, ...] | None, dtype: torch.dtype) -> Adapter:
    """The same ranks in both layers; the second site has the first one's rank. None: nothing at all."""
    generator = torch.Generator().manual_seed(seed)

    def part(index: int, rank: int, n_in: int, width: int) -> Projection:
        a, b = torch.randn(rank, n_in, generator=generator), torch.randn(width, rank, generator=generator)
        return Projection(index, (a / n_in**0.5).to(dtype), b.to(dtype), 0.5 + index)

    def site(shape: SiteShape) -> list[Projection]:
        found = zip(range(3), ranks or (None,) * 3, shape.widths, strict=False)
        return [part(i, rank, shape.n_in, width) for i, rank, width in found if rank]

    return [[site(shape) for shape in LAYOUT.sites] for _ in range(LAYOUT.layers)]


@dataclass
class Loaded:
    """Adapters in scattered pages of an arena that is NaN everywhere else."""

    tables: LoraTables
    adapters: list[Adapter]


def load(adapters: list[Adapter], dtype: torch.dtype, seed: int = 0) -> Loaded:
    images = [plan_image(adapter, LAYOUT, PAGE // UNIT) for adapter in adapters]
    free = list(range(sum(image.n_pages for image in images) + 3))
    random.Random(seed).shuffle(free)
    arena = torch.full((len(free), PAGE), math.nan, dtype=dtype)
    tables = LoraTables(arena, LAYOUT, len(adapters))
    for slot, (adapter, image) in enumerate(zip(adapters, images, strict=True)):
        pages = [free.pop() for _ in range(image.n_pages)]
        filled = torch.full((image.n_pages, PAGE), math.nan, dtype=dtype)
        for layer in range(LAYOUT.layers):
            fill_layer(filled.unbind(), image, adapter, LAYOUT, layer)
        arena[pages] = filled
        tables.put(slot, image.on_pages(pages))
    return Loaded(tables, adapters)


def dense(y: torch.Tensor, x: torch.Tensor, loaded: Loaded, row_slots: list[int | None], layer: int, site: int):
    """Row by row in fp64 with a whole weight delta."""
    out, starts = y.double().clone(), [0, 48, 64]
    for row, slot in enumerate(row_slots):
        for part in loaded.adapters[slot][layer][site] if slot is not None else ():
            at = starts[part.slice]
            delta = part.scale * part.b.double() @ (part.a.double() @ x[row].double())
            out[row, at : at + len(delta)] += delta
    return out


def run(
    loaded: Loaded, row_slots: list[int | None], dtype: torch.dtype, *, layer=1, site=0, block_m=16, parts=2, pad=0
):
    """The operator on random rows: what came out, what should have, and what was there."""
    generator = torch.Generator().manual_seed(len(row_slots))
    shape = LAYOUT.sites[site]
    x = torch.randn(len(row_slots), shape.n_in, generator=generator).to(dtype)
    y = torch.randn(len(row_slots), sum(shape.widths), generator=generator).to(dtype)
    before, expected = y.clone(), dense(y, x, loaded, row_slots, layer, site)
    table = torch.from_numpy(chunk_table(plan_rows(row_slots, dict.fromkeys(range(len(loaded.adapters)), 1)), block_m))
    table = torch.cat([table, torch.zeros(pad, 3, dtype=torch.int32)])
    partials = PartialSums(torch.full((parts, len(row_slots), LAYOUT.most_ranks(site)), math.nan))
    shrink(partials, x, loaded.tables.at(layer, site), ChunkTable(table, block_m))
    expand(y, partials, loaded.tables.at(layer, site), ChunkTable(table, block_m))
    return y, expected, before


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((actual.double() - expected).abs().max())
    assert error <= RELATIVE[actual.dtype] * float(expected.abs().max() + 1), error


@pytest.mark.parametrize(
    ("workload", "rows", "dtype"),
    [
        *itertools.product(
            ["distinct", "uniform", "skewed", "identical", "base", "holes"], [1, 3, 21], [torch.float32]
        ),
        *itertools.product(["uniform", "identical", "holes"], [3, 21], [torch.bfloat16, torch.float16]),
    ],
    ids=str,
)
def test_the_operator_equals_a_dense_computation(dtype, workload, rows):
    loaded = load([make_adapter(slot, ranks, dtype) for slot, ranks in enumerate(MIXED)], dtype)
    y, expected, _ = run(loaded, [slot if slot is None else slot % 5 for slot in popularity(workload, rows)], dtype)
    assert_close(y, expected)


@pytest.mark.parametrize("rank", [1, 4, 15, 16, 17, 32, 40])
@pytest.mark.parametrize("site", [0, 1])
def test_every_rank_at_every_site(rank, site):
    loaded = load([make_adapter(rank, (rank,) * 3, torch.float32)], torch.float32)
    y, expected, _ = run(loaded, [0] * 5 + [None] + [0], torch.float32, site=site, layer=0)
    assert_close(y, expected)


@pytest.mark.parametrize("block_m", [16, 32, 64])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_chunks_and_parts_of_any_size(block_m, parts):
    loaded = load([make_adapter(slot, ranks, torch.float32) for slot, ranks in enumerate(MIXED)], torch.float32)
    y, expected, _ = run(
        loaded, [0] * 37 + [None] * 3 + [2] * 2 + [1], torch.float32, block_m=block_m, parts=parts, pad=3
    )
    assert_close(y, expected)


def test_rows_without_an_adapter_keep_their_bits():
    loaded = load([make_adapter(slot, ranks, torch.bfloat16) for slot, ranks in enumerate(MIXED)], torch.bfloat16)
    row_slots = [None, 0, 0, None, 4, None]  # slot 4 touches nothing
    y, _, before = run(loaded, row_slots, torch.bfloat16)
    untouched = [0, 3, 4, 5]
    assert torch.equal(y[untouched], before[untouched])


def test_a_row_does_not_depend_on_its_neighbours():
    loaded = load([make_adapter(slot, ranks, torch.float32) for slot, ranks in enumerate(MIXED)], torch.float32)
    alone, _, _ = run(loaded, [0, 0, 0, 0, 0], torch.float32)
    beside, _, _ = run(loaded, [0, 0, 0, 0, 1], torch.float32)
    assert torch.equal(alone[:4], beside[:4])


def test_more_adapters_than_before_with_the_same_launch():
    """A captured graph: the grid stays, the table changes (SGLang #28371 dropped segments here)."""
    loaded = load([make_adapter(slot, ranks, torch.float32) for slot, ranks in enumerate(MIXED)], torch.float32)
    few, expected_few, _ = run(loaded, [0] * 8, torch.float32, pad=7)  # 1 chunk of a grid of 8
    many, expected_many, _ = run(loaded, [0, 1, 2, 3, 0, 1, 2, 3], torch.float32)  # 8 of 8
    assert_close(few, expected_few)
    assert_close(many, expected_many)


def test_a_cleared_slot_adds_nothing():
    loaded = load([make_adapter(0, (8, 8, 8), torch.float32)], torch.float32)
    loaded.tables.clear(0)
    y, _, before = run(loaded, [0] * 6, torch.float32)
    assert torch.equal(y, before)


@given(st.lists(st.one_of(st.none(), st.integers(0, 4)), min_size=1, max_size=40), st.sampled_from([16, 32]))
def test_chunks_cover_every_token_once(row_slots, block_m):
    table = chunk_table(plan_rows(row_slots, dict.fromkeys(range(5), 1)), block_m)
    covered = [(t, slot) for slot, first, n in table.tolist() for t in range(first, first + n)]
    assert covered == [(t, NO_SLOT if slot is None else slot) for t, slot in enumerate(row_slots)]
    assert all(1 <= n <= block_m for _, _, n in table.tolist())


@given(st.integers(1, 20_000), st.integers(1, 300), st.integers(1, 200))
def test_parts_cover_the_input_and_none_is_empty(n_in, programs, sms):
    length = part_length(n_in, programs, sms)
    parts = -(-n_in // length)
    assert parts * length >= n_in > (parts - 1) * length


def test_the_schedules_agree():
    """The same row in a chunk of three and in one of four: vector arithmetic and tensor cores."""
    loaded = load([make_adapter(0, (16, 5, 40), torch.float32)], torch.float32)
    few, _, _ = run(loaded, [0] * (PER_ROW - 1) + [None], torch.float32)
    many, _, _ = run(loaded, [0] * PER_ROW, torch.float32)
    torch.testing.assert_close(few[:3], many[:3], rtol=1e-5, atol=1e-5)
