"""The kernels between products and attention, with adapters' parts still to be added: norms, rotation, pages, silu."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from weft_bench.gpu_check import CheckContext, Checks, Rows, assert_close, assert_same, short
from weft_bench.gpu_check_adapters import Loaded, Slots
from weft_kernels.triton.fused import add_norm, embed, rope_write, silu_mul
from weft_kernels.triton.lora import DeferredExpand
from weft_kernels.triton.tables import Layout, SiteShape
from weft_runner.model.cuda.executor import DECODE_CHUNK, PROMPT_CHUNK

PAGE_TOKENS, LAYERS, MAX_RANK = 16, 2, 64
POSITIONS = 4096
N_IN, TINY_N_IN = 1024, 64  # of what was shrunk
RANKS = ((16, 16, 16), (8, None, 64), (None, 33, None), (64, 64, 64), (None, None, None))
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Heads:
    """Of a family: q heads, k and v heads, their size; `normed`: each head is normed before it is rotated."""

    heads: int
    kv_heads: int
    dim: int
    normed: bool = False


FAMILIES = (Heads(32, 8, 128), Heads(16, 16, 64, normed=True), Heads(16, 2, 32), Heads(8, 1, 128, normed=True))
TINY_FAMILIES = (Heads(2, 1, 16, normed=True),)


def checks(context: CheckContext) -> Checks:
    families = TINY_FAMILIES if context.tiny else FAMILIES
    for dtype in (torch.float32, torch.bfloat16) if context.tiny else context.dtypes:
        for hidden in context.of((96, 4096, 5120), (80,)):
            yield f"{short(dtype)}, embed, hidden {hidden}", partial(_embed, context, dtype, hidden)
            yield f"{short(dtype)}, add and norm, hidden {hidden}", partial(_add_norm, context, dtype, hidden)
        for label, rows, slots, block_m in _steps(context):
            for family in families if dtype != torch.float16 else families[:1]:
                name = f"{short(dtype)}, rotation, {label}, {family.heads} heads, {family.kv_heads} kv, {family.dim}"
                yield name, partial(_rope, context, dtype, family, rows, slots, block_m)
            for inner in context.of((1040, 14336), (48,)):
                yield (
                    f"{short(dtype)}, silu, {label}, inner {inner}",
                    partial(_silu, context, dtype, inner, rows, slots, block_m),
                )


def _steps(context: CheckContext) -> list[tuple[str, list[tuple[int, int]], list[int | None], int]]:
    """(what it is, rows as (position, tokens), their slots, tokens of a chunk)."""
    n, prompt = context.of((64, 300), (5, 20))
    ones = [(7 * row % 90, 1) for row in range(n)]
    mixed: list[int | None] = [None if row % 5 == 4 else row % len(RANKS) for row in range(n)]
    return [
        ("rows of many adapters", ones, sorted(mixed, key=lambda slot: -1 if slot is None else slot), DECODE_CHUNK),
        ("rows of one adapter", ones, [0] * n, DECODE_CHUNK),
        ("rows of the base", ones, [None] * n, DECODE_CHUNK),
        ("a prompt and rows", [(5, prompt), *ones[:3]], [3, 1, None, 0], PROMPT_CHUNK),
    ]


def _embed(context: CheckContext, dtype: torch.dtype, hidden: int) -> None:
    table = torch.randn(7, hidden, device=context.device).to(dtype)
    tokens = torch.tensor([6, 0, 3, 3, 5], dtype=torch.int32, device=context.device)
    residual = torch.full((5, hidden), math.nan, device=context.device)
    embed(residual, tokens, table)
    assert_same(residual, table[tokens.long()].float())


def _add_norm(context: CheckContext, dtype: torch.dtype, hidden: int) -> None:
    residual, y = (torch.randn(9, hidden, device=context.device) for _ in range(2))
    weight, y = torch.rand(hidden, device=context.device) + 0.5, y.to(dtype)
    for added in (None, y):
        x, here = torch.full_like(residual, math.nan, dtype=dtype), residual.clone()
        add_norm(x, here, added, weight, EPS)
        expected = residual if added is None else residual + added.float()
        assert_same(here, expected)
        assert_close(x, _normed(expected.double(), weight))


def _rope(
    context: CheckContext, dtype: torch.dtype, family: Heads, rows: list[tuple[int, int]], slots: list[int | None],
    block_m: int,
) -> None:  # fmt: skip
    heads, kv_heads, dim = family.heads, family.kv_heads, family.dim
    made = Rows.made(context.device, rows, slots, page_tokens=PAGE_TOKENS, block_m=block_m, padding=2)
    widths = (heads * dim, kv_heads * dim, kv_heads * dim)
    loaded, x, qkv = _projected(context, dtype, made, widths)
    tokens = len(made.step.tokens)
    expected = _dense(loaded, qkv, x, made, slots).view(-1, heads + 2 * kv_heads, dim)
    qkv[tokens:] = math.nan
    kv = torch.randn(made.n_pages, LAYERS, 2, kv_heads, PAGE_TOKENS, dim, device=context.device).to(dtype)
    q = torch.full((len(qkv), heads, dim), math.nan, device=context.device, dtype=dtype)
    norms = [torch.rand(dim, device=context.device) + 0.5 if family.normed else None for _ in range(2)]
    angles = torch.rand(POSITIONS, dim // 2, device=context.device) * 6
    cos_sin, before, here = torch.stack((angles.cos(), angles.sin()), dim=1), kv.clone(), made.here
    rope_write(
        q, kv, qkv, here.rows, here.pages, here.row_of, here.chunked, cos_sin, layer=LAYERS - 1, q_norm=norms[0],
        k_norm=norms[1], eps=EPS, heads=heads, pending=_pending(loaded, x, made, slots),
    )  # fmt: skip
    turned = _rotated(expected, family, norms, cos_sin, _positions(rows, context.device))
    assert_close(q[:tokens], turned[:, :heads])
    assert_same(q[tokens:], torch.full_like(q[tokens:], math.nan))
    _assert_written(kv, before, made, turned[:, heads:])


def _assert_written(kv: torch.Tensor, before: torch.Tensor, made: Rows, expected: torch.Tensor) -> None:
    """Keys and values [T, 2 N, D] at their pages, and nothing else anywhere."""
    token, untouched = 0, torch.ones(kv.shape[:1] + kv.shape[4:5], dtype=torch.bool, device=kv.device)
    for row in made.step.rows:
        for position in range(row.position, row.context):
            page, inside = row.pages[position // PAGE_TOKENS], position % PAGE_TOKENS
            assert_close(kv[page, LAYERS - 1, :, :, inside].flatten(0, 1), expected[token])
            untouched[page, inside], token = False, token + 1
    assert_same(kv[:, 0], before[:, 0])
    here, there = (cache[:, LAYERS - 1].permute(0, 3, 1, 2, 4)[untouched] for cache in (kv, before))
    assert_same(here, there)


def _silu(
    context: CheckContext, dtype: torch.dtype, inner: int, rows: list[tuple[int, int]], slots: list[int | None],
    block_m: int,
) -> None:  # fmt: skip
    made = Rows.made(context.device, rows, slots, page_tokens=PAGE_TOKENS, block_m=block_m, padding=2)
    loaded, x, gate_up = _projected(context, dtype, made, (inner, inner))
    expected = _dense(loaded, gate_up, x, made, slots)
    out = torch.full((len(gate_up), inner), math.nan, device=context.device, dtype=dtype)
    silu_mul(out, gate_up, made.here.chunked, pending=_pending(loaded, x, made, slots))
    tokens = len(made.step.tokens)
    gate, up = expected[:, :inner], expected[:, inner:]
    assert_close(out[:tokens], gate * torch.sigmoid(gate) * up)
    assert_same(out[tokens:], torch.full_like(out[tokens:], math.nan))


def _projected(
    context: CheckContext, dtype: torch.dtype, made: Rows, widths: tuple[int, ...]
) -> tuple[Loaded, torch.Tensor, torch.Tensor]:
    """Adapters of a site of these widths, what they shrink, and the base's product: padding included."""
    n_in, tokens = TINY_N_IN if context.tiny else N_IN, made.here.shape.tokens
    torch.manual_seed(tokens)
    loaded = Loaded.made(context, Layout(1, (SiteShape(n_in, widths),), MAX_RANK), RANKS, dtype)
    x, y = (torch.randn(tokens, size, device=context.device).to(dtype) for size in (n_in, sum(widths)))
    return loaded, x, y


def _token_slots(made: Rows, slots: Slots) -> list[int | None]:
    return [slot for row, slot in zip(made.step.rows, slots, strict=True) for _ in range(row.end - row.start)]


def _dense(loaded: Loaded, y: torch.Tensor, x: torch.Tensor, made: Rows, slots: Slots) -> torch.Tensor:
    """The projection with adapters, of the step's own tokens."""
    return loaded.dense(y, x, _token_slots(made, slots), 0, 0)[: len(made.step.tokens)]


def _pending(loaded: Loaded, x: torch.Tensor, made: Rows, slots: Slots) -> DeferredExpand | None:
    """As the engine leaves it; a step of the base has none."""
    if all(slot is None for slot in slots):
        return None
    return DeferredExpand(loaded.shrunk(x, made.here.chunked, 0, 0), loaded.tables.at(0, 0))


def _positions(rows: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(position, position + count) for position, count in rows]).to(device)


def _rotated(
    qkv: torch.Tensor, family: Heads, norms: Sequence[torch.Tensor | None], cos_sin: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """[T, heads + 2 N, D] in fp64: q and k normed and rotated, v as it is."""
    heads, turned = family.heads, family.heads + family.kv_heads
    if norms[0] is not None and norms[1] is not None:
        q, k = _normed(qkv[:, :heads], norms[0]), _normed(qkv[:, heads:turned], norms[1])
        qkv = torch.cat((q, k, qkv[:, turned:]), dim=1)
    cos, sin = (cos_sin[positions][:, half].double()[:, None] for half in (0, 1))
    low, high = qkv[:, :turned].chunk(2, dim=-1)
    both = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    return torch.cat((both, qkv[:, turned:]), dim=1)


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()
