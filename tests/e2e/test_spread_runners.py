"""Runners of ranks on two hosts (network namespaces), two each: a host that is asked to stop drains its runner."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from harness.crowd import SLOW, Crowd, Watched, assert_undisturbed, load, strike
from harness.hosts import two_hosts
from harness.quickstart import copy_manifests, sure_cases
from harness.waiting import eventually
from weft.domain.runner import RunnerBook
from weft_stage.reports import runners
from weft_stage.stack import Stack

pytestmark = pytest.mark.slow

MODELS = ("weft-quickstart", "acme/upper", "acme/reverse-words")
TESTS = Path(__file__).parents[1]


@pytest.fixture
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two runners of two stages of two tensor ranks each."""
    manifests = copy_manifests(tmp_path_factory.mktemp("m"), replicas=2, parallelism={"pipeline": 2, "tensor": 2})
    with two_hosts() as hosts:
        up = ("weft_stage.runner_up", "harness.spread_runner", hosts.address, hosts.other, " ".join(hosts.enter), "--")
        environment = {**SLOW, "PYTHONPATH": f"{SLOW['PYTHONPATH']}:{TESTS}"}
        with Stack(manifests, tmp_path_factory.mktemp("w"), environment=environment, up=up) as made:
            made.wait_for_models()
            yield made


def other_host(runner: int) -> psutil.Process:
    children = psutil.Process(runner).children(recursive=True)
    (found,) = [child for child in children if "--host=1/2" in child.cmdline()]
    return found


async def stopped_at_other_host(stack: Stack, made: Crowd) -> str:
    """SIGTERM to the other host of a runner that has streams under way; the runner's component."""
    names = {stack.components()[name]["listen"].rpartition(":")[2]: name for name in stack.names("runner")}
    struck = ""

    def blow(runner: RunnerBook, running: list[tuple[Watched, int]]) -> bool:
        nonlocal struck
        if sum(0 < tokens < 0.6 * len(watched.case.expect) for watched, tokens in running) < 2:
            return False
        struck = names[runner.spec.address.rpartition(":")[2]]  # the host is the one that its other host reaches
        os.kill(other_host(stack.pid(struck)).pid, signal.SIGTERM)
        return True

    await strike(grpc.insecure_channel(stack.address("supervisor")), made, blow)
    return struck


async def test_sigterm_at_one_host_drains_the_runner_with_kv_migration(stack: Stack) -> None:
    def ready() -> bool:
        return all(stack.components()[name]["phase"] == "Ready" for name in stack.names("runner"))

    def moved() -> float:
        return stack.metric("scheduler", "weft_scheduler_kv_migrations_total", reason="drain")

    async def is_ready() -> bool:
        listed = await runners(stack.address("supervisor"))
        return ready() and sum(one.figures.ready and not one.figures.draining for one in listed) == 2

    await eventually(is_ready)
    cases, logs = sure_cases(MODELS, 20, seed=21), dict[str, str]()
    async with load(stack.url, cases, "rank", width=8) as made:
        while not moved():
            before = {name: stack.components()[name]["pid"] for name in stack.names("runner")}
            struck = await stopped_at_other_host(stack, made)
            leader = before[struck]

            async def again(struck: str = struck, leader: int = leader) -> bool:
                """A successor runs, and what may be struck next is ready, if anything is."""
                return stack.components()[struck]["pid"] not in (None, leader) and (bool(moved()) or await is_ready())

            await eventually(again)
            logs[struck] = (stack.data_dir / "logs" / f"{struck}.log").read_text()
    assert_undisturbed(made.streams)
    for log in logs.values():
        assert "rank 2 is asked to stop" in log
        assert "is lost" not in log
        assert "failed" not in log
