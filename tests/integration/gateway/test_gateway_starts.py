"""A process that has just started, or learns of a new pool: who needs what is still missing waits for it."""

import asyncio
from pathlib import Path

import pytest

from weft.wire.v1 import scheduler_pb2

from .conftest import ANSWER, World, serving, soon, until
from .test_gateway_refusals import TEXT, refused

ABSENT = "sha256:" + "0" * 64


def with_broken_pool(world: World, version: int = 1) -> scheduler_pb2.Routes:
    """The usual routes and a pool whose tokenizer the depot does not have."""
    routes = world.routes(version=version)
    routes.pools.add(name="team/broken", base_digest=ABSENT, base_model_name="broken")
    routes.routes.add(model_name="broken", namespace="team", pool="team/broken")
    return routes


async def test_the_first_requests_wait_for_the_route_table(parts: World, tmp_path: Path) -> None:
    routes, parts.scheduler.routes = parts.scheduler.routes, scheduler_pb2.Routes()
    async with serving(parts, parts.settings(tmp_path), ready=False) as world, world.http() as http:
        asked = asyncio.create_task(http.post("/v1/completions", json=TEXT))
        listed = asyncio.create_task(http.get("/v1/models"))
        await until(lambda: world.gateway.machine.admission.arriving == 2 and world.gateway.manager.scheduler.up)
        unready = await http.get("/readyz")
        assert (unready.status_code, unready.text) == (503, "no route table from the scheduler yet\n")
        world.scheduler.send_routes(routes)
        assert (await soon(asked)).json()["choices"][0]["text"] == ANSWER
        assert (await soon(listed)).json()["data"][0]["id"] == "tiny"
        assert (await http.get("/readyz")).status_code == 200
        await world.settled()


async def test_a_request_for_a_pool_at_zero_waits_for_its_tokenizer_and_wakes_the_pool(
    parts: World, tmp_path: Path
) -> None:
    manifest = parts.depot.blobs.path(parts.base_digest)
    kept = manifest.read_bytes()
    manifest.unlink()
    parts.scheduler.autopilot = False
    parts.scheduler.routes.pools[0].ready_runners = 0
    async with serving(parts, parts.settings(tmp_path), ready=False) as world, world.http() as http:
        asked = asyncio.create_task(http.post("/v1/completions", json=TEXT))
        await until(lambda: world.gateway.machine.admission.waiting_for_tokenizer(world.base_digest))
        assert world.depot.blobs.put(kept) == world.base_digest
        submit = await world.scheduler.next("submit")
        world.scheduler.assign(submit.request_id)
        assert (await soon(asked)).json()["choices"][0]["text"] == ANSWER
        await world.settled()


async def test_requests_held_for_a_tokenizer_that_does_not_come_leave_capacity_for_the_others(
    parts: World, tmp_path: Path
) -> None:
    parts.scheduler.routes = with_broken_pool(parts)
    async with serving(parts, parts.settings(tmp_path, max_in_flight=8)) as world, world.http() as http:
        held = [asyncio.create_task(http.post("/v1/completions", json=TEXT | {"model": "broken"})) for _ in range(2)]
        await until(lambda: world.gateway.machine.admission.waiting_for_tokenizer(ABSENT) == 2)
        error = refused(await http.post("/v1/completions", json=TEXT | {"model": "broken"}), 503, "model_not_ready")
        assert "team/broken" in error["message"]
        answers = await asyncio.gather(*(http.post("/v1/completions", json=TEXT) for _ in range(6)))
        assert [answer.status_code for answer in answers] == [200] * 6
        assert not any(one.done() for one in held)
        await soon(world.gateway.manager.drain(600.0))
        assert [answer.status_code for answer in await asyncio.gather(*held)] == [503] * 2


async def test_a_hold_for_a_tokenizer_ends_with_the_reason(parts: World, tmp_path: Path) -> None:
    parts.scheduler.routes = with_broken_pool(parts)
    async with serving(parts, parts.settings(tmp_path, hold_seconds=1.0)) as world, world.http() as http:
        error = refused(await http.post("/v1/completions", json=TEXT | {"model": "broken"}), 503, "model_not_ready")
        assert "not hold" in error["message"]
        assert not world.gateway.machine.admission.waiting_for_tokenizer(ABSENT)


async def test_a_new_pool_without_its_tokenizer_takes_no_gateway_away(world: World) -> None:
    world.scheduler.send_routes(with_broken_pool(world, version=2))
    await until(lambda: world.gateway.machine.routes.version == 2)
    async with world.http() as http:
        assert (await http.get("/readyz")).status_code == 200


@pytest.mark.parametrize("missing", ["routes", "tokenizer"])
async def test_a_request_that_is_held_when_the_process_stops_is_refused_at_once(
    parts: World, tmp_path: Path, missing: str
) -> None:
    parts.scheduler.routes = scheduler_pb2.Routes() if missing == "routes" else with_broken_pool(parts)
    async with serving(parts, parts.settings(tmp_path), ready=False) as world, world.http() as http:
        asked = asyncio.create_task(http.post("/v1/completions", json=TEXT | {"model": "broken"}))
        machine = world.gateway.machine
        await until(
            lambda: (
                machine.admission.arriving and (missing == "routes" or machine.admission.waiting_for_tokenizer(ABSENT))
            )
        )
        await soon(world.gateway.manager.drain(600.0))
        refused(await soon(asked), 503, "shutting_down")
