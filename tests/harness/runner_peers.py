"""Who a runner speaks to over real sockets: the supervisor's end of its stream, and a gateway's."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import grpc.aio

from harness.waiting import PATIENCE_S, soon
from weft.domain.request import FinishReason, SequenceTokens, Step
from weft.domain.runner import RunnerBook
from weft.wire.codec.cluster import RUNNER_TO_SUPERVISOR
from weft.wire.codec.session import RUNNER_TO_GATEWAY
from weft.wire.streams import SendQueue, channel, serve_stream
from weft.wire.v1 import common_pb2, runner_pb2, runner_pb2_grpc, supervisor_pb2, supervisor_pb2_grpc
from weft.wire.v1.runner_pb2 import GatewayToRunner
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


class Gateway:
    """A gateway's session: what it sent, what it heard. It is open within its block."""

    def __init__(self, address: str, incarnation: str, name: str = "g1") -> None:
        self._channel = channel(address)
        self.outbox: SendQueue[GatewayToRunner] = SendQueue()
        self.outbox.put(GatewayToRunner(hello=runner_pb2.SessionHello(gateway=name, incarnation=incarnation)))
        self.call = runner_pb2_grpc.RunnerStub(self._channel).Session(aiter(self.outbox))

    def start(self, request_id: str, prompt: list[int], counter: int = 1, term: int = 1, **fields: Any) -> None:
        start = {"max_tokens": 6, "reservation_tokens": 6, **fields}
        sampling = start.pop("sampling", runner_pb2.Sampling(top_p=1.0, ignore_eos=True))
        epoch = common_pb2.Epoch(term=term, counter=counter)
        self.outbox.put(
            GatewayToRunner(
                start=runner_pb2.Start(request_id=request_id, epoch=epoch, prompt=prompt, sampling=sampling, **start)
            )
        )

    async def next(self, kind: str) -> Any:
        """The next message, which has to be of this kind."""
        message = await soon(self.call.read())
        assert message is not grpc.aio.EOF, "the session ended"
        assert message.WhichOneof("message") == kind, message
        return getattr(message, kind)

    async def answer(self, request_id: str) -> tuple[list[int], FinishReason]:
        tokens: list[int] = []
        while True:
            for sequence in await self._step():
                if sequence.request_id == request_id:
                    assert sequence.position == len(tokens)
                    tokens.extend(sequence.tokens)
                    if sequence.finish is not None:
                        return tokens, sequence.finish

    async def answers(self, *request_ids: str) -> dict[str, list[int]]:
        """Return the answers of requests that run at the same time."""
        tokens: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
        running = set(request_ids)
        while running:
            for sequence in await self._step():
                tokens[sequence.request_id].extend(sequence.tokens)
                if sequence.finish is not None:
                    running.remove(sequence.request_id)
        return tokens

    async def _step(self) -> Sequence[SequenceTokens]:
        step = RUNNER_TO_GATEWAY.decode(runner_pb2.RunnerToGateway(step=await self.next("step")))
        assert isinstance(step, Step)
        return step.sequences

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.outbox.close()
        self.call.cancel()
        await self._channel.close()
