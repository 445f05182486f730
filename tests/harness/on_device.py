"""What tests of the device share: which device it is, how large cases are there, and how near results have to be.

The device is this machine's CPU under Triton's interpreter, or a GPU (TRITON_INTERPRET=0, as `make gpu-check` sets it).
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import triton

from harness.numerics import record
from weft_kernels.plan import plan_rows
from weft_runner.model import StepInput, StepRow
from weft_runner.model.cuda.step import DeviceStep, StepTables

INTERPRETED: bool = triton.knobs.runtime.interpret
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DEPTH = 3  # layers of most models here
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What the same inputs in fp64 may differ by. `stored`: of each number; the others of a row's length or largest.

    `product`: sums in another order. `lora`: two of them, and the rounding of what goes between. `attention`: the
    weights of keys are rounded before they meet the values. `logits`: of a whole model of DEPTH layers, where each
    kernel rounds once.
    """

    stored: float
    product: float
    lora: float
    attention: float
    logits: float


# A GPU rounds bf16 to the nearest, the interpreter cuts it off, by up to 2 ** -7 of a number (`product`: half as much
# again for what comes before); a GPU's exp2 and rsqrt are approximations.
TOLERANCES = (
    {
        FP32: Tolerance(5e-6, 1e-5, 1e-5, 2e-6, 1e-4),
        BF16: Tolerance(2.0**-7 * 1.001, 1.5 * 2.0**-7, 2e-2, 1.5e-2, 3e-2),
        FP16: Tolerance(2.0**-10, 3e-3, 3e-3, 2e-3, 4e-3),
    }
    if INTERPRETED
    else {
        FP32: Tolerance(5e-6, 1e-5, 1e-5, 2e-5, 1e-4),
        BF16: Tolerance(2.0**-8 * 1.001, 1e-2, 2e-2, 1e-2, 4.5e-2),
        FP16: Tolerance(2.0**-10, 3e-3, 3e-3, 2e-3, 4e-3),
    }
)
DTYPES = tuple(TOLERANCES)
EXACT_DTYPES = (FP32,) if INTERPRETED else (FP32, BF16)  # of whole models: cut off layer by layer, bf16 drifts


def sized(*, gpu: T, interpreted: T) -> T:
    """What suits the device: a GPU gets the sizes of models, the interpreter what it computes in seconds."""
    return interpreted if INTERPRETED else gpu


def name_of(value: object) -> str:
    """Name a parameter in a test's name."""
    return str(value).removeprefix("torch.")


def assert_close(actual: torch.Tensor, expected: torch.Tensor, relative: float | None = None) -> None:
    """Assert a distance of at most `relative` (LoRA's) of the largest expected value and one; NaN is far from all."""
    relative = TOLERANCES[actual.dtype].lora if relative is None else relative
    name = f"Triton in {name_of(actual.dtype)}"
    actual, expected = actual.double(), expected.double().to(actual.device)
    largest = float(expected.abs().max()) + 1.0 if expected.numel() else 1.0
    allowed = relative * largest
    if expected.numel():
        record(f"{name}, of the largest", float((actual - expected).abs().max()) / largest, relative)
    _assert_none(~((actual - expected).abs() <= allowed), actual, expected, f"more than {allowed:.3g} apart")


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert the same bits, NaN too."""
    expected = expected.to(actual.device)
    wrong = (actual != expected) & ~(actual.isnan() & expected.isnan())
    _assert_none(wrong, actual, expected, "not the same")


def assert_near(actual: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    """Assert |actual - expected| <= relative |expected|, as vectors, row by row."""
    name = f"Triton in {name_of(actual.dtype)}"
    actual, expected = actual.double(), expected.double().to(actual.device)
    errors = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    if errors.numel():
        record(f"{name}, of a row", float(errors.max()), relative)
    wrong = (~(errors <= relative)).nonzero()
    assert not len(wrong), (
        f"{len(wrong)} of {errors.numel()} rows are off; the first, {wrong[0].tolist()}, "
        f"by {float(errors[tuple(wrong[0].tolist())]):.3g} of its length (allowed {relative:g})"
    )


def assert_logits(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, layers: int = DEPTH) -> None:
    """Compare a model in `dtype`: fp32 shows mistakes, by its largest logit; 16 bits what rounding does, row by row.

    Roundings of different layers do not know of each other: their sum grows with the root of the number of layers
    (rounded to bf16 where kernels do, plain torch is off by 0.018 of a row with 3 layers, 0.030 with 8, 0.043 with 16;
    of 980 rows with 3 layers half by 0.016, ten by more than 0.031, one by 0.037).
    """
    if dtype == FP32:
        assert_close(actual, expected, TOLERANCES[dtype].logits)
    else:
        assert_near(actual, expected, TOLERANCES[dtype].logits * math.sqrt(max(layers, DEPTH) / DEPTH))


def _assert_none(wrong: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor, how: str) -> None:
    places = wrong.nonzero()
    if len(places):
        at = tuple(places[0].tolist())
        first = f"first at {list(at)}: {float(actual[at]):.6g} is not {float(expected[at]):.6g}"
        raise AssertionError(f"{len(places)} of {wrong.numel()} are {how}; {first}")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of a step on random pages: each (position, tokens), and its adapter's slot."""

    step: StepInput
    here: DeviceStep
    n_pages: int

    @classmethod
    def made(
        cls, device: torch.device, rows: Sequence[tuple[int, int]], slots: Sequence[int | None], *, page_tokens: int,
        block_m: int = 16, prefill_tokens: int = 1, padding: int = 0,
    ) -> "Rows":  # fmt: skip
        """`padding`: tokens and chunks that the step does not have, as in a captured one. Two pages are nobody's."""
        used = [-(-(position + count) // page_tokens) for position, count in rows]
        free = list(range(sum(used) + 2))
        random.Random(len(rows)).shuffle(free)
        step_rows, start = list[StepRow](), 0
        for (position, count), n in zip(rows, used, strict=True):
            pages = tuple(free.pop() for _ in range(n))
            step_rows.append(StepRow(start, start + count, position, pages, samples=True))
            start += count
        per_token = [slot for slot, (_, count) in zip(slots, rows, strict=True) for _ in range(count)]
        ranks = {slot: 1 for slot in slots if slot is not None}
        step = StepInput([0] * start, tuple(step_rows), plan_rows(per_token, ranks))
        tables = StepTables.of(step, block_m, prefill_tokens)
        shape = tables.shape
        padded = replace(
            shape, tokens=shape.tokens + padding, chunks=shape.chunks + padding, turns=shape.turns + padding
        )
        here = DeviceStep(padded, device)
        here.write(tables)
        return cls(step, here, sum(used) + 2)
