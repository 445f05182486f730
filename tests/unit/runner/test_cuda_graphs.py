"""Steps find the smallest graph that holds them, written there as the kernels read it, or none."""

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft_kernels.plan import Segment, SegmentPlan, plan_rows
from weft_kernels.triton import chunks, lora
from weft_runner.model import StepInput, StepRow, check_step
from weft_runner.model.cuda.cuda_graphs import (
    MAX_GRAPH_TOKENS,
    CudaGraphs,
    Outputs,
    decode_sizes,
    prompt_sizes,
    warm_up_steps,
)
from weft_runner.model.cuda.executor import DECODE_CHUNK, chunk_tokens
from weft_runner.model.cuda.step import DeviceStep, StepTables, decode_shape, prompt_shape

ROWS, ROW_PAGES, PAGE_TOKENS, TILE = 40, 20, 16, 32
MAX_TOKENS = 320


def graphs(rows: int = ROWS, tokens: int = MAX_TOKENS) -> CudaGraphs:
    decodes = [decode_shape(n, ROW_PAGES, DECODE_CHUNK) for n in decode_sizes(rows)]
    prompts = [prompt_shape(n, rows, ROW_PAGES, chunk_tokens(n), TILE) for n in prompt_sizes(tokens)]
    return CudaGraphs(lambda *_: Outputs(torch.empty(0), torch.empty(0)), torch.device("cpu"), decodes, prompts, TILE)


GRAPHS = graphs()


def step_of(rows: Sequence[tuple[int, int, int | None]], **row: bool) -> StepInput:
    """Make a step of rows (tokens, position, adapter's slot), each on pages of its own."""
    made, slots, start, page = list[StepRow](), list[int | None](), 0, 0
    for count, position, slot in rows:
        n_pages = -(-(position + count) // PAGE_TOKENS)
        pages = tuple(range(page, page + n_pages))
        made.append(StepRow(start, start + count, position, pages, **{"samples": True, **row}))
        slots += [slot] * count
        start, page = start + count, page + n_pages
    step = StepInput(list(range(start)), tuple(made), plan_rows(slots, dict.fromkeys(range(8), 1)))
    check_step(step, PAGE_TOKENS)
    return step


Rows = st.lists(
    st.tuples(st.integers(1, 90), st.integers(0, 200), st.none() | st.integers(0, 7)), min_size=1, max_size=ROWS
)


@given(Rows)
def test_what_is_written_is_the_step_and_padding_that_nothing_is_done_for(rows):
    step = step_of(rows)
    placed = GRAPHS.place(step)
    if placed is None:
        return
    here, arrays = placed.here, step.arrays
    tables = StepTables.of(step, here.shape.block_m, TILE)
    for view, values, pad in (
        (here.tokens, arrays.tokens, None), (here.rows, arrays.rows[:, :4], None), (here.sampled, arrays.sampled, 0),
        (here.row_of, np.repeat(range(len(rows)), [n for n, _, _ in rows]), -1),
        (here.chunked.table, chunks.chunk_table(step.plan, here.shape.block_m), 0),
        (here.picked, np.where([n == 1 for n, _, _ in rows], range(len(rows)), -1), -1), (here.tiles, tables.tiles, -1),
    ):  # fmt: skip
        assert view[: len(values)].tolist() == values.tolist()
        assert pad is None or (view[len(values) :] == pad).all()
    assert here.pages[: len(arrays.pages)].tolist() == arrays.pages.tolist()
    if not step.plan.segments:
        assert len(chunks.chunk_table(step.plan, here.shape.block_m)) <= len(here.base_chunked)


@given(Rows)
def test_no_smaller_graph_holds_it(rows):
    step = step_of(rows)
    placed = GRAPHS.place(step)
    smaller = [size for size in prompt_sizes(MAX_TOKENS) if placed is None or size < placed.here.shape.tokens]
    if placed is not None and not placed.here.shape.tiles:
        return  # decode rows have graphs of their own
    for size in smaller:
        shape = prompt_shape(size, ROWS, ROW_PAGES, chunk_tokens(size), TILE)
        assert not shape.holds(StepTables.of(step, shape.block_m, TILE).shape)


def test_decode_rows_take_the_next_size():
    for n in range(1, ROWS + 1):
        placed = GRAPHS.place(step_of([(1, 9, None)] * n))
        assert placed is not None
        assert (placed.here.shape.rows, placed.here.shape.tiles) == (min(s for s in decode_sizes(ROWS) if s >= n), 0)


@pytest.mark.parametrize(
    ("rows", "row"),
    [
        ([(MAX_TOKENS + 1, 0, None)], {}), ([(9, 0, None), (1, 8, None)], {"pools": True}),
        ([(1, 8, None)], {"pools": True}),
    ],
    ids=["too many tokens", "a row that pools", "a decode row that pools"],
)  # fmt: skip
def test_what_no_graph_is_for_runs_eagerly(rows, row):
    assert GRAPHS.place(step_of(rows, **row)) is None


def test_a_part_of_a_prompt_that_samples_nothing_has_a_graph():
    placed = GRAPHS.place(step_of([(30, 0, 1)], samples=False))
    assert placed is not None
    assert placed.here.shape.tokens == 32


def test_a_standing_batch_is_written_once():
    """Whole once more only after another step was, in another graph or the same."""
    step = step_of([(1, 9, 1), (1, 17, 2)])
    first = GRAPHS.place(step)
    assert first is not None
    for position in (10, 11):
        step.advance([position, 7], [position, position + 8])
        assert GRAPHS.place(step) is first
        assert first.here.tokens.tolist() == [position, 7]
        assert first.here.rows[:, 2].tolist() == [position, position + 8]
        GRAPHS.place(step_of([(4, 0, None)]))
    GRAPHS.place(step_of([(1, 40, None), (1, 0, 3)]))
    step.advance([1, 2], [12, 20])
    assert GRAPHS.place(step) is first
    assert first.here.chunked.table[:, 0].tolist() == [1, 2]


def test_sizes_of_steps_with_prompts_are_few_and_near():
    assert len(decode_sizes(1024)) == 51
    for rows in range(1, 1025):
        assert min(size for size in decode_sizes(1024) if size >= rows) - rows <= max(7, rows / 8)
    assert prompt_sizes(MAX_GRAPH_TOKENS) == prompt_sizes(8192)
    assert (len(prompt_sizes(8192)), prompt_sizes(8192)[-1], prompt_sizes(100)[-2:]) == (20, 1024, [96, 100])
    assert prompt_sizes(5) == [5]
    sizes = prompt_sizes(8192)
    assert all(after - before <= max(16, before // 4) for before, after in pairwise(sizes))


def test_steps_of_traffic_have_few_padding_tokens():
    """256 streams, prompts of 16 to 512 tokens arriving at random beside those that decode: 12 % at the most."""
    found, rng, used, padded = graphs(256, 1024), random.Random(1), 0, 0
    for _ in range(200):
        lengths = [rng.randint(16, 512) for _ in range(rng.randint(1, 3))]
        rows = [(1, rng.randint(1, 250), rng.choice([None, *range(8)])) for _ in range(rng.randint(0, 250))]
        step = step_of([*((min(n, 300), 0, rng.choice([None, 1])) for n in lengths), *rows])
        placed = found.place(step)
        assert (placed is None) == (len(step.tokens) > MAX_GRAPH_TOKENS)
        if placed is not None:
            used, padded = used + len(step.tokens), padded + placed.here.shape.tokens
    assert padded <= 1.12 * used
    assert isinstance(found.place(step_of([(16, 0, None)])).here, DeviceStep)


def block_m(n_tokens: int) -> int:
    return 64 if n_tokens >= 128 else 16


@pytest.mark.parametrize("most", [1, 7, 64, 130, 512, 2048])
def test_warming_up_meets_the_bucket_of_every_number_of_chunks(most):
    """Before the first request every kernel that a step can need has been compiled."""
    met = set()
    for step in warm_up_steps(most, block_m, PAGE_TOKENS):
        check_step(step, PAGE_TOKENS)
        block = block_m(len(step.tokens))
        met.add((block, lora.chunk_bucket(chunks.count_chunks(chunks.chunk_table(step.plan, block)))))
    for n_tokens in range(1, most + 1):
        block = block_m(n_tokens)
        fewest = chunks.count_chunks(chunks.chunk_table(SegmentPlan(n_tokens, (Segment(0, n_tokens, 0, 1),)), block))
        for n_chunks in {fewest, n_tokens, (fewest + n_tokens) // 2}:
            assert (block, lora.chunk_bucket(n_chunks)) in met, (n_tokens, n_chunks)
