"""The built-in autoscaler on one machine: to zero when nobody asks, back when somebody does, and nobody is refused."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import yaml

from harness.quickstart import DEMO, Case, copy_manifests
from harness.waiting import PATIENCE_S, eventually
from weft_cli.errors import CommandError
from weft_stage.stack import Stack, is_ready

pytestmark = pytest.mark.slow

SCALING = {"minReplicas": 0, "maxReplicas": 2, "idleSeconds": 1}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The quickstart whose pool has no number of its own."""
    folder = copy_manifests(tmp_path_factory.mktemp("m"))
    path = folder / "01-pool.yaml"
    pool = yaml.safe_load(path.read_text())
    del pool["spec"]["replicas"]
    pool["spec"]["autoscaling"] = SCALING
    path.write_text(yaml.safe_dump(pool))
    with Stack(folder, tmp_path_factory.mktemp("w")) as made:
        yield made


def status(stack: Stack) -> Any:
    """The pool's; {} while the stack starts."""
    try:
        return stack.controller.get("servingpools", "weft-system", "quickstart").get("status", {})
    except CommandError:
        return {}


async def known(stack: Stack, client: httpx2.AsyncClient) -> bool:
    """Adapters are ready, also those of a pool without runners, and the gateway lists them."""
    listed, _ = stack.controller.list("loraadapters")
    try:
        models = {model["id"] for model in (await client.get("/v1/models")).json()["data"]}
    except httpx2.ConnectError:  # the gateway starts beside the pool that has no runners yet
        return False
    return all(map(is_ready, listed)) and models == {case.model for case in DEMO}


async def until_runners(stack: Stack, count: int) -> None:
    async def settled() -> bool:
        found = await asyncio.to_thread(status, stack)
        running = len(stack.names("runner"))  # one that drains is no replica any more, but it still runs
        return (found.get("desiredReplicas"), found.get("replicas"), running) == (count, count, count)

    await eventually(settled)


def grown_for_demand(stack: Stack) -> bool:
    return status(stack).get("lastScale", {}).get("reason") == "Demand"


async def right(client: httpx2.AsyncClient, case: Case) -> None:
    body = {"model": case.model, "prompt": case.prompt, "temperature": 0, "max_tokens": 120}
    got = await client.post("/v1/completions", json=body)
    assert got.status_code == 200, got.text
    assert got.json()["choices"][0]["text"].strip() == case.expect


async def ask_until(seen: asyncio.Event, client: httpx2.AsyncClient) -> None:
    """All models at once, again and again, so that there is demand until somebody has seen what it led to."""
    while True:
        await asyncio.gather(*(right(client, case) for case in DEMO))
        if seen.is_set():
            return


async def test_a_pool_nobody_uses_has_no_runner_and_the_next_request_gets_one(stack: Stack) -> None:
    async with httpx2.AsyncClient(base_url=stack.url, timeout=PATIENCE_S) as client:
        for _ in range(2):
            await until_runners(stack, 0)
            await eventually(lambda: known(stack, client))
            grown = asyncio.Event()
            asked = asyncio.create_task(ask_until(grown, client))  # held until a runner is up
            await eventually(lambda: asyncio.to_thread(grown_for_demand, stack))
            grown.set()
            await asked
    await until_runners(stack, 0)
    assert status(stack)["lastScale"]["reason"] == "Idle"
