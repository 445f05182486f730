"""Prompts on one runner and the tokens after the first on another: every answer is the one of a single runner."""

import asyncio
from collections.abc import Iterator

import httpx2
import pytest

from harness.answers import choices_of
from harness.crowd import SLOW, assert_undisturbed, crowd, finished, until_idle
from harness.quickstart import copy_manifests, sure_cases
from harness.roles import phases_apart
from harness.waiting import PATIENCE_S, eventually
from weft_stage.stack import Stack

pytestmark = pytest.mark.slow

MODELS = ("weft-quickstart", "acme/upper", "acme/reverse-words")
LONG = "the quick brown fox jumps over the lazy dog and runs away " * 6


@pytest.fixture(scope="module")
def unified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(copy_manifests(tmp_path_factory.mktemp("m")), tmp_path_factory.mktemp("w"), "--auth") as made:
        made.key = made.create_key("acme")
        made.wait_for_models()
        yield made


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Chunks of 64 tokens: longer prompts leave in several parts. With keys, so that prompts share pages."""
    manifests = copy_manifests(
        tmp_path_factory.mktemp("m"), replicas=2, phases={"mode": "Split"}, advanced={"maxBatchTokens": 64}
    )
    with Stack(manifests, tmp_path_factory.mktemp("w"), "--auth") as made:
        made.key = made.create_key("acme")
        made.wait_for_models()
        yield made


async def test_texts_of_all_adapters_mixed_are_those_of_one_runner(split: Stack) -> None:
    await eventually(lambda: phases_apart(split))
    assert_undisturbed(await finished(split.url, sure_cases(MODELS, 24, seed=3), "split", split.key))
    assert split.metric("runner", "weft_runner_handed_over_total") >= 24
    assert split.metric("runner", "weft_runner_kv_lost_total") == 0
    await until_idle(split, 2)


async def test_choices_likelihoods_penalties_and_shared_prompts_are_the_same_to_the_last_bit(
    split: Stack, unified: Stack
) -> None:
    bodies = [
        {
            "model": MODELS[number % len(MODELS)], "prompt": LONG[number:], "max_tokens": 24, "n": 1 + number % 3,
            "temperature": float(number % 2), "seed": number, "logprobs": number % 4, "logit_bias": {"1": -100},
            "frequency_penalty": 0.7 * (number % 3), "presence_penalty": 0.3 * (number % 2),
        }
        for number in range(12)
    ]  # fmt: skip
    for again in range(2):  # pages of earlier prompts are found on both runners
        found = [await asyncio.gather(*[choices_of(stack, body) for body in bodies]) for stack in (split, unified)]
        assert found[0] == found[1], again
    assert split.metric("runner", "weft_runner_prefix_reused_tokens_total") > 0


async def test_a_prompt_that_the_prompt_runner_knows_is_counted_as_reused(split: Stack) -> None:
    await eventually(lambda: phases_apart(split))
    body = {"model": MODELS[1], "prompt": f"again and {LONG}", "max_tokens": 8, "logit_bias": {"1": -100}}
    before = split.metric("runner", "weft_runner_handed_over_total")
    async with httpx2.AsyncClient(trust_env=False, headers={"authorization": f"Bearer {split.key}"}) as client:
        answers = [await client.post(f"{split.url}/v1/completions", json=body, timeout=PATIENCE_S) for _ in range(2)]
    first, second = (answer.json()["usage"] for answer in answers)
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, second)]
    assert cached[0] == 0
    assert second["prompt_tokens"] - 16 <= cached[1] < second["prompt_tokens"], "all but the last page"
    assert split.metric("runner", "weft_runner_handed_over_total") - before == 2
    await until_idle(split, 2)


async def test_an_answer_of_one_token_and_a_client_that_disconnects_leave_nothing_behind(split: Stack) -> None:
    assert len(await choices_of(split, {"model": MODELS[0], "prompt": LONG, "max_tokens": 1})) == 1
    async with httpx2.AsyncClient(trust_env=False, headers={"authorization": f"Bearer {split.key}"}) as client:
        body = {"model": MODELS[1], "prompt": LONG, "max_tokens": 400, "stream": True, "logit_bias": {"1": -100}}
        async with client.stream("POST", f"{split.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            await anext(aiter(answer.aiter_lines()))
    await until_idle(split, 2)


async def test_a_burst_of_prompts_makes_a_token_runner_mixed_for_a_while_and_no_text_changes(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    groups = [
        {"name": phase.lower(), "phase": phase, "minRunners": count, "maxRunners": count}
        for phase, count in (("Prompt", 1), ("Token", 2))
    ]  # of each phase one never does both
    manifests = copy_manifests(tmp_path_factory.mktemp("m"), replicas=3, phases={"mode": "Split"}, runnerGroups=groups)
    with Stack(manifests, tmp_path_factory.mktemp("w"), environment=SLOW) as stack:
        stack.wait_for_models()
        await eventually(lambda: phases_apart(stack))
        cases = sure_cases(MODELS, 16, seed=5)
        async with crowd(stack.url, cases, "beside") as made:
            await made.until(lambda: all(watched.text for watched in made.streams))
            prompts = [{"model": MODELS[0], "prompt": LONG[n % 60 :], "max_tokens": 1} for n in range(60)]
            await asyncio.gather(*[choices_of(stack, body) for body in prompts])
        assert_undisturbed(list(made.streams))
        assert stack.metric("scheduler", "weft_scheduler_role_changes_total", role="mixed") >= 1
        await eventually(lambda: phases_apart(stack))
