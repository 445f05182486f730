"""A scheduler with a standby: whatever happens to the one that acts, streams go on and requests are served again soon.

The times are printed: from the blow to the first token of a request that was asked after it.
"""

import asyncio
import signal
from collections.abc import Iterator

import pytest

from harness.cluster.cluster import needs_own
from harness.crowd import Crowd, assert_undisturbed, load, longest_pause
from harness.installation import NAMESPACE, Installation
from harness.quickstart import Case, sure_cases
from harness.waiting import eventually
from weft_stage.scrape import scrape, total

pytestmark = needs_own("stops processes of a node and its API server")

MODELS = ("weft-quickstart", "acme/upper", "acme/reverse-words", "initech/cipher")
WIDTH = 8


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return sure_cases(MODELS, 32, seed=43)


@pytest.fixture(scope="module")
def two(installation: Installation) -> Iterator[Installation]:
    installation.upgrade(scheduler={"replicas": 2})
    yield installation
    installation.upgrade()


def holder(installation: Installation) -> str:
    """The pod of the scheduler that acts."""
    return installation.plane.get("lease", "weft-scheduler", NAMESPACE)["spec"]["holderIdentity"].rpartition("_")[0]


async def until_both_are_ready(installation: Installation) -> None:
    async def there() -> bool:
        return len(await asyncio.to_thread(installation.ready, "scheduler")) == 2

    await eventually(there)


def acts(installation: Installation, pod: str) -> float:
    return total(scrape(installation.reach(f"pod/{pod}", 7401)), "weft_scheduler_leader")


async def served_again(made: Crowd) -> float:
    """Seconds from now until a request that is asked from now on has its first token."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    await made.until(lambda: any(one.asked_at > began and one.text for one in made.streams))
    return loop.time() - began


async def test_metrics_name_the_pod_that_acts(two: Installation) -> None:
    await until_both_are_ready(two)
    pod = holder(two)
    assert {name: acts(two, name) for name in two.names("scheduler")} == {
        name: float(name == pod) for name in ("weft-scheduler-0", "weft-scheduler-1")
    }


@pytest.mark.parametrize("blow", ["kill -9", "stand still", "lose the pod", "delete"])
async def test_streams_go_on_and_requests_are_served_again(two: Installation, cases: list[Case], blow: str) -> None:
    await until_both_are_ready(two)
    pod = await asyncio.to_thread(holder, two)
    async with load(two.url, cases, blow.replace(" ", ""), width=WIDTH) as made:
        await made.until(lambda: len(made.streams) > 3 * WIDTH)
        await asyncio.to_thread(strike, two, pod, blow)
        seconds = await served_again(made)
        now = await asyncio.to_thread(holder, two)
        if blow == "stand still":
            two.node.kill(NAMESPACE, pod, signal.SIGCONT)
        after = len(made.streams)
        await made.until(lambda: len(made.streams) > after + 3 * WIDTH)
    print(f"{blow}: {pod} acted, then {now}; served again after {seconds:.1f} s; {longest_pause(made.streams)}")
    if blow == "stand still":  # the others come back in their data directory, and may be there before the standby is
        assert now != pod
    assert_undisturbed(made.streams)
    await until_both_are_ready(two)


def strike(installation: Installation, pod: str, blow: str) -> None:
    """`stand still`: nothing comes from it any more, and its connections stay, as where its node is lost."""
    gone = ("delete", "pod", pod, "-n", NAMESPACE, "--wait=false")
    if blow == "delete":
        installation.plane.kubectl(*gone)
    elif blow == "lose the pod":
        installation.node.kill(NAMESPACE, pod)
        installation.plane.kubectl(*gone, "--force", "--grace-period=0")
    else:
        installation.node.kill(NAMESPACE, pod, signal.SIGSTOP if blow == "stand still" else signal.SIGKILL)


async def test_the_acting_scheduler_goes_on_while_the_api_server_is_away(two: Installation, cases: list[Case]) -> None:
    await until_both_are_ready(two)
    pod = await asyncio.to_thread(holder, two)
    async with load(two.url, cases, "api-server", width=WIDTH) as made:
        await made.until(lambda: len(made.streams) > 3 * WIDTH)
        await asyncio.to_thread(two.plane.restart_api_server)
        after = len(made.streams)
        await made.until(lambda: len(made.streams) > after + 3 * WIDTH)
    print(f"api-server: {longest_pause(made.streams)}")
    assert await asyncio.to_thread(holder, two) == pod
    assert_undisturbed(made.streams)


async def test_a_standby_is_taken_and_given_back_and_no_request_fails(two: Installation, cases: list[Case]) -> None:
    await until_both_are_ready(two)
    for replicas in (1, 2):
        async with load(two.url, cases, f"to-{replicas}", width=WIDTH) as made:
            await made.until(lambda made=made: len(made.streams) > 3 * WIDTH)
            await asyncio.to_thread(two.upgrade, scheduler={"replicas": replicas})
            after = len(made.streams)
            await made.until(lambda made=made, after=after: len(made.streams) > after + 3 * WIDTH)
        print(f"to {replicas}: {longest_pause(made.streams)}")
        assert_undisturbed(made.streams)
    await until_both_are_ready(two)
