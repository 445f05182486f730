"""The runner's link to a supervisor that it does not hear: another connection where one can be made, else the same."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from harness.grpc_server import listening
from harness.waiting import soon
from weft.domain.ids import RunnerId
from weft.domain.machine import Closed, Connected
from weft.domain.runner import Heartbeat, Registered, RunnerSpec
from weft.wire.codec.cluster import RUNNER_TO_SUPERVISOR, SUPERVISOR_TO_RUNNER
from weft.wire.streams import SendQueue, channel, serve_stream
from weft.wire.v1.supervisor_pb2_grpc import SupervisorServicer, add_SupervisorServicer_to_server
from weft_runner.shell import supervisor_link
from weft_trouble.links import Links

LEASE = Registered(lease_ms=600, report_ms=10)
SPEC = RunnerSpec(RunnerId("u", "1"), "h:1", "ns/pool", 16, 4, 8, 4, 8, 64)


class Supervisor(SupervisorServicer):
    """Counts streams and what comes on each, and answers every message, as long as it `answers`."""

    def __init__(self) -> None:
        self.answers, self.heard = True, asyncio.Queue[tuple[int, object]]()
        self.streams = 0
        self._awake, self._late = asyncio.Event(), list[SendQueue[Any]]()
        self._awake.set()

    async def Runner(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.streams += 1
        number, outbox = self.streams, SendQueue[Any]()

        def on_message(envelope: Any) -> None:
            message = RUNNER_TO_SUPERVISOR.decode(envelope)
            self.heard.put_nowait((number, message))
            if not self._awake.is_set():
                self._late.append(outbox)
            elif self.answers or isinstance(message, RunnerSpec):
                outbox.put(SUPERVISOR_TO_RUNNER.encode(LEASE))

        async for message in serve_stream(request_iterator, context, outbox, on_message):
            yield message

    def be_late(self) -> None:
        """Answer nothing from now on, on no connection."""
        self._awake.clear()

    def catch_up(self) -> None:
        """Answer what was asked meanwhile."""
        for outbox in self._late:
            outbox.put(SUPERVISOR_TO_RUNNER.encode(LEASE))
        self._awake.set()

    async def awake(self) -> None:
        await self._awake.wait()

    async def until(self, holds: Callable[[int, object], bool]) -> int:
        """Wait for a message for which it holds. Returns the number of its stream."""
        while not holds(*(found := await self.heard.get())):
            pass
        return found[0]


class Health(health_pb2_grpc.HealthServicer):
    """The supervisor's, which answers when it does."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:  # noqa: N802
        await self._supervisor.awake()
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


@dataclass
class Engine:
    """Takes what the link tells the engine."""

    events: list[Any] = field(default_factory=list[Any])
    busy_since: float | None = None
    layers_done: int = 0

    def post(self, event: object) -> None:
        self.events.append(event)


@dataclass
class Stage:
    supervisor: Supervisor
    links: Links
    address: str
    engine: Engine
    channels: list[grpc.aio.Channel]
    link: supervisor_link.SupervisorLink
    beats: bool = True

    async def beat(self) -> None:
        """Send heartbeats, as the machine of an idle runner does."""
        while True:
            if self.beats:
                self.link.send(Heartbeat())
            await asyncio.sleep(LEASE.lease_ms / 4000)


@asynccontextmanager
async def linked(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """A runner's link through which the supervisor has heard a few heartbeats."""
    monkeypatch.setattr(supervisor_link, "ASK_S", 0.2)
    supervisor, engine, channels = Supervisor(), Engine(), list[grpc.aio.Channel]()

    def register(server: grpc.aio.Server) -> None:
        add_SupervisorServicer_to_server(supervisor, server)
        health_pb2_grpc.add_HealthServicer_to_server(Health(supervisor), server)

    async with listening(register) as target, Links() as links:
        address = await links.forward(target)

        def opened() -> grpc.aio.Channel:
            channels.append(channel(address, peer="supervisor"))
            return channels[-1]

        link = supervisor_link.SupervisorLink(engine, SPEC, opened, lambda _: None)  # pyright: ignore[reportArgumentType] (of the engine)
        stage = Stage(supervisor, links, target, engine, channels, link)
        tasks = [asyncio.create_task(link.run()), asyncio.create_task(stage.beat())]
        for _ in range(9):
            await soon(supervisor.until(lambda _, message: isinstance(message, Heartbeat)))
        yield stage
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_link_that_leads_nowhere_is_left_for_another_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked(monkeypatch) as stage:
        stage.links.abandon(stage.address)
        assert await soon(stage.supervisor.until(lambda stream, _: stream > 1)) == 2
        assert await soon(stage.supervisor.until(lambda _, message: isinstance(message, Heartbeat))) == 2
        kinds = [type(event) for event in stage.engine.events if isinstance(event, Connected | Closed)]
        assert kinds == [Connected, Closed, Connected]


async def test_a_link_whose_answers_are_lost_is_kept_where_no_other_has_any(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked(monkeypatch) as stage:
        stage.links.stall(stage.address, there=False)
        while len(stage.channels) < 4:
            await soon(stage.supervisor.until(lambda _, message: isinstance(message, Heartbeat)))
        stage.links.resume(stage.address)
        for _ in range(9):
            await soon(stage.supervisor.until(lambda _, message: isinstance(message, Heartbeat)))
        assert stage.supervisor.streams == 1
        assert not [event for event in stage.engine.events if isinstance(event, Closed)]


async def test_a_supervisor_that_has_never_answered_is_one_of_an_older_version(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked(monkeypatch) as stage:
        stage.supervisor.answers = False
        stage.links.abandon(stage.address)  # the next stream has no answer but the first
        assert await soon(stage.supervisor.until(lambda stream, _: stream > 1)) == 2
        opened = len(stage.channels)
        for _ in range(20):
            assert await soon(stage.supervisor.until(lambda _, message: isinstance(message, Heartbeat))) == 2
        assert len(stage.channels) == opened


async def test_a_supervisor_that_is_late_is_no_dead_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new connection is answered as late as the old one."""
    async with linked(monkeypatch) as stage:
        monkeypatch.setattr(supervisor_link, "ASK_S", 60.0)
        monkeypatch.setattr(supervisor_link, "RECHECK_S", 1.0)  # both answers are heard on a busy machine, too
        stage.supervisor.be_late()
        while len(stage.channels) < 2:
            await soon(stage.supervisor.until(lambda _, message: isinstance(message, Heartbeat)))
        stage.supervisor.catch_up()
        for _ in range(9):
            await soon(stage.supervisor.until(lambda _, message: isinstance(message, Heartbeat)))
        assert stage.supervisor.streams == 1


async def test_a_runner_that_sends_nothing_does_not_come_again_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that computes nothing must lose its lease: another stream would renew it."""
    async with linked(monkeypatch) as stage:
        stage.beats, opened = False, len(stage.channels)
        await asyncio.sleep(2 * LEASE.lease_ms / 1000)  # nothing is to happen
        assert (stage.supervisor.streams, len(stage.channels)) == (1, opened)
