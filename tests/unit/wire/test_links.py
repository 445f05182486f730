"""Links and server ends over real gRPC on loopback: what is told first, what happens when either side goes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from annotated_types import Le
from prometheus_client import REGISTRY

from harness.ports import free_port
from harness.waiting import soon
from weft.wire.errors import PeerError, peer_errors
from weft.wire.streams import ClientStream, SendQueue, channel, serve_stream
from weft.wire.v1 import runner_pb2, runner_pb2_grpc
from weft_gateway.core import MAX_UNACKED
from weft_gateway.settings import GatewaySettings


def start(request_id: str) -> runner_pb2.GatewayToRunner:
    return runner_pb2.GatewayToRunner(start=runner_pb2.Start(request_id=request_id))


class Peer(runner_pb2_grpc.RunnerServicer):
    """A server end that keeps what it was told and lets the test speak through its outbox."""

    def __init__(self, outbox_limit: int = 100) -> None:
        self.heard: asyncio.Queue[str] = asyncio.Queue()
        self.outbox: SendQueue[runner_pb2.RunnerToGateway] | None = None
        self.limit = outbox_limit
        self.ended = asyncio.Event()
        self.fail_on: str | None = None

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[runner_pb2.RunnerToGateway]:  # noqa: N802
        self.outbox = SendQueue(self.limit)
        self.ended.clear()
        try:
            async for message in serve_stream(request_iterator, context, self.outbox, self._on_message):
                yield message
        finally:
            self.ended.set()

    def _on_message(self, message: runner_pb2.GatewayToRunner) -> None:
        if message.start.request_id == self.fail_on:
            raise ValueError("cannot take that")
        self.heard.put_nowait(message.start.request_id)


async def serve_peer(peer: Peer, port: int = 0) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    runner_pb2_grpc.add_RunnerServicer_to_server(peer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, port


class Client:
    """A link with its events as queues."""

    def __init__(self, port: int, resubmits: int = 0) -> None:
        self.port, self.resubmits = port, resubmits
        self.channel = channel(f"127.0.0.1:{port}")
        self.got: asyncio.Queue[str] = asyncio.Queue()
        self.ups: asyncio.Queue[str] = asyncio.Queue()
        self.hellos, self.told_four_times = 0, asyncio.Event()
        self.link: ClientStream[runner_pb2.GatewayToRunner, runner_pb2.RunnerToGateway] = ClientStream(
            "test",
            runner_pb2_grpc.RunnerStub(self.channel).Session,
            hello=self._hello,
            on_message=self._take,
            on_up=self._on_up,
            on_down=lambda reason: self.ups.put_nowait(f"down: {reason}"),
        )
        self.task = asyncio.create_task(self.link.run())

    def _take(self, message: runner_pb2.RunnerToGateway) -> None:
        if message.no_capacity.request_id == "bad":
            raise PeerError("no such word")
        self.got.put_nowait(message.no_capacity.request_id)

    def _hello(self) -> list[runner_pb2.GatewayToRunner]:
        self.hellos += 1
        if self.hellos == 4:
            self.told_four_times.set()
        return [start(f"hello{self.hellos}")]

    def _on_up(self) -> None:
        assert all(self.link.send(start("resubmit")) for _ in range(self.resubmits))
        self.ups.put_nowait("up")

    async def close(self) -> None:
        self.link.close()
        await self.task
        await self.channel.close()


@asynccontextmanager
async def connected(peer: Peer, resubmits: int = 0) -> AsyncGenerator[Client]:
    server, port = await serve_peer(peer)
    client = Client(port, resubmits)
    assert await soon(client.ups.get()) == "up"
    yield client
    await client.close()
    await server.stop(0)


@pytest.fixture
async def peer() -> AsyncIterator[tuple[Peer, Client]]:
    async with connected(peer := Peer()) as client:
        yield peer, client


async def test_the_hello_comes_first_and_messages_keep_their_order(peer: tuple[Peer, Client]) -> None:
    server, client = peer
    for i in range(50):
        assert client.link.send(start(str(i)))
    assert [await server.heard.get() for _ in range(51)] == ["hello1", *map(str, range(50))]


@pytest.mark.slow
async def test_the_most_that_a_gateway_resubmits_is_sent_whole_and_leaves_the_outbox_its_limit() -> None:
    """Every request in flight, every outcome that is not stored, and an end."""
    (most,) = (limit.le for limit in GatewaySettings.model_fields["max_in_flight"].metadata if isinstance(limit, Le))
    length = int(most) + MAX_UNACKED + 1
    server = Peer()
    async with connected(server, resubmits=length) as client:
        sent = [client.link.send(start(str(i))) for i in range(100)]
        heard = [await soon(server.heard.get()) for _ in range(1 + length + 100)]
        assert all(sent)
        assert heard == ["hello1"] + ["resubmit"] * length + [str(i) for i in range(100)]
        assert client.ups.empty(), "one connection carried it all"


async def test_a_server_may_speak_first_and_ends_when_the_client_closes(peer: tuple[Peer, Client]) -> None:
    server, client = peer
    server.outbox.put(runner_pb2.RunnerToGateway(no_capacity=runner_pb2.NoCapacity(request_id="a")))
    assert await client.got.get() == "a"
    await client.close()
    await soon(server.ended.wait())


async def test_a_link_finds_a_restarted_server_and_tells_its_hello_again() -> None:
    first, port = Peer(), free_port()
    server, _ = await serve_peer(first, port)
    client = Client(port)
    assert await soon(client.ups.get()) == "up"
    await server.stop(0)
    assert (await soon(client.ups.get())).startswith("down")
    assert not client.link.send(start("lost"))  # dropped: the next hello tells what still counts
    second = Peer()
    server, _ = await serve_peer(second, port)
    assert await soon(client.ups.get()) == "up"
    assert (await second.heard.get()).startswith("hello")
    await client.close()
    await server.stop(0)


async def test_a_peer_that_does_not_read_is_cut_off_and_comes_back() -> None:
    server = Peer(outbox_limit=3)
    async with connected(server) as client:
        assert await server.heard.get() == "hello1"
        message = runner_pb2.RunnerToGateway(no_capacity=runner_pb2.NoCapacity(request_id="x"))
        accepted = [server.outbox.put(message) for _ in range(5)]  # no chance to send in between
        assert accepted == [True, True, True, False, False]
        assert "RESOURCE_EXHAUSTED" in await soon(client.ups.get())
        assert await soon(client.ups.get()) == "up"


async def test_an_error_in_the_server_ends_the_stream_and_the_client_hears_of_it() -> None:
    server = Peer()
    server.fail_on = "bad"
    async with connected(server) as client:
        client.link.send(start("bad"))
        assert (await soon(client.ups.get())).startswith("down: UNKNOWN")


async def test_a_link_to_nobody_closes_at_once() -> None:
    client = Client(1)  # nothing listens there
    await soon(client.close())
    assert client.ups.empty()


async def test_an_outbox_delivers_what_was_queued_before_it_closed() -> None:
    outbox: SendQueue[int] = SendQueue()
    outbox.put(1)
    outbox.put(2)
    outbox.close()
    assert not outbox.put(3)
    assert [m async for m in outbox] == [1, 2]


async def test_what_a_sender_bounds_by_itself_counts_beside_the_limit() -> None:
    outbox: SendQueue[int] = SendQueue(2)
    with outbox.unbounded():
        assert all(outbox.put(i) for i in range(5))
    assert [outbox.put(i) for i in range(5, 9)] == [True, True, False, False]
    assert [m async for m in outbox] == list(range(7))


async def test_why_a_link_does_not_come_up_is_logged_once_for_each_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.wire.streams.MAX_PAUSE_S", 0.05)
    server, port = Peer(), free_port()
    client = Client(port)
    await soon(client.told_four_times.wait())
    told = [record for record in caplog.records if record.getMessage() == "link does not come up"]
    assert len(told) == 1
    assert told[0].levelname == "WARNING"
    grpc_server, _ = await serve_peer(server, port)
    assert await soon(client.ups.get()) == "up"
    await client.close()
    await grpc_server.stop(0)


async def test_a_message_outside_the_contract_ends_the_connection_and_not_the_link(peer: tuple[Peer, Client]) -> None:
    server, client = peer
    for word in ("good", "bad", "not taken"):
        server.outbox.put(runner_pb2.RunnerToGateway(no_capacity=runner_pb2.NoCapacity(request_id=word)))
    assert await soon(client.got.get()) == "good"
    assert await soon(client.ups.get()) == "down: it broke the contract: no such word"
    assert await soon(client.ups.get()) == "up"
    assert client.got.empty()
    assert not client.task.done()


class Strict(Peer):
    """A runner that answers as every server of Weft does."""

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[runner_pb2.RunnerToGateway]:  # noqa: N802
        async with peer_errors("gateway", context):
            async for message in super().Session(request_iterator, context):
                yield message

    def _on_message(self, message: runner_pb2.GatewayToRunner) -> None:
        if message.start.request_id == "bad":
            raise PeerError("no such word" + "!" * 10_000)
        super()._on_message(message)


async def test_a_server_ends_one_peers_stream_with_the_reason_and_keeps_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Strict()
    async with connected(server) as client:
        labels = {"peer": "gateway", "code": "INVALID_ARGUMENT"}
        before = REGISTRY.get_sample_value("weft_peer_errors_total", labels) or 0.0
        for words in (start("bad").SerializeToString(), b"\xff\xff\xff no message"):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{client.port}") as opened:
                call: Any = opened.stream_stream("/weft.v1.Runner/Session", None, None)(iter([words]))
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await soon(call.read())
            assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert str(ended.value.details()).startswith(("no such word!", "bytes that are no message"))
        assert REGISTRY.get_sample_value("weft_peer_errors_total", labels) == before + 2
        assert [r.getMessage() for r in caplog.records].count("peer refused") == 2
        client.link.send(start("still here"))
        while await soon(server.heard.get()) != "still here":
            pass


async def test_the_pause_between_attempts_doubles_up_to_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_s = list[float]()

    async def record(closed: Any, timeout_s: float) -> None:
        closed.close()
        pauses_s.append(timeout_s)
        if len(pauses_s) == 7:
            link.close()

    async with channel(f"127.0.0.1:{free_port()}") as nobody:
        stub: Any = runner_pb2_grpc.RunnerStub(nobody)
        link = ClientStream[Any, Any]("test", stub.Session, hello=list, on_message=print)
        monkeypatch.setattr("weft.wire.streams.random.uniform", max)
        monkeypatch.setattr("weft.wire.streams.asyncio.wait_for", record)
        await link.run()
    assert pauses_s == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
