"""Pods are deleted and processes killed while streams run; every client reads the text it would have read anyway."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cluster.cluster import needs_own
from harness.crowd import SLOW_POD, Crowd, Watched, assert_undisturbed, crowd, finished, load, strike
from harness.installation import NAMESPACE, Installation
from harness.quickstart import Case, sure_cases
from harness.waiting import eventually
from weft.domain.runner import RunnerBook, RunnerId

pytestmark = needs_own("ends processes of a node and gateways that port-forwards lead to")

MODELS = ("weft-quickstart", "acme/upper", "acme/reverse-words", "initech/cipher")
ATTEMPTS = 20  # rounds in which the moment to strike may come
STREAMS, SEQUENCES = 48, 28  # of a runner
MOVED = 6  # streams that go on at another runner


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Make long answers, none of them near a tie."""
    return sure_cases(MODELS, STREAMS, seed=20)


@pytest.fixture(scope="module")
def pair(installation: Installation) -> Iterator[Installation]:
    """Two runners: all streams need both, and keep them busy for longer than a pod takes to get its SIGTERM."""
    env = [{"name": name, "value": value} for name, value in SLOW_POD.items()]
    installation.patch_pool({"replicas": 2, "advanced": {"maxSequences": SEQUENCES}, "template": {"env": env}})
    asyncio.run(installation.until_runners(2, max_sequences=SEQUENCES))
    yield installation
    installation.patch_pool({"replicas": 1, "advanced": {"maxSequences": 32}, "template": None})
    asyncio.run(installation.until_runners(1, max_sequences=32))


async def strike_pod(installation: Installation, made: Crowd, how: str) -> RunnerId:
    """End a runner pod with several streams between their first token and 60 % of their tokens."""
    struck: list[RunnerBook] = []
    signum = signal.SIGKILL if how == "kill -9" else signal.SIGSTOP

    def blow(runner: RunnerBook, running: list[tuple[Watched, int]]) -> bool:
        if sum(0 < tokens < 0.6 * len(watched.case.expect) for watched, tokens in running) < MOVED:
            return False
        installation.node.kill(NAMESPACE, runner.spec.name, signum)
        struck.append(runner)
        return True

    await strike(installation.supervisor_channel(), made, blow)
    if how == "delete pod":
        await delete_frozen(installation, struck[0].spec.name)
    return struck[0].spec.runner


async def delete_frozen(installation: Installation, pod: str) -> None:
    """Delete a pod whose processes stand still until it has its SIGTERM: on a busy machine its streams ended first."""
    node = installation.node
    pids = node.pids(NAMESPACE, pod)

    async def is_pending() -> bool:
        return any(pending_signals(pid) >> (signal.SIGTERM - 1) & 1 for pid in pids)

    try:
        await delete_pod(installation, pod)
        await eventually(is_pending)
    finally:
        node.kill(NAMESPACE, pod, signal.SIGCONT)


def pending_signals(pid: int) -> int:
    """The mask of signals that a process has got and not taken yet."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd"))


async def delete_pod(installation: Installation, pod: str) -> None:
    await asyncio.to_thread(installation.plane.kubectl, "delete", "pod", pod, "-n", NAMESPACE, "--wait=false")


@pytest.mark.parametrize("how", ["kill -9", "delete pod"])
async def test_a_runner_pod_goes_and_its_streams_go_on(pair: Installation, cases: list[Case], how: str) -> None:
    await pair.until_runners(2, max_sequences=SEQUENCES)
    assert_undisturbed(await finished(pair.url, cases, f"quiet {how}"))

    def migrations() -> float:
        return pair.metric("scheduler", "weft_scheduler_migrations_total")

    before = await asyncio.to_thread(migrations)
    async with load(pair.url, cases, how.replace(" ", ""), width=SEQUENCES) as made:  # one runner has room for all
        moved = 0.0
        while moved < MOVED:  # else they ended before the blow fell
            await pair.until_runners(2, max_sequences=SEQUENCES)
            struck = await strike_pod(pair, made, how)

            async def over(struck: RunnerId = struck) -> bool:
                nonlocal moved
                gone = struck not in {one.spec.runner for one in await pair.runners()}
                moved = await asyncio.to_thread(migrations) - before
                return gone or moved >= MOVED

            await eventually(over)
    print(f"{len(made.streams)} requests, {moved:.0f} migrations")
    assert_undisturbed(made.streams)


async def test_control_plane_pods_are_deleted_one_after_the_other_and_no_request_fails(
    pair: Installation, cases: list[Case]
) -> None:
    await pair.until_runners(2, max_sequences=SEQUENCES)
    for component in ("operator", "scheduler", "supervisor", "predictor", "depot"):
        async with load(pair.url, cases, component, width=12) as made:
            before = uids(pair, component)
            for pod in pair.names(component):
                await asyncio.to_thread(pair.plane.kubectl, "delete", "pod", pod, "-n", NAMESPACE, "--wait=true")

            async def replaced(component: str = component, before: set[str] = before) -> bool:
                now = await asyncio.to_thread(uids, pair, component)
                return len(now) == len(before) and not now & before

            await eventually(replaced)
        print(f"{component}: {len(made.streams)} requests meanwhile")
        assert_undisturbed(made.streams)


async def test_a_gateway_told_to_stop_finishes_its_streams(pair: Installation, cases: list[Case]) -> None:
    await pair.until_runners(2, max_sequences=SEQUENCES)
    for attempt in range(ATTEMPTS):
        (pod,) = pair.names("gateway")
        async with crowd(pair.url, cases, f"gateway-term-{attempt}") as made:
            await made.until(lambda made=made: sum(bool(w.text) for w in made.streams) >= 12)
            if struck := made.running:
                await delete_pod(pair, pod)
        assert_undisturbed(list(made.streams))
        await eventually_ready(pair, "gateway", 1)
        if struck:
            return
    pytest.fail(f"no stream ran any more in {ATTEMPTS} rounds")


async def test_gateways_are_replaced_under_clients_that_keep_their_connections_and_no_request_fails(
    pair: Installation, cases: list[Case]
) -> None:
    await pair.until_runners(2, max_sequences=SEQUENCES)
    async with load(pair.url, cases, "rolled", width=12) as made:
        for arguments in (("restart",), ("status", "--timeout=300s")):
            await asyncio.to_thread(
                pair.plane.kubectl, "rollout", arguments[0], "deployment/weft-gateway", "-n", NAMESPACE, *arguments[1:]
            )
        await eventually_ready(pair, "gateway", 1)
    print(f"{len(made.streams)} requests meanwhile")
    assert_undisturbed(made.streams)


async def test_a_killed_gateway_loses_its_connections_and_nothing_else(pair: Installation, cases: list[Case]) -> None:
    await pair.until_runners(2, max_sequences=SEQUENCES)
    await asyncio.to_thread(pair.scale_gateway, 2)
    for attempt in range(ATTEMPTS):
        await eventually_ready(pair, "gateway", 2)
        pods = pair.names("gateway")
        first, second = (pair.pod_url(pod) for pod in pods)
        killed = pair.node.pids(NAMESPACE, pods[0])
        async with (
            crowd(first, cases[:8], f"lost-{attempt}") as lost,
            crowd(second, cases[8:16], f"kept-{attempt}") as kept,
        ):
            await kept.until(lambda kept=kept: sum(bool(w.text) for w in kept.streams) >= 4)
            await lost.until(lambda lost=lost: any(w.text for w in lost.streams))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        assert_undisturbed(list(kept.streams))
        assert all(w.case.expect.startswith(w.text) for w in lost.streams)
        if any(w.text != w.case.expect for w in lost.streams):  # else they ended before the blow fell
            break
    else:
        pytest.fail(f"no stream ran any more in {ATTEMPTS} rounds")
    await eventually_ready(pair, "gateway", 2)

    async def let_go() -> bool:
        return not any(runner.sequences for runner in await pair.runners())

    await eventually(let_go)
    await asyncio.to_thread(pair.scale_gateway, 1)
    await eventually_ready(pair, "gateway", 1)


async def eventually_ready(installation: Installation, component: str, count: int) -> None:
    async def there() -> bool:
        return (
            len(await asyncio.to_thread(installation.ready, component))
            == count
            == len(await asyncio.to_thread(installation.names, component))
        )

    await eventually(there)


def uids(installation: Installation, component: str) -> set[str]:
    """Return the uids of the Ready pods of a component."""
    found = installation.pods(f"app.kubernetes.io/component={component}")
    ready = installation.ready(component)
    return {pod["metadata"]["uid"] for pod in found if pod["metadata"]["name"] in ready}


async def test_a_pod_deleted_while_it_starts_ends_of_itself(pair: Installation) -> None:
    before = set(pair.names("runner"))
    await asyncio.to_thread(pair.patch_pool, {"replicas": 3})

    def started() -> list[str]:
        new = [pod for pod in pair.pods("app.kubernetes.io/component=runner") if pod["metadata"]["name"] not in before]
        return [pod["metadata"]["name"] for pod in new if pod["status"]["phase"] == "Running"]

    async def runs() -> bool:
        return bool(await asyncio.to_thread(started))

    await eventually(runs)
    (pod,) = started()
    codes = await asyncio.to_thread(codes_at_the_end, pair, pod)
    assert codes
    assert 128 + signal.SIGKILL not in codes, "nobody had to wait for the end of its grace"
    await asyncio.to_thread(pair.patch_pool, {"replicas": 2})
    await pair.until_runners(2, max_sequences=SEQUENCES)


def codes_at_the_end(installation: Installation, pod: str) -> set[int]:
    """Delete a pod. Returns the exit codes of its containers until it is gone."""
    installation.plane.kubectl("delete", "pod", pod, "-n", NAMESPACE, "--wait=false")
    codes: set[int] = set()

    def is_gone(found: dict[str, Any] | None) -> bool:
        for container in (found or {}).get("status", {}).get("containerStatuses", ()):
            if "terminated" in container["state"]:
                codes.add(container["state"]["terminated"]["exitCode"])
        return found is None

    installation.plane.objects.until("pod", pod, NAMESPACE, is_gone, f"pod {pod} is gone")
    return codes
