"""The operator's end of the Registry stream against a real gRPC server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from harness.waiting import PATIENCE_S
from tests.unit.operator.planning import adapter_ref, digest, pool_ref
from weft.domain.routes import AdapterSpec, AdapterStatus, PoolSpec, PoolStatus
from weft.wire.streams import SendQueue, serve_stream
from weft.wire.v1 import scheduler_pb2 as pb
from weft.wire.v1.scheduler_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from weft_operator.controller import RegistryClient, registry_client
from weft_operator.core import PublishAdapter, PublishPool, UnpublishAdapter, UnpublishPool

POOL = PoolSpec(
    "default/base", digest("b"), "base", shared_all=True, max_queue=10, created_unix_s=5, min_runners=1, drain_s=60.0
)


def entry(uid: str, letter: str = "a") -> AdapterSpec:
    return AdapterSpec("acme/upper", "acme", "default/base", digest(letter), 8, uid, 5, bytes=100)


class Scheduler(SchedulerServicer):
    """Keeps what it hears; says what it is told to say."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[pb.RegistryToScheduler] = asyncio.Queue()
        self.outbox: SendQueue[pb.SchedulerToRegistry] = SendQueue()

    async def Registry(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802 (gRPC's name)
        self.outbox = SendQueue()
        async for message in serve_stream(request_iterator, context, self.outbox, self.heard.put_nowait):
            yield message

    async def next(self) -> pb.RegistryToScheduler:
        async with asyncio.timeout(PATIENCE_S):
            return await self.heard.get()


class Reports:
    """What came back, as it can be awaited."""

    def __init__(self) -> None:
        self.pools: asyncio.Queue[tuple[str, PoolStatus]] = asyncio.Queue()
        self.adapters: asyncio.Queue[tuple[str, AdapterStatus]] = asyncio.Queue()


@asynccontextmanager
async def connected(*, start: bool = True, term: int = 0) -> AsyncIterator[tuple[RegistryClient, Scheduler, Reports]]:
    server, scheduler, reports = grpc.aio.server(), Scheduler(), Reports()
    add_SchedulerServicer_to_server(scheduler, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = RegistryClient(
        f"127.0.0.1:{port}",
        on_pool=lambda name, report: reports.pools.put_nowait((name, report)),
        on_adapter=lambda uid, report: reports.adapters.put_nowait((uid, report)),
        term=term,
    )
    running = asyncio.create_task(client.run())
    if start:
        client.start()
    try:
        yield client, scheduler, reports
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(None)


async def test_nothing_is_sent_before_the_table_is_complete() -> None:
    async with connected(start=False) as (client, scheduler, _):
        client.update(PublishPool(pool_ref(), POOL))
        await asyncio.sleep(0)
        client.update(PublishAdapter(adapter_ref("upper"), entry("u1")))
        assert scheduler.heard.empty()
        client.start()
        snapshot = await scheduler.next()
        assert snapshot.snapshot
        assert [pool.route.name for pool in snapshot.pools] == ["default/base"]
        assert [adapter.route.uid for adapter in snapshot.adapters] == ["u1"]


async def test_an_empty_table_is_a_complete_snapshot_too() -> None:
    async with connected() as (_, scheduler, _):
        snapshot = await scheduler.next()
        assert (snapshot.snapshot, list(snapshot.pools), list(snapshot.adapters)) == (True, [], [])


async def test_changes_of_one_turn_are_one_message_and_versions_grow() -> None:
    async with connected(term=7) as (client, scheduler, _):
        first = await scheduler.next()
        client.update(PublishPool(pool_ref(), POOL))
        client.update(PublishAdapter(adapter_ref("upper"), entry("u1")))
        second = await scheduler.next()
        assert (first.term, second.term, second.snapshot) == (7, 7, False)
        assert second.version > first.version
        assert second.pools[0].route.shared_all
        assert second.pools[0].drain_s == 60
        assert (second.adapters[0].route.digest, second.adapters[0].bytes) == (digest("a"), 100)
        client.update(UnpublishAdapter(adapter_ref("upper"), "u1"))
        client.update(UnpublishPool(pool_ref()))
        third = await scheduler.next()
        assert (list(third.removed_pools), list(third.removed_adapters)) == (["default/base"], ["u1"])


async def test_a_first_change_leaves_at_once_and_a_crowd_behind_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_client, "GATHER_S", 3600.0)
    async with connected() as (client, scheduler, _):
        await scheduler.next()
        client.update(PublishPool(pool_ref(), POOL))
        assert (await scheduler.next()).pools
        monkeypatch.setattr(registry_client, "GATHER_S", 0.5)
        for number in range(100):
            client.update(PublishAdapter(adapter_ref(f"a{number}"), entry(f"u{number}")))
            await asyncio.sleep(0)
        told = messages = 0
        while told < 100:
            told, messages = told + len((await scheduler.next()).adapters), messages + 1
        assert messages < 10


async def test_of_one_adapter_only_the_last_state_of_a_turn_is_sent() -> None:
    async with connected() as (client, scheduler, _):
        await scheduler.next()
        for letter in "acd":
            client.update(PublishAdapter(adapter_ref("upper"), entry("u1", letter)))
        client.update(UnpublishAdapter(adapter_ref("upper"), "u1"))
        client.update(PublishAdapter(adapter_ref("upper"), entry("u1", "e")))
        change = await scheduler.next()
        assert [adapter.route.digest for adapter in change.adapters] == [digest("e")]
        assert list(change.removed_adapters) == []


async def test_an_object_made_again_replaces_the_one_before() -> None:
    async with connected() as (client, scheduler, _):
        await scheduler.next()
        client.update(PublishAdapter(adapter_ref("upper"), entry("u1")))
        await scheduler.next()
        client.update(PublishAdapter(adapter_ref("upper"), entry("u2")))
        change = await scheduler.next()
        assert [adapter.route.uid for adapter in change.adapters] == ["u2"]
        assert list(change.removed_adapters) == ["u1"]


async def test_a_broken_stream_begins_again_with_everything() -> None:
    async with connected() as (client, scheduler, _):
        await scheduler.next()
        client.update(PublishAdapter(adapter_ref("upper"), entry("u1")))
        await scheduler.next()
        scheduler.outbox.close()
        snapshot = await scheduler.next()
        assert snapshot.snapshot
        assert [adapter.route.uid for adapter in snapshot.adapters] == ["u1"]


async def test_the_schedulers_word_comes_back() -> None:
    async with connected() as (_, scheduler, reports):
        await scheduler.next()
        pool = pb.PoolStatus(pool="default/base", ready_runners=3, wanted_runners=1, victims=["b", "a"])
        scheduler.outbox.put(pb.SchedulerToRegistry(pool=pool))
        scheduler.outbox.put(pb.SchedulerToRegistry(adapter=pb.AdapterStatus(uid="u", digest="d", routed=True)))
        async with asyncio.timeout(PATIENCE_S):
            report = PoolStatus(3, 1, ("b", "a"), pool="default/base")
            assert await reports.pools.get() == ("default/base", report)
            assert await reports.adapters.get() == ("u", AdapterStatus("d", True, uid="u"))


async def test_whether_an_adapter_is_gone_is_asked_on_every_connection_until_it_is_answered() -> None:
    async with connected() as (client, scheduler, reports):
        await scheduler.next()
        client.update(PublishAdapter(adapter_ref("upper"), entry("u1")))
        await scheduler.next()
        client.update(UnpublishAdapter(adapter_ref("upper"), "u1", unload=True))
        client.update(UnpublishAdapter(adapter_ref("older"), "u0", unload=True))  # of a life before this one
        assert sorted((await scheduler.next()).removed_adapters) == ["u0", "u1"]
        scheduler.outbox.close()
        again = await scheduler.next()
        assert (again.snapshot, list(again.adapters), list(again.removed_adapters)) == (True, [], ["u0", "u1"])
        still = pb.AdapterStatus(uid="u0", routed=False)
        for status in (still, pb.AdapterStatus(uid="u1", digest=digest("a"), removed=True)):
            scheduler.outbox.put(pb.SchedulerToRegistry(adapter=status))
        async with asyncio.timeout(PATIENCE_S):
            assert [(await reports.adapters.get())[0] for _ in range(2)] == ["u0", "u1"]
        scheduler.outbox.close()
        assert list((await scheduler.next()).removed_adapters) == ["u0"]
