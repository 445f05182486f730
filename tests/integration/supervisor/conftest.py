"""A supervisor's shell on loopback with a real store; scheduler and predictor are fakes at the narrow seam.

The fakes are gRPC servers that speak the contract and decide nothing: they collect what they are told in queues, so a
test awaits the message it needs.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import pytest

from harness.waiting import PATIENCE_S, soon
from weft.store import migrate
from weft.store.database import open_database, sqlite_url
from weft.wire.channels import Outbox, both_ways, channel
from weft.wire.v1 import common_pb2, predictor_pb2, scheduler_pb2, supervisor_pb2
from weft.wire.v1.predictor_pb2_grpc import PredictorServicer, add_PredictorServicer_to_server
from weft.wire.v1.scheduler_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from weft.wire.v1.supervisor_pb2_grpc import (
    AdminStub,
    SupervisorStub,
    add_AdminServicer_to_server,
    add_SupervisorServicer_to_server,
)
from weft_supervisor.admin import AdminServer
from weft_supervisor.core.supervisor import Config, Supervisor
from weft_supervisor.server import SupervisorServer


class FakeScheduler(SchedulerServicer):
    """Collects messages by kind; `send` reaches the newest supervisor stream."""

    def __init__(self) -> None:
        self.inbox: dict[str, asyncio.Queue] = {k: asyncio.Queue() for k in ("hello", "report", "outcome_ack", "keys")}
        self.outbox: Outbox = Outbox()

    async def Cluster(self, request_iterator, context):  # noqa: N802
        outbox = self.outbox = Outbox()
        async for message in both_ways(request_iterator, context, outbox, self._take):
            yield message

    def _take(self, message: scheduler_pb2.SupervisorToScheduler) -> None:
        kind = message.WhichOneof("message")
        self.inbox[kind].put_nowait(getattr(message, kind))

    async def next(self, kind: str):
        return await soon(self.inbox[kind].get())

    async def report_with(self, condition) -> scheduler_pb2.ClusterReport:
        while not condition(report := await self.next("report")):
            pass
        return report

    def send(self, **message) -> None:
        assert self.outbox.put(scheduler_pb2.SchedulerToSupervisor(**message))

    def break_stream(self) -> None:
        self.outbox.close()


class FakePredictor(PredictorServicer):
    """Collects outcomes; acknowledges them while `acknowledges`."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue = asyncio.Queue()
        self.acknowledges = True
        self.outbox: Outbox = Outbox()

    async def Observe(self, request_iterator, context):  # noqa: N802
        outbox = self.outbox = Outbox()

        def take(message: predictor_pb2.ObserveRequest) -> None:
            for outcome in message.outcomes:
                self.inbox.put_nowait(outcome)
            if self.acknowledges:
                outbox.put(predictor_pb2.ObserveAck(request_ids=[o.request_id for o in message.outcomes]))

        async for message in both_ways(request_iterator, context, outbox, take):
            yield message

    async def next(self) -> common_pb2.Outcome:
        return await soon(self.inbox.get())


def hello_of(runner: common_pb2.RunnerId, *, pool: str = "ns/pool", total_pages: int = 4) -> supervisor_pb2.RunnerHello:
    """What an honest runner says of itself."""
    return supervisor_pb2.RunnerHello(
        runner=runner, address="h:1", pool=pool, page_tokens=16, total_pages=total_pages, max_sequences=8,
        max_adapters=4, max_rank=8, max_context_tokens=16 * total_pages,
    )  # fmt: skip


@dataclass
class RunnerClient:
    """A runner's end of its stream, told by the test what to say."""

    call: grpc.aio.StreamStreamCall
    number: int = 0
    id: common_pb2.RunnerId = field(default_factory=lambda: common_pb2.RunnerId(uuid="a", incarnation="1"))

    async def hello(self, total_pages: int = 4) -> supervisor_pb2.Registered:
        await self.call.write(supervisor_pb2.RunnerToSupervisor(hello=hello_of(self.id, total_pages=total_pages)))
        return (await self.read()).registered

    async def state(self, *names: str, free: int = 0, paused: tuple[str, ...] = (), **fields) -> None:
        self.number += 1
        state = supervisor_pb2.RunnerState(
            sequence=self.number,
            free_pages=free,
            used_pages=len(names),
            sequences=[
                supervisor_pb2.SequenceState(
                    request_id=name,
                    epoch=common_pb2.Epoch(term=1, counter=i),
                    admitted=i,
                    reserved_pages=1,
                    used_pages=1,
                    reservation_tokens=16,
                )
                for i, name in enumerate(names)
            ],
            overruns=[
                supervisor_pb2.Overrun(
                    request_id=name, epoch=common_pb2.Epoch(term=1, counter=names.index(name)), reservation_tokens=32
                )
                for name in paused
            ],
            **fields,
        )
        await self.call.write(supervisor_pb2.RunnerToSupervisor(state=state))

    async def beat(self) -> None:
        await self.call.write(supervisor_pb2.RunnerToSupervisor(heartbeat=supervisor_pb2.Heartbeat()))

    async def read(self) -> supervisor_pb2.SupervisorToRunner:
        message = await soon(self.call.read())
        assert message is not grpc.aio.EOF, "the stream has ended"
        return message

    async def ended(self) -> bool:
        return await soon(self.call.read()) is grpc.aio.EOF


@dataclass
class World:
    server: SupervisorServer
    scheduler: FakeScheduler
    predictor: FakePredictor
    supervisor: SupervisorStub
    admin: AdminStub

    def runner(self, uuid: str = "a", incarnation: str = "1") -> RunnerClient:
        return RunnerClient(self.supervisor.Runner(), id=common_pb2.RunnerId(uuid=uuid, incarnation=incarnation))


@pytest.fixture
async def store(tmp_path: Path):
    engine = open_database(sqlite_url(tmp_path / "weft.sqlite"))
    await migrate.upgrade(engine)
    yield engine
    await engine.dispose()


@pytest.fixture
def config() -> Config:
    """No lease and no preemption runs out while a test goes on."""
    return Config(lease_s=600.0, report_s=0.01, preempt_s=600.0)


@pytest.fixture
async def world(store, config) -> AsyncIterator[World]:
    scheduler, predictor = FakeScheduler(), FakePredictor()
    async with (
        listening(
            lambda s: (add_SchedulerServicer_to_server(scheduler, s), add_PredictorServicer_to_server(predictor, s))
        ) as peers_at,
        channel(peers_at) as to_peers,
    ):
        server = SupervisorServer(Supervisor(config, highest_term=3), store, to_peers, to_peers)
        admin = AdminServer(store, server)
        await admin.tell_keys()
        async with listening(
            lambda s: (add_SupervisorServicer_to_server(server, s), add_AdminServicer_to_server(admin, s))
        ) as own_at:
            running = asyncio.create_task(server.run(keep_days=30))
            async with channel(own_at) as to_own:
                yield World(server, scheduler, predictor, SupervisorStub(to_own), AdminStub(to_own))
            await server.drain()
            await soon(running)


@asynccontextmanager
async def listening(register: Callable[[grpc.aio.Server], object]) -> AsyncIterator[str]:
    """A server's address; its clients are to be gone before it is, and then it waits for nobody."""
    server = grpc.aio.server()
    register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(PATIENCE_S)
