"""The supervisor's end of a runner's stream, over a real socket."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc.aio

from harness.waiting import PATIENCE_S
from weft.domain.runner import RunnerBook
from weft.wire.codec.cluster import RUNNER_TO_SUPERVISOR
from weft.wire.streams import SendQueue, serve_stream
from weft.wire.v1 import supervisor_pb2, supervisor_pb2_grpc
from weft.wire.v1.supervisor_pb2 import SupervisorToRunner


@dataclass
class Supervisor(supervisor_pb2_grpc.SupervisorServicer):
    """The supervisor's end of the stream: keeps what a runner says, sends the orders of a test."""

    hellos: list[Any] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    heartbeats: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)  # the stream of a runner has ended
    outbox: SendQueue[Any] = field(default_factory=SendQueue)
    book: Any = None
    news: asyncio.Condition = field(default_factory=asyncio.Condition)
    lease_ms: int = 400

    async def Runner(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 (the contract's name)
        self.outbox = SendQueue()
        self.outbox.put(SupervisorToRunner(registered=supervisor_pb2.Registered(lease_ms=self.lease_ms, report_ms=20)))
        try:
            async for message in serve_stream(request_iterator, context, self.outbox, self._take):
                yield message
        finally:
            self.over.set()

    def _take(self, message: Any) -> None:
        match message.WhichOneof("message"):
            case "hello":
                self.hellos.append(message.hello)
                self.book = RunnerBook(RUNNER_TO_SUPERVISOR.decode(message))
            case "report":
                report = RUNNER_TO_SUPERVISOR.decode(message)
                if report.full or self.book.version is not None:
                    self.states.append(self._applied(report))
                else:  # made before the stream came up
                    self.outbox.put(SupervisorToRunner(resync=supervisor_pb2.Resync()))
            case "heartbeat":
                self.heartbeats += 1
        asyncio.get_running_loop().create_task(self._wake())

    def _applied(self, report: Any) -> Any:
        """The whole state after that report."""
        self.book.apply(report)
        book = self.book
        return SimpleNamespace(
            **report.figures._asdict(), version=report.version, full=report.full, overruns=report.overruns,
            sequences=[*book.sequences.values()], adapters=[*book.adapters.values()], progress=book.progress,
        )  # fmt: skip

    async def _wake(self) -> None:
        async with self.news:
            self.news.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self.news:
            await self.news.wait_for(condition)

    def order(self, *desired: str, version: int = 1, pinned: bool = False, drain: bool = False, tier: Any = 0) -> None:
        adapters = [supervisor_pb2.DesiredAdapter(digest=d, pinned=pinned, tier=tier) for d in desired]
        change = supervisor_pb2.DesiredChange(version=version, full=True, adapters=adapters)
        order = supervisor_pb2.RunnerOrder(desired=change, drain=drain)
        self.outbox.put(SupervisorToRunner(order=order))


@asynccontextmanager
async def supervised(address: str = "127.0.0.1:0") -> AsyncIterator[tuple[Supervisor, str]]:
    supervisor, server = Supervisor(), grpc.aio.server()
    supervisor_pb2_grpc.add_SupervisorServicer_to_server(supervisor, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield supervisor, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
