"""Runners of two pods each, behind mutual TLS: right texts, a lost pod is a runner started again, KV between them."""

import asyncio
from collections.abc import Iterator

import pytest

from harness.crowd import assert_undisturbed, crowd, finished
from harness.installation import NAMESPACE, Installation
from harness.quickstart import sure_cases
from harness.waiting import eventually
from weft.domain.runner import RunnerRole

MODELS = ("weft-quickstart", "acme/upper", "acme/reverse-words", "initech/cipher")


@pytest.fixture(scope="module")
def spread(installation: Installation) -> Iterator[Installation]:
    """Two stages of a model in a pod each: the bits are those of a runner of one pod."""
    installation.patch_pool({"replicas": 2, "parallelism": {"pipeline": 2, "podsPerRunner": 2}})
    asyncio.run(until_pods(installation))
    yield installation
    installation.patch_pool({"replicas": 1, "parallelism": None, "phases": None})
    asyncio.run(installation.until_runners(1, max_sequences=32))


async def until_pods(installation: Installation) -> None:
    """Two runners, both of pods of a StatefulSet."""

    async def there() -> bool:
        ready = [one for one in await installation.runners() if one.figures.ready and not one.figures.draining]
        return len(ready) == 2 and all(one.spec.name.endswith("-0") for one in ready)

    await eventually(there)
    await installation.until_runners(2, max_sequences=32)


async def incarnations(installation: Installation) -> dict[str, str]:
    return {one.spec.name: one.spec.runner.incarnation for one in await installation.runners()}


def restarts(installation: Installation) -> dict[str, int]:
    pods = installation.pods("app.kubernetes.io/component=runner")
    return {pod["metadata"]["name"]: pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods}


async def test_a_lost_pod_is_its_runner_started_again_and_no_other(spread: Installation) -> None:
    before, counted = await incarnations(spread), await asyncio.to_thread(restarts, spread)
    victim, other = sorted(before)
    assert sorted(counted) == sorted(f"{name.removesuffix('-0')}-{rank}" for name in before for rank in (0, 1))
    async with crowd(spread.url, sure_cases(MODELS, 24, seed=11), "pods") as made:
        await made.until(lambda: all(watched.text for watched in made.streams[:4]))
        lost = f"{victim.removesuffix('-0')}-1"
        await asyncio.to_thread(
            spread.plane.kubectl, "delete", "pod", lost, "-n", NAMESPACE, "--force", "--grace-period=0", "--wait=false"
        )
        await made.until(lambda: all(watched.finish is not None for watched in made.streams))
        assert_undisturbed(list(made.streams))

    async def again() -> bool:
        found = await incarnations(spread)
        return found.keys() == before.keys() and found[victim] != before[victim]

    await eventually(again)
    await until_pods(spread)
    assert (await incarnations(spread))[other] == before[other]
    after = await asyncio.to_thread(restarts, spread)
    assert {name: after[name] for name in after if name.startswith(other.removesuffix("-0"))} == {
        name: counted[name] for name in counted if name.startswith(other.removesuffix("-0"))
    }
    assert_undisturbed(await finished(spread.url, sure_cases(MODELS, 12, seed=12), "again"))


async def test_runners_of_several_pods_send_kv_rank_by_rank(spread: Installation) -> None:
    await asyncio.to_thread(spread.patch_pool, {"phases": {"mode": "Split"}})

    async def split() -> bool:
        return {one.figures.role for one in await spread.runners()} == {RunnerRole.PROMPT, RunnerRole.TOKEN}

    await eventually(split)
    assert_undisturbed(await finished(spread.url, sure_cases(MODELS, 24, seed=13), "split"))
    assert await asyncio.to_thread(spread.metric, "runner", "weft_runner_handed_over_total") >= 24
    assert await asyncio.to_thread(spread.metric, "runner", "weft_runner_kv_lost_total") == 0
