# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
"""Attention over KV pages: `prepare_decode` for rows of one token, `prepare_prefill` for rows of several.

Softmax runs online over blocks of keys, in fp32 and base 2 (FlashAttention-2, arXiv 2307.08691). Both kernels share
one loop and one tile: the query heads that share a kv head are packed beside each other, `tokens x group` rows, so
that their keys and values are read once (Q blocks, arXiv 2511.11581). In decode a tile is one token and the context
is split over programs (Flash-Decoding), of which the one that ends last joins the partial results of all, in the order
of the splits. In prefill a program has a tile of one row's tokens and walks the keys that any of them can see.

Shapes, the same everywhere:

    q      [T, heads, D]           contiguous; query head h reads kv head h // group, group = heads // N
    out    [T, heads * D]          contiguous
    kv     [pages, L, 2, N, P, D]  contiguous, q's dtype; the step's own keys and values are in it already
    rows   int32 [R, 4]            (start, end, position, first page): tokens [start, end) of the step, the first at
                                   absolute `position`; pages[first page + i] holds positions [i P, (i + 1) P)
    pages  int32 [...]             page ids of all rows, flat

A token at position p sees keys [p - window + 1, p], window 0: [0, p]. What lies in pages outside of a row's visible
keys is never loaded, so it may be anything, NaN too. A row's result depends on its own tokens, pages and the launch
constants, not on what else is in the step. Sums and maxima are fp32; fp32 inputs are multiplied in fp32, not tf32.
Where a cap c is given, each score s is c tanh(s / c). A D that is no power of two is padded to one inside (D up).
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from weft_kernels.triton.dot import dot
from weft_kernels.triton.prepared import Launch, next_power_of_2, prepared

LONG_KEYS = 2048  # for one program of a decode step: beyond them its context is shared by more
_LONG_KEYS = tl.constexpr(LONG_KEYS)
_MIN_ROWS = 16  # of a tile: what a tensor core instruction takes
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeScratch:
    """Partial results of a split decode; made once, large enough for any launch with `n * splits <= rows * splits`.

    partial: fp32 [rows, heads, splits, D], each split's own softmax; log_sum: fp32 [rows, heads, splits], its base 2
    log of the sum of exponentials; arrived: int32 [rows, heads], how many splits of a row's kv head are done, 0 between
    two launches. Launches that share one follow each other on the device.
    """

    partial: torch.Tensor
    log_sum: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def make(cls, rows: int, heads: int, splits: int, dim: int, device: torch.device | str) -> Self:
        return cls(
            torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=device),
            torch.empty(rows, heads, splits, dtype=torch.float32, device=device),
            torch.zeros(rows, heads, dtype=torch.int32, device=device),
        )


def prepare_decode(
    out: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    pages: torch.Tensor,
    picked: torch.Tensor,
    *,
    window: int,
    scale: float,
    splits: int,
    scratch: DecodeScratch,
    usual: int | None = None,
    cap: float = 0.0,
) -> Launch:
    """Prepare launches with (out, q, layer).

    Attend the one token of each row in `picked`, int32 [n]; -1: nothing to do, no token's `out` is touched.

    The grid is (splits, N, n) whatever the contexts are: a captured launch replays with other rows, positions, pages
    and numbers of live entries. Each program takes its share of the context it finds, possibly none. A context is
    shared by the first `usual` of the splits (None: by all), a long one by more, one for each LONG_KEYS keys. Splits
    that have nothing to do lie between those that have, so that they cost no time of their own.
    """
    _check(out, q, kv, rows, pages, picked)
    (n,), (_, heads, dim), (_, layers, _, kv_heads, page_tokens, _) = picked.shape, q.shape, kv.shape
    assert n * heads * splits <= scratch.log_sum.numel(), (n, heads, splits, scratch.log_sum.shape)
    assert n * heads * splits * dim <= scratch.partial.numel(), (n, heads, splits, dim, scratch.partial.shape)
    assert n * kv_heads <= scratch.arrived.numel(), (n, kv_heads, scratch.arrived.shape)
    kernel = prepared(
        _decode_kernel, LAYERS=layers, KV_HEADS=kv_heads, GROUP=heads // kv_heads, P=page_tokens, D=dim, WINDOW=window,
        CAP=cap * _LOG2_E, SPLITS_UP=next_power_of_2(splits),
        **decode_config(heads // kv_heads, next_power_of_2(dim), kv.dtype.itemsize),
    )  # fmt: skip
    return kernel.bound(
        (splits, kv_heads, n), scratch.partial, scratch.log_sum, scratch.arrived, kv, rows, pages, picked,
        scale * _LOG2_E, usual or splits,
    )  # fmt: skip


def prepare_prefill(
    out: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    pages: torch.Tensor,
    tiles: torch.Tensor,
    *,
    window: int,
    scale: float,
    block_m: int,
    cap: float = 0.0,
) -> Launch:
    """Prepare launches with (out, q, layer).

    Attend `block_m` tokens for each of `tiles`, int32 [n, 2] from `prefill_tiles` of the same block_m.

    A tile is (row, its first token counted from the row's first); row -1: nothing to do.
    """
    _check(out, q, kv, rows, pages, tiles)
    (n, _), (_, heads, dim), (_, layers, _, kv_heads, page_tokens, _) = tiles.shape, q.shape, kv.shape
    group = heads // kv_heads
    kernel = prepared(
        _prefill_kernel, LAYERS=layers, KV_HEADS=kv_heads, GROUP=group, P=page_tokens, D=dim, WINDOW=window,
        CAP=cap * _LOG2_E, TOKENS=block_m, **prefill_config(block_m * group, next_power_of_2(dim), kv.dtype.itemsize),
    )  # fmt: skip
    return kernel.bound((kv_heads, n, 1), kv, rows, pages, tiles, scale * _LOG2_E)


def prefill_tiles(
    rows: npt.NDArray[np.int32], block_m: int, single: npt.NDArray[np.bool_] | None = None
) -> npt.NDArray[np.int32]:
    """Cut rows [R, 4] into tiles int32 [n, 2] of at most block_m tokens, for the rows that have more than one token.

    `single` [R]: for all but these, where a row of one token is a part of a longer one.

    The tile with most keys comes first: programs start in this order, and a long one that starts last would keep the
    device waiting for it alone.
    """
    lengths = rows[:, 1] - rows[:, 0]
    counts = np.where(lengths == 1 if single is None else single, 0, -(-lengths // block_m))
    row = np.repeat(np.arange(len(rows)), counts)
    first = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * block_m
    order = np.argsort(-(rows[row, 2] + first), kind="stable")
    return np.stack((row, first), axis=1)[order].astype(np.int32)


# ---- sizes. None of them was measured: they follow from the compiler's reports for sm_80 and sm_90 and from counting.
# fp32 is for checks: its products are plain FMAs that keep both operands in registers, so its tiles are small.


def prefill_block(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> int:
    """The block_m for long prompts: 128 rows of query heads a tile, 64 at D 256.

    A block of keys and values in bf16 makes as many FLOP a byte of L2 traffic as the tile has rows: at 64 Hopper's
    tensor cores would wait for L2, and more than 128 do not fit in the registers. Short prompts leave processors
    idle: a caller with few tiles may take a smaller block_m.
    """
    rows = 128 if dim <= 128 else 64
    if dtype == torch.float32:
        rows = min(64, max(_MIN_ROWS, 2048 // next_power_of_2(dim)))
    return max(1, rows // (heads // kv_heads))


def decode_config(group: int, dim: int, itemsize: int) -> dict[str, int]:
    """16 KiB of keys and 16 KiB of values a block (64 tokens at D 128), at most 128 tokens; half of it in fp32.

    With three stages a program has one such block in flight while it computes on another, in 70 KiB of shared memory
    and about 100 registers: three programs to an SM on Hopper, two on Ampere. 64 KiB in flight on each SM and more is
    what covers the latency of a memory of 5 TB/s. Tiles of 16 rows are all one mma takes; 4 warps share its columns.
    """
    block_bytes = 8192 if itemsize == 4 else 16384
    return {
        "BLOCK_M": max(_MIN_ROWS, next_power_of_2(group)),
        "BLOCK_N": min(128, max(16, block_bytes // (dim * itemsize))),
        "num_warps": 4,
        "num_stages": 3,
    }


def prefill_config(rows: int, dim: int, itemsize: int) -> dict[str, int]:
    """Blocks of 64 keys, 32 at D 256: the most at which neither sm_80 nor sm_90 spills.

    Eight warps for 128 rows are two warpgroups of wgmma on Hopper, 64 rows each. Three stages at D 128 are 96 KiB of
    shared memory on Ampere, which has 99 at least, and 128 KiB on Hopper, which keeps the queries there, too.
    """
    block_m = max(_MIN_ROWS, next_power_of_2(rows))
    if itemsize == 4:
        return {"BLOCK_M": block_m, "BLOCK_N": min(64, max(16, 1024 // dim)), "num_warps": 4, "num_stages": 2}
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": 64 if dim <= 128 else 32,
        "num_warps": 8 if block_m >= 128 or block_m * dim >= 128 * 128 else 4,
        "num_stages": 3,
    }


def _check(
    out: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    pages: torch.Tensor,
    launched: torch.Tensor,
) -> None:
    """Check what the kernels take for granted."""
    (tokens, heads, dim), (_, _, halves, kv_heads, page_tokens, kv_dim) = q.shape, kv.shape
    assert all(map(torch.Tensor.is_contiguous, (q, out, kv, rows, pages, launched)))
    assert rows.dtype == pages.dtype == launched.dtype == torch.int32
    assert out.shape == (tokens, heads * dim), (out.shape, q.shape)
    assert (halves, kv_dim, kv.dtype) == (2, dim, q.dtype), (kv.shape, kv.dtype, q.shape, q.dtype)
    assert heads % kv_heads == 0, (heads, kv_heads)
    assert dim % 16 == 0, dim
    assert page_tokens >= 16, page_tokens
    assert page_tokens.bit_count() == 1, page_tokens


# ---- device code


@triton.jit
def _attend(
    acc,  # fp32 [M, D up], not yet divided by `total`
    top,  # fp32 [M], largest score so far, in base 2
    total,  # fp32 [M], sum of 2^(score - top)
    q,  # [M, D up]
    positions,  # int32 [M]
    keys,  # this layer's and head's in page 0
    pages,  # the row's first
    scale, begin, end,
    low,  # keys [low, high) may be loaded
    high,
    MASKED: tl.constexpr,  # False: all of [begin, end) is visible from every position, and whole blocks
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, P: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr,  # of scores in base 2; 0: none
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Go on with the online softmax over keys [begin, end), a block of BLOCK_N at a time."""
    D_UP: tl.constexpr = triton.next_power_of_2(D)
    columns = tl.arange(0, D_UP)
    inside = tl.arange(0, BLOCK_N)
    ids = tl.load(pages + (begin + inside) // P, mask=begin + inside < high, other=0)
    for block in range(begin, end, BLOCK_N):
        tokens = block + inside
        at = (ids.to(tl.int64) * (LAYERS * 2 * KV_HEADS * P) + tokens % P)[:, None] * D + columns[None, :]
        k_at = keys + at
        v_at = k_at + KV_HEADS * P * D
        if MASKED:
            stored = tokens < high
            if WINDOW:
                stored &= tokens >= low
            held = _with_columns(stored[:, None], columns, D)
            k = tl.load(k_at, mask=held, other=0.0)
            v = tl.load(v_at, mask=held, other=0.0)  # weight 0 is not enough: 0 * NaN
        elif D_UP > D:
            k = tl.load(k_at, mask=columns[None, :] < D, other=0.0)
            v = tl.load(v_at, mask=columns[None, :] < D, other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        ids = tl.load(pages + (tokens + BLOCK_N) // P, mask=tokens + BLOCK_N < high, other=0)
        scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32)) * scale
        if CAP > 0:
            scores = CAP * (2.0 * tl.sigmoid(scores * (2.0 / CAP)) - 1.0)  # CAP tanh(scores / CAP)
        if MASKED:
            visible = tokens[None, :] <= positions[:, None]
            if WINDOW:
                visible &= tokens[None, :] > positions[:, None] - WINDOW
            scores = tl.where(visible, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = new_top
        if MASKED and WINDOW:  # a row may have seen nothing yet, and -inf - -inf is NaN
            shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(weights, 1)
        acc = dot(weights.to(v.dtype), v, acc * fade[:, None])
        top = new_top
    return acc, top, total


@triton.jit
def _with_columns(mask, columns, D: tl.constexpr):
    """Mask [M, 1] of rows -> of those and of the first D columns, where there are more."""
    if columns.shape[0] > D:
        mask &= columns[None, :] < D
    return mask


@triton.jit(do_not_specialize=["layer", "usual"])
def _decode_kernel(
    partial,  # fp32 [n, heads, splits, D]
    log_sum,  # fp32 [n, heads, splits]
    arrived,  # int32 [n, N]
    kv, rows, pages,
    picked,  # int32 [n]
    scale,  # times log2(e)
    usual, out, q, layer,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, D: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SPLITS_UP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One token's `GROUP` heads of a kv head over one split of the context. Grid (splits, N, n)."""
    split, kv_head, index, splits = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(0)
    row = tl.load(picked + index)
    if row < 0:
        return
    token = tl.load(rows + row * 4)
    position = tl.load(rows + row * 4 + 2)
    pages += tl.load(rows + row * 4 + 3)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    heads = kv_head * GROUP + tl.arange(0, BLOCK_M)
    live = tl.arange(0, BLOCK_M) < GROUP
    D_UP: tl.constexpr = triton.next_power_of_2(D)
    columns = tl.arange(0, D_UP)
    held = _with_columns(live[:, None], columns, D)

    # the splits share the blocks of the visible context, from the page in which it begins
    low = tl.maximum(0, position - WINDOW + 1) if WINDOW else 0
    begin = low // P * P
    blocks = tl.cdiv(position + 1 - begin, BLOCK_N)
    used = tl.minimum(tl.minimum(splits, blocks), tl.maximum(usual, blocks // (_LONG_KEYS // BLOCK_N)))
    if split >= used:
        return
    first, last = split * blocks // used, (split + 1) * blocks // used

    here = (token.to(tl.int64) * HEADS + heads)[:, None] * D + columns[None, :]
    acc, top, total = _attend(
        tl.zeros([BLOCK_M, D_UP], tl.float32), tl.full([BLOCK_M], -float("inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32), tl.load(q + here, mask=held, other=0.0),
        tl.full([BLOCK_M], 0, tl.int32) + position, kv + (layer * 2 * KV_HEADS + kv_head) * (P * D), pages, scale,
        begin + first * BLOCK_N, begin + last * BLOCK_N, low, position + 1,
        True,  # masks cost nothing beside the bytes
        LAYERS, KV_HEADS, P, D, WINDOW, CAP, BLOCK_N,
    )  # fmt: skip
    result = acc / total[:, None]
    if SPLITS_UP > 1:  # noqa: SIM102 (settled by the compiler, the next one by the device)
        if used > 1:
            at = (index * HEADS + heads) * splits
            parts = partial + at[:, None] * D + columns[None, :]
            tl.store(parts + split * D, result, mask=held)
            tl.store(log_sum + at + split, top + tl.log2(total), mask=live)
            tl.debug_barrier()  # all threads have stored before one of them says so
            if tl.atomic_add(arrived + index * KV_HEADS + kv_head, 1, sem="acq_rel") < used - 1:
                return
            tl.store(arrived + index * KV_HEADS + kv_head, 0)
            _join(
                out + (token.to(tl.int64) * HEADS + kv_head * GROUP) * D, partial, log_sum,
                (index * HEADS + kv_head * GROUP) * splits, splits, used, GROUP, D, SPLITS_UP,
            )  # fmt: skip
            return
    tl.store(out + here, result.to(out.dtype.element_ty), mask=held)


@triton.jit
def _join(out, partial, log_sum, first, splits, used, GROUP: tl.constexpr, D: tl.constexpr, SPLITS_UP: tl.constexpr):
    """out [GROUP, D]: splits weighed by their shares of the sum of exponentials. Others wrote them: not from L1."""
    GROUP_UP: tl.constexpr = triton.next_power_of_2(GROUP)
    D_UP: tl.constexpr = triton.next_power_of_2(D)
    head, columns, split = tl.arange(0, GROUP_UP), tl.arange(0, D_UP), tl.arange(0, SPLITS_UP)
    live = head < GROUP
    held = _with_columns(live[:, None], columns, D)
    at = first + head * splits
    there = live[:, None] & (split < used)[None, :]
    sums = tl.load(log_sum + at[:, None] + split[None, :], mask=there, other=-float("inf"), cache_modifier=".cg")
    top = tl.where(live, tl.max(sums, 1), 0.0)
    acc, total = tl.zeros([GROUP_UP, D_UP], tl.float32), tl.sum(tl.exp2(sums - top[:, None]), 1)
    for i in tl.range(0, used, loop_unroll_factor=8):
        weight = tl.exp2(tl.load(log_sum + at + i, mask=live, other=0.0, cache_modifier=".cg") - top)
        part = partial + (at + i)[:, None] * D + columns[None, :]
        acc += weight[:, None] * tl.load(part, mask=held, other=0.0, cache_modifier=".cg")
    tl.store(out + head[:, None] * D + columns[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["layer"])
def _prefill_kernel(
    kv, rows, pages,
    tiles,  # int32 [n, 2]
    scale,  # times log2(e)
    out, q, layer,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, D: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`TOKENS` tokens of a row times the `GROUP` heads of a kv head. Grid (N, n): a tile's heads start together."""
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(tiles + tile * 2)
    if row < 0:
        return
    inside = tl.load(tiles + tile * 2 + 1)
    start = tl.load(rows + row * 4) + inside
    tokens = tl.minimum(tl.load(rows + row * 4 + 1) - start, TOKENS)
    position = tl.load(rows + row * 4 + 2) + inside  # of the tile's first token
    pages += tl.load(rows + row * 4 + 3)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    token = tl.arange(0, BLOCK_M) // GROUP
    heads = kv_head * GROUP + tl.arange(0, BLOCK_M) % GROUP
    live = token < tokens
    D_UP: tl.constexpr = triton.next_power_of_2(D)
    columns = tl.arange(0, D_UP)
    held = _with_columns(live[:, None], columns, D)
    here = (token * HEADS + heads)[:, None] * D + columns[None, :]
    q_tile = tl.load(q + start.to(tl.int64) * (HEADS * D) + here, mask=held, other=0.0)
    positions = position + token
    keys = kv + (layer * 2 * KV_HEADS + kv_head) * (P * D)

    # Keys from left to right; all tokens see those in `middle`, which need no mask:
    #   low           the last token's low    position       position + tokens
    #   |--- window's edge ---|----- middle -----|--- diagonal ---|
    # counted from the page that `low` is in. At the window's edge in half blocks: there are few keys that all see, and
    # a loop with both masks needs registers that sm_80 has not got for whole ones.
    high = position + tokens
    low = tl.maximum(0, position - WINDOW + 1) if WINDOW else 0
    begin = low // P * P
    acc = tl.zeros([BLOCK_M, D_UP], tl.float32)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    middle = begin
    if WINDOW:
        EDGE_N: tl.constexpr = max(16, BLOCK_N // 2)
        middle += tl.cdiv(tl.maximum(0, high - WINDOW) - begin, EDGE_N) * EDGE_N
        acc, top, total = _attend(
            acc, top, total, q_tile, positions, keys, pages, scale, begin, middle, low, high,
            True, LAYERS, KV_HEADS, P, D, WINDOW, CAP, EDGE_N,
        )  # fmt: skip
    diagonal = middle + tl.maximum(0, position + 1 - middle) // BLOCK_N * BLOCK_N
    acc, top, total = _attend(
        acc, top, total, q_tile, positions, keys, pages, scale, middle, diagonal, low, high,
        False, LAYERS, KV_HEADS, P, D, 0, CAP, BLOCK_N,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q_tile, positions, keys, pages, scale, diagonal, high, low, high,
        True, LAYERS, KV_HEADS, P, D, 0, CAP, BLOCK_N,
    )  # fmt: skip
    result = acc / tl.maximum(total, 1.0)[:, None]  # at least 1 where a key was seen; what pads the tile may see none
    tl.store(out + start.to(tl.int64) * (HEADS * D) + here, result.to(out.dtype.element_ty), mask=held)
