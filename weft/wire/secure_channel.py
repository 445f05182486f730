"""A TLS channel whose next connection uses the certificates as they are then.

gRPC fixes a channel's credentials at its making. So a change of the files makes a new channel for the calls from then
on; the old one lives as long as the calls that began on it.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from weft.wire.channel_options import CHANNEL_OPTIONS
from weft.wire.roles import Role, dns_name
from weft.wire.tls import Tls, TlsFiles


class SecureChannel(grpc.aio.Channel):
    """What generated stubs use of a channel, over whichever is present. One event loop owns it."""

    def __init__(self, address: str, tls: Tls, peer: Role) -> None:
        self._address, self._tls = address, tls
        self._peer: Role = peer
        self._present = _Generation(tls.present(), self._open)
        self._retired: set[_Generation] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "SecureChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close(None)

    async def close(self, grace: float | None = None) -> None:
        """Ends every call."""
        generations, self._retired = [self._present, *self._retired], set()
        await asyncio.gather(*(generation.channel.close(grace) for generation in generations), *self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel.channel_ready()

    def unary_unary(self, *method: Any, **kwargs: Any) -> Any:
        return self._later("unary_unary", method, kwargs)

    def unary_stream(self, *method: Any, **kwargs: Any) -> Any:
        return self._later("unary_stream", method, kwargs)

    def stream_unary(self, *method: Any, **kwargs: Any) -> Any:
        return self._later("stream_unary", method, kwargs)

    def stream_stream(self, *method: Any, **kwargs: Any) -> Any:
        return self._later("stream_stream", method, kwargs)

    def _later(self, kind: str, method: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A stub's method: which channel carries it is decided at each call."""

        def done_with(generation: _Generation) -> Callable[[object], None]:
            return lambda _: self._done(generation)

        def call(*args: Any, **options: Any) -> Any:
            generation = self._current()
            started = getattr(generation.channel, kind)(*method, **kwargs)(*args, **options)
            generation.calls += 1
            started.add_done_callback(done_with(generation))
            return started

        return call

    def _current(self) -> "_Generation":
        material = self._tls.present()
        if material.version != self._present.version:
            self._retired.add(self._present)
            self._close_unused(self._present)
            self._present = _Generation(material, self._open)
        return self._present

    def _done(self, generation: "_Generation") -> None:
        generation.calls -= 1
        self._close_unused(generation)

    def _close_unused(self, generation: "_Generation") -> None:
        if generation in self._retired and not generation.calls:
            self._retired.remove(generation)
            task = asyncio.create_task(generation.channel.close(None))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _open(self, material: TlsFiles) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)
        options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", dns_name(self._peer))]
        return grpc.aio.secure_channel(self._address, credentials, options=options)


class _Generation:
    """One channel, and how many of its calls are not done."""

    def __init__(self, material: TlsFiles, open_channel: Callable[[TlsFiles], grpc.aio.Channel]) -> None:
        self.version, self.calls = material.version, 0
        self.channel = open_channel(material)
