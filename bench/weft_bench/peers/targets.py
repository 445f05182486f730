"""Ratios that are aimed at beside the peers, in one run on an otherwise idle machine. Pure."""

from collections.abc import Collection

from weft_bench.cpu_shapes import BASE, DISTINCT, IDENTICAL
from weft_bench.peers.engines import LLAMA, MISTRAL, PEFT, VLLM

DECODE, PREFILL, WHOLE = "decode", "prefill", "whole run"
ROWS, LONG_ROWS = 16, 4  # rows of the cells that are prefill of long prompts alone
AMX, AVX2 = "amx_bf16", "avx2"
BEST_OF = {VLLM, PEFT, LLAMA, MISTRAL}  # a target for the best peer holds where these are among the peers
OF_BEST = ("small", "m135")
Cell = tuple[str, int, str]  # metric, rows, popularity
PREFILLS: tuple[Cell, ...] = tuple((PREFILL, rows, kind) for rows in (ROWS, LONG_ROWS) for kind in (BASE, DISTINCT))

# times as fast as a peer at least, by shape, for weights in bf16 and kernels of level AMX
MIN_RATIO: dict[tuple[str, Cell], dict[str, float]] = {
    (VLLM, (DECODE, ROWS, DISTINCT)): {"tiny": 10, "small": 3.5, "m135": 6},
    (VLLM, (DECODE, ROWS, IDENTICAL)): {"m135": 8},
    (VLLM, (WHOLE, ROWS, DISTINCT)): {"tiny": 10, "small": 6, "m135": 9},
    (VLLM, (PREFILL, ROWS, DISTINCT)): {"tiny": 15, "small": 12, "m135": 15},
    (PEFT, (PREFILL, ROWS, DISTINCT)): {"tiny": 1.8, "small": 1.6, "m135": 1.8},
    (VLLM, (DECODE, ROWS, BASE)): {"tiny": 1.5, "small": 1.5, "m135": 1.5},
    (VLLM, (PREFILL, ROWS, BASE)): {"tiny": 1 / 1.1, "small": 1 / 1.1, "m135": 1 / 1.1},
    (VLLM, (DECODE, 1, BASE)): {"m135": 1.3},
    (VLLM, (DECODE, 1, IDENTICAL)): {"m135": 5},
}
# for weights of as many bytes and kernels of every level
MIN_EQUAL_BYTES_RATIO = {(LLAMA, (DECODE, 1, BASE)): {"m135": 1.0, "mid": 1.0}}
# times as fast as the best peer, by level: the peers without oneDNN have no kernels beyond AVX2
MIN_BEST_RATIO: dict[Cell, dict[str, float]] = {
    (DECODE, ROWS, DISTINCT): {AMX: 8, AVX2: 3}, **{cell: {AMX: 2.5, AVX2: 1.5} for cell in PREFILLS},
}  # fmt: skip
# share of the machine's bound at least, by shape
MIN_SHARE: dict[Cell, dict[str, float]] = {
    (DECODE, ROWS, DISTINCT): dict.fromkeys(OF_BEST, 0.95), (DECODE, 1, BASE): {"m135": 0.85, "mid": 0.85},
    **dict.fromkeys(PREFILLS, dict.fromkeys(OF_BEST, 0.5)),
}  # fmt: skip


def target(peers: Collection[str], cell: Cell, shape: str, dtype: str = "bf16", level: str = AMX) -> str | None:
    """Return a `Line.target` beside the best of these peers; None without a target."""
    if len(peers) > 1:
        holds = dtype == "bf16" and shape in OF_BEST and set(peers) >= BEST_OF
        return at_least(MIN_BEST_RATIO.get(cell, {}).get(level) if holds else None)
    (peer,) = peers
    ratio = MIN_EQUAL_BYTES_RATIO.get((peer, cell), {}).get(shape)
    if dtype == "bf16" and level == AMX:
        ratio = MIN_RATIO.get((peer, cell), {}).get(shape, ratio)
    return at_least(ratio)


def at_least(value: float | None) -> str | None:
    """Return a `Line.target`."""
    return None if value is None else f">= {value:.3g}"
