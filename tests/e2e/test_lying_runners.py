"""A runner that lies about its KV: the other one refuses it by name, the prompt is computed again, nobody else notices.

KV passes over TCP; the token runner gets of one request what `LyingLinks` makes of its prompt runner's messages.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.answers import choices_of
from harness.crowd import SLOW, until_idle
from harness.lying_links import Lie, lying_links
from harness.quickstart import copy_manifests
from harness.roles import phases_apart
from harness.waiting import PATIENCE_S, eventually
from weft.domain.ids import Epoch
from weft.domain.kv_transfer import KvComplete, KvHello, KvOffer
from weft.wire.codec.kv_transfer import KvPages
from weft_stage.linked_runner import RUNNER
from weft_stage.stack import Stack

pytestmark = pytest.mark.slow

LONG = "the quick brown fox jumps over the lazy dog and runs away " * 2
BESIDE = 2  # streams that run when the lie is told
FROM_SENDER = (KvOffer, KvPages, KvComplete)


def another_layout(message: Any) -> Any:
    return replace(message, kv_layout="of another model") if isinstance(message, KvHello) else message


def other_geometry(message: Any) -> Any:
    """Bytes of all layers, as those of the first one."""
    return message._replace(layers=1) if isinstance(message, KvPages) else message


def stale_epoch(message: Any) -> Any:
    """To the receiver an epoch before; what it answers is about that one."""
    epoch = getattr(message, "epoch", None)
    if epoch is None:
        return message
    other = Epoch(epoch.term, epoch.counter + (-1 if isinstance(message, FROM_SENDER) else 1))
    return message._replace(epoch=other) if isinstance(message, KvPages) else replace(message, epoch=other)


def more_than_was_sent(message: Any) -> Any:
    return replace(message, in_kv=message.in_kv + 16) if isinstance(message, KvComplete) else message


def a_token_that_there_is_not(message: Any) -> Any:
    return replace(message, tokens=(1 << 20,)) if isinstance(message, KvComplete) else message


# What a runner logs of each: of a stale epoch by whether the offer comes before or after the Start.
LIES: dict[Lie, tuple[str, ...]] = {
    another_layout: ("KV layout 'of another model' is not",),
    other_geometry: ("bytes for 1 layers of",),
    stale_epoch: ("the other runner refuses it: epoch", "nobody waits for it"),
    more_than_was_sent: ("more than the pages that are expected",),
    a_token_that_there_is_not: ("came with a token outside the vocabulary",),
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    manifests = copy_manifests(
        tmp_path_factory.mktemp("m"), replicas=2, phases={"mode": "Split"}, advanced={"maxBatchTokens": 64}
    )
    with Stack(manifests, tmp_path_factory.mktemp("w"), up=(*RUNNER, "--"), environment=SLOW) as made:
        made.wait_for_models()
        yield made


def ask(prompt: str, number: int, max_tokens: int) -> dict[str, Any]:
    return {
        "model": ("acme/upper", "weft-quickstart")[number % 2], "prompt": prompt, "max_tokens": max_tokens,
        "temperature": 1, "seed": number, "logprobs": 1, "logit_bias": {"1": -100},
    }  # fmt: skip


async def test_a_lie_is_refused_by_name_and_the_prompt_computed_again(stack: Stack) -> None:
    beside, asked, told = [ask("hello there", number, 980) for number in range(BESIDE)], ask(LONG, 7, 4), 0
    await eventually(lambda: phases_apart(stack))
    async with lying_links(stack) as links, asyncio.timeout(2 * PATIENCE_S):
        *expected, answer = await asyncio.gather(*[choices_of(stack, body) for body in (*beside, asked)])
        running = await handed_over(stack, beside)
        for lie, refusals in LIES.items():

            async def named(refusals: tuple[str, ...] = refusals) -> bool:
                return any(map(links.logged, refusals))

            told_beside = False
            while not told_beside:
                if any(one.done() for one in running):  # they had ended before the lie was told
                    assert await asyncio.gather(*running) == expected
                    running = await handed_over(stack, beside)
                assert await choices_of(stack, asked) == answer
                if lie is another_layout:
                    await links.cut()
                with links.lying(lie):
                    assert await choices_of(stack, asked) == answer, lie
                told += 1
                told_beside = not any(one.done() for one in running)
            await eventually(named)
        assert await asyncio.gather(*running) == expected
        await until_idle(stack, 2)
        assert links.logged("reason=kv_lost", "scheduler") == told


async def handed_over(stack: Stack, bodies: Sequence[dict[str, Any]]) -> list[asyncio.Future[list[Any]]]:
    """Streams that are beyond their prompt, on the token runner."""
    before = stack.metric("runner", "weft_runner_handed_over_total")
    running = [asyncio.ensure_future(choices_of(stack, body)) for body in bodies]

    async def all_of_them() -> bool:
        return stack.metric("runner", "weft_runner_handed_over_total") >= before + len(bodies)

    await eventually(all_of_them)
    return running
