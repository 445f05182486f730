"""Captured decode steps: whatever the capture had, a replay may have more adapters, fewer, others, in other slots.

Everything is recorded before any adapter is there, so that each replay has more than its capture had (SGLang #28371
dropped segments here).
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from weft.domain.model.config import ModelSpec
from weft_bench.gpu_check import CheckContext, Checks, assert_same, short
from weft_bench.gpu_check_models import (
    ADAPTERS,
    LLAMA,
    PAGE_TOKENS,
    TINY,
    HostAdapter,
    Pair,
    assert_logits,
    device_executor,
    host_weights,
)
from weft_bench.gpu_models import StepOf, random_tokens, step_of

ROWS, TINY_ROWS = 17, 2
REPLAYS = 3
SAME_RANKS = 100 * len(ADAPTERS)  # a number whose adapter has the ranks of number 0


def checks(context: CheckContext) -> Checks:
    spec = TINY if context.tiny else replace(LLAMA, windows=(0, 40, 0))
    (rows,) = context.of((ROWS,), (TINY_ROWS,))
    for dtype in (torch.float32, torch.bfloat16) if context.gpu.is_real else (torch.float32,):
        pair = Pair.made(context, spec, dtype, rows, rows, graphs=True)
        name = short(dtype)
        for label, slots in _mixtures(rows):
            yield f"{name}, {label}", partial(pair.decode, slots, steps=1 if context.tiny else 3)
        for n in range(1, rows):
            yield f"{name}, {n} of at most {rows} rows", partial(pair.decode, _holes(n), steps=1)
        yield f"{name}, another adapter in the same slot and pages", partial(_replaced, pair, spec, rows)
        yield f"{name}, an adapter in a slot that was empty", partial(_added, pair, spec, rows)
        yield f"{name}, a step advances, token by token", partial(_advanced, pair, rows)
        yield f"{name}, a replay gives the same bits again", partial(_again, pair, rows)
        yield f"{name}, captured as eager", partial(_as_eager, context, pair, spec, dtype, rows)
        del pair
        context.gpu.free()


def _mixtures(rows: int) -> list[tuple[str, list[int | None]]]:
    """One after the other on the same graphs."""
    return [
        ("all rows of one adapter", [0] * rows),
        ("each row its own adapter: more than ever before", list(range(rows))),
        ("each row its own, in other slots", list(reversed(range(rows)))),
        ("fewer adapters, and rows of the base", _holes(rows)),
        ("the base alone", [None] * rows),
        ("one adapter again", [rows - 1] * rows),
    ]


def _holes(rows: int) -> list[int | None]:
    return [None if row % 3 == 1 else row // 2 for row in range(rows)]


def _replaced(pair: Pair, spec: ModelSpec, rows: int) -> None:
    pair.decode([0] * rows, steps=1)
    before = pair.device.lent[0]
    pair.evict(0)
    pair.load(0, HostAdapter.made(spec, SAME_RANKS, pair.dtype))  # other numbers, the same ranks
    assert pair.device.lent[0] == before, "the pages are others: this shows nothing"
    pair.decode([0, *range(1, rows)], steps=1)


def _added(pair: Pair, spec: ModelSpec, rows: int) -> None:
    """The slot beyond all others, then it is empty again: whoever names it has no adapter."""
    pair.load(rows, HostAdapter.made(spec, 77, pair.dtype))
    pair.decode([rows, *range(1, rows)], steps=1)
    pair.evict(rows)
    pair.decode([*range(1, rows), None], steps=1)


def _advanced(pair: Pair, rows: int) -> None:
    """The same step object with new tokens and positions, as the engine runs a standing batch."""
    tokens = [random_tokens(random.Random(7), rows, pair.vocab) for _ in range(REPLAYS)]
    logits = list[list[torch.Tensor]]()
    for driven in pair.both:
        driven.drop_all()
        parts = [StepOf([token], 0, driven.deck.deal(1), row) for row, token in enumerate(tokens[0])]
        step, found = step_of(parts, PAGE_TOKENS), list[torch.Tensor]()
        for position, each in enumerate(tokens):
            step.advance(each, [position] * rows)
            found.append(driven.executor.run(step).clone())
        logits.append(found)
        for part in parts:
            driven.deck.back(part.pages)
    for actual, expected in zip(*logits, strict=True):
        assert_logits(actual, expected, pair.dtype)


def _again(pair: Pair, rows: int) -> None:
    pair.device.drop_all()
    step = step_of([StepOf([row], 0, pair.device.deck.deal(1), row) for row in range(rows)], PAGE_TOKENS)
    first = pair.device.executor.run(step).clone()
    for _ in range(REPLAYS):
        assert_same(pair.device.executor.run(step), first)
    for row in step.rows:
        pair.device.deck.back(row.pages)


def _as_eager(context: CheckContext, pair: Pair, spec: ModelSpec, dtype: torch.dtype, rows: int) -> None:
    """The same step without graphs: other sizes of launches, so not the same bits."""
    eager = device_executor(context, spec, host_weights(spec, dtype), dtype, rows, rows + 1, graphs=False)
    for number in range(1, rows):
        eager.load(number, HostAdapter.made(spec, number, dtype))
    slots: Sequence[int | None] = [None, *range(1, rows)]
    found = list[torch.Tensor]()
    for driven in (pair.device, eager):
        driven.drop_all()
        step = step_of([StepOf([9], 0, driven.deck.deal(1), slot) for slot in slots], PAGE_TOKENS)
        found.append(driven.executor.run(step).clone())
        for row in step.rows:
            driven.deck.back(row.pages)
    assert_logits(found[0], found[1], dtype)
