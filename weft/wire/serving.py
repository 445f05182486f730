"""The life of a process that serves gRPC: health, probes, SIGTERM, drain. One function for every service."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from weft.process import AddressInUse
from weft.telemetry.logs import kv
from weft.telemetry.probes import Probes
from weft.wire.auth_interceptor import RoleInterceptor
from weft.wire.channels import CHANNEL_OPTIONS, PATIENCE
from weft.wire.tls import Tls, TlsFiles

BEAT_S = 5.0  # between two signs of life of an event loop: few, and dense against the 30 s without one that count
log = logging.getLogger(__name__)

SERVER_OPTIONS: list[tuple[str, Any]] = [
    *(dict(CHANNEL_OPTIONS) | PATIENCE).items(),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a silent share
]


class StopSignal(asyncio.Event):
    """A stop that SIGTERM or SIGINT sets. `interrupted`: by SIGINT, so that somebody at a terminal waits."""

    interrupted = False

    def interrupt(self) -> None:
        self.interrupted = self.interrupted or not self.is_set()
        self.set()


def stop_on_signals() -> StopSignal:
    """Catch the signals. Call it before the start-up work that a signal may interrupt."""
    stop, loop = StopSignal(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, stop.interrupt)
    return stop


async def serve(
    register: Callable[[grpc.aio.Server], None],
    *,
    listen: str,
    names: Iterable[str],
    stop: asyncio.Event,
    probes: Probes | None = None,
    drain: Callable[[], Awaitable[None]] | None = None,
    grace_s: float = 1.0,
    tls: Tls | None = None,
) -> None:
    """Serve until `stop`, then NOT_SERVING, `drain()`, and close within `grace_s`.

    With `tls` callers show a certificate, and its role decides what they may call (`weft.wire.roles`).

    Raises AddressInUse.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[RoleInterceptor()] if tls else None)
    statuses: _Statuses = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue] (not in the stubs)
    health_pb2_grpc.add_HealthServicer_to_server(statuses, server)
    register(server)
    try:
        if tls:
            server.add_secure_port(listen, server_credentials(tls))
        else:
            server.add_insecure_port(listen)
    except RuntimeError as error:  # gRPC does not say why
        raise AddressInUse("--listen", listen, "cannot be listened on") from error
    await server.start()
    await _set_health(statuses, names, health_pb2.HealthCheckResponse.SERVING)
    log.info("serving", extra=kv(listen=listen))
    alive = asyncio.create_task(heartbeat(probes)) if probes else None
    await stop.wait()
    await _set_health(statuses, names, health_pb2.HealthCheckResponse.NOT_SERVING)
    log.info("draining")
    if drain:
        await drain()
    await server.stop(grace_s)
    if alive:
        alive.cancel()


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Make credentials that read the certificates at each handshake; a client has to show its own."""
    sent = [tls.present().version]

    def newer() -> grpc.ServerCertificateConfiguration | None:
        """Read certificates that have changed, in gRPC's threads, at each handshake. None: nothing new."""
        material = tls.present()
        if material.version == sent[0]:
            return None
        sent[0] = material.version
        return _configuration(material)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(tls.present()),
        newer,  # pyright: ignore[reportArgumentType] (None is in its documentation, not in the stubs)
        require_client_authentication=True,
    )


def _configuration(material: TlsFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.ca)


class _Statuses(Protocol):
    """The health servicer: what is said of each service name."""

    async def set(self, service: str, status: int) -> None: ...


async def _set_health(statuses: _Statuses, names: Iterable[str], status: int) -> None:
    for name in ("", *names):
        await statuses.set(name, status)


async def heartbeat(probes: Probes) -> None:
    """Tell, for as long as it runs, that this event loop turns."""
    while True:
        probes.mark_alive()
        await asyncio.sleep(BEAT_S)
