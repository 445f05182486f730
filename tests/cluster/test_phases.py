"""A pool of mode Split in pods behind mutual TLS: prompts on one, the tokens after the first one on another."""

import asyncio
from collections.abc import Iterator

import pytest

from harness.crowd import SLOW_POD, Crowd, Watched, assert_undisturbed, finished, load, strike
from harness.installation import NAMESPACE, Installation
from harness.quickstart import sure_cases
from harness.waiting import eventually
from weft.domain.runner import RunnerBook, RunnerRole

MODELS = ("weft-quickstart", "acme/upper", "acme/reverse-words", "initech/cipher")


@pytest.fixture(scope="module")
def split(installation: Installation) -> Iterator[Installation]:
    """Two slow runners that change from mixed to prompt and token where they are: no pod is replaced for it."""
    env = [{"name": name, "value": value} for name, value in SLOW_POD.items()]
    installation.patch_pool({"replicas": 2, "advanced": {"maxSequences": 24}, "template": {"env": env}})
    asyncio.run(installation.until_runners(2, max_sequences=24))
    yield installation
    plain = {"replicas": 1, "phases": None, "advanced": {"maxSequences": 32}, "template": None}
    installation.patch_pool(plain)
    asyncio.run(installation.until_runners(1, max_sequences=32))


async def until_roles(installation: Installation, *roles: RunnerRole) -> None:
    async def there() -> bool:
        return sorted(b.figures.role.value for b in await installation.runners()) == sorted(r.value for r in roles)

    await eventually(there)


async def test_runners_take_roles_without_a_restart_and_every_text_is_right(split: Installation) -> None:
    cases, before = sure_cases(MODELS, 24, seed=7), split.names("runner")
    assert_undisturbed(await finished(split.url, cases[:8], "mixed"))
    await asyncio.to_thread(split.patch_pool, {"phases": {"mode": "Split"}})
    await until_roles(split, RunnerRole.PROMPT, RunnerRole.TOKEN)
    assert_undisturbed(await finished(split.url, cases, "split"))
    assert await asyncio.to_thread(split.metric, "runner", "weft_runner_handed_over_total") >= 24
    assert await asyncio.to_thread(split.metric, "runner", "weft_runner_kv_lost_total") == 0
    await asyncio.to_thread(split.patch_pool, {"phases": {"mode": "Unified"}})
    await until_roles(split, RunnerRole.MIXED, RunnerRole.MIXED)
    assert_undisturbed(await finished(split.url, cases[:8], "mixed again"))
    assert split.names("runner") == before


async def test_streams_of_a_deleted_token_runner_move_with_their_kv(split: Installation) -> None:
    cases = sure_cases(MODELS, 20, seed=20)

    def moved() -> float:
        return split.metric("scheduler", "weft_scheduler_kv_migrations_total")

    before = await asyncio.to_thread(moved)
    await asyncio.to_thread(split.patch_pool, {"phases": {"mode": "Split"}})
    async with load(split.url, cases, "deleted", width=12) as made:
        while await asyncio.to_thread(moved) == before:
            await until_roles(split, RunnerRole.PROMPT, RunnerRole.TOKEN)
            pod = await token_runner_in_decode(split, made)
            await asyncio.to_thread(split.plane.kubectl, "delete", "pod", pod, "-n", NAMESPACE, "--wait=true")
            await split.until_runners(2, max_sequences=24)
    assert_undisturbed(made.streams)


async def token_runner_in_decode(split: Installation, made: Crowd) -> str:
    """The pod of the token runner, once several of its streams have most of their tokens before them."""
    found = ""

    def blow(runner: RunnerBook, running: list[tuple[Watched, int]]) -> bool:
        nonlocal found
        early = sum(0 < tokens < 0.6 * len(watched.case.expect) for watched, tokens in running)
        if runner.figures.role is RunnerRole.TOKEN and early >= 4:
            found = runner.spec.name
        return bool(found)

    await strike(split.supervisor_channel(), made, blow)
    return found
