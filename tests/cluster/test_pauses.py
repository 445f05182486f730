"""How long streams pause while runners are replaced, released or evicted, and while the API server is away.

Every text is right. The longest pauses are printed: how long one is depends on the machine.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from harness.cluster.cluster import needs_own
from harness.crowd import assert_undisturbed, load, longest_pause
from harness.installation import NAMESPACE, Installation
from harness.quickstart import Case, sure_cases
from harness.waiting import eventually

pytestmark = needs_own("stops processes of a node and its API server")

MODELS = ("weft-quickstart", "acme/upper", "acme/reverse-words", "initech/cipher")
WIDTH = 8


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return sure_cases(MODELS, 32, seed=41)


@asynccontextmanager
async def measured(installation: Installation, cases: list[Case], name: str) -> AsyncIterator[None]:
    """Run streams all the while, and some more afterwards."""
    async with load(installation.url, cases, name, width=WIDTH) as made:
        await made.until(lambda: len(made.streams) > 3 * WIDTH)
        yield
        after = len(made.streams)
        await made.until(lambda: len(made.streams) > after + 3 * WIDTH)
    print(f"{name}: {longest_pause(made.streams)}")
    assert_undisturbed(made.streams)


async def scaled(installation: Installation, replicas: int) -> None:
    await asyncio.to_thread(installation.patch_pool, {"replicas": replicas})
    await installation.until_runners(replicas, max_sequences=32)


async def replaced(installation: Installation, before: set[str]) -> None:
    """Wait until none of these runner pods is there, and as many others are ready."""

    async def there() -> bool:
        return not before & set(await asyncio.to_thread(installation.names, "runner"))

    await eventually(there)
    await installation.until_runners(len(before), max_sequences=32)


async def test_streams_go_on_while_runners_are_replaced_released_and_the_api_server_is_away(
    installation: Installation, cases: list[Case]
) -> None:
    async with measured(installation, cases, "scale-out"):
        await scaled(installation, 2)
    changed = {"template": {"env": [{"name": "WEFT_TEST", "value": "1"}]}}
    for name, spec in (("upgrade", changed), ("rollback", {"template": None})):
        before = set(installation.names("runner"))
        async with measured(installation, cases, name):
            await asyncio.to_thread(installation.patch_pool, spec)
            await replaced(installation, before)
    async with measured(installation, cases, "scale-in"):
        await scaled(installation, 1)
    async with measured(installation, cases, "api-server"):
        await asyncio.to_thread(installation.plane.restart_api_server)
    await installation.until_runners(1, max_sequences=32)


@pytest.mark.parametrize("how", ["evict", "delete"])
async def test_requests_are_held_while_a_pools_only_runner_goes_and_another_one_starts(
    installation: Installation, cases: list[Case], how: str
) -> None:
    await installation.until_runners(1, max_sequences=32)
    before = set(installation.names("runner"))
    (pod,) = before
    async with measured(installation, cases, f"only-runner-{how}"):
        if how == "evict":
            await asyncio.to_thread(evict, installation, pod)
        else:
            await asyncio.to_thread(installation.plane.kubectl, "delete", "pod", pod, "-n", NAMESPACE, "--wait=false")
        await replaced(installation, before)


def evict(installation: Installation, pod: str) -> None:
    """Evict a pod as `kubectl drain` does."""
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}}
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction"
    installation.plane.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))


async def test_every_pod_of_the_release_is_replaced_and_no_request_fails(
    installation: Installation, cases: list[Case]
) -> None:
    async with measured(installation, cases, "release"):
        await asyncio.to_thread(
            installation.upgrade, common={"pod": {"metadata": {"annotations": {"weft.dev/test": "replaced"}}}}
        )
