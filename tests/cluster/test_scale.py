"""Pools grow and shrink under load: by the built-in autoscaler to zero and back, and through /scale."""

import asyncio
from collections.abc import Iterator

import pytest

from harness.crowd import SLOW_POD, assert_undisturbed, finished, load
from harness.installation import NAMESPACE, Installation
from harness.quickstart import DEMO, Case, sure_cases
from harness.session import answer_of
from harness.waiting import eventually

MODELS = ("weft-quickstart", "acme/upper", "acme/reverse-words", "initech/cipher")


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return sure_cases(MODELS, 20, seed=20)


@pytest.fixture
def pool(installation: Installation) -> Iterator[Installation]:
    """The pool with few sequences a runner, slow ones: 40 clients keep more than two busy. Put back afterwards."""
    env = [{"name": name, "value": value} for name, value in SLOW_POD.items()]
    installation.patch_pool({"advanced": {"maxSequences": 8}, "template": {"env": env}})
    asyncio.run(installation.until_runners(1, max_sequences=8))
    yield installation
    plain = {"replicas": 1, "autoscaling": None, "advanced": {"maxSequences": 32}, "template": None}
    installation.patch_pool(plain)
    asyncio.run(installation.until_runners(1, max_sequences=32))


async def until_pods(installation: Installation, count: int) -> None:
    """Wait until there are exactly `count` runner pods, all Ready, and the pool's status says so."""

    def there() -> bool:
        status = installation.plane.get("spool", "quickstart", NAMESPACE)["status"]
        pods = installation.pods("serving.weft.dev/pool=quickstart")
        return len(pods) == len(installation.ready("runner")) == count == status.get("readyReplicas", 0)

    await eventually(lambda: asyncio.to_thread(there))


async def every_adapter_answers_from_every_runner(installation: Installation) -> None:
    """Ask every runner past the scheduler, so that none is left out."""
    items = (await asyncio.to_thread(installation.plane.get, "loras"))["items"]
    digests = {item["status"]["modelName"]: item["status"]["digest"] for item in items}
    listed, tls = await installation.runners(), installation.certificate("gateway")
    for runner in listed:
        address = installation.reach(f"pod/{runner.spec.name}", int(runner.spec.address.rpartition(":")[2]))
        for epoch, case in enumerate(DEMO, 1):
            digest = digests.get(case.model, "")
            got = await answer_of(runner.spec.runner, address, tls, case, digest, epoch)
            assert got == case.expect, f"{runner.spec.name}: {case.model}"


async def test_the_built_in_autoscaler_grows_to_three_shrinks_to_zero_and_wakes(
    pool: Installation, cases: list[Case]
) -> None:
    autoscaling = {"minReplicas": 0, "maxReplicas": 3, "idleSeconds": 3600}
    pool.patch_pool({"replicas": None, "autoscaling": autoscaling})
    async with load(pool.url, cases, "grow", width=40) as made:
        await until_pods(pool, 3)
    assert_undisturbed(made.streams)
    await every_adapter_answers_from_every_runner(pool)  # they are kept, for they are not idle long enough
    pool.patch_pool({"autoscaling": {"idleSeconds": 1}})
    await until_pods(pool, 0)
    assert_undisturbed(await finished(pool.url, cases[:4], "wake"))
    assert pool.plane.get("spool", "quickstart", NAMESPACE)["spec"].get("replicas") is None


async def test_the_scale_subresource_grows_and_shrinks_a_pool_under_load(pool: Installation, cases: list[Case]) -> None:
    pool.patch_pool({"replicas": 1, "autoscaling": None})
    await until_pods(pool, 1)
    async with load(pool.url, cases, "scale", width=40) as made:
        for count in (3, 1):
            await asyncio.to_thread(
                pool.plane.kubectl, "scale", "spool/quickstart", "-n", NAMESPACE, f"--replicas={count}"
            )
            await until_pods(pool, count)
    assert_undisturbed(made.streams)
