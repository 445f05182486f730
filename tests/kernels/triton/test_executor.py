"""The cuda executor against the reference executor: models of all families, prompts, chunks and decode rows mixed."""

import pytest
import torch

from harness.device_models import FAMILIES, LLAMA, Pair
from harness.on_device import DTYPES, EXACT_DTYPES, FP32, name_of, sized
from weft.domain.model.spec import ModelSpec
from weft_stage.gpu_device import Gpu

pytestmark = pytest.mark.gpu

# sequence -> (tokens, adapter); steps: how many tokens of each
SEQUENCES: dict[str, tuple[int, int | None]] = sized(
    gpu={"x": (160, 0), "y": (50, 1), "z": (12, None), "u": (25, 2), "v": (25, 2), "w": (9, 3), "t": (9, 4)},
    interpreted={"x": (20, 0), "y": (6, 1), "z": (7, None)},
)
STEPS: tuple[dict[str, int], ...] = sized(
    gpu=(
        {"x": 150, "y": 3},  # chunks of prompts
        {"x": 1, "y": 40, "z": 5},
        {"u": 17, "v": 1, "x": 1},
        {"u": 1, "w": 6, "t": 6, "v": 20},
        {"x": 1, "y": 1, "z": 1, "u": 1, "v": 1, "w": 1, "t": 1},
        {"t": 1, "w": 1, "v": 1, "z": 1},
        {"z": 1},
    ),
    interpreted=({"x": 18, "y": 3}, {"x": 1, "y": 1, "z": 5}, {"y": 1, "z": 1}),
)
ROWS = 8
ROUNDED = ("llama", "qwen3")  # in bf16, too
WITH_INT4 = sized(gpu=("qwen3", "starcoder2"), interpreted=("starcoder2",))  # a tied head, biases of everything
RECORDED = sized(gpu=17, interpreted=2)


def play(gpu: Gpu, spec: ModelSpec, dtype: torch.dtype, *, packed: bool = False) -> None:
    """`packed`: with int4 weights."""
    adapters = 1 + max(slot for _, slot in SEQUENCES.values() if slot is not None)
    pair = Pair.made(gpu, spec, dtype, ROWS, adapters, graphs=False, packed=packed)
    for key, (length, slot) in SEQUENCES.items():
        pair.add(key, length, slot)
    for counts in STEPS:
        pair.step(counts)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(name, dtype) for name in FAMILIES for dtype in EXACT_DTYPES if dtype == FP32 or name in ROUNDED],
    ids=name_of,
)
def test_logits_are_the_references(gpu: Gpu, family: str, dtype: torch.dtype) -> None:
    play(gpu, FAMILIES[family], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=name_of)
@pytest.mark.parametrize("family", WITH_INT4)
def test_int4_logits_are_those_of_the_numbers_that_its_codes_stand_for(
    gpu: Gpu, family: str, dtype: torch.dtype
) -> None:
    play(gpu, FAMILIES[family], dtype, packed=True)


@pytest.mark.slow
def test_recorded_int4_steps_of_few_rows_and_of_more_are_the_references(gpu: Gpu) -> None:
    pair = Pair.made(gpu, LLAMA, DTYPES[0], RECORDED, RECORDED, graphs=True, packed=True)
    for rows in (RECORDED, 1):
        pair.decode(list(range(rows)), steps=1)
