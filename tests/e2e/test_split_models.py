"""Pools whose runners split the model over two processes each.

The right texts, also when a rank is killed; and where prompts and tokens have runners of their own, KV travels shard by
shard and every answer has the bits of a runner that does both; a runner of fewer ranks than it says is refused by name.
"""

import asyncio
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import psutil
import pytest

from harness.answers import choices_of
from harness.crowd import SLOW, Crowd, Watched, assert_undisturbed, finished, load, strike, until_idle
from harness.last_words import last_words
from harness.lying_links import lying_links
from harness.quickstart import Case, copy_manifests, sure_cases
from harness.roles import phases_apart
from harness.waiting import PATIENCE_S, eventually
from weft.domain.kv_transfer import KvReady
from weft.domain.runner import RunnerBook
from weft_stage.errors import StackFailed
from weft_stage.linked_runner import RUNNER, SHARED_MEMORY
from weft_stage.reports import runners
from weft_stage.stack import Stack

pytestmark = pytest.mark.slow

MODELS = ("weft-quickstart", "acme/upper", "acme/reverse-words", "initech/cipher")
LONG = "the quick brown fox jumps over the lazy dog and runs away " * 6


@pytest.fixture(scope="module", params=["tensor", "pipeline"])
def shards(request: pytest.FixtureRequest) -> dict[str, int]:
    return {request.param: 2}


@pytest.fixture(scope="module")
def stack(shards: dict[str, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two runners of two ranks and at most 12 sequences each."""
    manifests = copy_manifests(
        tmp_path_factory.mktemp("m"), replicas=2, parallelism=shards, advanced={"maxSequences": 12}
    )
    with Stack(manifests, tmp_path_factory.mktemp("w"), environment=SLOW) as made:
        made.wait_for_models()
        yield made


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """20 long answers, none of them near a tie."""
    return sure_cases(MODELS, 20, seed=20)


async def test_a_split_runner_gives_the_right_texts_and_its_requests_continue_elsewhere_when_a_rank_dies(
    stack: Stack, cases: list[Case]
) -> None:
    """Clients ask again and again: how many runners they fill must not hang on how fast this test reads."""
    await eventually(lambda: ready(stack, 2))
    ranks = await ranks_of(stack)
    async with asyncio.timeout(3 * PATIENCE_S), load(stack.url, cases, "split", width=20) as made:
        await made.until(lambda: sum(w.finish is not None for w in made.streams) >= len(cases))
        moves = stack.metric("scheduler", "weft_scheduler_migrations_total")
        victims = await kill_rank(stack, made, ranks)
        await eventually(lambda: moved(stack, moves + len(victims)))
    assert_undisturbed(made.streams)
    await eventually(lambda: ready(stack, 2))


async def test_sharded_runners_of_a_split_pool_give_the_bits_of_one_and_refuse_one_of_fewer_ranks(
    stack: Stack, shards: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    models = MODELS[:3]
    bodies = [
        {
            "model": models[number % len(models)], "prompt": LONG[number:], "max_tokens": 24, "n": 1 + number % 3,
            "temperature": float(number % 2), "seed": number, "logprobs": 3, "logit_bias": {"1": -100},
        }
        for number in range(9)
    ]  # fmt: skip
    manifests = copy_manifests(
        tmp_path_factory.mktemp("m"), replicas=2, phases={"mode": "Split"}, parallelism=shards,
        advanced={"maxBatchTokens": 64},
    )  # fmt: skip
    with Stack(manifests, tmp_path_factory.mktemp("w"), up=(*RUNNER, SHARED_MEMORY, "--")) as split:
        split.wait_for_models()
        await eventually(lambda: phases_apart(split))
        async with lying_links(split) as links:
            found = [await asyncio.gather(*[choices_of(one, body) for body in bodies]) for one in (split, stack)]
            assert found[0] == found[1]
            assert_undisturbed(await finished(split.url, sure_cases(models, 12, seed=3), "split"))
            assert split.metric("runner", "weft_runner_handed_over_total") >= 12
            assert split.metric("runner", "weft_runner_kv_lost_total") == 0
            await links.cut()
            with links.lying(too_few_ranks):
                assert await choices_of(split, bodies[0]) == found[0][0]
            await links.until_logged("a runner of 1 ranks: this one has 2")
            await until_idle(split, 2)


def too_few_ranks(message: Any) -> Any:
    return replace(message, shard_addresses=()) if isinstance(message, KvReady) else message


async def kill_rank(stack: Stack, made: Crowd, ranks: dict[str, psutil.Process]) -> list[Watched]:
    """Kill rank 1 of a runner that has 3 streams with at least 5 and less than two fifths of their tokens."""
    victims: list[Watched] = []

    def blow(runner: RunnerBook, running: list[tuple[Watched, int]]) -> bool:
        victims[:] = [w for w, tokens in running if 5 <= tokens < 0.4 * len(w.case.expect)]
        if len(victims) < 3:
            return False
        ranks[runner.spec.name].kill()
        return True

    await strike(grpc.insecure_channel(stack.address("supervisor")), made, blow)
    return victims


async def ranks_of(stack: Stack) -> dict[str, psutil.Process]:
    """Return rank 1 of each runner; a warning shows what a runner said that was ready and had none."""
    found: dict[str, list[psutil.Process]] = {}

    async def there() -> bool:
        for name in stack.names("runner"):
            try:
                found[name] = psutil.Process(stack.pid(name)).children()
            except (StackFailed, psutil.NoSuchProcess):  # between two lives
                found[name] = []
        return all(len(ranks) == 1 for ranks in found.values())

    if not await there():
        warnings.warn(f"{found}\n{last_words(stack)}", stacklevel=1)
        await eventually(there)
    return {name: rank for name, (rank,) in found.items()}


async def moved(stack: Stack, count: float) -> bool:
    return stack.metric("scheduler", "weft_scheduler_migrations_total") >= count


async def ready(stack: Stack, count: int) -> bool:
    listed = await runners(stack.address("supervisor"))
    return sum(one.figures.ready and not one.figures.draining for one in listed) == count
