"""A link over which nothing comes any more though its connection stays: half-open TCP, a network that drops."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from harness.waiting import soon
from weft.wire.serving import SERVER_OPTIONS
from weft.wire.streams import ClientStream, channel
from weft_trouble.links import Links

METHOD = "/test.Test/Session"


async def ticks(requests: AsyncIterator[bytes], _: "grpc.aio.ServicerContext[bytes, bytes]") -> AsyncIterator[bytes]:
    """Answers a message, and goes on sending while nobody asks."""
    async for message in requests:
        yield message
        while True:
            await asyncio.sleep(0.05)
            yield message


async def served() -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handler: Any = grpc.stream_stream_rpc_method_handler(ticks)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Session": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def to_its_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_stream_whose_link_passes_nothing_any_more_ends_while_data_was_flowing() -> None:
    server, address = await served()
    async with Links() as links, channel(await links.forward(address)) as opened:
        call: Any = opened.stream_stream(METHOD)()
        await call.write(b"tick")
        for _ in range(3):
            assert await soon(call.read()) == b"tick"
        links.stall(address)
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await soon(to_its_end(call))
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(None)


async def test_a_link_whose_connection_leads_nowhere_is_opened_anew() -> None:
    server, address = await served()
    connections, heard_on = [0], asyncio.Queue[int]()

    def hello() -> list[bytes]:
        connections[0] += 1
        return [b"tick"]

    async def heard_on_a_connection_after(number: int) -> int:
        while (found := await heard_on.get()) <= number:
            pass
        return found

    async with Links() as links, channel(await links.forward(address)) as opened:
        link: ClientStream[bytes, bytes] = ClientStream(
            "test", opened.stream_stream(METHOD), hello=hello, on_message=lambda _: heard_on.put_nowait(connections[0])
        )
        running = asyncio.create_task(link.run())
        first = await soon(heard_on_a_connection_after(0))
        links.abandon(address)
        await soon(heard_on_a_connection_after(first))
        running.cancel()
        await asyncio.wait([running])
    await server.stop(None)
