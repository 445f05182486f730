"""The same bytes as gRPC messages, for comparison: a stream of a mebibyte each, copied into pages where they arrive."""

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np

from weft.wire.roles import dns_name
from weft.wire.tls import Tls
from weft_bench.transfer_ends import PATIENCE_S, cpu_s

MESSAGE_BYTES = 1 << 20
METHOD = "/weft.bench.Transfer/Send"
OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


async def transfers_s(
    address: str, tls: Path | None, content: "np.ndarray[Any, np.dtype[np.uint8]]", count: int
) -> list[float]:
    """Return the seconds of each transfer of `content`, until its acknowledgement, but for the first one."""
    seconds: list[float] = []
    async with _channel(address, tls) as channel:
        begin: Any = channel.stream_stream(METHOD, _as_it_is, _as_it_is)  # the stubs know no call without an iterator
        call = begin()
        for _ in range(count + 1):
            began = time.perf_counter()
            for at in range(0, len(content), MESSAGE_BYTES):
                await call.write(content[at : at + MESSAGE_BYTES].tobytes())
            await call.write(b"")
            await call.read()
            seconds.append(time.perf_counter() - began)
        await call.done_writing()
    return seconds[1:]


@contextmanager
def receiver(n_bytes: int, tls: Path | None) -> "Generator[tuple[str, Connection[Any, Any]]]":
    """Start a receiver; give its address, and a pipe that answers with its CPU seconds."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, n_bytes, tls), daemon=True)
    process.start()
    try:
        yield here.recv(), here
        here.send("end")
        process.join(PATIENCE_S)
    finally:
        process.kill()


def _as_it_is(message: bytes) -> bytes:
    return message


def _channel(address: str, tls: Path | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(address, options=OPTIONS)
    files = Tls(tls, "runner").present()
    credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.certificate)
    named = ("grpc.ssl_target_name_override", dns_name("runner"))
    return grpc.aio.secure_channel(address, credentials, options=(*OPTIONS, named))


def _serve(asks: "Connection[Any, Any]", n_bytes: int, tls: Path | None) -> None:
    asyncio.run(_serving(asks, n_bytes, tls))


async def _serving(asks: "Connection[Any, Any]", n_bytes: int, tls: Path | None) -> None:
    pages = np.ones(n_bytes, np.uint8)

    async def take(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        del context
        at = 0
        async for message in requests:
            if not message:
                yield b"\1"
                at = 0
                continue
            pages[at : at + len(message)] = np.frombuffer(message, np.uint8)
            at += len(message)

    server = grpc.aio.server(options=OPTIONS)
    handler = grpc.method_handlers_generic_handler(
        "weft.bench.Transfer", {"Send": grpc.stream_stream_rpc_method_handler(take)}
    )
    server.add_generic_rpc_handlers((handler,))
    if tls is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        files = Tls(tls, "runner").present()
        credentials = grpc.ssl_server_credentials([(files.key, files.certificate)], files.ca, require_client_auth=True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    asks.send(f"127.0.0.1:{port}")
    while await asyncio.to_thread(asks.recv) != "end":
        asks.send(cpu_s())
    await server.stop(None)
