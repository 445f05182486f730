"""A gRPC server of a test, on loopback."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from weft.wire.serving import SERVER_OPTIONS


@asynccontextmanager
async def listening(
    register: Callable[[grpc.aio.Server], object],
    credentials: grpc.ServerCredentials | None = None,
    *,
    grace_s: float | None = None,
) -> AsyncIterator[str]:
    """Yield a server's address. `grace_s`: how long it waits in the end for its clients to go."""
    server, at = grpc.aio.server(options=SERVER_OPTIONS), "127.0.0.1:0"
    register(server)
    port = server.add_secure_port(at, credentials) if credentials else server.add_insecure_port(at)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace_s)
