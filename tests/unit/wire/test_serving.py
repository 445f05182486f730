"""A serving process: health, drain, a port in use."""

import asyncio
import os
import signal

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from harness.ports import free_port
from harness.waiting import PATIENCE_S, soon
from weft.process import AddressInUse
from weft.wire.serving import serve, stop_on_signals


async def healthy(port: int, service: str = "weft.v1.X") -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(
            health_pb2.HealthCheckRequest(service=service), wait_for_ready=True, timeout=PATIENCE_S
        )
        return int(answer.status)


async def test_sigterm_drains_before_the_server_stops() -> None:
    port, stop = free_port(), stop_on_signals()
    seen: list[int] = []

    async def drain() -> None:
        seen.append(await healthy(port))

    task = asyncio.create_task(
        serve(lambda _: None, listen=f"127.0.0.1:{port}", names=["weft.v1.X"], stop=stop, drain=drain)
    )
    assert await healthy(port) == health_pb2.HealthCheckResponse.SERVING
    os.kill(os.getpid(), signal.SIGTERM)
    await soon(task)
    assert seen == [health_pb2.HealthCheckResponse.NOT_SERVING]


@pytest.mark.parametrize(
    ("signals", "interrupted"),
    [([signal.SIGINT], True), ([signal.SIGTERM, signal.SIGINT], False), ([signal.SIGINT, signal.SIGTERM], True)],
)
async def test_a_stop_is_an_interrupt_where_sigint_came_first(signals: list[int], interrupted: bool) -> None:
    stop = stop_on_signals()
    for number in signals:
        os.kill(os.getpid(), number)
    await soon(stop.wait())
    assert stop.interrupted is interrupted


async def test_a_port_in_use_is_an_error() -> None:
    stop, port = asyncio.Event(), free_port()
    first = asyncio.create_task(serve(lambda _: None, listen=f"127.0.0.1:{port}", names=[], stop=stop))
    await healthy(port, "")
    with pytest.raises(AddressInUse, match="--listen"):
        await serve(lambda _: None, listen=f"127.0.0.1:{port}", names=[], stop=stop)
    stop.set()
    await soon(first)
