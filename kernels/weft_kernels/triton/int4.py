# pyright: basic, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Products with int4 weights (`weft_kernels.int4`) from their packed form, y[rows, n_out] = x[rows, n_in] W^T.

**Layout.** int32 [n_out / 16, groups, 144]: 16 outputs of a group are 576 bytes side by side, so that a warp reads 512
contiguous ones. First eight words of each output, `[8][16]`: bits 4 j of word i begin the code of input 8 j + i. Then a
word of each output: the bits of its scale, and above them those of its minimum. Outputs are padded to 16 and inputs to
64; what is beyond is multiplied with nothing, or not stored.

**Few rows** (a decode step) are bound by the weights' bytes: a program takes 16 outputs, makes fp32 weights of the
codes in registers and multiplies them with vector arithmetic. **More rows** are multiplied by tensor cores: 16 + q,
which bf16 holds exactly and three operations on bits make, group by group:

    y = y + scale * dot;  y = y + (minimum - 16 scale) * sum of the 64 inputs

so weights are not rounded. Sums are fp32 in both. Where outputs are too few for the device, groups are split over
programs that leave planes, added in a fixed order.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from weft_kernels.int4 import GROUP, quantised
from weft_kernels.triton.dot import dot
from weft_kernels.triton.prepared import PreparedKernel, cdiv, next_power_of_2

BLOCK_OUT = 16  # outputs that lie together
WORDS = 8 * BLOCK_OUT + BLOCK_OUT  # of a group of them
FEW_ROWS = 8  # beyond, the arithmetic of vectors takes longer than reading: 2 + rows operations a weight
TILE_ROWS = (16, 32, 64, 128)
GROUPS = 8  # at a time, with few rows
PROGRAMS_PER_SM = 2
MIN_PART_GROUPS = 16  # a plane costs less than reading them
MAX_GROUP_PARTS = 16
JOINED = 1024  # numbers of a program that adds planes
PACK_NUMBERS = 1 << 22  # quantised at a time, in some 40 bytes each

_GROUP = tl.constexpr(GROUP)
_BLOCK_OUT = tl.constexpr(BLOCK_OUT)
_WORDS = tl.constexpr(WORDS)


def pack(matrix: torch.Tensor) -> torch.Tensor:
    """Pack [n_out, n_in] of any float dtype, on its device."""
    n_out, n_in = matrix.shape
    packed = torch.empty(-(-n_out // BLOCK_OUT), -(-n_in // GROUP), WORDS, dtype=torch.int32, device=matrix.device)
    blocks = max(1, PACK_NUMBERS // (n_in * BLOCK_OUT))
    for begin in range(0, len(packed), blocks):
        _pack_into(packed[begin : begin + blocks], matrix[begin * BLOCK_OUT : (begin + blocks) * BLOCK_OUT])
    return packed


def is_packed(weight: torch.Tensor) -> bool:
    """Whether a weight is packed, or [n_out, n_in] in a float dtype."""
    return weight.dtype == torch.int32


def _pack_into(packed: torch.Tensor, matrix: torch.Tensor) -> None:
    codes, scale, minimum = quantised(torch.nn.functional.pad(matrix, (0, 0, 0, -len(matrix) % BLOCK_OUT)))
    nibbles = codes.long().unflatten(2, (8, 8)) << (4 * torch.arange(8, device=codes.device))[:, None]
    factors = _bits(scale) | _bits(minimum) << 16
    words = torch.cat((nibbles.sum(2), factors), dim=2).unflatten(0, (-1, BLOCK_OUT))  # [blocks, 16, groups, 9]
    words = words.permute(0, 2, 3, 1).flatten(2)
    packed[:] = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)  # with the same bits


def _bits(number: torch.Tensor) -> torch.Tensor:
    """The bits of numbers in bf16, as int64."""
    return number.bfloat16().view(torch.int16).long() & 0xFFFF


def linear(
    x: torch.Tensor, packed: torch.Tensor, n_out: int, *, sms: int, bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None, split_as: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Compute x [rows, n_in] W^T + bias [n_out]: [rows, n_out] in `dtype` (that of x). `sms`: the device's
    multiprocessors.

    `split_as`: outputs of the matrix that this is a piece of, whose results each are these bits; 0: it is whole.
    """
    rows, n_in = x.shape
    blocks, groups, _ = packed.shape
    assert groups == cdiv(n_in, GROUP), (x.shape, packed.shape)
    assert blocks == cdiv(n_out, BLOCK_OUT), (n_out, packed.shape)
    assert x.stride(1) == 1, x.stride()
    y = torch.empty(rows, n_out, dtype=dtype or x.dtype, device=x.device)
    block_m, block_n = _tile(rows)
    programs = cdiv(n_out, block_n)
    parts = _parts(cdiv(split_as or n_out, block_n), groups, sms) if rows <= TILE_ROWS[2] else 1
    planes = y if parts == 1 else torch.empty(parts, rows, n_out, dtype=torch.float32, device=x.device)
    to, added = planes, bias if parts == 1 else None
    length = cdiv(cdiv(groups, parts), MIN_PART_GROUPS) * MIN_PART_GROUPS  # of a part, in groups
    sizes = (rows, n_in, n_out, groups, length, x.stride(0))
    if rows <= FEW_ROWS:
        _few_rows_of(block_m)((programs, parts, 1), to, x, packed, added, *sizes)
    else:
        _tiles_of(block_m, block_n)((programs, parts, cdiv(rows, block_m)), to, x, packed, added, *sizes)
    if parts > 1:
        _join_of(parts)((cdiv(rows * n_out, JOINED), 1, 1), y, planes, bias, rows * n_out, n_out)
    return y


@cache
def _few_rows_of(block_m: int) -> PreparedKernel:
    warps = 2 if block_m == 2 else 4
    return PreparedKernel(_few_rows, BLOCK_M=block_m, GROUPS=GROUPS, num_warps=warps, enable_fp_fusion=True)


@cache
def _tiles_of(block_m: int, block_n: int) -> PreparedKernel:
    return PreparedKernel(
        _tiles, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=8 if block_m == 128 else 4, num_stages=3,
        enable_fp_fusion=True,
    )  # fmt: skip


@cache
def _join_of(parts: int) -> PreparedKernel:
    return PreparedKernel(_join, PARTS=parts, BLOCK=JOINED)


def _tile(rows: int) -> tuple[int, int]:
    """The rows and outputs of a program. For one row a thread would have 2 bytes of x, which none copies ahead."""
    up = next_power_of_2(rows)
    if rows <= FEW_ROWS:
        return max(up, 2), BLOCK_OUT
    return (128, 128) if up >= 128 else (up, 64)


def _parts(programs: int, groups: int, sms: int) -> int:
    """The number of parts of the groups with which programs keep all multiprocessors busy; as many as are filled."""
    wanted = max(1, min(MAX_GROUP_PARTS, PROGRAMS_PER_SM * sms // programs))
    length = cdiv(cdiv(groups, wanted), MIN_PART_GROUPS) * MIN_PART_GROUPS
    return cdiv(groups, length)


# ---- on the device


@triton.jit(do_not_specialize=["rows", "groups", "length"])
def _few_rows(
    y, x, packed, bias, rows, n_in, n_out, groups, length, x_stride, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr
):
    """Program (16 outputs, part of the groups): rows [M] of x, all of them."""
    block, part = tl.program_id(0), tl.program_id(1)
    out, i, m = tl.arange(0, _BLOCK_OUT), tl.arange(0, 8), tl.arange(0, BLOCK_M)
    rows_of_x = x + m.to(tl.int64)[:, None, None] * x_stride
    live = (m < rows)[:, None, None]
    g0 = part * length
    acc = tl.zeros([BLOCK_M, GROUPS, 8, _BLOCK_OUT], tl.float32)
    for g1 in tl.range(g0, tl.minimum(g0 + length, groups), GROUPS, num_stages=3):
        g = g1 + tl.arange(0, GROUPS)
        here = packed + (block.to(tl.int64) * groups + g) * _WORDS
        inside = g < groups
        words = tl.load(
            here[:, None, None] + (i[:, None] * _BLOCK_OUT + out[None, :])[None], mask=inside[:, None, None], other=0
        )
        factors = tl.load(here[:, None] + 8 * _BLOCK_OUT + out[None, :], mask=inside[:, None], other=0)
        scale, minimum = _scale_of(factors)
        offset = (minimum - 16.0 * scale)[:, None, :]
        scale = scale[:, None, :]
        for j in tl.static_range(8):
            k = g[:, None] * _GROUP + 8 * j + i[None, :]  # [G, 8]
            inputs = tl.load(rows_of_x + k[None], mask=live & (k < n_in)[None], other=0.0).to(tl.float32)
            # Bits 19 to 22 of 16.0: 16 + q.
            code = (words << 19 - 4 * j) if 4 * j <= 19 else (words >> 4 * j - 19)
            weights = ((code & 0x780000) | 0x41800000).to(tl.float32, bitcast=True) * scale + offset
            acc += weights[None] * inputs[:, :, :, None]
    total = tl.sum(tl.reshape(acc, (BLOCK_M, GROUPS * 8, _BLOCK_OUT)), axis=1)  # [M, 16]
    _store(y, total, bias, part, tl.arange(0, BLOCK_M), block * _BLOCK_OUT + out, rows, n_out)


@triton.jit(do_not_specialize=["rows", "groups", "length"])
def _tiles(
    y, x, packed, bias, rows, n_in, n_out, groups, length, x_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Program (outputs, part of the groups, rows): [M, N], a group at a time."""
    part = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, _GROUP)
    i, j = tl.arange(0, 8), tl.arange(0, 8)
    live = (m < rows)[:, None]
    stored = n < tl.cdiv(n_out, _BLOCK_OUT) * _BLOCK_OUT
    lines = packed + (n // _BLOCK_OUT).to(tl.int64) * groups * _WORDS
    codes = lines[None, :] + i[:, None] * _BLOCK_OUT + (n % _BLOCK_OUT)[None, :]  # [8, N]
    factors = lines + 8 * _BLOCK_OUT + n % _BLOCK_OUT
    inputs = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    g0 = part * length
    for g in range(g0, tl.minimum(g0 + length, groups)):
        a = tl.load(inputs + g * _GROUP, mask=live & (k < n_in - g * _GROUP)[None, :], other=0.0)
        words = tl.load(codes + g * _WORDS, mask=stored[None, :], other=0)
        scale, minimum = _scale_of(tl.load(factors + g * _WORDS, mask=stored, other=0))
        up, down = tl.maximum(3 - 4 * j, 0)[:, None, None], tl.maximum(4 * j - 3, 0)[:, None, None]
        bits = ((words[None] << up >> down) & 0x78) | 0x4180  # bits 3 to 6 of 16.0 in bf16: 16 + q, [8, 8, N]
        b = tl.reshape(bits, (_GROUP, BLOCK_N)).to(tl.int16).to(tl.bfloat16, bitcast=True).to(a.dtype)
        dots = dot(a, b, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        total = tl.sum(a.to(tl.float32), axis=1)
        acc += dots * scale[None, :] + total[:, None] * (minimum - 16.0 * scale)[None, :]
    _store(y, acc, bias, part, m, n, rows, n_out)


@triton.jit
def _scale_of(factors):
    """Scale and minimum in fp32, from the bits of both in bf16."""
    return (factors << 16).to(tl.float32, bitcast=True), (factors & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _store(y, acc, bias, part, m, n, rows, n_out):
    """acc [M, N] to rows m and columns n of y, or of the part's plane."""
    if bias is not None:
        acc += tl.load(bias + n, mask=n < n_out, other=0.0).to(tl.float32)[None, :]
    to = y + (part * rows + m).to(tl.int64)[:, None] * n_out + n[None, :]
    tl.store(to, acc.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (n < n_out)[None, :])


@triton.jit(do_not_specialize=["count"])
def _join(y, planes, bias, count, n_out, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """y = the sum of the planes, in their order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(PARTS):
        total += tl.load(planes + part * count.to(tl.int64) + at, mask=live, other=0.0)
    if bias is not None:
        total += tl.load(bias + at % n_out, mask=live, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=live)
