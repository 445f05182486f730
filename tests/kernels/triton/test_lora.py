"""Shrink and expand in Triton against dense fp64: ranks, dtypes, popularities, both schedules, pages anywhere."""

import itertools
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.lora_slots import Loaded, Slots
from harness.on_device import DTYPES, FP32, assert_close, assert_same, name_of, sized
from weft_bench.cpu_shapes import POPULARITIES, adapter_of_row
from weft_kernels.plan import plan_rows
from weft_kernels.triton import chunks, lora, tables
from weft_stage.gpu_device import Gpu

pytestmark = pytest.mark.gpu

LAYOUT = sized(
    gpu=tables.Layout(2, (tables.SiteShape(1024, (1024, 256, 256)), tables.SiteShape(704, (1040,))), max_rank=128),
    interpreted=tables.Layout(2, (tables.SiteShape(80, (48, 16, 16)), tables.SiteShape(48, (80,))), max_rank=40),
)
MAX_RANK = LAYOUT.max_rank
# Adapter i's ranks of each slice of a site; the last one touches nothing.
RANKS = sized(
    gpu=(
        (1, 3, 16), (None, 64, None), (17, None, 8), (16, 16, 16), (128, 128, 128), (32, 1, 33), (64, 64, 64),
        (None, None, None),
    ),
    interpreted=((1, 3, 16), (None, 40, None), (17, None, 8), (16, 16, 16), (None, None, None)),
)  # fmt: skip
NOTHING = len(RANKS) - 1
BATCHES = (1, 2, 3, 5, 16, 33, 64, 256)
WORKLOADS = (*POPULARITIES, "base", "holes")


@cache
def loaded_of(gpu: Gpu, ranks: tuple[tuple[int | None, ...], ...] = RANKS, dtype: torch.dtype = FP32) -> Loaded:
    return Loaded.made(gpu, LAYOUT, ranks, dtype)


def slots_of(workload: str, rows: int) -> list[int | None]:
    """Punica's popularities over the adapters that there are, in the engine's order; holes: some rows have none."""
    if workload == "holes":
        return [None if row % 7 in (0, 3) else row // 7 % len(RANKS) for row in range(rows)]
    found = [None if number is None else number % len(RANKS) for number in adapter_of_row(workload, rows)]
    return sorted(found, key=lambda slot: -1 if slot is None else slot)


def run(
    loaded: Loaded, slots: Slots, *, layer: int = 1, site: int = 0, block_m: int = 16, parts: int = 0, pad: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator on random rows: what came out, what should have, and what was there.

    `parts` 0: as many as the engine makes; `pad`: chunks of a captured launch that the step does not have.
    """
    shape, arena = LAYOUT.sites[site], loaded.tables.arena
    generator = torch.Generator().manual_seed(len(slots))
    x, y = (
        torch.randn(len(slots), size, generator=generator).to(arena.device, arena.dtype)
        for size in (shape.n_in, sum(shape.widths))
    )
    before, expected = y.clone(), loaded.dense(y, x, slots, layer, site)
    rows = chunks.chunk_table(plan_rows(slots, dict.fromkeys(range(len(loaded.adapters)), 1)), block_m)
    table = torch.cat([torch.from_numpy(rows), torch.zeros(pad, 4, dtype=torch.int32)]).to(arena.device)
    chunked = lora.ChunkTable(table, block_m, chunks.count_chunks(rows) + pad)
    partials, tables = loaded.shrunk(x, chunked, layer, site, parts), loaded.tables.at(layer, site)
    lora.prepare_expand(y, partials, tables, chunked)(y, partials.tensor, tables.expands)
    return y, expected, before


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("workload", "rows", "dtype"),
    sized(
        gpu=list(itertools.product(WORKLOADS, BATCHES, DTYPES)),
        interpreted=[
            ("Distinct", 3, FP32), ("Skewed", 9, FP32), ("Identical", 1, FP32), ("base", 3, FP32), ("holes", 21, FP32),
            *itertools.product(["Uniform"], [9], DTYPES), *itertools.product(["Identical"], [21], DTYPES),
        ],
    ),
    ids=name_of,
)  # fmt: skip
def test_the_operator_equals_a_dense_computation(gpu: Gpu, dtype: torch.dtype, workload: str, rows: int) -> None:
    for site in sized(gpu=(0, 1), interpreted=(0,)):
        y, expected, _ = run(loaded_of(gpu, RANKS, dtype), slots_of(workload, rows), site=site, parts=2 * (1 - site))
        assert_close(y, expected)


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("site", "rank"),
    sized(
        gpu=list(itertools.product((0, 1), (1, 4, 15, 16, 17, 32, 64, 128))),
        interpreted=[(0, 1), (0, 15), (0, 16), (0, 17), (0, 40), (1, 1), (1, 17)],
    ),
)
def test_every_rank_at_every_site(gpu: Gpu, rank: int, site: int) -> None:
    y, expected, _ = run(loaded_of(gpu, ((rank,) * 3,)), [0] * 5 + [None] + [0], site=site, layer=0, parts=2)
    assert_close(y, expected)


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("parts", "block_m"),
    sized(gpu=list(itertools.product((1, 2, 5), (16, 32, 64, 128))), interpreted=[(2, 16), (5, 32), (1, 64), (2, 128)]),
)
def test_chunks_and_parts_of_any_size(gpu: Gpu, block_m: int, parts: int) -> None:
    y, expected, _ = run(loaded_of(gpu), [0] * 37 + [None] * 3 + [2] * 2 + [1], block_m=block_m, parts=parts, pad=3)
    assert_close(y, expected)


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("block_m", sized(gpu=(16, 64, 128), interpreted=(64,)))
def test_a_prompt_of_one_adapter_beside_rows_of_others(gpu: Gpu, block_m: int, dtype: torch.dtype) -> None:
    prompt, beside = sized(gpu=(2048, 31), interpreted=(21, 3))
    slots = [*[2] * prompt, *(row % len(RANKS) for row in range(beside))]
    for site in (0, 1):
        y, expected, _ = run(loaded_of(gpu, RANKS, dtype), slots, site=site, block_m=block_m, pad=3)
        assert_close(y, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rows_without_an_adapter_keep_their_bits(gpu: Gpu, dtype: torch.dtype) -> None:
    slots = [None, 0, 0, None, NOTHING, None]
    y, _, before = run(loaded_of(gpu, RANKS, dtype), slots)
    untouched = [0, 3, 4, 5]
    assert_same(y[untouched], before[untouched])


def test_a_row_does_not_depend_on_its_neighbours(gpu: Gpu) -> None:
    alone, _, _ = run(loaded_of(gpu), [0, 0, 0, 0, 0], parts=2)
    beside, _, _ = run(loaded_of(gpu), [0, 0, 0, 0, 1], parts=2)
    assert_same(alone[:4], beside[:4])


@pytest.mark.numeric
def test_more_adapters_than_before_with_the_same_launch(gpu: Gpu) -> None:
    """A captured graph: the grid stays, the table changes (SGLang #28371 dropped segments here)."""
    few, expected_few, _ = run(loaded_of(gpu), [0] * 8, pad=7)  # 1 chunk of a grid of 8
    many, expected_many, _ = run(loaded_of(gpu), [0, 1, 2, 3, 0, 1, 2, 3])  # 8 of 8
    assert_close(few, expected_few)
    assert_close(many, expected_many)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_cleared_slot_adds_nothing(gpu: Gpu, dtype: torch.dtype) -> None:
    loaded = Loaded.made(gpu, LAYOUT, ((8, 8, 8),), dtype)
    loaded.tables.clear(0)
    y, _, before = run(loaded, [0] * 6)
    assert_same(y, before)


@pytest.mark.numeric
def test_the_schedules_agree(gpu: Gpu) -> None:
    """The same rows as single ones and in a chunk: vector arithmetic and tensor cores."""
    loaded = loaded_of(gpu, ((16, 5, MAX_RANK),))
    few, _, _ = run(loaded, [0] * (chunks.PER_ROW - 1) + [None])
    many, _, _ = run(loaded, [0] * chunks.PER_ROW)
    assert_close(few[:-1], many[:-1])


@given(st.lists(st.one_of(st.none(), st.integers(0, 4)), min_size=1, max_size=40), st.sampled_from([16, 32]))
def test_chunks_cover_every_token_once(row_slots, block_m):
    table = chunks.chunk_table(plan_rows(row_slots, dict.fromkeys(range(5), 1)), block_m)
    held = table[: chunks.count_chunks(table)]
    assert not held[:, 3].any()
    covered = [(t, slot) for slot, first, n, _ in held.tolist() for t in range(first, first + n)]
    assert covered == [(t, chunks.NO_SLOT if slot is None else slot) for t, slot in enumerate(row_slots)]
    assert all(n == 1 or chunks.PER_ROW <= n <= block_m for n in held[:, 2].tolist())


@given(st.lists(st.one_of(st.none(), st.integers(0, 4)), min_size=1, max_size=40), st.sampled_from([16, 32]))
def test_a_chunk_has_each_of_its_turns_and_a_table_no_more_rows_than_tokens(row_slots, block_m):
    table = chunks.chunk_table(plan_rows(row_slots, dict.fromkeys(range(5), 1)), block_m)
    held = table[: chunks.count_chunks(table), :3].tolist()
    assert sorted(table.tolist()) == sorted([*c, turn] for c in held for turn in range(min(c[2], chunks.TURNS)))
    assert len(table) <= len(row_slots)


@given(st.integers(1, 20_000), st.integers(1, 300), st.integers(1, 200))
def test_parts_cover_the_input_and_none_is_empty(n_in, programs, sms):
    length = lora.part_length(n_in, programs, sms)
    parts = -(-n_in // length)
    assert parts * length >= n_in > (parts - 1) * length
