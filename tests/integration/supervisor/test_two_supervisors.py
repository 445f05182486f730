"""Two supervisors on one PostgreSQL, with every other service as it ships: either may die at any time."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from sqlalchemy import URL

from harness import stored
from harness.fleet import Fleet, Service
from harness.postgres import Postgres, needs_postgres
from harness.quickstart import DEMO, sure_cases
from harness.waiting import PATIENCE_S, eventually
from weft.store.database import open_database
from weft.wire.streams import channel
from weft.wire.v1 import supervisor_pb2 as pb
from weft.wire.v1.supervisor_pb2_grpc import AdminStub

pytestmark = needs_postgres
TWO = ("supervisor", "second")


@pytest.mark.slow
async def test_a_supervisor_waits_for_a_server_that_starts_after_it(tmp_path: Path, postgres: Postgres) -> None:
    with postgres.database() as url, Fleet(tmp_path).running() as fleet:
        await asyncio.to_thread(postgres.stop)
        try:
            fleet.supervisor("supervisor", "--database", url.render_as_string())
            await eventually(lambda: _says(fleet, "the store does not answer yet"))
        finally:
            await asyncio.to_thread(postgres.start)
        await fleet.ready("supervisor")


async def test_a_url_of_no_postgresql_ends_the_start_without_repeating_it(tmp_path: Path) -> None:
    with Fleet(tmp_path).running() as fleet:
        fleet.supervisor("supervisor", "--database", "mysql://weft:se-cret@db/weft")
        assert await asyncio.to_thread(fleet.ended, "supervisor") == 2
    log = fleet.log("supervisor").read_text()
    assert "it has to be postgresql://" in log
    assert "se-cret" not in log


@pytest.fixture(scope="module")
def url(postgres: Postgres) -> Iterator[URL]:
    """The URL of a database for all of them."""
    with postgres.database() as made:
        yield made


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, url: URL) -> Iterator[Fleet]:
    """Both start at the same time on an empty database."""
    with Fleet(tmp_path_factory.mktemp("fleet")).running() as fleet:
        fleet.control_plane("--database", url.render_as_string(hide_password=False), supervisors=TWO, auth=True)
        yield fleet


@pytest.fixture
def fleet(started: Fleet) -> Fleet:
    """Whole again, whatever a test before has killed."""
    for name in TWO:
        if name not in started.processes:
            started.start_again(name)
    return started


async def create_key(fleet: Fleet, at: str) -> str:
    async with channel(fleet.at[at]) as opened:
        made = await AdminStub(opened).CreateKey(
            pb.CreateKeyRequest(namespace="acme"), wait_for_ready=True, timeout=PATIENCE_S
        )
    return made.key


async def accepted(fleet: Fleet, key: str) -> bool:
    gateway = f"http://{fleet.at['gateway']}"
    async with httpx2.AsyncClient(base_url=gateway, trust_env=False, timeout=PATIENCE_S) as http:
        answer = await http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
    return answer.status_code == 200 and "acme/upper" in answer.text


async def refused(fleet: Fleet, key: str) -> bool:
    return not await accepted(fleet, key)


async def runners_at(fleet: Fleet, supervisor: str) -> int:
    async with channel(fleet.at[supervisor]) as opened:
        answer = await AdminStub(opened).ListRunners(pb.ListRunnersRequest(), wait_for_ready=True, timeout=PATIENCE_S)
    return sum(reported.report.ready for reported in answer.runners)


@pytest.mark.slow
async def test_runners_of_both_serve_and_a_death_of_one_supervisor_loses_nothing(fleet: Fleet, url: URL) -> None:
    adapters = await fleet.resolved()
    cases = [*DEMO[:2] * 5, *sure_cases(("acme/upper",), 6, seed=3)]
    for name in TWO:
        await fleet.ready(name)
    async with Service(fleet.at["supervisor"], fleet.at["second"]) as either:
        fleet.runner("one", supervisor=either.address)
        fleet.runner("two", supervisor=fleet.at["second"])
        async with fleet.registry(adapters, runners=2) as registry:
            await registry.until_ready(2)
            await fleet.ready("gateway")
            key = await create_key(fleet, "supervisor")
            await eventually(lambda: accepted(fleet, key))
            assert [await runners_at(fleet, name) for name in TWO] == [1, 1]
            asked = [asyncio.create_task(fleet.completion(case, key)) for case in cases]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            fleet.kill("supervisor")
            assert await asyncio.gather(*asked) == [case.expect for case in cases]
            await eventually(lambda: _both_there(fleet))
            await registry.until_ready(2)
            assert await fleet.completion(DEMO[1], key) == DEMO[1].expect
    await eventually(lambda: _stored(url, len(cases) + 1))
    fleet.kill("one", "two")


async def _both_there(fleet: Fleet) -> bool:
    return await runners_at(fleet, "second") == 2


async def _stored(url: URL, count: int) -> bool:
    engine = open_database(url)
    try:
        if await stored.count(engine) < count:
            return False
        usage = await stored.usage(engine)
        assert await stored.count(engine) == count
    finally:
        await engine.dispose()
    assert sum(row.requests for row in usage) == count, "each outcome counts once"
    return True


@pytest.mark.slow
async def test_a_key_made_or_revoked_at_one_is_the_others_after_a_moment(fleet: Fleet) -> None:
    adapters = await fleet.resolved()
    async with fleet.registry(adapters):
        await fleet.ready("gateway")
        kept, revoked = [await create_key(fleet, "supervisor") for _ in range(2)]
        async with channel(fleet.at["supervisor"]) as opened:
            await AdminStub(opened).RevokeKey(pb.RevokeKeyRequest(key_id=revoked.split("-")[1]), timeout=PATIENCE_S)
        fleet.kill("supervisor", "scheduler", "gateway")
        for name in ("scheduler", "gateway"):  # new ones know no key but what the second supervisor sends
            fleet.start_again(name)
        await fleet.ready("gateway")
        await eventually(lambda: accepted(fleet, kept))
        await eventually(lambda: refused(fleet, revoked))


async def _says(fleet: Fleet, text: str) -> bool:
    return text in fleet.log("supervisor").read_text()
