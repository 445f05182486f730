"""A peer behind a name that gets another address, as a pod that is scheduled anew behind a headless Service."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from harness.waiting import PATIENCE_S, eventually
from weft.wire.channels import CHANNEL_OPTIONS, fast_keepalive_socket_options, options_to
from weft.wire.serving import SERVER_OPTIONS
from weft.wire.streams import channel

ADDRESS = struct.pack("!HH", 1, 1)  # type A, class IN


class NameServer(asyncio.DatagramProtocol):
    """Answers every question of an address with `address`, and with nothing for any other type."""

    def __init__(self) -> None:
        self.address = "127.0.0.1"
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        question = data[12 : data.index(b"\0", 12) + 5]
        known = question.endswith(ADDRESS)
        answer = b"\xc0\x0c" + ADDRESS + struct.pack("!IH", 0, 4) + socket.inet_aton(self.address) if known else b""
        self.transport.sendto(data[:2] + b"\x81\x80" + struct.pack("!4H", 1, known, 0, 0) + question + answer, addr)


@pytest.fixture
async def names() -> AsyncIterator[NameServer]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 0))
    yield server
    transport.close()


async def serve(host: str, port: int = 0) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)  # type: ignore[attr-defined]
    port = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    return server, port


@pytest.mark.parametrize(
    ("options", "found_ms"),
    [
        (options_to("scheduler"), 3_000),
        (options_to("scheduler", hurried=False), 6_000),  # before a standby acts, 8 s
        (options_to("supervisor"), 17_000),  # a runner looks for another way before that
        (SERVER_OPTIONS, 17_000),
    ],
)
def test_a_link_is_found_dead_within_seconds_by_who_can_open_another(options: Any, found_ms: int) -> None:
    links = dict(options)
    assert links["grpc.keepalive_time_ms"] + links["grpc.keepalive_timeout_ms"] == found_ms
    assert links["grpc.http2.ping_timeout_ms"] == links["grpc.keepalive_timeout_ms"]
    assert len(links) == len(options)  # said once each


def test_a_socket_to_the_depot_is_found_dead_within_8_seconds() -> None:
    sockets = {name: value for _, name, value in fast_keepalive_socket_options()}
    probes_s = sockets[socket.TCP_KEEPINTVL] * sockets[socket.TCP_KEEPCNT]
    assert sockets[socket.TCP_KEEPIDLE] + probes_s == 8 == sockets[socket.TCP_USER_TIMEOUT] / 1_000


async def test_a_peer_that_comes_back_under_another_address_is_found_in_seconds(names: NameServer) -> None:
    """gRPC's own default is to ask for a name once in 30 s at most."""
    assert dict(CHANNEL_OPTIONS)["grpc.dns_min_time_between_resolutions_ms"] <= 2_000
    first, port = await serve("127.0.0.1")
    name_server = "{}:{}".format(*names.transport.get_extra_info("sockname"))
    async with channel(f"dns://{name_server}/peer.test:{port}") as connection:
        stub = health_pb2_grpc.HealthStub(connection)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        await first.stop(0)
        names.address = "127.0.0.2"
        second, _ = await serve("127.0.0.2", port)

        async def is_found() -> bool:
            """A call may be on its way on the connection that ends."""
            with suppress(grpc.aio.AioRpcError):
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S, wait_for_ready=True)
                return True
            return False

        await eventually(is_found)
        await second.stop(0)
