"""A link over which nothing comes any more though its connection stays: half-open TCP, a network that drops."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from harness.waiting import soon
from weft.wire.roles import Role
from weft.wire.serving import SERVER_OPTIONS
from weft.wire.streams import channel
from weft_bench.links import Links

PEERS: tuple[Role, ...] = ("supervisor", "runner")  # found after 17 s and 3 s on a machine that is not busy
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


@pytest.mark.parametrize("peer", PEERS)
async def test_a_stream_whose_link_passes_nothing_any_more_ends_while_data_was_flowing(peer: Role) -> None:
    server, address = await served()
    async with Links() as links, channel(await links.forward(address), peer=peer) as opened:
        call: Any = opened.stream_stream(METHOD)()
        await call.write(b"tick")
        for _ in range(3):
            assert await soon(call.read()) == b"tick"
        links.stall(address)
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await soon(to_its_end(call))
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(None)
