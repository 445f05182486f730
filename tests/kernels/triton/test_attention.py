"""Paged attention in Triton against plain fp64, row by row: groupings, windows, splits, chunks, pages anywhere.

Whatever a row must not see is NaN: other layers, pages that nobody wrote, keys past its context or before its window.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.on_device import BF16, DTYPES, FP16, FP32, INTERPRETED, TOLERANCES, assert_near, sized
from weft_kernels.triton import attention
from weft_runner.model.cuda.attention import LONG_SPLITS, MAX_SPLITS, attention_splits
from weft_stage.gpu_device import Gpu

LAYERS, LAYER = 3, 1
pytestmark = pytest.mark.gpu

UNTOUCHED = -7.0  # what is in `out` before


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype = FP32
    page_tokens: int = 16
    scale_by: float = 1.5  # times what the engine has
    cap: float = 0.0

    def __str__(self) -> str:
        capped = f"_capped_{self.cap:g}" if self.cap else ""
        return f"{self.heads}_on_{self.kv_heads}_heads_of_{self.dim}_{str(self.dtype).removeprefix('torch.')}{capped}"

    @property
    def scale(self) -> float:
        return self.scale_by * self.dim**-0.5


SMALL = Shape(4, 2, 16)
SHAPES = sized(  # groups of 1, 2, 3, 4, 8 heads, and more than a tile's 16 rows
    gpu=[
        Shape(2, 2, 16), Shape(2, 1, 32, BF16), Shape(6, 2, 64), Shape(4, 1, 128), Shape(4, 1, 128, BF16),
        Shape(8, 1, 64, FP16, page_tokens=32), Shape(8, 1, 32), Shape(20, 1, 16, BF16),
        Shape(4, 4, 96, BF16), Shape(8, 2, 80),
    ],
    interpreted=[
        Shape(2, 2, 16), Shape(3, 1, 32), Shape(4, 1, 128, BF16), Shape(8, 1, 64, FP16, page_tokens=32),
        Shape(20, 1, 16, BF16), Shape(4, 2, 48),
    ],
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Tokens at positions [position, position + tokens), the earlier ones in pages already."""

    position: int
    tokens: int

    @property
    def context(self) -> int:
        return self.position + self.tokens


@dataclass(frozen=True, eq=False)
class Step:
    shape: Shape
    q: torch.Tensor
    kv: torch.Tensor
    rows: torch.Tensor
    pages: torch.Tensor


def decoding(*contexts: int) -> list[Row]:
    return [Row(context - 1, 1) for context in contexts]


def make_step(rng: random.Random, shape: Shape, rows: list[Row], window: int = 0) -> Step:
    """Random tokens in scattered pages, NaN around them. Every row has a page more than it needs."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(shape.dtype)

    counts = [row.context // shape.page_tokens + 2 for row in rows]
    free = list(range(sum(counts) + 3))
    rng.shuffle(free)
    kv = torch.full((len(free), LAYERS, 2, shape.kv_heads, shape.page_tokens, shape.dim), math.nan, dtype=shape.dtype)
    table: list[tuple[int, int, int, int]] = []
    pages: list[int] = []
    for row, count in zip(rows, counts, strict=True):
        start = table[-1][1] if table else 0
        table.append((start, start + row.tokens, row.position, len(pages)))
        pages += [free.pop() for _ in range(count)]
        seen = torch.arange(max(0, row.position - window + 1) if window else 0, row.context)
        at = torch.tensor(pages[table[-1][3] :])[seen // shape.page_tokens]
        kv[at, LAYER, :, :, seen % shape.page_tokens] = normal(len(seen), 2, shape.kv_heads, shape.dim)
    q = normal(table[-1][1], shape.heads, shape.dim)
    return Step(shape, q, kv, torch.tensor(table, dtype=torch.int32), torch.tensor(pages, dtype=torch.int32))


def expected(step: Step, window: int = 0) -> torch.Tensor:
    """[T, heads * D] in fp64, a row at a time, all scores of it at once."""
    shape, out = step.shape, torch.zeros(step.q.shape, dtype=torch.float64, device=step.q.device)
    for start, end, position, first in step.rows.tolist():
        context = position + end - start
        pages = step.pages[first : first + -(-context // shape.page_tokens)].long()
        k, v = (  # each [heads, context, D]
            step.kv[pages, LAYER, kind].transpose(0, 1).flatten(1, 2)[:, :context].double()
            .repeat_interleave(shape.heads // shape.kv_heads, dim=0)
            for kind in range(2)
        )  # fmt: skip
        seen = torch.arange(context, device=out.device)
        own = seen[position:, None]
        visible = (seen <= own) & (seen > own - window) if window else seen <= own
        scores = torch.einsum("thd,hsd->hts", step.q[start:end].double(), k) * shape.scale
        scores = shape.cap * torch.tanh(scores / shape.cap) if shape.cap else scores
        weights = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1)
        out[start:end] = torch.einsum("hts,hsd->thd", weights, v.nan_to_num())
    return out.flatten(1)


def attended(
    step: Step, device: torch.device, *, window: int = 0, splits: int = 1,
    usual: int | None = None, block_m: int | None = None, picked: list[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Both kernels over the rows that are theirs; `picked`: other rows than all that decode."""
    shape, length = step.shape, step.rows[:, 1] - step.rows[:, 0]
    picked = (length == 1).nonzero().flatten().tolist() if picked is None else picked
    block_m = block_m or attention.prefill_block(shape.heads, shape.kv_heads, shape.dim, shape.dtype)
    out = torch.full((len(step.q), shape.heads * shape.dim), UNTOUCHED, dtype=shape.dtype, device=device)
    q, kv, rows, pages = (x.to(device) for x in (step.q, step.kv, step.rows, step.pages))
    scratch = attention.DecodeScratch.make(len(picked), shape.heads, splits, shape.dim, device)
    for part in (scratch.partial, scratch.log_sum):
        part.fill_(math.nan)
    attention.prepare_decode(
        out, q, kv, rows, pages, torch.tensor(picked, dtype=torch.int32, device=device),
        window=window, scale=shape.scale, cap=shape.cap, splits=splits, usual=usual, scratch=scratch,
    )(out, q, LAYER)  # fmt: skip
    attention.prepare_prefill(
        out, q, kv, rows, pages, torch.from_numpy(attention.prefill_tiles(step.rows.numpy(), block_m)).to(device),
        window=window, scale=shape.scale, cap=shape.cap, block_m=block_m,
    )(out, q, LAYER)  # fmt: skip
    return out.cpu()


def assert_attended(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert_near(actual, wanted, TOLERANCES[actual.dtype].attention)


# ---- decode


@pytest.mark.numeric
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_leaves_rows_alone_that_are_not_picked(splits: int, rng: random.Random, device: torch.device) -> None:
    step = make_step(rng, SMALL, decoding(20, 33, 5, 16))
    out = attended(step, device, splits=splits, picked=[-1, 3, -1, -1, 1])
    assert_attended(out[[1, 3]], expected(step)[[1, 3]])
    assert bool((out[[0, 2]] == UNTOUCHED).all())


@pytest.mark.parametrize("splits", [1, 2])
def test_decode_of_a_row_does_not_depend_on_the_others(splits: int, rng: random.Random, device: torch.device) -> None:
    step = make_step(rng, SMALL, decoding(300, 1, 50))
    together = attended(step, device, splits=splits)
    for row in range(3):
        alone = attended(step, device, splits=splits, picked=[row])
        assert torch.equal(alone[row], together[row])


@pytest.mark.numeric
def test_scratch_serves_fewer_rows_with_more_splits(rng: random.Random, device: torch.device) -> None:
    scratch = attention.DecodeScratch.make(2, SMALL.heads, 3, SMALL.dim, device)
    step = make_step(rng, SMALL, decoding(290, 140))
    out = torch.empty(2, SMALL.heads * SMALL.dim, device=device)
    arrays = [x.to(device) for x in (step.q, step.kv, step.rows, step.pages)]
    for picked, splits in (([0], 6), ([1], 4)):
        attention.prepare_decode(
            out, *arrays, torch.tensor(picked, dtype=torch.int32, device=device),
            window=0, scale=SMALL.scale, splits=splits, scratch=scratch,
        )(out, arrays[0], LAYER)  # fmt: skip
    assert_attended(out.cpu(), expected(step))


# ---- prefill


def test_prefill_of_a_row_does_not_depend_on_the_others(rng: random.Random, device: torch.device) -> None:
    step = make_step(rng, SMALL, [Row(0, 30), Row(70, 5)])
    alone = Step(SMALL, step.q, step.kv, step.rows[1:], step.pages)
    assert torch.equal(attended(alone, device)[30:], attended(step, device)[30:])


def test_prefill_skips_empty_tiles(rng: random.Random, device: torch.device) -> None:
    step = make_step(rng, SMALL, [Row(0, 4)])
    out = torch.full((4, SMALL.heads * SMALL.dim), UNTOUCHED, device=device)
    arrays = [x.to(device) for x in (step.q, step.kv, step.rows, step.pages)]
    tiles = torch.full((2, 2), -1, dtype=torch.int32, device=device)
    attention.prepare_prefill(out, *arrays, tiles, window=0, scale=1.0, block_m=8)(out, arrays[0], LAYER)
    assert bool((out == UNTOUCHED).all())


@pytest.mark.parametrize("block_m", [1, 4, 100])
def test_tiles_hold_every_token_of_the_rows_in_prefill_once(block_m: int) -> None:
    lengths = [1, 7, 2, 1, 4, 9]
    ends = np.cumsum(lengths)
    rows = np.stack((ends - lengths, ends, [50, 0, 9, 0, 30, 2], np.zeros(6)), axis=1).astype(np.int32)
    tiles = attention.prefill_tiles(rows, block_m)
    held = [(row, token) for row, first in tiles for token in range(first, min(first + block_m, lengths[row]))]
    assert sorted(held) == [(row, token) for row, length in enumerate(lengths) if length > 1 for token in range(length)]
    assert tiles.dtype == np.int32
    keys = rows[tiles[:, 0], 2] + tiles[:, 1]
    assert bool((keys[:-1] >= keys[1:]).all()), "the longest come first"


def test_no_row_in_prefill_no_tiles() -> None:
    assert attention.prefill_tiles(np.array([[0, 1, 5, 0]], np.int32), 8).shape == (0, 2)
    assert attention.prefill_tiles(np.empty((0, 4), np.int32), 8).shape == (0, 2)


# ---- as models have them

CONTEXTS = sized(gpu=(1, 15, 16, 17, 64, 127, 129, 150, 1000, 4096, 8192), interpreted=(1, 16, 17, 100))
PROMPTS = sized(
    gpu=(Row(0, 300), Row(1000, 513), Row(17, 2), Row(0, 2048), Row(31, 65)),
    interpreted=(Row(0, 2), Row(0, 37), Row(61, 20), Row(16, 16)),
)
MODELS = sized(
    gpu=[
        *((Shape(8, 8 // group, dim, BF16), 0) for dim in (32, 64, 128) for group in (1, 4, 8)),
        *((Shape(9, 3, 64, dtype), 0) for dtype in DTYPES),
        *((Shape(8, 2, 128, dtype), 100) for dtype in DTYPES),
        (Shape(8, 8, 64, BF16), 4096),
        *((Shape(8, 4, 256, dtype, cap=2.0), 100) for dtype in DTYPES),
    ],
    interpreted=[(Shape(2, 1, 16), 0), (Shape(4, 1, 16), 7), (Shape(2, 1, 16, cap=0.5), 7)],
)
EVERY_MODEL = pytest.mark.parametrize(("shape", "window"), [*((shape, 0) for shape in SHAPES), *MODELS], ids=str)


def on(device: torch.device, step: Step) -> Step:
    """The same step there: what is expected of a long one is computed there, too."""
    return Step(step.shape, step.q.to(device), step.kv.to(device), step.rows, step.pages)


@pytest.mark.numeric
@pytest.mark.parametrize(
    "splits", [1, sized(gpu=MAX_SPLITS, interpreted=3), None], ids=lambda n: f"{n or 'usual'} splits"
)
@EVERY_MODEL
def test_decode_of_contexts_of_every_length(
    shape: Shape, window: int, splits: int | None, rng: random.Random, gpu: Gpu
) -> None:
    """`splits` None: as many as the engine takes, more of them for long contexts."""
    step = on(gpu.device, make_step(rng, shape, decoding(*CONTEXTS), window))
    usual, most = (
        (None, splits) if splits else (1, max(attention_splits(len(CONTEXTS), shape.kv_heads, gpu.sms), LONG_SPLITS))
    )
    assert_attended(attended(step, gpu.device, window=window, splits=most, usual=usual), expected(step, window))


@pytest.mark.numeric
@EVERY_MODEL
def test_prefill_of_long_prompts_and_of_their_ends(shape: Shape, window: int, rng: random.Random, gpu: Gpu) -> None:
    step = on(gpu.device, make_step(rng, shape, list(PROMPTS), window))
    assert_attended(attended(step, gpu.device, window=window), expected(step, window))


# ---- both

HALF = Shape(2, 1, 64)  # blocks of 32 tokens in decode, of 16 keys in prefill
SEEN = [*decoding(1, 16, 38, 99), Row(0, 50), Row(75, 21)]


def mixed(shape: Shape, rows: list[Row], window: int = 0, splits: int = 1, block_m: int | None = None) -> Any:
    return example(seed=0, shape=shape, rows=rows, window=window, splits=splits, block_m=block_m)


@pytest.mark.numeric
@settings(max_examples=settings.default.max_examples // sized(gpu=4, interpreted=8))
@mixed(Shape(2, 1, 128), decoding(1, 17, 40, 90), splits=16)  # more of them than blocks of 16 tokens
@mixed(SMALL, [Row(3, 11), Row(120, 9)], block_m=1)
@mixed(SMALL, [Row(3, 11), Row(120, 9)], block_m=64)
@mixed(HALF, SEEN, window=1, splits=3, block_m=32)
@mixed(HALF, SEEN, window=16, block_m=32)
@mixed(HALF, SEEN, window=40, splits=3, block_m=8)
@mixed(HALF, SEEN, window=1000, block_m=32)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from(
        [SMALL, HALF, Shape(3, 1, 64, BF16), Shape(2, 2, 32, page_tokens=32), Shape(4, 2, 48, cap=1.0)]
    ),
    rows=st.lists(st.builds(Row, st.integers(0, 150), st.just(1) | st.integers(1, 40)), min_size=1, max_size=4),
    window=st.just(0) | st.integers(1, 60),
    splits=st.integers(1, 4),
    block_m=st.none() | st.integers(1, 16),
)
def test_a_mixed_step_equals_plain_attention(
    device: torch.device, seed: int, shape: Shape, rows: list[Row], window: int, splits: int, block_m: int | None
) -> None:
    step = make_step(random.Random(seed), shape, rows, window)
    out = attended(step, device, window=window, splits=splits, block_m=block_m)
    assert_attended(out, expected(step, window))


@pytest.mark.numeric
@pytest.mark.skipif(INTERPRETED, reason="the interpreter would copy 4 GiB: `make gpu-check` on a machine with a GPU")
def test_pages_beyond_two_to_the_31_elements(rng: random.Random, device: torch.device) -> None:
    shape = Shape(4, 1, 64, BF16)
    step = make_step(rng, shape, [Row(40, 1), Row(20, 30)])
    wanted, last = expected(step), len(step.kv) - 1
    n_pages = 2**31 // step.kv[0].numel() + len(step.kv)
    kv = torch.empty(n_pages, *step.kv.shape[1:], dtype=BF16, device=device)
    kv[-last - 1 :] = step.kv.to(device)
    far = Step(shape, step.q, kv, step.rows, step.pages + (n_pages - 1 - last))
    assert_attended(attended(far, device, splits=2), wanted)
