"""The process: flags, socket, uvicorn, SIGTERM."""

import asyncio
import contextlib
import fcntl
import logging
import socket
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import BinaryIO

import uvicorn
import uvloop
from pydantic import ValidationError

from weft.telemetry import logs
from weft.telemetry.logs import kv
from weft.telemetry.probes import split_address
from weft.wire.serving import stop_on_signals
from weft_gateway.app import build_app
from weft_gateway.gateway import ACK_SECONDS, Gateway
from weft_gateway.settings import Settings, parse

EXIT_USAGE = 2
log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM. 0: drained; 1: failed; 2: wrong settings or a port in use."""
    try:
        settings = parse(sys.argv[1:] if argv is None else argv)
    except ValidationError as error:
        sys.stderr.write(_listed(error))
        return EXIT_USAGE
    logs.configure("gateway", level=settings.log_level, fmt=settings.log_format)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line a request to the depot
    try:
        lock = _own(settings.data_dir)
    except OSError as error:
        log.error(
            "cannot own the data directory", extra=kv(error="DataDirInUse", data_dir=settings.data_dir, detail=error)
        )
        return EXIT_USAGE
    with lock:
        return _serve(settings)


def _serve(settings: Settings) -> int:
    try:
        listener = _listen(settings.http)
    except OSError as error:
        log.error("cannot listen", extra=kv(error="PortInUse", http=settings.http, detail=error))
        return EXIT_USAGE
    return uvloop.run(run(settings, listener))


async def run(settings: Settings, listener: socket.socket) -> int:
    """Serve on a bound socket until a signal, then drain."""
    stop = stop_on_signals()
    gateway = Gateway(settings)
    server = _Server(_config(gateway))
    async with gateway.running() as serving:
        http = asyncio.create_task(server.serve(sockets=[listener]), name="http")
        stopping = asyncio.create_task(stop.wait(), name="signal")
        host, port = listener.getsockname()[:2]
        log.info("serving", extra=kv(http=f"{host}:{port}", gateway_id=gateway.serving.gateway_id))
        await asyncio.wait([stopping, serving, http], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        server.should_exit = True
        await gateway.drain()
        await http
        if serving.done():
            log.error("the gateway's streams ended", exc_info=serving.exception())
        return 1 if serving.done() else 0


class _Server(uvicorn.Server):
    """uvicorn under our own signal handling: it would end the process by the signal instead of with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _config(gateway: Gateway) -> uvicorn.Config:
    grace_s = gateway.settings.drain_seconds + 2 * ACK_SECONDS
    return uvicorn.Config(
        build_app(gateway),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=round(grace_s + 1),
    )


def _own(data_dir: Path) -> BinaryIO:
    """The data directory's lock, held while the file is open. Raises OSError when another process holds it."""
    data_dir.mkdir(parents=True, exist_ok=True)
    lock = (data_dir / "lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock


def _listen(address: str) -> socket.socket:
    """A bound socket, so that a port in use is told before anything starts."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    listener.setblocking(False)
    return listener


def _listed(error: ValidationError) -> str:
    """Every wrong setting, a line each."""
    lines = [
        f"  --{'.'.join(map(str, e['loc'])).replace('_', '-')}: {e['msg']} (got {e['input']!r})" for e in error.errors()
    ]
    return "weft_gateway: wrong settings\n" + "\n".join(lines) + "\n"
