"""`python -m weft_depot`: parts put together, sockets opened, signals obeyed.

Exit codes: 0 after SIGTERM, 2 when it cannot start (wrong settings, port in use, data directory in use).
"""

import logging
import signal

import uvicorn

from weft.artifacts.blobs import BlobStore
from weft.process import EXIT_CANNOT_START, CannotStart, listen, owned
from weft.telemetry import logs
from weft.telemetry.logs import kv
from weft_depot.contents import Limits
from weft_depot.core.operations import Operations
from weft_depot.remembered import Remembered
from weft_depot.resolve import Resolver
from weft_depot.server import build_app
from weft_depot.service import Depot
from weft_depot.settings import Settings
from weft_depot.sources import Source
from weft_depot.sources.file import FileSource

log = logging.getLogger("weft_depot")
DRAIN_S = 3


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM."""
    settings = Settings.parse(argv)
    logs.configure("depot", level=settings.log_level, fmt=settings.log_format)
    try:
        _serve(settings)
    except CannotStart as error:
        log.error("cannot start", extra=kv(error=type(error).__name__, detail=error))
        return EXIT_CANNOT_START
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
    with owned(settings.data_dir, "depot"), listen(settings.http, "--http") as listener:
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
