"""The whole engine on the device beside the engine on the reference: the same texts, while adapters come and go.

More adapters than slots, so that each is loaded, evicted and loaded again beside running steps, which look ahead.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.device_models import PAGE_TOKENS, HostAdapter, device_executor, host_weights, reference_executor
from harness.on_device import sized
from weft.domain.request import Step
from weft_bench.drive import engine
from weft_runner.core import BatchLimits, PoolLimits
from weft_runner.model import Executor, map_tensors
from weft_stage.cpu_models import adapter
from weft_stage.gpu_device import Gpu
from weft_stage.gpu_models import Scale, random_tokens, spec_of
from weft_stage.playing import Ask, Folders, Player
from weft_stage.shapes import Shape

pytestmark = pytest.mark.gpu

SHAPE = sized(
    gpu=Shape(hidden=512, layers=3, heads=8, kv_heads=2, inner=704, vocab=1000),
    interpreted=Shape(hidden=32, layers=1, heads=2, kv_heads=1, inner=48, vocab=64),
)
CONTEXT, PROMPT = 64, 12
RANKS = (16, 4, 33)
SLOTS, ROWS = 2, sized(gpu=8, interpreted=2)
REQUESTS, ADAPTERS, TOKENS = sized(gpu=(40, 6, 24), interpreted=(3, 2, 3))
NEAR_TIE = 1e-3  # of two best logits: sums in another order may turn these


class Listener(Player):
    """A player that keeps the texts, by the order of their requests."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.texts: dict[str, list[int]] = {}
        super().__init__(make)

    def _told(self, output: Any) -> None:
        for _, message in output.sends:
            for sequence in message.sequences if isinstance(message, Step) else ():
                self.texts.setdefault(sequence.request_id, []).extend(sequence.tokens)
        super()._told(output)


@pytest.mark.slow
def test_texts_are_the_references_while_adapters_come_and_go(gpu: Gpu, tmp_path: Path) -> None:
    spec = spec_of(SHAPE, CONTEXT)
    weights = host_weights(spec, torch.float32)
    asks, source = asked(tmp_path)
    device = device_executor(gpu, spec, weights, torch.float32, ROWS, SLOTS, graphs=True).executor
    reference = reference_executor(spec, weights, ROWS, SLOTS).executor
    ours, theirs = (played(executor, source, asks) for executor in (device, reference))
    for number, ask in enumerate(asks):
        assert_same_text(weights, source, ask, number, ours[number], theirs[number])


def played(executor: Executor, source: Folders, asks: Sequence[Ask]) -> list[list[int]]:
    """Play requests with the executor's pages, which are more than enough: adapters leave for want of slots."""
    limits = PoolLimits(
        total_pages=ROWS * 40, page_tokens=PAGE_TOKENS, max_sequences=ROWS, max_adapters=SLOTS,
        max_context_tokens=CONTEXT, vocab_size=SHAPE.vocab, batch=BatchLimits(max_prefills=2, max_batch_tokens=64),
        page_bytes=executor.adapters.page_bytes, keep_copies=True,
    )  # fmt: skip
    player = Listener(lambda told: engine.engine_of(executor, limits, source, told, max_rank=max(RANKS)))
    try:
        player.play(asks, streams=ROWS)
    finally:
        player.engine.close()
    return [player.texts[key] for key in sorted(player.texts, key=int)]


def asked(folder: Path) -> tuple[list[Ask], Folders]:
    """Make requests in turn over adapters and the base."""
    rng, source = random.Random(0), Folders()
    for number in range(ADAPTERS):
        source.paths[f"a{number}"] = adapter(folder, "checked", SHAPE, number, RANKS[number % len(RANKS)])
    names = [*source.paths, ""]
    asks = [
        Ask(names[number % len(names)], random_tokens(rng, PROMPT, SHAPE.vocab), TOKENS) for number in range(REQUESTS)
    ]
    return asks, source


def assert_same_text(weights: Any, source: Folders, ask: Ask, number: int, ours: list[int], theirs: list[int]) -> None:
    """Assert the same text, or one that parts from it where the two best tokens are all but equal."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if at is None:
        return
    gap = best_gap(weights, source, ask, theirs[:at])
    assert gap <= NEAR_TIE, (
        f"request {number}, adapter {ask.adapter or 'none'}: token {at} is {ours[at]}, not {theirs[at]}, "
        f"which is {gap:.3g} ahead"
    )


def best_gap(weights: Any, source: Folders, ask: Ask, text: list[int]) -> float:
    """Return how far the reference's best next token is ahead of its second one."""
    spec, slot = spec_of(SHAPE, CONTEXT), None
    driven = reference_executor(spec, weights, 1, 1)
    if ask.adapter:
        files = source.adapter(ask.adapter)
        driven.load(0, HostAdapter(map_tensors(files.tensors), Scale(1.0)))
        slot = 0
    tokens = [*ask.prompt, *text]
    driven.add("x", tokens, slot, len(tokens))
    best = driven.step({"x": len(tokens)})[0].topk(2).values
    return float(best[0] - best[1])
