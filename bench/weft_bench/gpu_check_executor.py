"""The cuda executor against the reference executor: models of all families, prompts, chunks and decode rows mixed.

fp32 shows mistakes: its logits agree to 1e-4 of the largest. bf16 shows what rounding does: 3e-2 of a row's length.
"""

from functools import partial

import torch

from weft.domain.model.config import ModelSpec
from weft_bench.gpu_check import CheckContext, Checks
from weft_bench.gpu_check_models import FAMILIES, TINY_FAMILIES, Pair

# sequence -> (tokens, adapter); steps: how many tokens of each
SEQUENCES: dict[str, tuple[int, int | None]] = {
    "x": (160, 0), "y": (50, 1), "z": (12, None), "u": (25, 2), "v": (25, 2), "w": (9, 3), "t": (9, 4),
}  # fmt: skip
STEPS: tuple[dict[str, int], ...] = (
    {"x": 150, "y": 3},  # chunks of prompts
    {"x": 1, "y": 40, "z": 5},
    {"u": 17, "v": 1, "x": 1},
    {"u": 1, "w": 6, "t": 6, "v": 20},
    {"x": 1, "y": 1, "z": 1, "u": 1, "v": 1, "w": 1, "t": 1},
    {"t": 1, "w": 1, "v": 1, "z": 1},
    {"z": 1},
)
TINY_SEQUENCES: dict[str, tuple[int, int | None]] = {"x": (20, 0), "y": (6, 1), "z": (7, None)}
TINY_STEPS: tuple[dict[str, int], ...] = ({"x": 18, "y": 3}, {"x": 1, "y": 1, "z": 5}, {"y": 1, "z": 1})
ROWS = 8
ROUNDED = ("llama", "qwen3")  # also in bf16


def checks(context: CheckContext) -> Checks:
    for name, spec in (TINY_FAMILIES if context.tiny else FAMILIES).items():
        yield f"{name}, float32", partial(play, context, spec, torch.float32)
        if context.gpu.is_real and name in ROUNDED:
            yield f"{name}, bfloat16", partial(play, context, spec, torch.bfloat16)


def play(context: CheckContext, spec: ModelSpec, dtype: torch.dtype, *, packed: bool = False) -> None:
    """`packed`: with int4 weights. Raises Differs."""
    sequences, steps = (TINY_SEQUENCES, TINY_STEPS) if context.tiny else (SEQUENCES, STEPS)
    adapters = 1 + max(slot for _, slot in sequences.values() if slot is not None)
    pair = Pair.made(context, spec, dtype, ROWS, adapters, graphs=False, packed=packed)
    for key, (length, slot) in sequences.items():
        pair.add(key, length, slot)
    for counts in steps:
        pair.step(counts)
    context.gpu.free()
