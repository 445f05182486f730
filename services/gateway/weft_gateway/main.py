"""The process: flags, socket, uvicorn, SIGTERM."""

import asyncio
import contextlib
import gc
import logging
import socket
import sys
from collections.abc import AsyncGenerator, Coroutine, Sequence
from functools import partial
from typing import TypeVar, cast

import uvicorn
import uvloop

from weft.process import EXIT_CANNOT_START, CannotStart, listen, lock_data_dir, raise_descriptor_limit
from weft.telemetry import logs
from weft.telemetry.logs import kv
from weft.telemetry.probes import Probes
from weft.telemetry.tracing import tracer
from weft.wire.quiet_server import QuietServer
from weft.wire.serving import heartbeat, stop_on_signals
from weft.wire.tls import load_tls
from weft_gateway.openai.lines import LineRunner
from weft_gateway.settings import GatewaySettings
from weft_gateway.shell.app import MODEL_PATHS, build_app
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.bounded_http import BoundedHttp, ConnectionBound
from weft_gateway.shell.early_refusals import EarlyRefusals
from weft_gateway.shell.status import metrics_of

CLOSE_SECONDS = 5  # for slow readers of an answer's last bytes
# After SIGTERM: for connections without a further request. Clients mostly keep idle connections for 4 to 15 s.
IDLE_SECONDS = 10.0
# After SIGINT (a person's Ctrl-C): for running answers to finish, and for their clients to read.
INTERRUPTED_DRAIN_SECONDS, INTERRUPTED_CLOSE_SECONDS = 0.5, 1
# Beyond the limit a connection gives way (`core.connection_places`), or the answer is 503. Eight times the requests at
# once (2,000): most connections of clients are idle.
MAX_CONNECTIONS = 16_384
# For the event loop to get the interpreter from a thread. uvloop takes it for every callback. With Python's default of
# 5 ms, a turn with a hundred callbacks would take half a second while a thread parses bodies.
SWITCH_SECONDS = 0.0005
OWN_DESCRIPTORS = 512  # reserve for files, peers and sessions to runners
PROBE_SECONDS = 10.0  # for the event loop to answer a probe's thread
T = TypeVar("T")
log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT. Return 0: drained; 1: failed; 2: wrong settings, a port or a data directory in
    use."""
    settings = GatewaySettings.parse(argv)
    logs.configure("gateway", level=settings.log_level, fmt=settings.log_format)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with lock_data_dir(settings.data_dir, "gateway"), listen(settings.http, "--http") as listener:
            return uvloop.run(run(settings, listener))
    except CannotStart as error:
        log.error("cannot start", extra=kv(error=type(error).__name__, detail=error))
        return EXIT_CANNOT_START


async def run(settings: GatewaySettings, listener: socket.socket) -> int:
    """Serve on a bound socket until a signal, then drain."""
    stop = stop_on_signals()
    spans = tracer("gateway")
    state = AppState(settings, tls=load_tls(settings.tls_dir, "gateway"), tracer=spans)
    lines = LineRunner(state) if settings.batch else None
    bound = ConnectionBound(max(1, min(MAX_CONNECTIONS, raise_descriptor_limit() - OWN_DESCRIPTORS)))
    if bound.limit < MAX_CONNECTIONS:
        log.warning("fewer connections than there may be", extra=kv(limit=bound.limit, why="the limit of open files"))
    server = _Server(server_config(state, bound))
    gc.collect()
    gc.freeze()  # the 75,000 objects of modules and schemas stay; visiting them takes the collector 40 ms
    async with contextlib.AsyncExitStack() as parts:
        if settings.probes:
            await parts.enter_async_context(probing(settings.probes, state))
        streams = [await parts.enter_async_context(part.running()) for part in (state, lines) if part]
        http = asyncio.create_task(server.serve(sockets=[listener]), name="http")
        stopping = asyncio.create_task(stop.wait(), name="signal")
        host, port = listener.getsockname()[:2]
        log.info("serving", extra=kv(http=f"{host}:{port}", gateway_id=state.machine.gateway_id))
        await asyncio.wait([stopping, *streams, http], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        failed = [task for task in streams if task.done()]
        if lines:
            await lines.drain()
        drain_seconds = settings.drain_seconds
        if stop.interrupted:
            drain_seconds = min(drain_seconds, INTERRUPTED_DRAIN_SECONDS)
            server.config.timeout_graceful_shutdown = INTERRUPTED_CLOSE_SECONDS
        elif not failed:
            drain_seconds -= await server.end_connections(state, drain_seconds / 2)
        await state.manager.drain(drain_seconds)  # with an open port: late requests get an answer
        server.should_exit = True
        await http
        for task in failed:
            log.error("the gateway's streams ended", exc_info=task.exception())
        if spans:
            await asyncio.to_thread(spans.close)
        return 1 if failed else 0


@contextlib.asynccontextmanager
async def probing(listen: str, state: AppState) -> AsyncGenerator[Probes]:
    """Answer probes at `listen` during the block: a crowd of clients cannot block the kubelet.

    Readiness and metrics are read on the event loop, because it changes them. Raises AddressInUse.
    """
    loop = asyncio.get_running_loop()

    def on_loop(work: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(PROBE_SECONDS)

    async def not_ready_reason() -> str | None:
        return state.not_ready_reason()

    probes = Probes(
        listen,
        lambda: on_loop(not_ready_reason()),
        metrics=lambda authorization: on_loop(metrics_of(state, authorization)),
        shortages=state.manager.shortages,
    )
    with contextlib.closing(probes):
        probes.start()
        alive = asyncio.create_task(heartbeat(probes), name="heartbeat")
        try:
            yield probes
        finally:
            alive.cancel()


class _Server(QuietServer):
    async def end_connections(self, state: AppState, limit_s: float) -> float:
        """Answer requests on open connections, and ask each client to leave, until no connection is open. Return the
        seconds taken.

        A balancer sends this gateway no request any more, or will stop in a moment. A client with a connection cannot
        know this. Its next answer has `Connection: close`.
        """
        loop = asyncio.get_running_loop()
        began, connections = loop.time(), cast("set[BoundedHttp]", self.server_state.connections)
        log.info("closing connections", extra=kv(open=len(connections), limit_s=limit_s))
        state.stopping = True
        self.config.timeout_keep_alive = idle_s = min(IDLE_SECONDS, limit_s / 3)  # pyright: ignore[reportAttributeAccessIssue]
        for connection in connections:
            connection.close_soon(idle_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while connections:
                    await next(iter(connections)).closed.wait()
        return min(limit_s, loop.time() - began)


def server_config(state: AppState, bound: ConnectionBound) -> uvicorn.Config:
    """Describe the HTTP server of a gateway."""
    return uvicorn.Config(
        build_app(state),
        loop="uvloop",
        http=partial(BoundedHttp, bound=bound, refusals=EarlyRefusals(state, MODEL_PATHS)),  # pyright: ignore[reportArgumentType]
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        proxy_headers=False,  # the client's address is not used
        timeout_keep_alive=state.settings.keep_alive_seconds,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
