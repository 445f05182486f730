"""The public operator on mixtures of dtypes, ranks, adapters and awkward segments, against dense fp64."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.numerics import within
from weft_kernels.lora import LoraSite, LoraSlice, add_lora, expand, shrink
from weft_kernels.plan import Segment, SegmentPlan, check_plan, plan_rows

H_IN = 24
WIDTHS = (16, 8, 8)  # q|k|v of one site

# what fp64 of the same inputs may differ by, relative to the largest value
RELATIVE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def make_site(seed: int, ranks: tuple[int | None, ...], dtype: torch.dtype, scale: float = 1.5) -> LoraSite | None:
    """A stacked site with one slice per projection that has a rank; None: an adapter that leaves the site alone."""
    generator = torch.Generator().manual_seed(seed)
    slices, stacked = [], []
    rank_start = out_start = 0
    for index, (rank, width) in enumerate(zip(ranks, WIDTHS, strict=True)):
        if rank:
            stacked.append(torch.randn(rank, H_IN, generator=generator).to(dtype))
            b_t = torch.randn(rank, width, generator=generator).to(dtype)
            here = (rank_start, rank_start + rank, out_start, out_start + width)
            slices.append(LoraSlice(*here, b_t, scale + index))
            rank_start += rank
        out_start += width
    return LoraSite(torch.cat(stacked).t().contiguous(), tuple(slices)) if slices else None


def dense(y: torch.Tensor, x: torch.Tensor, sites: list[LoraSite | None], row_slots: list[int | None]) -> torch.Tensor:
    """Row by row in fp64 with a whole weight delta: no segment, no stacking, no order."""
    out = y.double().clone()
    for row, slot in enumerate(row_slots):
        site = None if slot is None else sites[slot]
        for piece in site.slices if site else ():
            a = site.a_t.double()[:, piece.rank_start : piece.rank_end]
            out[row, piece.out_start : piece.out_end] += piece.scale * (x[row].double() @ a) @ piece.b_t.double()
    return out


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual.double() - expected).abs().max() / (expected.abs().max() + 1)
    within(f"LoRA of torch in {actual.dtype}, of the largest", float(error), RELATIVE[actual.dtype])


@st.composite
def mixed_batches(draw):
    """Adapters of different ranks and projections, some of which leave the site alone; rows in any order or in turn."""
    rank = st.none() | st.integers(1, 9) | st.sampled_from([16, 64])
    adapters = draw(st.lists(st.tuples(rank, rank, rank), min_size=1, max_size=6))
    rows = draw(st.lists(st.none() | st.integers(0, len(adapters) - 1), min_size=1, max_size=33))
    return adapters, draw(st.sampled_from([rows, sorted(rows, key=str)]))


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
@given(mixed_batches())
def test_any_mix_of_ranks_modules_and_rows_equals_a_dense_computation(dtype, batch):
    """Rows without an adapter keep their bits."""
    adapters, row_slots = batch
    sites = [make_site(slot, ranks, dtype) for slot, ranks in enumerate(adapters)]
    x, y = torch.randn(len(row_slots), H_IN).to(dtype), torch.randn(len(row_slots), sum(WIDTHS)).to(dtype)
    before, expected = y.clone(), dense(y, x, sites, row_slots)
    plan = plan_rows(row_slots, {slot: max(1, sum(r or 0 for r in ranks)) for slot, ranks in enumerate(adapters)})
    add_lora(y, x, sites, plan)
    assert_close(y, expected)
    alone = [row for row, slot in enumerate(row_slots) if slot is None]
    assert torch.equal(y[alone], before[alone])


@pytest.mark.numeric
def test_shrink_alone_and_expand_alone_equal_their_dense_parts():
    sites = [make_site(0, (4, 2, 3), torch.float32), None, make_site(2, (None, 5, None), torch.float32)]
    plan = plan_rows([0, 0, 1, 2], {0: 9, 1: 1, 2: 5})
    x = torch.randn(4, H_IN)
    v = shrink(x, sites, plan)
    assert v[1] is None
    for segment, shrunk in zip(plan.segments, v, strict=True):
        if shrunk is not None:
            assert_close(shrunk, x[segment.start : segment.end].double() @ sites[segment.slot].a_t.double())
    y = torch.zeros(4, sum(WIDTHS))
    expand(y, v, sites, plan)
    assert_close(y, dense(torch.zeros_like(y), x, sites, [0, 0, 1, 2]))


@pytest.mark.numeric
def test_a_view_of_a_wider_output_is_written_in_place():
    wide = torch.zeros(3, sum(WIDTHS) + 10)
    x, site = torch.randn(3, H_IN), make_site(0, (2, 2, 2), torch.float32)
    add_lora(wide[:, 5:-5], x, [site], plan_rows([0, 0, 0], {0: 6}))
    assert_close(wide[:, 5:-5], dense(torch.zeros(3, sum(WIDTHS)), x, [site], [0, 0, 0]))
    assert not wide[:, :5].any()
    assert not wide[:, -5:].any()


def test_bytes_count_true_ranks_without_padding():
    site = make_site(0, (1, None, 3), torch.float32)
    assert site.n_bytes == 4 * (4 * H_IN + 1 * WIDTHS[0] + 3 * WIDTHS[2])


@given(st.lists(st.none() | st.integers(0, 3), max_size=40))
def test_a_plan_gives_each_row_its_own_slot_and_merges_neighbours(row_slots):
    plan = plan_rows(row_slots, dict.fromkeys(range(4), 2))
    check_plan(plan)
    told: list[int | None] = [None] * len(row_slots)
    for segment in plan.segments:
        told[segment.start : segment.end] = [segment.slot] * (segment.end - segment.start)
    assert told == row_slots
    neighbours = itertools.pairwise(plan.segments)
    assert not any(a.end == b.start and a.slot == b.slot for a, b in neighbours)
    assert plan.max_rank == (2 if plan.segments else 0)


@pytest.mark.parametrize(
    "segments",
    [
        (Segment(0, 0, 0, 1),),
        (Segment(2, 1, 0, 1),),
        (Segment(0, 5, 0, 1),),
        (Segment(0, 2, 0, 1), Segment(1, 3, 1, 1)),
        (Segment(0, 1, -1, 1),),
        (Segment(0, 1, 0, 0),),
    ],
)
def test_a_plan_that_cannot_be_is_refused(segments):
    with pytest.raises(AssertionError):
        SegmentPlan(4, segments)


def test_a_step_of_another_size_than_its_plan_is_refused():
    with pytest.raises(AssertionError):
        add_lora(torch.zeros(3, 4), torch.zeros(3, H_IN), [], plan_rows([None, None], {}))
