"""Checks of the device against plain torch: what they share. A check raises `Differs`, or passes."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from weft_bench.gpu_device import Gpu
from weft_kernels.plan import plan_rows
from weft_runner.model.cuda.step import DeviceStep, Shape, shape_of, tiles_of
from weft_runner.model.step import StepInput, StepRow

Check = tuple[str, Callable[[], None]]
Checks = Iterator[Check]
HALVES = (torch.bfloat16, torch.float16)
# What fp64 of the same inputs may differ by, relative to the largest value: sums in another order, and for 16 bits the
# rounding of what is stored and of what goes between two products.
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Differs(Exception):
    """The device computed something else; the message has the first place where."""


@dataclass(frozen=True, slots=True)
class CheckContext:
    """`tiny`: shapes that Triton's interpreter computes in seconds."""

    gpu: Gpu
    tiny: bool

    @property
    def device(self) -> torch.device:
        return self.gpu.device

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The interpreter cuts bf16 off where a GPU rounds it: what is compared there is fp32."""
        return (torch.float32, *HALVES) if self.gpu.is_real else (torch.float32,)

    def of(self, whole: tuple[int, ...], tiny: tuple[int, ...]) -> tuple[int, ...]:
        return tiny if self.tiny else whole


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def assert_close(actual: torch.Tensor, expected: torch.Tensor, relative: float | None = None) -> None:
    """Within `relative` of the largest expected value (and one); NaN is far from everything. Raises Differs."""
    relative = RELATIVE[actual.dtype] if relative is None else relative
    actual, expected = actual.double(), expected.double().to(actual.device)
    allowed = relative * (float(expected.abs().max()) + 1.0) if expected.numel() else 0.0
    wrong = ~((actual - expected).abs() <= allowed)
    _raise_at(wrong, actual, expected, f"more than {allowed:.3g} apart")


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits, NaN too. Raises Differs."""
    wrong = (actual != expected) & ~(actual.isnan() & expected.isnan())
    _raise_at(wrong, actual, expected, "not the same")


def assert_near(actual: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    """|actual - expected| <= relative |expected|, as vectors, row by row. Raises Differs."""
    actual, expected = actual.double(), expected.double().to(actual.device)
    errors = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    wrong = ~(errors <= relative)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        first = f"the first, {row}, by {float(errors[row]):.3g} of its length (allowed {relative:g})"
        raise Differs(f"{int(wrong.sum())} of {len(wrong)} rows are off; {first}")


def _raise_at(wrong: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor, how: str) -> None:
    if bool(wrong.any()):
        index = tuple(wrong.nonzero()[0].tolist())
        told = f"first at {list(index)}: {float(actual[index]):.6g} is not {float(expected[index]):.6g}"
        raise Differs(f"{int(wrong.sum())} of {wrong.numel()} are {how}; {told}")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of a step on random pages: each (position, tokens), and its adapter's slot."""

    step: StepInput
    here: DeviceStep
    n_pages: int

    @classmethod
    def made(
        cls, device: torch.device, rows: list[tuple[int, int]], slots: list[int | None], *, page_tokens: int,
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
        tiles = tiles_of(step, prefill_tokens)
        shape = shape_of(step, tiles, block_m)
        padded = Shape(
            shape.tokens + padding, shape.rows, shape.chunks + padding, shape.tiles, shape.sampled, shape.pages, block_m
        )
        here = DeviceStep(padded, device)
        here.write(step, tiles)
        return cls(step, here, sum(used) + 2)
