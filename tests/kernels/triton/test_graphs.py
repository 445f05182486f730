"""Captured steps: whatever the capture had, a replay may have more adapters, fewer, others, in other slots.

Everything is recorded before any adapter is there, so that each replay has more than its capture had (SGLang #28371
dropped segments here). The tests share one pair of executors: each leaves it with the adapters it found.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

import pytest
import torch

from harness.device_models import ADAPTERS, LLAMA, PAGE_TOKENS, HostAdapter, Pair
from harness.on_device import EXACT_DTYPES, assert_logits, assert_same, name_of, sized
from weft.domain.model.spec import LayerSpec
from weft_stage.gpu_device import Gpu
from weft_stage.gpu_models import StepOf, random_tokens, step_of

pytestmark = pytest.mark.gpu

SPEC = sized(gpu=replace(LLAMA, by_layer=(LayerSpec(), LayerSpec(40), LayerSpec())), interpreted=LLAMA)
ROWS = sized(gpu=17, interpreted=2)
STEPS = sized(gpu=3, interpreted=1)
REPLAYS = 3
SAME_RANKS = 100 * len(ADAPTERS)  # a number whose adapter has the ranks of number 0


def holes(rows: int) -> list[int | None]:
    return [None if row % 3 == 1 else row // 2 for row in range(rows)]


# Tokens of each row in steps with prompts, one step after the other: whole prompts, parts of them, rows in decode.
PROMPTS = sized(
    gpu=[[40], [1, 7], [1, 1, 9, 2], [1, 1, 100], [1, 30, 1, 64, 1, 200], [*[1] * 12, 3, 130, 1, 66], [*[8] * 17]],
    interpreted=[[5], [1, 9], [2, 1], [1, 20]],
)
MIXTURES: dict[str, list[int | None]] = {  # one after the other on the same graphs
    "one adapter": [0] * ROWS,
    "more adapters than ever before": list(range(ROWS)),
    "each row its own, in other slots": list(reversed(range(ROWS))),
    "fewer adapters, and rows of the base": holes(ROWS),
    "the base alone": [None] * ROWS,
    "one adapter again": [ROWS - 1] * ROWS,
    **{f"{rows} of at most {ROWS} rows": holes(rows) for rows in range(1, ROWS)},
}


@pytest.fixture(scope="module", params=EXACT_DTYPES, ids=name_of)
def pair(gpu: Gpu, request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield Pair.made(gpu, SPEC, request.param, ROWS, ROWS, graphs=True)
    gpu.free()


@pytest.fixture(params=EXACT_DTYPES, ids=name_of)
def pair_of_prompts(gpu: Gpu, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """With graphs of steps with prompts, too: the others compute prompts eagerly, without padding to interpret."""
    yield Pair.made(gpu, SPEC, request.param, ROWS, ROWS, graphs=True, tokens=max(map(sum, PROMPTS)))
    gpu.free()


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_replay_has_the_adapters_of_its_rows(pair: Pair, mixture: str) -> None:
    pair.decode(MIXTURES[mixture], steps=STEPS)


def test_another_adapter_in_the_same_slot_and_pages_is_the_one_that_is_used(pair: Pair) -> None:
    pair.decode([0] * ROWS, steps=1)
    before = pair.device.lent[0]
    pair.evict(0)
    pair.load(0, HostAdapter.made(SPEC, SAME_RANKS, pair.dtype))  # other numbers, the same ranks
    assert pair.device.lent[0] == before, "the pages are others: this shows nothing"
    pair.decode([0, *range(1, ROWS)], steps=1)


def test_a_slot_that_was_empty_has_an_adapter_and_then_none_again(pair: Pair) -> None:
    """The slot beyond all others."""
    pair.load(ROWS, HostAdapter.made(SPEC, 77, pair.dtype))
    pair.decode([ROWS, *range(1, ROWS)], steps=1)
    pair.evict(ROWS)
    pair.decode([*range(1, ROWS), None], steps=1)


@pytest.mark.parametrize("adapted", [True, False], ids=["adapters", "base"])
def test_a_replay_has_the_prompts_and_the_rows_of_its_step(pair_of_prompts: Pair, adapted: bool) -> None:
    pair = pair_of_prompts
    lengths = [sum(column) for column in zip_longest(*PROMPTS, fillvalue=0)]
    for row, length in enumerate(lengths):
        pair.add(str(row), length, holes(ROWS)[row] if adapted else None)
    for counts in PROMPTS:
        pair.step({str(row): count for row, count in enumerate(counts)})


@pytest.mark.numeric
def test_a_step_advances_token_by_token(pair: Pair) -> None:
    """The same step object with new tokens and positions, as the engine runs a standing batch."""
    tokens = [random_tokens(random.Random(7), ROWS, pair.spec.vocab_size) for _ in range(REPLAYS)]
    logits = list[list[torch.Tensor]]()
    for driven in pair.both:
        driven.drop_all()
        parts = [StepOf([token], 0, driven.deck.deal(1), row) for row, token in enumerate(tokens[0])]
        step, found = step_of(parts, PAGE_TOKENS), list[torch.Tensor]()
        for position, each in enumerate(tokens):
            step.advance(each, [position] * ROWS)
            found.append(driven.executor.run(step).clone())
        logits.append(found)
        for part in parts:
            driven.deck.back(part.pages)
    for actual, expected in zip(*logits, strict=True):
        assert_logits(actual, expected, pair.dtype)


def test_a_replay_gives_the_same_bits_again(pair: Pair) -> None:
    pair.device.drop_all()
    step = step_of([StepOf([row], 0, pair.device.deck.deal(1), row) for row in range(ROWS)], PAGE_TOKENS)
    first = pair.device.executor.run(step).clone()
    for _ in range(REPLAYS):
        assert_same(pair.device.executor.run(step), first)
    for row in step.rows:
        pair.device.deck.back(row.pages)
