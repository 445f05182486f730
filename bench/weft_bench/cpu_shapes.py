"""Shapes of the random models, and which adapter each row of a batch uses: pure."""

import math
import random
from collections import ChainMap
from collections.abc import Sequence

from weft_stage.shapes import Shape

SHAPES = {
    "tiny": Shape(hidden=256, layers=4, heads=8, kv_heads=4, inner=704, vocab=4096),
    "small": Shape(hidden=1024, layers=8, heads=16, kv_heads=8, inner=2816, vocab=8192),
    "m135": Shape(hidden=576, layers=30, heads=9, kv_heads=3, inner=1536, vocab=49152),
    "mid": Shape(hidden=2048, layers=16, heads=16, kv_heads=4, inner=5632, vocab=32000),
}
OTHER_FAMILIES = {
    "gemma3-1b": Shape(1152, 26, 4, 1, 6912, 262_144, "Gemma3ForCausalLM", head=256),
    "phi4-mini-half": Shape(3072, 16, 24, 8, 8192, 200_064, "Phi3ForCausalLM"),  # 16 of Phi-4-mini's 32 layers
}
DEVICE_SHAPES = {
    "8B": Shape(hidden=4096, layers=32, heads=32, kv_heads=8, inner=14336, vocab=128256),  # Llama 3.1 8B
    "1B": Shape(hidden=2048, layers=16, heads=32, kv_heads=8, inner=8192, vocab=128256),  # Llama 3.2 1B
    "tiny": Shape(hidden=32, layers=1, heads=2, kv_heads=1, inner=48, vocab=64),  # under the interpreter
}
EVERY_FAMILY = ChainMap(SHAPES, OTHER_FAMILIES)
BASE, IDENTICAL, UNIFORM, SKEWED, DISTINCT = "base", "Identical", "Uniform", "Skewed", "Distinct"
POPULARITIES = (IDENTICAL, UNIFORM, SKEWED, DISTINCT)
ZIPF_RATIO = 1.5
RANK = 16
MIXED_RANKS = (8, 16, 32, 64)


def adapter_of_row(popularity: str, rows: int) -> list[int | None]:
    """Return the adapter of each row, None for the base: Punica's four workloads (section 7).

    Skewed: the i-th most popular of them is 1.5 times as popular as the next one. Raises ValueError.
    """
    match popularity:
        case "base":
            return [None] * rows
        case "Identical" | "Uniform" | "Distinct":
            kinds = {IDENTICAL: 1, UNIFORM: math.ceil(math.sqrt(rows)), DISTINCT: rows}[popularity]
            return [row % kinds for row in range(rows)]
        case "Skewed":
            return list(_skewed(rows))
        case _:
            raise ValueError(f"no popularity is called {popularity!r}")


def distinct(adapters: Sequence[int | None]) -> int:
    """Count the different adapters that a step reads; the base is none."""
    return len({adapter for adapter in adapters if adapter is not None})


def ranks_of(adapters: Sequence[int | None], ranks: Sequence[int] = (RANK,)) -> tuple[list[int], list[int]]:
    """Return the ranks of a batch: of each of its adapters once, and of each of its rows (0: the base).

    Adapter i has rank `ranks[i % len(ranks)]`.
    """
    used = sorted({adapter for adapter in adapters if adapter is not None})
    rows = [0 if adapter is None else ranks[adapter % len(ranks)] for adapter in adapters]
    return [ranks[adapter % len(ranks)] for adapter in used], rows


def prompts(rng: random.Random, count: int, length: int, vocab: int) -> list[list[int]]:
    """Draw prompts of random tokens, none of them a special one (0 to 4)."""
    return [[rng.randrange(5, vocab) for _ in range(length)] for _ in range(count)]


def drawn(rng: random.Random, adapters: int, requests: int, *, zipf: bool) -> list[int]:
    """Draw the adapter of each request: every one of them at least once, the others by popularity 1 / i or alike.

    Raises ValueError with fewer requests than adapters.
    """
    if requests < adapters:
        raise ValueError(f"{requests} requests cannot ask for {adapters} adapters at least once each")
    weights = [1 / (i + 1) if zipf else 1.0 for i in range(adapters)]
    asked = [*range(adapters), *rng.choices(range(adapters), weights, k=requests - adapters)]
    rng.shuffle(asked)
    return asked


def _skewed(rows: int) -> Sequence[int]:
    """Return the rows of each adapter in proportion to 1.5^-k, at least one each until they are used up."""
    shares = [ZIPF_RATIO**-k for k in range(rows)]
    counts = [max(1, round(rows * share / sum(shares))) for share in shares]
    return [k for k, count in enumerate(counts) for _ in range(count)][:rows]
