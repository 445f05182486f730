"""Messages that wait together go as one to a peer that takes them so, in their order, and one by one to any other."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.waiting import soon
from weft.wire.errors import PeerError
from weft.wire.streams import (
    ACCEPTED,
    CALLED,
    MAX_FOLLOWING,
    MAX_JOINED_BYTES,
    ClientStream,
    SendQueue,
    serve_stream,
    unjoined,
)
from weft.wire.v1 import runner_pb2, runner_pb2_grpc

LONG_S = 60.0  # nothing in these tests takes so long


def gone(request_id: str) -> runner_pb2.RunnerToGateway:
    return runner_pb2.RunnerToGateway(no_capacity=runner_pb2.NoCapacity(request_id=request_id))


def stop(request_id: str) -> runner_pb2.GatewayToRunner:
    return runner_pb2.GatewayToRunner(stop=runner_pb2.Stop(request_id=request_id))


def joining(limit: int = 10_000) -> SendQueue[runner_pb2.RunnerToGateway]:
    outbox: SendQueue[runner_pb2.RunnerToGateway] = SendQueue(limit)
    outbox.joins = True
    return outbox


@given(st.lists(st.sampled_from([1, 100, 30_000, 70_000]), max_size=200))
async def test_nothing_is_lost_or_passed_and_each_envelope_has_its_bounds(sizes: list[int]) -> None:
    messages = [gone(f"{i}:".ljust(size, "x")) for i, size in enumerate(sizes)]
    kept = [message.SerializeToString() for message in messages]
    outbox = joining()
    for message in messages:
        outbox.put(message)
    outbox.close()
    sent = [envelope async for envelope in outbox]
    ids = [one.no_capacity.request_id for envelope in sent for one in unjoined(envelope)]
    assert ids == [message.no_capacity.request_id for message in messages]
    assert [message.SerializeToString() for message in messages] == kept, "other queues may have them, too"
    assert all(len(envelope.following) <= MAX_FOLLOWING for envelope in sent)
    assert all(envelope.ByteSize() < MAX_JOINED_BYTES + 1000 for envelope in sent if envelope.following)
    assert not any(one.following for envelope in sent for one in envelope.following)
    if all(size <= 100 for size in sizes):
        assert len(sent) == -(-len(sizes) // (MAX_FOLLOWING + 1)), "as few as there may be"


async def test_a_patient_message_goes_with_the_next_one() -> None:
    outbox = joining()
    sending = asyncio.ensure_future(anext(aiter(outbox)))
    outbox.put(gone("patient"), patience_s=LONG_S)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not sending.done()
    outbox.put(gone("urgent"))
    assert [one.no_capacity.request_id for one in unjoined(await soon(sending))] == ["patient", "urgent"]


async def test_a_patient_message_goes_alone_where_no_other_comes_and_the_next_one_waits_again() -> None:
    outbox = joining()
    messages = aiter(outbox)
    for name in ("a", "b"):
        sending = asyncio.ensure_future(anext(messages))
        outbox.put(gone(name), patience_s=0.01)
        await asyncio.sleep(0)
        assert not sending.done()
        assert (await soon(sending)).no_capacity.request_id == name


async def test_a_peer_that_takes_no_joined_messages_is_sent_each_at_once() -> None:
    outbox: SendQueue[runner_pb2.RunnerToGateway] = SendQueue()
    for name in ("a", "b"):
        outbox.put(gone(name), patience_s=LONG_S)
    messages = aiter(outbox)
    sent = [await soon(anext(messages)) for _ in range(2)]
    assert [one.no_capacity.request_id for one in sent] == ["a", "b"]
    assert not any(one.following for one in sent)


async def test_a_patient_message_is_sent_when_the_queue_closes_and_counts_against_its_limit() -> None:
    outbox = joining(1)
    assert outbox.put(gone("a"), patience_s=LONG_S)
    assert not outbox.put(gone("b"), patience_s=LONG_S)
    assert outbox.overflowed
    assert [one.no_capacity.request_id async for one in outbox] == ["a"]


def test_more_messages_than_may_follow_are_refused() -> None:
    envelope = gone("a")
    envelope.following.extend([gone("b")] * MAX_FOLLOWING)
    assert len(list(unjoined(envelope))) == MAX_FOLLOWING + 1
    envelope.following.add()
    with pytest.raises(PeerError, match="follow"):
        unjoined(envelope)


# ---- over gRPC


class Server(runner_pb2_grpc.RunnerServicer):
    """Sends three messages at once, and keeps what it was sent. `accepted`: in place of its own first word."""

    def __init__(self, accepted: str = "") -> None:
        self.heard, self._accepted = asyncio.Queue[str](), accepted

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[runner_pb2.RunnerToGateway]:  # noqa: N802
        if self._accepted:
            await context.send_initial_metadata(((ACCEPTED[0], self._accepted),))
            async for message in request_iterator:
                assert not message.following
                self._take(message)
            return
        outbox: SendQueue[runner_pb2.RunnerToGateway] = SendQueue()
        for name in "abc":
            outbox.put(gone(name))
        async for envelope in serve_stream(request_iterator, context, outbox, self._take, joins=True):
            yield envelope

    def _take(self, message: runner_pb2.GatewayToRunner) -> None:
        self.heard.put_nowait(message.stop.request_id)


@asynccontextmanager
async def opened(server: Server) -> AsyncGenerator[Any]:
    """The stub's method, to a server that serves."""
    grpc_server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    runner_pb2_grpc.add_RunnerServicer_to_server(server, grpc_server)
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield runner_pb2_grpc.RunnerStub(channel).Session
    await grpc_server.stop(0)


@pytest.mark.parametrize(("metadata", "envelopes"), [((CALLED,), 1), (((CALLED[0], "1"),), 3), ((), 3)])
async def test_a_server_joins_messages_for_a_client_that_takes_them(metadata: Any, envelopes: int) -> None:
    async with opened(Server()) as session:
        call = session(iter(()), metadata=metadata)
        first = [await soon(call.read()) for _ in range(envelopes)]
        assert [one.no_capacity.request_id for envelope in first for one in unjoined(envelope)] == ["a", "b", "c"]
        call.cancel()


@pytest.mark.parametrize("accepted", ["", "1"], ids=["takes several", "of a version before"])
async def test_a_link_sends_several_as_one_where_its_server_takes_them_and_hears_each(accepted: str) -> None:
    server, got, up = Server(accepted), asyncio.Queue[str](), asyncio.Event()
    async with opened(server) as session:
        link: ClientStream[runner_pb2.GatewayToRunner, runner_pb2.RunnerToGateway] = ClientStream(
            "test",
            session,
            hello=lambda: [stop("hello")],
            on_message=lambda message: got.put_nowait(message.no_capacity.request_id),
            on_up=up.set,
            joins=True,
        )
        running = asyncio.create_task(link.run())
        await soon(up.wait())
        for name in "xyz":
            link.send(stop(name), patience_s=0.001)
        assert [await soon(server.heard.get()) for _ in range(4)] == ["hello", "x", "y", "z"]
        if not accepted:
            assert [await soon(got.get()) for _ in range(3)] == ["a", "b", "c"]
        link.close()
        await soon(running)
