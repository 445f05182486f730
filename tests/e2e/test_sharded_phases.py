"""A Split pool of runners of two ranks each: KV travels shard by shard, and every answer is that of one such runner."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.answers import choices_of
from harness.crowd import assert_undisturbed, finished
from harness.quickstart import copy_manifests, sure_cases
from harness.waiting import eventually
from weft_bench.reports import runners
from weft_bench.stack import Stack

MODELS = ("weft-quickstart", "acme/upper", "acme/reverse-words")
LONG = "the quick brown fox jumps over the lazy dog and runs away " * 6


@pytest.fixture(scope="module", params=["tensor", "pipeline"])
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Stack]]:
    with ExitStack() as stacks:

        def made(**spec: object) -> Stack:
            folder: Path = tmp_path_factory.mktemp("m")
            manifests = copy_manifests(folder, parallelism={request.param: 2}, scheduler={"maxBatchTokens": 64}, **spec)
            stack = stacks.enter_context(Stack(manifests, tmp_path_factory.mktemp("w")))
            stack.wait_for_models()
            return stack

        yield made


async def test_two_sharded_runners_give_the_bits_of_one(start: Callable[..., Stack]) -> None:
    unified, split = start(), start(replicas=2, phases={"mode": "Split"})
    bodies = [
        {
            "model": MODELS[number % len(MODELS)], "prompt": LONG[number:], "max_tokens": 24, "n": 1 + number % 3,
            "temperature": float(number % 2), "seed": number, "logprobs": 3, "logit_bias": {"1": -100},
        }
        for number in range(9)
    ]  # fmt: skip
    found = [await asyncio.gather(*[choices_of(stack, body) for body in bodies]) for stack in (split, unified)]
    assert found[0] == found[1]
    assert_undisturbed(await finished(split.url, sure_cases(MODELS, 12, seed=3), "split"))
    assert split.metric("runner", "weft_runner_handed_over_total") >= 12
    assert split.metric("runner", "weft_runner_kv_lost_total") == 0

    async def idle() -> bool:
        listed = await runners(split.address("supervisor"))
        return len(listed) == 2 and all(r.figures.free_pages == r.spec.total_pages for r in listed)

    await eventually(idle)
