"""The whole engine on the device beside the engine on the reference: the same texts, while adapters come and go.

More adapters than slots, so that each is loaded, evicted and loaded again beside running steps, which look ahead.
"""

import random
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from weft.domain.request import Step
from weft_bench.cpu_models import adapter
from weft_bench.gpu_check import CheckContext, Checks, Differs
from weft_bench.gpu_check_models import PAGE_TOKENS, HostAdapter, device_executor, host_weights, reference_executor
from weft_bench.gpu_engine import engine_of
from weft_bench.gpu_models import Scale, random_tokens, spec_of
from weft_bench.playing import Ask, Folders, Player
from weft_bench.roofline import Shape
from weft_runner.core.admission import PoolLimits
from weft_runner.core.batch import BatchLimits
from weft_runner.model.adapter_store import map_tensors
from weft_runner.model.executor import Executor
from weft_runner.model.weights import ModelWeights
from weft_runner.shell.engine import Engine, Output

WHOLE = Shape(hidden=512, layers=3, heads=8, kv_heads=2, inner=704, vocab=1000)
TINY = Shape(hidden=32, layers=1, heads=2, kv_heads=1, inner=48, vocab=64)
CONTEXT, PROMPT = 64, 12
RANKS = (16, 4, 33)
SLOTS, ROWS, TINY_ROWS = 2, 8, 2
REQUESTS, TINY_REQUESTS = 40, 3
ADAPTERS, TINY_ADAPTERS = 6, 2
TOKENS, TINY_TOKENS = 24, 3
NEAR_TIE = 1e-3  # of two best logits: sums in another order may turn these


def checks(context: CheckContext) -> Checks:
    yield "texts of the engine, adapters coming and going", partial(_texts, context)


class Listener(Player):
    """A player that keeps the texts, by the order of their requests."""

    def __init__(self, make: Callable[[Callable[[Output], None]], Engine]) -> None:
        self.texts: dict[str, list[int]] = {}
        super().__init__(make)

    def _told(self, output: Output) -> None:
        for _, message in output.sends:
            for sequence in message.sequences if isinstance(message, Step) else ():
                self.texts.setdefault(sequence.request_id, []).extend(sequence.tokens)
        super()._told(output)


def _texts(context: CheckContext) -> None:
    shape = TINY if context.tiny else WHOLE
    (rows,) = context.of((ROWS,), (TINY_ROWS,))
    spec = spec_of(shape, CONTEXT)
    weights = host_weights(spec, torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        asks, source = _asks(context, shape, Path(folder))
        device = device_executor(context, spec, weights, torch.float32, rows, SLOTS, graphs=True).executor
        reference = reference_executor(spec, weights, rows, SLOTS).executor
        ours, theirs = (_played(executor, source, shape, rows, asks) for executor in (device, reference))
        for number, ask in enumerate(asks):
            _compare(weights, shape, source, ask, number, ours[number], theirs[number])


def _played(executor: Executor, source: Folders, shape: Shape, rows: int, asks: Sequence[Ask]) -> list[list[int]]:
    """As many pages as the executor has are more than enough: adapters leave for want of slots."""
    limits = PoolLimits(
        total_pages=rows * 40, page_tokens=PAGE_TOKENS, max_sequences=rows, max_adapters=SLOTS,
        max_context_tokens=CONTEXT, vocab_size=shape.vocab, batch=BatchLimits(max_prefills=2, max_batch_tokens=64),
        page_bytes=executor.adapters.page_bytes, keep_copies=True,
    )  # fmt: skip
    player = Listener(lambda told: engine_of(executor, limits, source, told, max_rank=max(RANKS)))
    try:
        player.play(asks, streams=rows)
    finally:
        player.engine.close()
    return [player.texts[key] for key in sorted(player.texts, key=int)]


def _asks(context: CheckContext, shape: Shape, folder: Path) -> tuple[list[Ask], Folders]:
    """Requests in turn over adapters and the base."""
    rng, source = random.Random(0), Folders()
    requests, adapters, tokens = context.of((REQUESTS, ADAPTERS, TOKENS), (TINY_REQUESTS, TINY_ADAPTERS, TINY_TOKENS))
    for number in range(adapters):
        source.paths[f"a{number}"] = adapter(folder, "checked", shape, number, RANKS[number % len(RANKS)])
    names = [*source.paths, ""]
    asks = [
        Ask(names[number % len(names)], random_tokens(rng, PROMPT, shape.vocab), tokens) for number in range(requests)
    ]
    return asks, source


def _compare(
    weights: ModelWeights, shape: Shape, source: Folders, ask: Ask, number: int, ours: list[int], theirs: list[int]
) -> None:
    """The same text, or one that parts from it where the two best tokens are all but equal. Raises Differs."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if at is None:
        return
    gap = _gap(weights, shape, source, ask, theirs[:at])
    if gap > NEAR_TIE:
        raise Differs(
            f"request {number}, adapter {ask.adapter or 'none'}: token {at} is {ours[at]}, not {theirs[at]}, "
            f"which is {gap:.3g} ahead"
        )


def _gap(weights: ModelWeights, shape: Shape, source: Folders, ask: Ask, text: list[int]) -> float:
    """How far the reference's best next token is ahead of its second one."""
    spec, slot = spec_of(shape, CONTEXT), None
    driven = reference_executor(spec, weights, 1, 1)
    if ask.adapter:
        files = source.adapter(ask.adapter)
        driven.load(0, HostAdapter(map_tensors(files.tensors), Scale(1.0)))
        slot = 0
    tokens = [*ask.prompt, *text]
    driven.add("x", tokens, slot, len(tokens))
    best = driven.step({"x": len(tokens)})[0].topk(2).values
    return float(best[0] - best[1])
