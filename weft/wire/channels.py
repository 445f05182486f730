"""Channels: keepalive and bounds of all of them, and TLS whose next connection uses the certificates as they are then.

gRPC fixes a channel's credentials at its making. So a change of the files makes a new channel for the calls from then
on; the old one lives as long as the calls that began on it.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from weft.wire.roles import Role, dns_name
from weft.wire.tls import Tls, TlsFiles

MAX_MESSAGE_BYTES = 64 << 20
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    # Windows of a fixed size bound what a process holds of a stream that it does not read. By default gRPC measures the
    # bandwidth and widens them: on a busy machine an upload held 100 MB at a server.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    # Who has opened a link can open another: one that says nothing for a second is asked, and given up 2 s later. gRPC
    # answers beside the interpreter, so that a long step is no silence. It waits for the longer of the two timeouts,
    # and the second is 60 s by default.
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # what one attempt may take at least, handshake and all: not a pause
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    # A peer that was scheduled anew has another address behind its name; gRPC would ask for it every 30 s only.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
]
# Links on which no request waits for its next token are asked more rarely: in the second after a question threads of
# gRPC wake some thirty times at either end (0.06 % of a core for one a second). They are given up before a standby of
# the peer takes its place, and asked before the other end asks.
UNHURRIED: dict[str, Any] = {"grpc.keepalive_time_ms": 4_000}
# Who serves can only wait for a peer to come back, and loses little by patience: a supervisor or a gateway that stands
# still for 10 s goes on with what it had. A runner looks for another way to its supervisor by itself, and keeps the
# one that it has until there is another (`weft_runner/shell/supervisor_link.py`).
PATIENCE: dict[str, Any] = {
    "grpc.keepalive_time_ms": 5_000,
    "grpc.keepalive_timeout_ms": 12_000,
    "grpc.http2.ping_timeout_ms": 12_000,
}


def options_to(peer: Role | None, *, hurried: bool = True) -> list[tuple[str, Any]]:
    """The options of a channel to a process of that role. `hurried`: requests wait for what comes over it."""
    of_link = PATIENCE if peer == "supervisor" else {} if hurried else UNHURRIED
    return list((dict(CHANNEL_OPTIONS) | of_link).items())


def fast_keepalive_socket_options() -> list[tuple[int, int, int]]:
    """Options of an HTTP socket that find a dead peer within 8 s, as far as this system has them."""
    tcp = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 8_000}
    options = {name: value for name, value in tcp.items() if hasattr(socket, name)}
    return [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        *((socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in options.items()),
    ]


def _at_each_call(kind: str) -> Any:
    """Make a method that makes a stub's method: which channel carries a call is decided at each call."""

    def make(self: "SecureChannel", *method: Any, **kwargs: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            return self.start(kind, method, kwargs, args, options)

        return call

    return make


class SecureChannel(grpc.aio.Channel):
    """A channel as generated stubs use it, over whichever is present. One event loop owns it."""

    def __init__(self, address: str, tls: Tls, peer: Role, *, namespace: str = "", hurried: bool = True) -> None:
        self._address, self._tls, self._name, self._hurried = address, tls, dns_name(peer, namespace), hurried
        self._peer: Role = peer
        self._present = _Generation(tls.present(), self._open)
        self._retired: set[_Generation] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "SecureChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close(None)

    async def close(self, grace: float | None = None) -> None:
        """End every call."""
        generations, self._retired = [self._present, *self._retired], set()
        await asyncio.gather(*(generation.channel.close(grace) for generation in generations), *self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel.channel_ready()

    unary_unary, unary_stream = _at_each_call("unary_unary"), _at_each_call("unary_stream")
    stream_unary, stream_stream = _at_each_call("stream_unary"), _at_each_call("stream_stream")

    def start(self, kind: str, method: Any, kwargs: Any, args: Any, options: Any) -> Any:
        """Begin a call of a stub's method on the present channel."""
        generation = self._current()
        started = getattr(generation.channel, kind)(*method, **kwargs)(*args, **options)
        generation.calls += 1

        def done(_: object) -> None:
            generation.calls -= 1
            self._close_unused(generation)

        started.add_done_callback(done)
        return started

    def _current(self) -> "_Generation":
        material = self._tls.present()
        if material.version != self._present.version:
            self._retired.add(self._present)
            self._close_unused(self._present)
            self._present = _Generation(material, self._open)
        return self._present

    def _close_unused(self, generation: "_Generation") -> None:
        if generation in self._retired and not generation.calls:
            self._retired.remove(generation)
            task = asyncio.create_task(generation.channel.close(None))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _open(self, material: TlsFiles) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)
        options = [*options_to(self._peer, hurried=self._hurried), ("grpc.ssl_target_name_override", self._name)]
        return grpc.aio.secure_channel(self._address, credentials, options=options)


class _Generation:
    """One channel, and how many of its calls are not done."""

    def __init__(self, material: TlsFiles, open_channel: Callable[[TlsFiles], grpc.aio.Channel]) -> None:
        self.version, self.calls = material.version, 0
        self.channel = open_channel(material)
