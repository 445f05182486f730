# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""What a layer does between its matrix products and attention: each tensor is read once and written once.

T tokens, H hidden, I intermediate, N kv heads, P tokens a page, D head size, L layers. Inside, everything is fp32.

Rotation and activation go by the chunks of `chunks.chunk_table`, int32 [E, 4]: (slot or -1, first token, tokens,
turn). A single token is computed alone, a chunk of several as one tile of `block_m` rows, which is the most that a
chunk has; one of 0 tokens does nothing, so that a captured graph can have more chunks than the step at hand.
"""

import math

import torch
import triton
import triton.language as tl

from weft_kernels.triton.chunks import TURNS
from weft_kernels.triton.lora import (
    BLOCK_R,
    ChunkTable,
    DeferredExpand,
    add_expanded,
    add_expanded_pair,
    expand_sizes,
    row_columns,
    slice_of,
)
from weft_kernels.triton.prepared import Launch, PreparedKernel, cdiv, next_power_of_2, prepared

BLOCK_M = (16, 32, 64, 128)

_TURNS = tl.constexpr(TURNS)
_GELU_1 = tl.constexpr(2 * math.sqrt(2 / math.pi))
_GELU_3 = tl.constexpr(2 * math.sqrt(2 / math.pi) * 0.044715)
_EMBED_BLOCK = 1024
_ELEMENTS_A_THREAD = 8  # of a row: one load of 16 bytes in bf16


def embed(residual: torch.Tensor, tokens: torch.Tensor, table: torch.Tensor, scale: float = 1.0) -> None:
    """Write residual fp32 [T, H] = scale * table[tokens]; tokens int32 [T], all of them inside the table [V, H]."""
    n_tokens, hidden = residual.shape
    assert residual.is_contiguous()
    assert table.is_contiguous()
    assert table.shape[1] == hidden, (table.shape, hidden)
    block = min(_EMBED_BLOCK, next_power_of_2(hidden))
    kernel = prepared(_embed, H=hidden, BLOCK=block, num_warps=_row_warps(block), enable_fp_fusion=True)
    kernel((n_tokens, cdiv(hidden, block), 1), residual, tokens, table, scale)


def prepare_add_norm(residual: torch.Tensor, eps: float, scale: float = 1.0, *, layer_norm: bool = False) -> Launch:
    """Prepare launches with (x, y, weight).

    residual += scale * y (None: as it is); x = residual * rsqrt(mean(residual^2) + eps) * weight, or without a weight
    (None) residual. x, y [T, H], contiguous, of the model's dtype, residual fp32 [T, H], weight fp32 [H]. `layer_norm`:
    the mean is subtracted first; weight [2, H]: what is multiplied with, and added.
    """
    assert residual.is_contiguous()
    return _norm_kernel(residual.shape[1], layer_norm).bound((len(residual), 1, 1), residual, eps, scale)


def prepare_norm(y: torch.Tensor, eps: float, *, layer_norm: bool = False) -> Launch:
    """Prepare launches with (x, y, weight): x = the norm of y, as in `prepare_add_norm`."""
    return _norm_kernel(y.shape[1], layer_norm).bound((len(y), 1, 1), None, eps, 1.0)


def _norm_kernel(hidden: int, layer_norm: bool) -> PreparedKernel:
    block = next_power_of_2(hidden)
    return prepared(
        _add_norm, H=hidden, BLOCK=block, LAYER_NORM=layer_norm, num_warps=_row_warps(block), enable_fp_fusion=True
    )


def prepare_norm_heads(qkv: torch.Tensor, heads: int, kv_heads: int, eps: float) -> Launch:
    """Prepare launches with (qkv, q_norm, k_norm).

    Queries and keys of qkv [T, (heads + 2 N) * D], in place: all heads of a token are normed as one row. q_norm fp32
    [heads * D], k_norm fp32 [N * D].
    """
    tokens, width = qkv.shape
    dim = width // (heads + 2 * kv_heads)
    assert qkv.is_contiguous()
    block = next_power_of_2(heads * dim)
    kernel = prepared(
        _norm_heads, Q=heads * dim, K=kv_heads * dim, BLOCK=block, num_warps=_row_warps(block), enable_fp_fusion=True
    )
    return kernel.bound((tokens, 2, 1), eps)


def prepare_rope_write(
    q: torch.Tensor,
    kv: torch.Tensor,
    qkv: torch.Tensor,
    rows: torch.Tensor,
    pages: torch.Tensor,
    row_of: torch.Tensor,
    chunked: ChunkTable,
    cos_sin: torch.Tensor | None,
    long: torch.Tensor | None,
    eps: float,
    pending: DeferredExpand | None,
    growth: tuple[float, int] = (0.0, 1),
) -> Launch:
    """Prepare launches with (q, qkv, q_norm, k_norm, layer, *expand_arguments(pending)).

    Queries and keys normed (q_norm, k_norm fp32 [D], or neither) and rotated; keys and values to their pages.

    qkv [T, (heads + 2 N) * D]: q heads, k heads, v heads -> q [T, heads, D] and `layer` of kv [pages, L, 2, N, P, D],
    all of one dtype. cos_sin fp32 [positions, 2, R / 2], of the first R numbers of each head, whose halves are paired,
    not neighbours; None: nothing is rotated. `long` int32 [rows]: which of two lines in cos_sin, that each position
    then has, is a row's; None: there is one. rows int32 [rows, 4]: start, end, position, first page; pages int32: rows'
    pages one after another; row_of int32 [T]: the token's row, -1 for padding, for which nothing is written.
    `pending`: the adapters' part of qkv, added first. `growth` (g, n): queries at position p are times
    1 + g ln(1 + floor(p / n)).
    """
    heads = q.shape[1]
    _, layers, _, kv_heads, page_tokens, dim = kv.shape
    assert dim % 16 == 0, dim
    assert chunked.block_m in BLOCK_M, chunked.block_m
    assert q.shape[2] == dim, (q.shape, dim)
    assert qkv.shape[1] == (heads + 2 * kv_heads) * dim, (qkv.shape, heads, kv_heads, dim)
    assert q.dtype == kv.dtype == qkv.dtype
    assert all(map(torch.Tensor.is_contiguous, (q, kv, qkv, chunked.table, rows)))
    assert cos_sin is None or cos_sin.is_contiguous()
    parts, share, *strides = expand_sizes(pending)
    dim_up = next_power_of_2(dim)
    block_m, warps = chunked.block_m, _tile_warps(chunked.block_m * dim_up)
    together = math.gcd(heads, kv_heads, max(1, 2 * row_columns(warps) // dim_up))  # two halves, of one slice
    kernel = prepared(
        _rope_write, PARTS=parts, SHARE=share, BLOCK_R=BLOCK_R, PAIR_R=_pair_ranks(block_m), HEADS=heads,
        KV_HEADS=kv_heads, LAYERS=layers, PAGE=page_tokens, DIM=dim, BLOCK_M=block_m, ROW_HEADS=together,
        ROTATED=dim if cos_sin is None else 2 * cos_sin.shape[2], GROWTH=growth[0], GROWTH_TOKENS=growth[1],
        num_warps=warps, enable_fp_fusion=True,
    )  # fmt: skip
    groups = cdiv(heads + 2 * kv_heads, min(together, TURNS))
    return kernel.bound((groups, len(chunked), 1), kv, rows, pages, row_of, chunked.table, cos_sin, long, eps, *strides)


def prepare_gate(
    out: torch.Tensor, gate_up: torch.Tensor, chunked: ChunkTable, pending: DeferredExpand | None, *,
    activation: str = "silu",
) -> Launch:  # fmt: skip
    """Prepare launches with (out, gate_up, *expand_arguments(pending)).

    out [T, I] = act(gate) * up; gate_up [T, 2 I], gate first; or act(up) where gate_up is [T, I]. `activation`: silu,
    or gelu (its tanh form). `pending`: the adapters' part of gate_up, added first.
    """
    inner, chunks, block_m = out.shape[1], chunked.table, chunked.block_m
    assert gate_up.shape[1] in (inner, 2 * inner), (gate_up.shape, inner)
    assert activation in ("silu", "gelu"), activation
    assert block_m in BLOCK_M, block_m
    assert all(map(torch.Tensor.is_contiguous, (out, gate_up, chunks)))
    parts, share, *strides = expand_sizes(pending)
    block_i = 128 if block_m <= 32 else 64  # prefill's tiles of 128 rows must stay in registers
    warps = _tile_warps(2 * block_m * block_i)
    row_i = min(row_columns(warps), max(16, next_power_of_2(inner)))
    kernel = prepared(
        _gate, PARTS=parts, SHARE=share, BLOCK_R=BLOCK_R, PAIR_R=_pair_ranks(block_m), I=inner, BLOCK_I=block_i,
        BLOCK_M=block_m, ROW_I=row_i, GATED=gate_up.shape[1] > inner, GELU=activation == "gelu", num_warps=warps,
        enable_fp_fusion=True,
    )  # fmt: skip
    return kernel.bound((cdiv(inner, min(row_i, TURNS * block_i)), len(chunked), 1), chunks, *strides)


def _row_warps(block: int) -> int:
    return min(max(block // (32 * _ELEMENTS_A_THREAD), 1), 16)


def _pair_ranks(block_m: int) -> int:
    """The ranks at a time of each of two tiles of one token: what registers allow beside prompts' tiles."""
    return 8 if block_m <= 32 else 2


def _tile_warps(elements: int) -> int:
    """The warps of a tile, 32 elements a thread: 2 for 16 rows of 128, so that many programs of one row fit."""
    return min(max(elements // 1024, 1), 8)


@triton.jit
def _embed(residual, tokens, table, scale, H: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + t).to(tl.int64)
    x = tl.load(table + token * H + column, mask=column < H)
    tl.store(residual + t * H + column, x.to(tl.float32) * scale, mask=column < H)


@triton.jit
def _add_norm(residual, eps, scale, x, y, weight, H: tl.constexpr, BLOCK: tl.constexpr, LAYER_NORM: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < H
    at = tl.program_id(0).to(tl.int64) * H + column
    r = tl.load((y if residual is None else residual) + at, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        w = tl.load(weight + column, mask=inside, other=0.0)  # under way while the sum is made
    if residual is not None and y is not None:
        r += tl.load(y + at, mask=inside, other=0.0).to(tl.float32) * scale
        tl.store(residual + at, r, mask=inside)
    if weight is not None:
        if LAYER_NORM:
            r = tl.where(inside, r - tl.sum(r, 0) / H, 0.0)
        r = r * tl.rsqrt(tl.sum(r * r, 0) / H + eps) * w
        if LAYER_NORM:
            r += tl.load(weight + H + column, mask=inside, other=0.0)
    tl.store(x + at, r.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _norm_heads(eps, qkv, q_norm, k_norm, Q: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, 0: its queries, 1: its keys)."""
    is_k = tl.program_id(1) > 0
    column, width = tl.arange(0, BLOCK), tl.where(is_k, K, Q)
    inside = column < width
    at = qkv + tl.program_id(0).to(tl.int64) * (Q + 2 * K) + tl.where(is_k, Q, 0) + column
    w = tl.load((k_norm if is_k else q_norm) + column, mask=inside, other=0.0)
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * w).to(qkv.dtype.element_ty), mask=inside)


# One binary for all layers; and tables that are slices of one buffer start at any multiple of four bytes.
@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["rows", "pages", "row_of", "chunks", "long"])
def _rope_write(
    kv, rows, pages, row_of, chunks, cos_sin, long, eps, part_stride, r_stride, q, qkv, q_norm, k_norm, layer,
    partials, arena, ends, scales, row_offsets, head_stride, offset_stride,
    PARTS: tl.constexpr, SHARE: tl.constexpr, BLOCK_R: tl.constexpr, PAIR_R: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, LAYERS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    ROW_HEADS: tl.constexpr, ROTATED: tl.constexpr, GROWTH: tl.constexpr, GROWTH_TOKENS: tl.constexpr,
):  # fmt: skip
    """Program (group, row of the chunk table): ROW_HEADS heads of a single token, or one head of a chunk.

    q heads, then k heads, then v heads. A single token may have fewer groups than there are, a chunk fewer heads.
    """
    group, chunk = tl.program_id(0), chunks + 4 * tl.program_id(1)
    slot, first, count, turn = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3)
    if count == 1:
        if group * ROW_HEADS < HEADS + 2 * KV_HEADS:
            _rope_tile(
                q, kv, qkv, rows, pages, row_of, cos_sin, long, q_norm, k_norm, layer, eps, slot, first, 1,
                group * ROW_HEADS, partials, arena, ends, scales, row_offsets, head_stride, offset_stride, part_stride,
                r_stride, PARTS, SHARE, BLOCK_R, PAIR_R, HEADS, KV_HEADS, LAYERS, PAGE, DIM, ROTATED, GROWTH,
                GROWTH_TOKENS, 1, ROW_HEADS,
            )  # fmt: skip
    elif count > 1:
        head = group * _TURNS + turn
        if head < HEADS + 2 * KV_HEADS:
            _rope_tile(
                q, kv, qkv, rows, pages, row_of, cos_sin, long, q_norm, k_norm, layer, eps, slot, first, count, head,
                partials, arena, ends, scales, row_offsets, head_stride, offset_stride, part_stride, r_stride, PARTS,
                SHARE, BLOCK_R, PAIR_R, HEADS, KV_HEADS, LAYERS, PAGE, DIM, ROTATED, GROWTH, GROWTH_TOKENS, BLOCK_M, 1,
            )  # fmt: skip


@triton.jit
def _rope_tile(
    q, kv, qkv, rows, pages, row_of, cos_sin, long, q_norm, k_norm, layer, eps, slot, first, count,
    head,  # the first: [0, HEADS): q, then N of k, then N of v
    partials, arena, ends, scales, row_offsets, head_stride, offset_stride, part_stride, r_stride,
    PARTS: tl.constexpr,  # 0: no adapters
    SHARE: tl.constexpr, BLOCK_R: tl.constexpr, PAIR_R: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, LAYERS: tl.constexpr,
    PAGE: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr,
    GROWTH: tl.constexpr,  # of queries with their positions; 0: none
    GROWTH_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr,
    TOGETHER: tl.constexpr,  # heads of one slice: C = TOGETHER * D / 2, padded to a power of two
):  # fmt: skip
    """Heads of tokens [first, first + count): their two halves, low and high [M, C], are rotated together."""
    HALF: tl.constexpr = DIM // 2
    UP: tl.constexpr = triton.next_power_of_2(HALF)
    TURNED: tl.constexpr = ROTATED // 2
    m = tl.arange(0, BLOCK_M)
    of = tl.arange(0, TOGETHER * UP) // UP * DIM  # where each column's head begins
    column = tl.arange(0, TOGETHER * UP) % UP
    low_at = column  # of low in its head
    gap = HALF  # from there to high
    if TURNED < HALF:  # two halves of what is rotated, behind them two of what is not
        low_at = tl.where(column < TURNED, column, column + TURNED)
        gap = tl.where(column < TURNED, TURNED, HALF - TURNED)
    inside = m < count
    held, there = inside[:, None], None
    if UP > HALF:
        there = (column < HALF)[None, :]
        held &= there
    token = first + m
    # Read under `inside`, not under `live`: loads that need not wait for `row_of` hide its latency.
    product = qkv + token[:, None].to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM + (of + low_at)[None, :]
    low = tl.load(product, mask=held, other=0.0).to(tl.float32)
    high = tl.load(product + gap, mask=held, other=0.0).to(tl.float32)
    if PARTS:
        index = (head >= HEADS).to(tl.int32) + (head >= HEADS + KV_HEADS).to(tl.int32)
        first_rank, last_rank, scale = slice_of(ends, scales, slot, head_stride, index)
        places = row_offsets + slot.to(tl.int64) * offset_stride
        begin = (head - tl.where(index == 0, 0, HEADS + (index - 1) * KV_HEADS)) * DIM  # in the slice
        columns = begin + of + low_at
        end = begin + TOGETHER * DIM
        if UP > HALF:
            columns = tl.where(column < HALF, columns, end)
        if BLOCK_M == 1:
            low, high = add_expanded_pair(
                low, high, partials, arena, places, first_rank, last_rank, scale, first_rank, last_rank, scale, token,
                columns, columns + gap, end, end, part_stride, r_stride, PARTS, PAIR_R,
            )  # fmt: skip
        else:
            low = add_expanded(low, partials, arena, places, first_rank, last_rank, scale, token, inside, columns, end,
                               part_stride, r_stride, PARTS, SHARE, BLOCK_M, BLOCK_R)  # fmt: skip
            high = add_expanded(high, partials, arena, places, first_rank, last_rank, scale, token, inside,
                                columns + gap, end, part_stride, r_stride, PARTS, SHARE, BLOCK_M,
                                BLOCK_R)  # fmt: skip

    row = tl.load(row_of + token, mask=inside, other=-1)
    live = row >= 0
    start = tl.load(rows + row * 4, mask=live, other=0)
    position = tl.load(rows + row * 4 + 2, mask=live, other=0) + token - start

    if head < HEADS + KV_HEADS:
        if q_norm is not None:
            weight = (q_norm if head < HEADS else k_norm) + low_at[None, :]
            squares = tl.reshape(low * low + high * high, [BLOCK_M, TOGETHER, UP])
            inverse = tl.rsqrt(tl.sum(squares, 2, keep_dims=True) / DIM + eps)
            inverse = tl.reshape(tl.broadcast_to(inverse, [BLOCK_M, TOGETHER, UP]), [BLOCK_M, TOGETHER * UP])
            low *= inverse * tl.load(weight, mask=there)
            high *= inverse * tl.load(weight + gap, mask=there)
        if cos_sin is not None:
            line = position
            if long is not None:
                line = 2 * position + tl.load(long + row, mask=live, other=0)
            angle = cos_sin + line[:, None] * ROTATED + column[None, :]
            turns = live[:, None]
            if TURNED < UP:
                turns &= (column < TURNED)[None, :]
            cos = tl.load(angle, mask=turns, other=1.0)
            sin = tl.load(angle + TURNED, mask=turns, other=0.0)
            low, high = low * cos - high * sin, high * cos + low * sin

    if head < HEADS:
        if GROWTH > 0:
            grown = (1.0 + GROWTH * tl.log((1 + position // GROWTH_TOKENS).to(tl.float32)))[:, None]
            low, high = low * grown, high * grown
        to = q + (token[:, None].to(tl.int64) * HEADS + head) * DIM + (of + low_at)[None, :]
    else:
        first_page = tl.load(rows + row * 4 + 3, mask=live, other=0)
        page = tl.load(pages + first_page + position // PAGE, mask=live, other=0).to(tl.int64)
        kv_head = (page * LAYERS + layer) * (2 * KV_HEADS) + head - HEADS  # v heads follow k heads here as in qkv
        to = kv + (kv_head * PAGE + position % PAGE)[:, None] * DIM + (of * PAGE + low_at)[None, :]
    held &= live[:, None]
    tl.store(to, low.to(kv.dtype.element_ty), mask=held)
    tl.store(to + gap, high.to(kv.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize_on_alignment=["chunks"])
def _gate(
    chunks, part_stride, r_stride, out, gate_up, partials, arena, ends, scales, row_offsets, head_stride, offset_stride,
    PARTS: tl.constexpr, SHARE: tl.constexpr, BLOCK_R: tl.constexpr, PAIR_R: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_I: tl.constexpr, BLOCK_M: tl.constexpr, ROW_I: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """Program (group, row of the chunk table): ROW_I columns of a single token, or BLOCK_I columns of a chunk."""
    group, chunk = tl.program_id(0), chunks + 4 * tl.program_id(1)
    slot, first, count, turn = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3)
    if count == 1:
        if group * ROW_I < I:
            _gate_tile(
                out, gate_up, slot, first, 1, group, partials, arena, ends, scales, row_offsets, head_stride,
                offset_stride, part_stride, r_stride, PARTS, SHARE, BLOCK_R, PAIR_R, I, ROW_I, 1, GATED, GELU,
            )  # fmt: skip
    elif count > 1:
        tile = group * _TURNS + turn
        if tile * BLOCK_I < I:
            _gate_tile(
                out, gate_up, slot, first, count, tile, partials, arena, ends, scales, row_offsets, head_stride,
                offset_stride, part_stride, r_stride, PARTS, SHARE, BLOCK_R, PAIR_R, I, BLOCK_I, BLOCK_M,
                GATED, GELU,
            )  # fmt: skip


@triton.jit
def _gate_tile(
    out, gate_up, slot, first, count, tile, partials, arena, ends, scales, row_offsets, head_stride, offset_stride,
    part_stride, r_stride, PARTS: tl.constexpr, SHARE: tl.constexpr, BLOCK_R: tl.constexpr, PAIR_R: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_I: tl.constexpr, BLOCK_M: tl.constexpr,
    GATED: tl.constexpr,  # else there is no `up`, and `gate` is what is activated
    GELU: tl.constexpr,
):  # fmt: skip
    """Columns [BLOCK_I] of tokens [first, first + count)."""
    m = tl.arange(0, BLOCK_M)
    columns = tile * BLOCK_I + tl.arange(0, BLOCK_I)
    column, token = columns[None, :], first + m
    inside = (m < count)[:, None] & (column < I)
    row = token[:, None].to(tl.int64)
    product = gate_up + row * (2 * I if GATED else I) + column
    gate = tl.load(product, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(product + I, mask=inside, other=0.0).to(tl.float32)
    if PARTS:
        _, gate_ranks, gate_scale = slice_of(ends, scales, slot, head_stride, 0)
        places = row_offsets + slot.to(tl.int64) * offset_stride
        if GATED:
            _, ranks, up_scale = slice_of(ends, scales, slot, head_stride, 1)
        if GATED and BLOCK_M == 1:
            gate, up = add_expanded_pair(
                gate, up, partials, arena, places, 0, gate_ranks, gate_scale, gate_ranks, ranks, up_scale, token,
                columns, columns, I, I, part_stride, r_stride, PARTS, PAIR_R,
            )  # fmt: skip
        else:
            gate = add_expanded(gate, partials, arena, places, 0, gate_ranks, gate_scale, token, m < count, columns, I,
                                part_stride, r_stride, PARTS, SHARE, BLOCK_M, BLOCK_R)  # fmt: skip
            if GATED:
                up = add_expanded(up, partials, arena, places, gate_ranks, ranks, up_scale, token, m < count, columns,
                                  I, part_stride, r_stride, PARTS, SHARE, BLOCK_M, BLOCK_R)  # fmt: skip
    if GELU:  # x (1 + tanh(u)) / 2 is x sigmoid(2 u)
        gate *= tl.sigmoid(gate * (_GELU_1 + _GELU_3 * gate * gate))
    else:
        gate *= tl.sigmoid(gate)
    if GATED:
        gate *= up
    tl.store(out + row * I + column, gate.to(out.dtype.element_ty), mask=inside)


_TAKE_BLOCK = 256


def take_tokens(tokens: torch.Tensor, taken: torch.Tensor, sampled: torch.Tensor) -> None:
    """Write tokens[i] = sampled[taken[i]] where taken[i] is no -1; a row without token (-1) gets token 0. int32 all."""
    kernel = prepared(_take_tokens, BLOCK=_TAKE_BLOCK)
    kernel((cdiv(len(tokens), _TAKE_BLOCK), 1, 1), tokens, taken, sampled, len(tokens))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["taken", "sampled"])
def _take_tokens(tokens, taken, sampled, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(taken + i, mask=i < count, other=-1)
    token = tl.load(sampled + at, mask=at >= 0, other=0)
    tl.store(tokens + i, tl.maximum(token, 0), mask=at >= 0)
