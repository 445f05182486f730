"""The process: `weft_supervisor [flags]`."""

import asyncio
import contextlib
import logging

import grpc.aio
import uvloop
from sqlalchemy.ext.asyncio import AsyncEngine

from weft.process import EXIT_CANNOT_START, CannotStart, lock_data_dir
from weft.store import fencing_terms
from weft.store.database import close_database
from weft.store.errors import StoreError
from weft.store.startup import ready_term, store_at
from weft.telemetry import logs
from weft.telemetry.logs import kv
from weft.telemetry.probes import Probes
from weft.wire.serving import serve, stop_on_signals
from weft.wire.streams import channel
from weft.wire.tls import Tls, load_tls
from weft.wire.v1.supervisor_pb2_grpc import add_AdminServicer_to_server, add_SupervisorServicer_to_server
from weft_supervisor.admin import AdminServer
from weft_supervisor.core.supervisor import Supervisor, SupervisorConfig
from weft_supervisor.server import SupervisorServer
from weft_supervisor.settings import SupervisorSettings

FINISH_S = 1.0
# The time between two reads of the keys in PostgreSQL, which other supervisors change too. Together with the way of the
# message, a revoked key opens nothing after 2 s (docs/reliability.md). Each read is a small query.
KEYS_S = 1.0
QUOTAS_S = 5.0  # between two reads of the day's tokens, if no other process changes keys
FILE = "weft.sqlite"
log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM. Returns 0 after a drain, 2 for wrong settings, a port in use or a store that fails."""
    settings = SupervisorSettings.parse(argv)
    logs.configure("supervisor", level=settings.log_level, fmt=settings.log_format)
    logging.getLogger("alembic").setLevel(logging.WARNING)  # a single line about the store is enough
    try:
        with lock_data_dir(settings.data_dir, "supervisor"):
            uvloop.run(_run(settings))
    except (CannotStart, OSError, StoreError) as error:
        log.error("cannot start", extra=kv(error=type(error).__name__, detail=error))
        return EXIT_CANNOT_START
    return 0


async def _run(settings: SupervisorSettings) -> None:
    stop, tls = stop_on_signals(), load_tls(settings.tls_dir, "supervisor")
    engine = store_at(settings.database, settings.data_dir / FILE)
    try:
        highest_term = await ready_term(engine, fencing_terms.highest, stop, shared=settings.database != "")
        if highest_term is not None:
            await _serve(settings, engine, highest_term, stop, tls)
    finally:
        await close_database(engine)


async def _serve(
    settings: SupervisorSettings, engine: AsyncEngine, highest_term: int, stop: asyncio.Event, tls: Tls | None
) -> None:
    async with (
        channel(settings.scheduler, tls, "scheduler", hurried=False) as scheduler,
        channel(settings.predictor, tls, "predictor", hurried=False) as predictor,
    ):
        server = SupervisorServer(
            Supervisor(SupervisorConfig(), highest_term=highest_term), engine, scheduler, predictor
        )
        admin = AdminServer(engine, server)
        await admin.send_keys()
        probes = Probes(settings.probes, lambda: "draining" if stop.is_set() else server.writer.trouble)
        probes.start()

        def register(grpc_server: grpc.aio.Server) -> None:
            add_SupervisorServicer_to_server(server, grpc_server)
            add_AdminServicer_to_server(admin, grpc_server)

        with contextlib.closing(probes):
            every_s = KEYS_S if settings.database else QUOTAS_S
            work = [asyncio.create_task(server.run()), asyncio.create_task(admin.follow_keys(every_s))]
            for task in work:
                task.add_done_callback(lambda _task: stop.set())  # a failure ends the process, with its traceback
            try:
                await serve(
                    register,
                    listen=settings.listen,
                    names=("weft.v1.Supervisor", "weft.v1.Admin"),
                    stop=stop,
                    probes=probes,
                    drain=server.drain,
                    tls=tls,
                )
            finally:  # a drained server ends by itself; an undrained (a port in use) or hanging server does not
                await asyncio.wait(work[:1], timeout=FINISH_S)
                for task in work:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
