"""A supervisor's shell on loopback with a real store; scheduler and predictor are fakes at the narrow seam.

The fakes are gRPC servers that speak the contract and decide nothing: they collect what they get in queues, so a
test awaits the message it needs.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import pytest

from harness.grpc_server import listening
from harness.stored import new_store
from harness.waiting import PATIENCE_S, soon
from weft.domain.ids import Epoch, RunnerId
from weft.domain.runner import (
    ClusterReport,
    Heartbeat,
    Overrun,
    Registered,
    RunnerFigures,
    RunnerReport,
    RunnerSpec,
    SequenceState,
)
from weft.store.database import sqlite_url
from weft.wire.codec.cluster import (
    RUNNER_TO_SUPERVISOR,
    SCHEDULER_TO_SUPERVISOR,
    SUPERVISOR_TO_RUNNER,
    SUPERVISOR_TO_SCHEDULER,
)
from weft.wire.streams import SendQueue, channel, serve_stream
from weft.wire.v1 import common_pb2, predictor_pb2, scheduler_pb2
from weft.wire.v1.predictor_pb2_grpc import PredictorServicer, add_PredictorServicer_to_server
from weft.wire.v1.scheduler_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from weft.wire.v1.supervisor_pb2_grpc import (
    AdminStub,
    SupervisorStub,
    add_AdminServicer_to_server,
    add_SupervisorServicer_to_server,
)
from weft_supervisor.admin import AdminServer
from weft_supervisor.core import Supervisor, SupervisorConfig
from weft_supervisor.server import SupervisorServer


class FakeScheduler(SchedulerServicer):
    """Collects messages by class; `send` reaches the newest supervisor stream."""

    def __init__(self) -> None:
        self.inbox: dict[type, asyncio.Queue] = {of: asyncio.Queue() for of in SUPERVISOR_TO_SCHEDULER.messages}
        self.outbox: SendQueue = SendQueue()

    async def Cluster(self, request_iterator, context):  # noqa: N802
        outbox = self.outbox = SendQueue()
        async for message in serve_stream(request_iterator, context, outbox, self._take):
            yield SCHEDULER_TO_SUPERVISOR.encode(message)

    def _take(self, envelope: scheduler_pb2.SupervisorToScheduler) -> None:
        message = SUPERVISOR_TO_SCHEDULER.decode(envelope)
        self.inbox[type(message)].put_nowait(message)

    async def next(self, of: type):
        return await soon(self.inbox[of].get())

    async def report_with(self, condition) -> ClusterReport:
        while not condition(report := await self.next(ClusterReport)):
            pass
        return report

    def forget(self) -> None:
        """Drop what has come so far."""
        for queue in self.inbox.values():
            while not queue.empty():
                queue.get_nowait()

    def send(self, message) -> None:
        assert self.outbox.put(message)

    def break_stream(self) -> None:
        self.outbox.close()


class FakePredictor(PredictorServicer):
    """Collects outcomes; acknowledges them while `acknowledges`."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue = asyncio.Queue()
        self.acknowledges = True
        self.outbox: SendQueue = SendQueue()

    async def Observe(self, request_iterator, context):  # noqa: N802
        outbox = self.outbox = SendQueue()

        def take(message: predictor_pb2.ObserveRequest) -> None:
            for outcome in message.outcomes:
                self.inbox.put_nowait(outcome)
            if self.acknowledges:
                outbox.put(predictor_pb2.ObserveAck(request_ids=[o.request_id for o in message.outcomes]))

        async for message in serve_stream(request_iterator, context, outbox, take):
            yield message

    async def next(self) -> common_pb2.Outcome:
        return await soon(self.inbox.get())


def spec_of(runner: RunnerId, *, pool: str = "ns/pool", total_pages: int = 4) -> RunnerSpec:
    """What an honest runner says of itself."""
    return RunnerSpec(
        runner, "h:1", pool, page_tokens=16, total_pages=total_pages, max_sequences=8, max_adapters=4, max_rank=8,
        max_context_tokens=16 * total_pages,
    )  # fmt: skip


@dataclass
class RunnerClient:
    """A runner's end of its stream; the test says what it sends."""

    call: grpc.aio.StreamStreamCall
    version: int = 0
    id: RunnerId = field(default_factory=lambda: RunnerId("a", "1"))

    async def send(self, message) -> None:
        await self.call.write(RUNNER_TO_SUPERVISOR.encode(message))

    async def hello(self, total_pages: int = 4) -> Registered:
        await self.send(spec_of(self.id, total_pages=total_pages))
        return await self.read()

    async def report(
        self, *names: str, free: int = 0, full: bool = True, paused: tuple[str, ...] = (), skip: int = 0, **fields
    ) -> None:
        """A report of these sequences; one that follows the last one, unless some are to be skipped."""
        self.version += 1 + skip
        sequences = [SequenceState(name, Epoch(1, i), "g", "", 1, 16, i) for i, name in enumerate(names)]
        overruns = [Overrun(name, Epoch(1, names.index(name)), 1, 32) for name in paused]
        of_report = {name: fields.pop(name) for name in list(fields) if name in RunnerReport._fields}
        figures = RunnerFigures(free, len(names), **fields)
        await self.send(RunnerReport(self.version, full, figures, sequences, overruns=overruns, **of_report))

    async def beat(self) -> None:
        await self.send(Heartbeat())

    async def read(self):
        envelope = await soon(self.call.read())
        assert envelope is not grpc.aio.EOF, "the stream has ended"
        return SUPERVISOR_TO_RUNNER.decode(envelope)

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
        return RunnerClient(self.supervisor.Runner(), id=RunnerId(uuid, incarnation))


@pytest.fixture
async def store(tmp_path: Path):
    engine = await new_store(sqlite_url(tmp_path / "weft.sqlite"))
    yield engine
    await engine.dispose()


@pytest.fixture
def config() -> SupervisorConfig:
    """No lease and no preemption runs out while a test goes on."""
    return SupervisorConfig(lease_s=600.0, report_s=0.01, preempt_s=600.0)


@pytest.fixture
async def world(store, config) -> AsyncIterator[World]:
    scheduler, predictor = FakeScheduler(), FakePredictor()
    async with (
        listening(
            lambda s: (add_SchedulerServicer_to_server(scheduler, s), add_PredictorServicer_to_server(predictor, s)),
            grace_s=PATIENCE_S,
        ) as peers_at,
        channel(peers_at) as to_peers,
    ):
        server = SupervisorServer(Supervisor(config, highest_term=3), store, to_peers, to_peers)
        admin = AdminServer(store, server)
        await admin.send_keys()
        async with listening(
            lambda s: (add_SupervisorServicer_to_server(server, s), add_AdminServicer_to_server(admin, s)),
            grace_s=PATIENCE_S,
        ) as own_at:
            running = asyncio.create_task(server.run())
            async with channel(own_at) as to_own:
                yield World(server, scheduler, predictor, SupervisorStub(to_own), AdminStub(to_own))
            await server.drain()
            await soon(running)
