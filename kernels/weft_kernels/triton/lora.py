# pyright: basic, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Shrink and expand over chunks of a step (SGMV; Punica, arXiv 2310.18547, section 4), in Triton.

**Two schedules.** A single token is computed with vector arithmetic (tensor cores would work on 16 rows of which 15
are empty, and want their operands in shared memory first), a chunk of several as a tile of 16 to 128 rows on tensor
cores. Which it is stands in the chunk table, so one captured launch serves any mixture.

**Shrink** splits h_in over programs and writes each part into a plane of its own, fp32 `[parts, T, R]`: no atomics, no
launch that fills with zeros, and sums in a fixed order. **Expand** sums the planes while it loads them. It is a device
function, so that the kernels which read the projection next (rotation, activation) add the adapter's tile on the way
and the projection is not read and written once more; `expand` alone is for the others.

Ranks are true ranks, found on the device: programs loop over blocks of them, and return at once where an adapter leaves
a site alone, where a chunk has no adapter, and where a captured launch has more programs than the step has chunks.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from weft_kernels.triton.chunks import TURNS
from weft_kernels.triton.dot import dot
from weft_kernels.triton.prepared import Argument, Arguments, Launch, cdiv, next_power_of_2, prepared
from weft_kernels.triton.tables import A_ROWS, SLICES, UNIT, SiteTables

BLOCK_R = 16  # ranks at a time: what a tensor core's tile has at least
# Programs of a shrink, of a decode step and of a prompt: with fewer, too few loads are under way to fill the memory's
# pipes; each part of h_in is one more plane that every tile of the expand reads. Measured on an H200: with 1 part of a
# prompt's q|k|v its shrink is 40 % slower, with 3 of gate|up the activation 14 %.
PROGRAMS_PER_SM, PROMPT_PROGRAMS_PER_SM = 3.8, 1.9
PART_STEP = 256  # of h_in: 8 KiB of A at rank 16, two loads of 16 bytes a thread
MAX_INPUT_PARTS = 32
# Of a chunk of several tokens in a decode step, whose turns share a part of h_in where there are at most two: each tile
# of the expand reads all planes, and those of gate|up are many. With more parts, and in prompts, it cost more than it
# gave (H100: 256 rows of one adapter 9 % faster, 32 rows with 3 parts 2 % slower, a prompt of 512 3 %).
MAX_PLANES, MAX_WIDE_PLANES, MAX_SHARED_PARTS = 16, 4, 2

_TURNS = tl.constexpr(TURNS)
_UNIT = tl.constexpr(UNIT)
_A_ROWS = tl.constexpr(A_ROWS)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """A step's chunks on the device, int32 [E, 4] (`chunks.chunk_table`); the most tokens of one; how many there are.

    Rows of no tokens do nothing: a captured graph may have more of them than the step at hand.
    """

    table: torch.Tensor
    block_m: int
    chunks: int

    def __len__(self) -> int:
        return self.table.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class PartialSums:
    """The planes that a shrink leaves for the expand of its site: fp32 [parts * share, T, ranks], valid until the next
    shrink.

    `share`: turns of a chunk of several tokens that share each part of h_in, and leave a plane each; a single token has
    the first `parts` planes. Columns beyond an adapter's own ranks, rows without an adapter and the other planes of
    single tokens are undefined and never read.
    """

    tensor: torch.Tensor
    share: int = 1

    @property
    def parts(self) -> int:
        """The number of parts of h_in in which a single token is shrunk."""
        return self.tensor.shape[0] // self.share


@dataclass(frozen=True, slots=True, eq=False)
class DeferredExpand:
    """An expand that the next kernel which reads the projection adds."""

    partials: PartialSums
    tables: SiteTables


def expand_sizes(pending: DeferredExpand | None) -> tuple[int, int, int, int]:
    """The sizes that a kernel with an expand in it is prepared for: parts, share, strides of the planes. 0 parts: no
    expand."""
    if pending is None:
        return 0, 0, 0, 0
    partials, (part_stride, r_stride, _) = pending.partials, pending.partials.tensor.stride()
    return partials.parts, partials.share, part_stride, r_stride


def expand_arguments(pending: DeferredExpand | None) -> tuple[Argument, Arguments]:
    """The arguments that a kernel with an expand in it takes last."""
    return (None, _NO_TABLES) if pending is None else (pending.partials.tensor, pending.tables.expands)


_NO_TABLES = Arguments(None, None, None, None, 0, 0)


def chunk_bucket(n_chunks: int) -> int:
    """Round a number of chunks up to 1, 4, 16, 64, ...: the number of parts is a constant of kernels, which are
    compiled for few of them."""
    return 4 ** math.ceil(math.log(n_chunks, 4)) if n_chunks > 1 else 1


def planes_of(
    tables: SiteTables, chunks: int, block_m: int, tokens: int, sms: int, *, alone: bool = True
) -> PartialSums:
    """Make room for what the shrink of `chunks` chunks of `tokens` tokens leaves. `alone`: no other device's sums are
    added to it."""
    parts, share = _parts_of(tables.shape.n_in, tables.shape.widths, chunks, block_m, sms, alone)
    ranks = -(-tables.most_ranks // BLOCK_R) * BLOCK_R
    planes = torch.empty(parts * share, tokens, ranks, dtype=torch.float32, device=tables.arena.device)
    return PartialSums(planes, share)


@lru_cache
def _parts_of(n_in: int, widths: tuple[int, ...], chunks: int, block_m: int, sms: int, alone: bool) -> tuple[int, int]:
    """The parts of h_in, and the turns that share each."""
    is_prompt = block_m > 32
    per_sm = PROMPT_PROGRAMS_PER_SM if is_prompt else PROGRAMS_PER_SM
    parts = -(-n_in // part_length(n_in, chunk_bucket(chunks) * len(widths), int(per_sm * sms)))
    if is_prompt or not alone or parts > MAX_SHARED_PARTS:
        return parts, 1
    return parts, min(TURNS, (MAX_WIDE_PLANES if sum(widths) > 2 * n_in else MAX_PLANES) // parts)


def part_length(n_in: int, programs: int, wanted: int) -> int:
    """The part of h_in that one program takes, so that instead of `programs` there are at least about `wanted`."""
    parts = min(MAX_INPUT_PARTS, max(1, -(-wanted // programs)))
    return -(-n_in // (parts * PART_STEP)) * PART_STEP


def prepare_shrink(partials: PartialSums, x: torch.Tensor, tables: SiteTables, chunked: ChunkTable) -> Launch:
    """Prepare launches with (planes, x, tables.shrinks), those of any layer.

    planes[., t, r] = parts of x[t] . A[r] for every rank r of token t's adapter at this site. x [T, n_in]. The number
    of planes says how many parts h_in is cut into (`planes_of`).
    """
    n_in, slices, parts = tables.shape.n_in, len(tables.shape.widths), partials.parts
    _, tokens, stride = partials.tensor.shape
    assert x.shape[-1] == n_in, (x.shape, tables.shape)
    assert x.stride(-1) == 1, x.stride()
    assert stride >= tables.most_ranks, (stride, tables.most_ranks)
    rows = len(chunked) if partials.share > 1 else chunked.chunks
    length, block_m = cdiv(n_in, parts), chunked.block_m
    block_k = min(PART_STEP, max(16, next_power_of_2(length)))
    kernel = prepared(
        _shrink, N_IN=n_in, SLICES=slices, LENGTH=cdiv(length, block_k) * block_k, BLOCK_M=block_m, BLOCK_K=block_k,
        TILE_K=min(block_k, 128), BLOCK_R=BLOCK_R, SHARE=partials.share, num_warps=_warps(block_m), num_stages=3,
        enable_fp_fusion=True,
    )  # fmt: skip
    return kernel.bound((parts, slices, rows), chunked.table, x.stride(0), tokens, stride)


def prepare_expand(y: torch.Tensor, partials: PartialSums, tables: SiteTables, chunked: ChunkTable) -> Launch:
    """Prepare launches with (y, planes, tables.expands), those of any layer.

    y[t, columns of a slice] += scale * V[t, its ranks] B^T, V the sum of the planes. y [T, sum of the widths].
    """
    widths = tables.shape.widths
    assert y.shape[-1] == sum(widths), (y.shape, widths)
    assert y.stride(-1) == 1, y.stride()
    parts, share, *strides = expand_sizes(DeferredExpand(partials, tables))
    assert not any(width % 16 for width in widths), widths
    (w0, w1, w2), block_m = (*widths, 0, 0)[:SLICES], chunked.block_m
    warps, widest = _warps(block_m), max(16, next_power_of_2(max(widths)))
    row_n = min(row_columns(warps), widest)
    kernel = prepared(
        _expand, W0=w0, W1=w1, W2=w2, PARTS=parts, SHARE=share, BLOCK_M=block_m,
        BLOCK_N=min(256 if block_m <= 32 else 128, widest), ROW_N=row_n, BLOCK_R=BLOCK_R, num_warps=warps, num_stages=2,
        enable_fp_fusion=True,
    )  # fmt: skip
    programs = sum(cdiv(width, row_n) for width in widths)
    return kernel.bound((programs, len(chunked), 1), chunked.table, y.stride(0), *strides)


def row_columns(warps: int) -> int:
    """The columns of one token's tile: 16 bytes in bf16 of each rank's row a thread.

    Then a thread has all ranks of its columns. With fewer columns ranks are shared among threads, whose sums go through
    shared memory: on an H100 that, and too few bytes under way behind a chain of lookups, cost 5 times the bytes' time.
    """
    return 256 * warps


def _warps(block_m: int) -> int:
    """The warps of a tile: twice as many for twice the rows, since the accumulators have to stay in registers."""
    return 8 if block_m >= 128 else 4


# ---- on the device


@triton.jit(do_not_specialize=["n_tokens"])
def _shrink(
    chunks, x_stride, n_tokens, r_stride, partials, x, arena, ends, row_offsets, head_stride, offset_stride,
    N_IN: tl.constexpr, SLICES: tl.constexpr, LENGTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    TILE_K: tl.constexpr, BLOCK_R: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Program (part of h_in, which of the rank blocks, row of the chunk table): a part, or a turn's share of it."""
    part, lane, chunk = tl.program_id(0), tl.program_id(1), chunks + tl.program_id(2) * 4
    slot, t0, n, turn = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3)
    if (slot < 0) | (n == 0) | (turn >= SHARE):
        return
    ranks = tl.load(ends + slot * head_stride + _A_ROWS)
    rows = row_offsets + slot.to(tl.int64) * offset_stride
    for r0 in range(lane * BLOCK_R, ranks, SLICES * BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        a = arena + tl.load(rows + r, mask=r < ranks, other=0).to(tl.int64) * _UNIT
        if n == 1:
            out = partials + (part * n_tokens + t0).to(tl.int64) * r_stride + r
            token = x + t0.to(tl.int64) * x_stride
            row = _shrink_row(token, a, r < ranks, part * LENGTH, N_IN, LENGTH, BLOCK_K, BLOCK_R)
            tl.store(out, row, mask=r < ranks)
        else:
            out = partials + ((part * SHARE + turn) * n_tokens + t0).to(tl.int64) * r_stride + r
            m = tl.arange(0, BLOCK_M)
            tokens = x + (t0 + m).to(tl.int64) * x_stride
            OWN: tl.constexpr = (LENGTH // SHARE + TILE_K - 1) // TILE_K * TILE_K
            k0, end = part * LENGTH + turn * OWN, N_IN
            if SHARE > 1:
                end = tl.minimum(part * LENGTH + tl.minimum((turn + 1) * OWN, LENGTH), N_IN)
            v = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            if SHARE > 1:  # a count that is found on the device: as a constant a short loop is unrolled into registers
                for k in range(k0, end, TILE_K):
                    v = _shrink_tile(v, tokens, m < n, a, r < ranks, k, end, TILE_K)
            else:
                for i in range(LENGTH // TILE_K):
                    v = _shrink_tile(v, tokens, m < n, a, r < ranks, k0 + i * TILE_K, end, TILE_K)
            tl.store(out[None, :] + m[:, None] * r_stride, v, mask=(m < n)[:, None] & (r < ranks)[None, :])


@triton.jit
def _shrink_row(x, a, live, k0, N_IN: tl.constexpr, LENGTH: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr):
    """[R]: one token against R rows of A. Products stay apart until the end: one reduction, not one a block."""
    v = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
    for i in tl.range(0, LENGTH // BLOCK_K, loop_unroll_factor=2):
        k = k0 + i * BLOCK_K + tl.arange(0, BLOCK_K)
        here = k < N_IN
        rows = tl.load(a[:, None] + k[None, :], mask=live[:, None] & here[None, :], other=0.0)
        v += rows.to(tl.float32) * tl.load(x + k, mask=here, other=0.0).to(tl.float32)[None, :]
    return tl.sum(v, axis=1)


@triton.jit
def _shrink_tile(v, x, live_tokens, a, live, k0, end, TILE_K: tl.constexpr):
    """v [M, R] + numbers [k0, k0 + TILE_K) of a chunk's tokens against those of R rows of A, on tensor cores."""
    k = k0 + tl.arange(0, TILE_K)
    here = k < end
    tokens = tl.load(x[:, None] + k[None, :], mask=live_tokens[:, None] & here[None, :], other=0.0)
    rows = tl.load(a[None, :] + k[:, None], mask=live[None, :] & here[:, None], other=0.0)
    return dot(tokens, rows, v)


@triton.jit
def add_expanded(
    y, partials, arena, rows, first_rank, last_rank, scale, tokens, live_tokens, columns, width, part_stride, r_stride,
    PARTS: tl.constexpr, SHARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """y [M, N] fp32 + scale * V[tokens, ranks of the slice] B^T[., columns]: an adapter's tile of one projection.

    `rows`: places of the site's rows of B^T; `tokens` [M] (M = 1: one token, vector arithmetic), `columns` [N] < width
    of the slice. V is rounded to the adapter's dtype for tensor cores, and stays fp32 for one token.
    """
    for r0 in range(first_rank, last_rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        live = r < last_rank
        b = _rows_of_b(arena, rows, r, live, columns, width)
        if BLOCK_M == 1:
            v = _row_v(partials, tokens, r, live, part_stride, r_stride, PARTS) * scale
            y += tl.sum(v[:, None] * b.to(tl.float32), axis=0)[None, :]
        else:
            v = partials + tokens.to(tl.int64)[:, None] * r_stride + r[None, :]
            sum_v = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for _ in range(PARTS * SHARE):
                sum_v += tl.load(v, mask=live_tokens[:, None] & live[None, :], other=0.0)
                v += part_stride
            y = dot((sum_v * scale).to(b.dtype), b, y)
    return y


@triton.jit
def add_expanded_pair(
    y0, y1, partials, arena, rows, first0, last0, scale0, first1, last1, scale1, token, columns0, columns1, width0,
    width1, part_stride, r_stride, PARTS: tl.constexpr, PAIR_R: tl.constexpr,
):  # fmt: skip
    """Add to two tiles [1, N] of one token, as `add_expanded` does: the loads of both are under way together."""
    for block in range(0, tl.maximum(last0 - first0, last1 - first1), PAIR_R):
        r = block + tl.arange(0, PAIR_R)
        r0, r1 = first0 + r, first1 + r
        live0, live1 = r0 < last0, r1 < last1
        b0 = _rows_of_b(arena, rows, r0, live0, columns0, width0)
        b1 = _rows_of_b(arena, rows, r1, live1, columns1, width1)
        v0 = _row_v(partials, token, r0, live0, part_stride, r_stride, PARTS) * scale0
        v1 = _row_v(partials, token, r1, live1, part_stride, r_stride, PARTS) * scale1
        y0 += tl.sum(v0[:, None] * b0.to(tl.float32), axis=0)[None, :]
        y1 += tl.sum(v1[:, None] * b1.to(tl.float32), axis=0)[None, :]
    return y0, y1


@triton.jit
def _rows_of_b(arena, rows, r, live, columns, width):
    """[R, N]: rows r of B^T."""
    b = arena + tl.load(rows + r, mask=live, other=0).to(tl.int64) * _UNIT
    return tl.load(b[:, None] + columns[None, :], mask=live[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def _row_v(partials, token, r, live, part_stride, r_stride, PARTS: tl.constexpr):
    """[R]: the sum of one token's planes; `token` [1]."""
    p = tl.arange(0, triton.next_power_of_2(PARTS)).to(tl.int64)[:, None]
    v = partials + token.to(tl.int64)[:, None] * r_stride + r[None, :]
    return tl.sum(tl.load(v + p * part_stride, mask=live[None, :] & (p < PARTS), other=0.0), axis=0)


@triton.jit
def slice_of(ends, scales, slot, head_stride, index):
    """[first, last) of the site's ranks that belong to slice `index` of a slot's adapter, its scale. Slot -1: none."""
    at = slot * head_stride + index
    has_adapter = slot >= 0
    first = tl.load(ends + at - 1, mask=has_adapter & (index > 0), other=0)
    last = tl.load(ends + at, mask=has_adapter, other=0)
    return first, last, tl.load(scales + at, mask=has_adapter, other=0.0)


@triton.jit
def _expand(
    chunks, y_stride, part_stride, r_stride, y, partials, arena, ends, scales, row_offsets, head_stride, offset_stride,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, PARTS: tl.constexpr, SHARE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROW_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Program (a single token's tile of columns, row of the chunk table): that tile, or a share of a chunk's tiles."""
    tile, chunk = tl.program_id(0), chunks + tl.program_id(1) * 4
    slot, t0, n, turn = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3)
    if (slot < 0) | (n == 0):
        return
    if n == 1:
        _expand_tile(y, partials, arena, ends, scales, row_offsets, slot, t0, 1, tile, head_stride, offset_stride,
                     y_stride, part_stride, r_stride, W0, W1, W2, PARTS, SHARE, 1, ROW_N, BLOCK_R)  # fmt: skip
    else:
        first = tile * _TURNS + turn
        T0: tl.constexpr = (W0 + BLOCK_N - 1) // BLOCK_N
        T1: tl.constexpr = (W1 + BLOCK_N - 1) // BLOCK_N
        T2: tl.constexpr = (W2 + BLOCK_N - 1) // BLOCK_N
        for i in range(0, T0 + T1 + T2 - first, tl.num_programs(0) * _TURNS):
            _expand_tile(y, partials, arena, ends, scales, row_offsets, slot, t0, n, first + i, head_stride,
                         offset_stride, y_stride, part_stride, r_stride, W0, W1, W2, PARTS, SHARE, BLOCK_M, BLOCK_N,
                         BLOCK_R)  # fmt: skip


@triton.jit
def _expand_tile(
    y, partials, arena, ends, scales, row_offsets, slot, t0, n, tile, head_stride, offset_stride, y_stride, part_stride,
    r_stride, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, PARTS: tl.constexpr, SHARE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Tile `tile` of tokens [t0, t0 + n). No tile reaches over the border of two slices."""
    T0: tl.constexpr = (W0 + BLOCK_N - 1) // BLOCK_N
    T1: tl.constexpr = (W1 + BLOCK_N - 1) // BLOCK_N
    index = (tile >= T0).to(tl.int32) + (tile >= T0 + T1).to(tl.int32)
    width = tl.multiple_of(tl.where(index == 0, W0, tl.where(index == 1, W1, W2)), 16)
    y += tl.multiple_of(tl.where(index == 0, 0, tl.where(index == 1, W0, W0 + W1)), 16)
    first_rank, last_rank, scale = slice_of(ends, scales, slot, head_stride, index)
    if first_rank < last_rank:
        tile -= tl.where(index == 0, 0, tl.where(index == 1, T0, T0 + T1))
        rows = row_offsets + slot.to(tl.int64) * offset_stride
        m, columns = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
        here = y + (t0 + m).to(tl.int64)[:, None] * y_stride + columns[None, :]
        live = (m < n)[:, None] & (columns < width)[None, :]
        out = tl.load(here, mask=live, other=0.0).to(tl.float32)
        out = add_expanded(out, partials, arena, rows, first_rank, last_rank, scale, t0 + m, m < n, columns, width,
                           part_stride, r_stride, PARTS, SHARE, BLOCK_M, BLOCK_R)  # fmt: skip
        tl.store(here, out.to(y.dtype.element_ty), mask=live)
