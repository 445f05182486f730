"""`python -m weft_depot`: parts put together, sockets opened, signals obeyed.

Exit codes: 0 after SIGTERM, 2 when it cannot start (wrong settings, port in use, data directory in use).
"""

import fcntl
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import BinaryIO

import uvicorn
from pydantic import ValidationError

from weft.artifacts.blobs import BlobStore
from weft.telemetry import logs
from weft.telemetry.logs import kv
from weft.telemetry.probes import split_address
from weft_depot.contents import Limits
from weft_depot.core.operations import Operations
from weft_depot.remembered import Remembered
from weft_depot.resolve import Resolver
from weft_depot.server import build_app
from weft_depot.service import Depot
from weft_depot.settings import Settings, parse
from weft_depot.sources import Source
from weft_depot.sources.file import FileSource

log = logging.getLogger("weft_depot")
DRAIN_S = 3


class CannotStart(Exception):
    """Something outside has to be put right first; the message says what."""


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM."""
    try:
        settings = parse(argv)
        logs.configure("depot", level=settings.log_level, fmt=settings.log_format)
        _serve(settings)
    except ValidationError as error:
        wrong = [f"--{'.'.join(map(str, e['loc'])).replace('_', '-')}: {e['msg']}" for e in error.errors()]
        sys.stderr.write("weft_depot: wrong settings\n  " + "\n  ".join(wrong) + "\n")
        return 2
    except CannotStart as error:
        log.error("cannot start", extra=kv(error=error))
        return 2
    return 0


def build(settings: Settings) -> Depot:
    """A depot with its sources; what a killed one left half-written is removed."""
    store = BlobStore(settings.data_dir / "blobs")
    removed = store.clean()
    if removed:
        log.info("half-written blobs removed", extra=kv(count=removed))
    sources: dict[str, Source] = {}
    if settings.file_root is not None:
        sources["file"] = FileSource(settings.file_root)
    limits = Limits(settings.max_adapter_bytes, settings.max_model_bytes)
    resolver = Resolver(sources, store, Remembered(settings.data_dir / "resolved"), limits)
    return Depot(resolver, threads=settings.threads, operations=Operations(keep_s=settings.keep_operation_s))


def _serve(settings: Settings) -> None:
    with _own(settings.data_dir), _listen(settings.http) as listener:
        depot = build(settings)
        host, port = listener.getsockname()[:2]
        config = uvicorn.Config(
            build_app(depot), log_config=None, access_log=False, timeout_graceful_shutdown=DRAIN_S, lifespan="on"
        )
        server = uvicorn.Server(config)

        def stop(*_: object) -> None:
            server.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)  # takes what comes early, and what uvicorn raises again at its end
        log.info("serving", extra=kv(listen=f"{host}:{port}", data_dir=settings.data_dir))
        server.run(sockets=[listener])
        log.info("stopped")


def _own(data_dir: Path) -> BinaryIO:
    """Lock the data directory for as long as the returned file is open. Raises CannotStart."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = (data_dir / "lock").open("ab")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CannotStart(f"{data_dir} belongs to another depot that is running") from error
    except OSError as error:
        raise CannotStart(f"{data_dir}: {error.strerror}") from error
    return lock


def _listen(address: str) -> socket.socket:
    """Raises CannotStart."""
    host, port = split_address(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(128)  # from here on a client may connect; it is answered once the loop turns
    except OSError as error:
        raise CannotStart(f"{address}: {error.strerror}") from error
    return listener
