"""Launches worth compiling for a GPU: our launchers with Llama 3.1 8B's shapes and with small ones (`triton_compile`).

`CASES` says what the kernels of each have to show beside compiling, not spilling and fitting in shared memory. Weights,
pages and activations are meta tensors: a launcher asks for shapes, types, strides.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft_kernels.triton import attention, fused, int4, lora, sampling, tables

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, PAGE = 4096, 14336, 32, 8, 128, 16
LAYERS, SLOTS, VOCAB = 32, 8, 128256
SMS = 132  # of an H100 or H200
QKV, OUT, GATE_UP, DOWN = range(4)

WIDE = "wide loads"  # 16 bytes a load: ld.global.v4 or cp.async of 16
MMA = "mma"  # tensor cores: mma.sync or wgmma
EXACT = "exact"  # no product and sum are fused into one rounding


@dataclass(frozen=True, slots=True)
class Case:
    """`expects`: what each kernel named there has to show; just these have to be launched, by `run`.

    `once`: all launches of a kernel are one variant of it, so that no step waits for a compiler after the first.
    `may_spill`: fp32 is for checks, not for speed: its products keep both operands in registers.
    `usual`: the capabilities that `make test` and `make test-slow` compile it for; `make test-long` has all.
    """

    name: str
    expects: Mapping[str, frozenset[str]]
    run: Callable[[], object]
    once: bool = False
    may_spill: bool = False
    usual: Sequence[int] = (90,)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _table(*shape: int, shifted: bool = False) -> torch.Tensor:
    """int32. `shifted`: a slice of a larger buffer, at no multiple of 16 bytes."""
    n = math.prod(shape)
    return meta(n + 1, dtype=torch.int32)[int(shifted) : n + int(shifted)].view(shape)


def shows(*what: str) -> frozenset[str]:
    return frozenset(what)


# ---- adapters

LLAMA = tables.Layout(
    LAYERS,
    (
        tables.SiteShape(HIDDEN, (HIDDEN, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)),
        tables.SiteShape(HIDDEN, (HIDDEN,)),
        tables.SiteShape(HIDDEN, (INNER, INNER)),
        tables.SiteShape(INNER, (HIDDEN,)),
    ),
    max_rank=64,
)
PHI = tables.Layout(  # 32 heads of 96
    LAYERS,
    (
        tables.SiteShape(3072, (3072, 3072, 3072)),
        tables.SiteShape(3072, (3072,)),
        tables.SiteShape(3072, (8192, 8192)),
        tables.SiteShape(8192, (3072,)),
    ),
    max_rank=64,
)
UNGATED = replace(LLAMA, sites=(*LLAMA.sites[:GATE_UP], tables.SiteShape(HIDDEN, (INNER,)), LLAMA.sites[DOWN]))
SMALL = tables.Layout(
    2,
    (
        tables.SiteShape(96, (96, 48, 48)),
        tables.SiteShape(96, (96,)),
        tables.SiteShape(96, (160, 160)),
        tables.SiteShape(160, (96,)),
    ),
    max_rank=8,
)


def _tables(layout: tables.Layout, layer: int, site: int, dtype: torch.dtype) -> tables.SiteTables:
    return tables.LoraTables(meta(1024, 2, KV_HEADS, PAGE, HEAD_DIM, dtype=dtype), layout, SLOTS).at(layer, site)


def _chunked(tokens: int, block_m: int, *, shifted: bool = False) -> lora.ChunkTable:
    """Decode (chunks of 16 and less): one adapter a token."""
    chunks = tokens if block_m == 16 else tokens // block_m
    return lora.ChunkTable(_table(chunks, 4, shifted=shifted), block_m, chunks)


def _partials(layout: tables.Layout, site: int, chunked: lora.ChunkTable, tokens: int) -> lora.PartialSums:
    tables = _tables(layout, 0, site, torch.bfloat16)
    return lora.planes_of(tables, chunked.chunks, chunked.block_m, tokens, SMS)


def _shrink(
    layout: tables.Layout,
    sites: Sequence[int],
    tokens: int,
    block_m: int,
    layer: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    for site in sites:
        chunked, tables = _chunked(tokens, block_m), _tables(layout, layer, site, dtype)
        x = meta(tokens, layout.sites[site].n_in, dtype=dtype)
        partials = _partials(layout, site, chunked, tokens)
        lora.prepare_shrink(partials, x, tables, chunked)(partials.tensor, x, tables.shrinks)


def _expand(
    layout: tables.Layout,
    sites: Sequence[int],
    tokens: int,
    block_m: int,
    layer: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    for site in sites:
        chunked, tables = _chunked(tokens, block_m), _tables(layout, layer, site, dtype)
        y = meta(tokens, sum(layout.sites[site].widths), dtype=dtype)
        partials = _partials(layout, site, chunked, tokens)
        lora.prepare_expand(y, partials, tables, chunked)(y, partials.tensor, tables.expands)


# ---- products with int4 weights


def _int4(rows: int, n_out: int, dtype: torch.dtype | None = None) -> None:
    packed = meta(n_out // int4.BLOCK_OUT, HIDDEN // 64, int4.WORDS, dtype=torch.int32)
    int4.linear(meta(rows, HIDDEN), packed, n_out, sms=SMS, dtype=dtype)


# ---- attention


def _decode(
    splits: int, *, kv_heads: int = KV_HEADS, heads: int = HEADS, dim: int = HEAD_DIM, layer: int = 0, window: int = 0,
    cap: float = 0.0, dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    n, ints = 64, torch.int32
    out, q = meta(n, heads * dim, dtype=dtype), meta(n, heads, dim, dtype=dtype)
    attention.prepare_decode(
        out, q, meta(1024, LAYERS, 2, kv_heads, PAGE, dim, dtype=dtype), meta(n, 4, dtype=ints), meta(4096, dtype=ints),
        meta(n, dtype=ints), window=window, scale=dim**-0.5, cap=cap, splits=splits,
        scratch=attention.DecodeScratch.make(n, heads, splits, dim, "meta"),
    )(out, q, layer)  # fmt: skip


def _prefill(
    block_m: int, *, kv_heads: int = KV_HEADS, heads: int = HEADS, dim: int = HEAD_DIM, layer: int = 0, window: int = 0,
    cap: float = 0.0, dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    tokens, ints = 2048, torch.int32
    out, q = meta(tokens, heads * dim, dtype=dtype), meta(tokens, heads, dim, dtype=dtype)
    attention.prepare_prefill(
        out, q, meta(1024, LAYERS, 2, kv_heads, PAGE, dim, dtype=dtype), meta(4, 4, dtype=ints), meta(4096, dtype=ints),
        meta(tokens // block_m, 2, dtype=ints), window=window, scale=dim**-0.5, cap=cap, block_m=block_m,
    )(out, q, layer)  # fmt: skip


BLOCK = attention.prefill_block(HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16)


# ---- between


def _pending(
    layout: tables.Layout, site: int, chunked: lora.ChunkTable, tokens: int, layer: int
) -> lora.DeferredExpand:
    """An adapter's part that is still to be added."""
    return lora.DeferredExpand(_partials(layout, site, chunked, tokens), _tables(layout, layer, site, torch.bfloat16))


def _rope_write(
    layout: tables.Layout, tokens: int, block_m: int, *, layer: int = 0, dim: int = HEAD_DIM, rotated: int = 0,
    long: bool = False, growth: tuple[float, int] = (0.0, 1), norm: bool = False, pending: bool = True,
    shifted: bool = False,
) -> None:  # fmt: skip
    heads, kv_heads = (width // dim for width in layout.sites[QKV].widths[:2])
    norms = [meta(dim, dtype=torch.float32) if norm else None for _ in range(2)]
    kv, qkv = meta(1024, LAYERS, 2, kv_heads, PAGE, dim), meta(tokens, (heads + 2 * kv_heads) * dim)
    q, chunked = meta(tokens, heads, dim), _chunked(tokens, block_m, shifted=shifted)
    left = _pending(layout, QKV, chunked, tokens, layer) if pending else None
    fused.prepare_rope_write(
        q, kv, qkv, _table(64, 4, shifted=shifted), _table(4096, shifted=shifted), _table(tokens, shifted=shifted),
        chunked, meta(8192, 2, (rotated or dim) // 2, dtype=torch.float32),
        meta(64, dtype=torch.int32) if long else None, 1e-5, left, growth,
    )(q, qkv, *norms, layer, *lora.expand_arguments(left))  # fmt: skip


def _gate(
    layout: tables.Layout, tokens: int, block_m: int, *, layer: int = 0, activation: str = "silu", pending: bool = True,
    shifted: bool = False,
) -> None:  # fmt: skip
    widths, chunked = layout.sites[GATE_UP].widths, _chunked(tokens, block_m, shifted=shifted)
    out, gate_up = meta(tokens, widths[0]), meta(tokens, sum(widths))
    left = _pending(layout, GATE_UP, chunked, tokens, layer) if pending else None
    launch = fused.prepare_gate(out, gate_up, chunked, left, activation=activation)
    launch(out, gate_up, *lora.expand_arguments(left))


def _embed(hidden: int) -> None:
    fused.embed(meta(64, hidden, dtype=torch.float32), _table(64), meta(VOCAB, hidden))


def _add_norm(rows: int, hidden: int, *, first: bool = False, normed: bool = True, layer_norm: bool = False) -> None:
    residual = meta(rows, hidden, dtype=torch.float32)
    weight = meta(*([2] if layer_norm else []), hidden, dtype=torch.float32) if normed else None
    launch = fused.prepare_add_norm(residual, 1e-5, layer_norm=layer_norm)
    launch(meta(rows, hidden), None if first else meta(rows, hidden), weight)


def _norm(rows: int, hidden: int) -> None:
    y = meta(rows, hidden)
    fused.prepare_norm(y, 1e-5)(meta(rows, hidden), y, meta(hidden, dtype=torch.float32))


def _norm_heads(rows: int) -> None:
    qkv, (q, k) = meta(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM), (n * HEAD_DIM for n in (HEADS, KV_HEADS))
    fused.prepare_norm_heads(qkv, HEADS, KV_HEADS, 1e-5)(
        qkv, meta(q, dtype=torch.float32), meta(k, dtype=torch.float32)
    )


# ---- sampling


def _logits(rows: int, vocab: int) -> torch.Tensor:
    return meta(rows, vocab, dtype=torch.float32)


def _draw(rows: int, vocab: int) -> None:
    bits, (temperature, top_p) = meta(rows, dtype=torch.int64), (meta(rows, dtype=torch.float64) for _ in range(2))
    sampler = sampling.DeviceSampler(rows, vocab, torch.device("meta"))
    sampler.draw(_logits(rows, vocab), _table(rows), bits, temperature, top_p)


def _argmax() -> None:
    sampling.argmax(_logits(64, VOCAB), _table(64), meta(64, dtype=torch.float32))


def _shift(n: int) -> None:
    values = meta(n, dtype=torch.float64)
    sampling.shift(_logits(64, VOCAB), _logits(64, VOCAB), _table(n), _table(n), values)


def _mask() -> None:
    sampling.mask(_logits(64, VOCAB), _table(3), meta(3, -(-VOCAB // 32), dtype=torch.int32))


TILED = shows(WIDE, MMA)
DRAWN = {
    "_likeliest_of_shares": shows(),
    "_likeliest": shows(),
    "_weigh": shows(EXACT),
    "_aim": shows(EXACT),
    "_collect": shows(EXACT),
    "_find": shows(EXACT),
}

# Chunks of 128 tokens, which no engine makes, tiles that no launcher chooses by itself, and what is close to another.
LONG: Sequence[int] = ()

BOTH, QKV_ONLY, DOWN_ONLY = (QKV, DOWN), (QKV,), (DOWN,)
SHOWN_LAYERS = (0, 1, 2, 16, 31)
SHIFTED: Any = [{"layer": layer, "shifted": layer % 2 == 1} for layer in SHOWN_LAYERS]
HEADS_OF_96: Any = {"kv_heads": 32, "heads": 32, "dim": 96}
GEMMA: Any = {"kv_heads": 4, "heads": 8, "dim": 256, "cap": 50.0}
TINY: Any = {"kv_heads": 3, "heads": 9, "dim": 64}  # a group of 3, as of tiny models
FP32 = torch.float32

# fmt: off
CASES = (
    # decode: 64 rows of as many adapters
    Case("shrink_decode", {"_shrink": TILED}, lambda: _shrink(LLAMA, BOTH, 64, 16)),
    Case("shrink_one_row", {"_shrink": TILED}, lambda: _shrink(LLAMA, BOTH, 1, 16), usual=LONG),
    Case("shrink_prefill_64", {"_shrink": TILED}, lambda: _shrink(LLAMA, BOTH, 2048, 64), usual=(80, 90)),
    Case("shrink_prefill_128", {"_shrink": TILED}, lambda: _shrink(LLAMA, BOTH, 8192, 128), usual=LONG),
    Case("shrink_any_layer", {"_shrink": TILED}, lambda: [_shrink(LLAMA, QKV_ONLY, 64, 16, i) for i in SHOWN_LAYERS],
         once=True),
    Case("shrink_small", {"_shrink": TILED}, lambda: _shrink(SMALL, QKV_ONLY, 7, 16)),
    Case("shrink_fp32", {"_shrink": shows()}, lambda: _shrink(SMALL, DOWN_ONLY, 7, 16, dtype=FP32), may_spill=True),
    Case("expand_decode", {"_expand": TILED}, lambda: _expand(LLAMA, BOTH, 64, 16)),
    Case("expand_one_row", {"_expand": TILED}, lambda: _expand(LLAMA, BOTH, 1, 16)),
    Case("expand_prefill_64", {"_expand": TILED}, lambda: _expand(LLAMA, BOTH, 2048, 64)),
    Case("expand_prefill_128", {"_expand": TILED}, lambda: _expand(LLAMA, BOTH, 8192, 128), usual=LONG),
    Case("expand_any_layer", {"_expand": TILED}, lambda: [_expand(LLAMA, QKV_ONLY, 64, 16, i) for i in SHOWN_LAYERS],
         once=True),
    Case("expand_small", {"_expand": TILED}, lambda: _expand(SMALL, QKV_ONLY, 7, 16)),
    Case("expand_fp32", {"_expand": shows()}, lambda: _expand(SMALL, DOWN_ONLY, 7, 16, dtype=FP32), may_spill=True),
    Case("int4_one_row", {"_few_rows": shows(WIDE)}, lambda: _int4(1, 2 * INNER), usual=(80, 90)),
    # split, as where outputs are few; and the head, in fp32
    Case("int4_few_rows", {"_few_rows": shows(WIDE), "_join": shows()},
         lambda: (_int4(8, HIDDEN // 4), _int4(4, VOCAB, FP32))),
    Case("int4_decode", {"_tiles": TILED, "_join": shows()}, lambda: _int4(32, HIDDEN), usual=(80, 90)),
    Case("int4_prefill", {"_tiles": TILED}, lambda: _int4(2048, 2 * INNER)),
    Case("decode_one_split", {"_decode_kernel": TILED}, lambda: _decode(1)),
    Case("decode_8_splits", {"_decode_kernel": TILED}, lambda: _decode(8)),
    Case("decode_window", {"_decode_kernel": TILED}, lambda: _decode(1, window=4096)),
    Case("decode_any_layer", {"_decode_kernel": TILED}, lambda: [_decode(1, layer=i) for i in SHOWN_LAYERS], once=True),
    Case("decode_heads_of_96", {"_decode_kernel": TILED}, lambda: _decode(8, **HEADS_OF_96)),
    Case("decode_capped", {"_decode_kernel": TILED}, lambda: _decode(8, **GEMMA)),
    Case("decode_small", {"_decode_kernel": TILED}, lambda: _decode(2, **TINY)),
    Case("decode_fp32", {"_decode_kernel": shows(WIDE)}, lambda: _decode(2, **TINY, dtype=FP32), may_spill=True),
    Case("prefill_tile_64", {"_prefill_kernel": TILED}, lambda: _prefill(64 // (HEADS // KV_HEADS)), usual=LONG),
    Case("prefill_tile_128", {"_prefill_kernel": TILED}, lambda: _prefill(BLOCK), usual=(80, 90)),
    Case("prefill_window", {"_prefill_kernel": TILED}, lambda: _prefill(BLOCK, window=4096)),
    Case("prefill_any_layer", {"_prefill_kernel": TILED}, lambda: [_prefill(BLOCK, layer=i) for i in SHOWN_LAYERS],
         once=True),
    Case("prefill_heads_of_96", {"_prefill_kernel": TILED},
         lambda: _prefill(attention.prefill_block(32, 32, 96, torch.bfloat16), **HEADS_OF_96, window=2047)),
    Case("prefill_capped", {"_prefill_kernel": TILED},
         lambda: _prefill(attention.prefill_block(8, 4, 256, torch.bfloat16), **GEMMA, window=4096)),
    Case("prefill_small", {"_prefill_kernel": TILED},
         lambda: _prefill(attention.prefill_block(9, 3, 64, torch.bfloat16), **TINY)),
    Case("prefill_fp32", {"_prefill_kernel": shows(WIDE)},
         lambda: _prefill(attention.prefill_block(4, 2, 16, FP32), kv_heads=2, heads=4, dim=16, dtype=FP32),
         may_spill=True, usual=LONG),
    Case("embed", {"_embed": shows()}, lambda: [_embed(hidden) for hidden in (HIDDEN, 96)]),
    Case("add_norm", {"_add_norm": shows(WIDE)}, lambda: [_add_norm(64, HIDDEN, first=x) for x in (True, False)]),
    Case("add_norm_small", {"_add_norm": shows()}, lambda: _add_norm(7, 96)),
    Case("norms_of_families", {"_add_norm": shows(WIDE), "_norm_heads": shows(WIDE)},
         lambda: [_norm(64, HIDDEN), _add_norm(64, HIDDEN, normed=False), _add_norm(64, HIDDEN, layer_norm=True),
                  _norm_heads(64)]),
    Case("rope_write", {"_rope_write": shows(WIDE)},
         lambda: [_rope_write(LLAMA, *shape, pending=False) for shape in ((64, 16), (2048, 64))]),
    Case("rope_write_decode", {"_rope_write": TILED}, lambda: _rope_write(LLAMA, 64, 16), usual=(80, 90)),
    Case("rope_write_prefill_64", {"_rope_write": TILED}, lambda: _rope_write(LLAMA, 2048, 64)),
    Case("rope_write_prefill_128", {"_rope_write": TILED}, lambda: _rope_write(LLAMA, 8192, 128), usual=LONG),
    Case("rope_write_128", {"_rope_write": shows(WIDE)}, lambda: _rope_write(LLAMA, 8192, 128, pending=False),
         usual=LONG),
    Case("rope_write_normed", {"_rope_write": TILED}, lambda: _rope_write(LLAMA, 2048, 64, norm=True)),
    Case("rope_write_any_layer", {"_rope_write": TILED}, lambda: [_rope_write(LLAMA, 64, 16, **x) for x in SHIFTED],
         once=True),
    Case("rope_write_heads_of_96", {"_rope_write": TILED},
         lambda: [_rope_write(PHI, *shape, dim=96) for shape in ((64, 16), (2048, 64))]),
    Case("rope_write_partial", {"_rope_write": TILED}, lambda: _rope_write(LLAMA, 2048, 64, rotated=96, long=True)),
    Case("rope_write_growing", {"_rope_write": TILED}, lambda: _rope_write(LLAMA, 64, 16, growth=(0.1, 8192))),
    Case("rope_write_small", {"_rope_write": TILED}, lambda: _rope_write(SMALL, 7, 16, dim=16)),
    Case("gate", {"_gate": shows(WIDE)},
         lambda: [_gate(LLAMA, *shape, pending=False) for shape in ((64, 16), (2048, 64))]),
    Case("gate_decode", {"_gate": TILED}, lambda: _gate(LLAMA, 64, 16)),
    Case("gate_prefill_64", {"_gate": TILED}, lambda: _gate(LLAMA, 2048, 64)),
    Case("gate_prefill_128", {"_gate": TILED}, lambda: _gate(LLAMA, 8192, 128), usual=LONG),
    Case("gate_128", {"_gate": shows(WIDE)}, lambda: _gate(LLAMA, 8192, 128, pending=False), usual=LONG),
    Case("gate_any_layer", {"_gate": TILED}, lambda: [_gate(LLAMA, 64, 16, **x) for x in SHIFTED],
         once=True),
    Case("gate_gelu", {"_gate": TILED}, lambda: _gate(LLAMA, 2048, 64, activation="gelu")),
    Case("gate_ungated", {"_gate": TILED},
         lambda: [_gate(UNGATED, *shape, activation="gelu") for shape in ((64, 16), (2048, 64))]),
    Case("gate_small", {"_gate": TILED}, lambda: _gate(SMALL, 7, 16), usual=LONG),
    Case("argmax", {"_likeliest_of_shares": shows(WIDE), "_likeliest": shows()}, _argmax),
    Case("shift", {"_shift": shows(EXACT)}, lambda: [_shift(n) for n in (1, 16, 300)], once=True),
    Case("mask", {"_mask": shows()}, _mask, once=True),
    Case("draw", {**DRAWN, "_likeliest_of_shares": shows(WIDE), "_weigh": shows(WIDE, EXACT)},
         lambda: _draw(64, VOCAB)),
    Case("draw_small", DRAWN, lambda: _draw(3, 257), usual=LONG),
)
# fmt: on
