"""The process: `weft_batch [flags]`."""

import asyncio
import contextlib
import logging
from functools import partial

import grpc.aio
import uvloop
from sqlalchemy.ext.asyncio import AsyncEngine

from weft.process import EXIT_CANNOT_START, CannotStart, lock_data_dir
from weft.store import fencing_terms
from weft.store.database import close_database
from weft.store.errors import StoreError
from weft.store.files import ROLE
from weft.store.startup import ready_term, store_at
from weft.telemetry import logs
from weft.telemetry.logs import kv
from weft.telemetry.probes import Probes
from weft.telemetry.tracing import Tracer, tracer
from weft.wire.serving import serve, stop_on_signals
from weft.wire.tls import Tls, load_tls
from weft.wire.v1.batch_pb2_grpc import add_BatchServicer_to_server
from weft_batch.calls import BatchCalls
from weft_batch.errors import StorageError
from weft_batch.server import BatchServer
from weft_batch.settings import BatchSettings
from weft_batch.storage import FileStorage, FolderStorage
from weft_batch.tenant_files import TenantQuotas

FILE = "batch.sqlite"
QUIET = ("alembic", "botocore", "urllib3")  # they would repeat errors of the store, or log headers and signatures
log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM. Return 0 after a drain, or 2 if it cannot start: settings, a port, store or storage."""
    settings = BatchSettings.parse(argv)
    logs.configure("batch", level=settings.log_level, fmt=settings.log_format)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        with lock_data_dir(settings.data_dir, "batch"):
            uvloop.run(_run(settings))
    except (CannotStart, OSError, StoreError, StorageError) as error:
        log.error("cannot start", extra=kv(error=type(error).__name__, detail=error))
        return EXIT_CANNOT_START
    return 0


def open_storage(settings: BatchSettings) -> FileStorage:
    """Open the storage. The S3 library is only loaded when used. Raises S3NotUsable, StorageUnavailable."""
    if not settings.files:
        return FolderStorage(settings.data_dir / "files")
    from weft_batch.storage_s3 import S3NotUsable, S3Storage, read_keys

    if (settings.s3_credentials is None) != settings.s3_pod_identity:
        either = "a folder with accessKeyId and secretAccessKey, or --s3-pod-identity"
        raise S3NotUsable(f"--files s3:// needs --s3-credentials: {either}")
    keys = read_keys(settings.s3_credentials) if settings.s3_credentials else None
    try:
        return S3Storage(settings.files, endpoint=settings.s3_endpoint, region=settings.s3_region, keys=keys)
    except ValueError as error:
        raise S3NotUsable(f"--files {settings.files} or --s3-endpoint: {error}") from error


async def _run(settings: BatchSettings) -> None:
    stop, tls, spans = stop_on_signals(), load_tls(settings.tls_dir, "batch"), tracer("batch")
    storage, engine = open_storage(settings), store_at(settings.database, settings.data_dir / FILE)
    try:
        take = partial(fencing_terms.take, role=ROLE)
        term = await ready_term(engine, take, stop, shared=settings.database != "")
        if term is not None:
            await _serve(settings, engine, term, storage, stop, tls, spans)
    finally:
        await close_database(engine)
        if spans:
            await asyncio.to_thread(spans.close)


async def _serve(
    settings: BatchSettings, engine: AsyncEngine, term: int, storage: FileStorage, stop: asyncio.Event, tls: Tls | None,
    spans: Tracer | None,
) -> None:  # fmt: skip
    shared = settings.database != ""
    limits = TenantQuotas(tenant_bytes=settings.tenant_bytes)
    server = BatchServer(engine, term, storage, limits, tracer=spans)
    probes = Probes(
        settings.probes, lambda: "draining" if stop.is_set() else server.trouble, shortages=server.shortages
    )
    probes.start()
    with contextlib.closing(probes):
        await server.load(sole=not shared)

        def register(grpc_server: grpc.aio.Server) -> None:
            add_BatchServicer_to_server(BatchCalls(server), grpc_server)

        running = asyncio.create_task(server.run(shared=shared))
        running.add_done_callback(lambda _task: stop.set())  # a failure ends the process, with its traceback
        try:
            await serve(
                register, listen=settings.listen, names=("weft.v1.Batch",), stop=stop, probes=probes,
                drain=server.drain, tls=tls,
            )  # fmt: skip
        finally:  # a drained server ends by itself; after a failed start (a port in use) it does not
            await server.drain()
            await running
