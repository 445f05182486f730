"""A pool of mode Split in pods behind mutual TLS: prompts on one, the tokens after the first one on another."""

import asyncio
from collections.abc import Iterator

import pytest

from harness.crowd import assert_undisturbed, finished
from harness.installation import Installation
from harness.quickstart import sure_cases
from harness.waiting import eventually
from weft.domain.runner import RunnerRole

MODELS = ("weft-quickstart", "acme/upper", "acme/reverse-words", "initech/cipher")


@pytest.fixture(scope="module")
def split(installation: Installation) -> Iterator[Installation]:
    """Two runners that change from mixed to prompt and token where they are: no pod is replaced for it."""
    installation.patch_pool({"replicas": 2})
    asyncio.run(installation.until_runners(2, max_sequences=32))
    yield installation
    installation.patch_pool({"replicas": 1, "phases": None})
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
