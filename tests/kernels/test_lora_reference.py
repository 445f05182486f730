"""The public operator on a grid of dtypes, ranks, popularities and awkward segments, against dense fp64."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
    error = float((actual.double() - expected).abs().max())
    assert error <= RELATIVE[actual.dtype] * float(expected.abs().max() + 1), error


def popularity(name: str, rows: int) -> list[int | None]:
    """The four workloads of Punica (section 7.1), and rows without an adapter."""
    match name:
        case "distinct":
            return list(range(rows))
        case "uniform":
            kinds = math.ceil(math.sqrt(rows))
            return sorted(i % kinds for i in range(rows))
        case "skewed":
            shares = [1.5**-k for k in range(rows)]
            counts = [max(1, round(rows * share / sum(shares))) for share in shares]
            return [k for k, count in enumerate(counts) for _ in range(count)][:rows]
        case "identical":
            return [0] * rows
        case "base":
            return [None] * rows
        case _:  # holes at both ends and in the middle
            return [None if i % 5 in (0, 3) else i // 5 for i in range(rows)]


@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
@pytest.mark.parametrize("ranks", [(1, 1, 1), (8, 4, 2), (16, None, 16), (None, 64, None)], ids=str)
@pytest.mark.parametrize("workload", ["distinct", "uniform", "skewed", "identical", "base", "holes"])
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_the_operator_equals_a_dense_computation(dtype, ranks, workload, rows):
    row_slots = popularity(workload, rows)
    sites = [make_site(slot, ranks, dtype) for slot in range(rows)]
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, H_IN, generator=generator).to(dtype)
    y = torch.randn(rows, sum(WIDTHS), generator=generator).to(dtype)
    expected = dense(y, x, sites, row_slots)
    add_lora(y, x, sites, plan_rows(row_slots, dict.fromkeys(range(rows), sum(r or 0 for r in ranks))))
    assert_close(y, expected)


@st.composite
def mixed_batches(draw):
    """Adapters of different ranks and projections, some of which leave the site alone; rows in any order."""
    rank = st.none() | st.integers(1, 9)
    adapters = draw(st.lists(st.tuples(rank, rank, rank), min_size=1, max_size=6))
    rows = draw(st.lists(st.none() | st.integers(0, len(adapters) - 1), min_size=1, max_size=20))
    return adapters, rows


@given(mixed_batches())
def test_any_mix_of_ranks_modules_and_rows_equals_a_dense_computation(batch):
    adapters, row_slots = batch
    sites = [make_site(slot, ranks, torch.float32) for slot, ranks in enumerate(adapters)]
    x, y = torch.randn(len(row_slots), H_IN), torch.zeros(len(row_slots), sum(WIDTHS))
    expected = dense(y, x, sites, row_slots)
    plan = plan_rows(row_slots, {slot: max(1, sum(r or 0 for r in ranks)) for slot, ranks in enumerate(adapters)})
    add_lora(y, x, sites, plan)
    assert_close(y, expected)


def test_rows_without_an_adapter_are_not_touched_bit_for_bit():
    x, y = torch.randn(5, H_IN), torch.randn(5, sum(WIDTHS))
    before = y.clone()
    add_lora(y, x, [make_site(0, (4, 4, 4), torch.float32)], plan_rows([None, 0, 0, None, None], {0: 12}))
    assert torch.equal(y[[0, 3, 4]], before[[0, 3, 4]])
    assert not torch.equal(y[1:3], before[1:3])


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
