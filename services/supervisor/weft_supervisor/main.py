"""The process: `weft_supervisor [flags]`."""

import asyncio
import contextlib
import logging
from collections.abc import Generator

import grpc.aio
from sqlalchemy.ext.asyncio import AsyncEngine

from weft.process import EXIT_CANNOT_START, CannotStart, owned
from weft.store import migrate, terms
from weft.store.database import open_database, sqlite_url
from weft.store.errors import StoreError
from weft.telemetry import logs
from weft.telemetry.logs import kv
from weft.telemetry.probes import Probes
from weft.wire.channels import channel
from weft.wire.serving import serve, stop_on_signals
from weft.wire.v1.supervisor_pb2_grpc import add_AdminServicer_to_server, add_SupervisorServicer_to_server
from weft_supervisor.admin import AdminServer
from weft_supervisor.core.supervisor import Config, Supervisor
from weft_supervisor.server import SupervisorServer
from weft_supervisor.settings import Settings

FINISH_S = 1.0
log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM. 0 after a drain, 2 for wrong settings, a port in use or a store that cannot be opened."""
    settings = Settings.parse(argv)
    logs.configure("supervisor", level=settings.log_level, fmt=settings.log_format)
    logging.getLogger("alembic").setLevel(logging.WARNING)  # one line about the store is enough
    try:
        with owned(settings.data_dir, "supervisor"):
            asyncio.run(_run(settings))
    except (CannotStart, OSError, StoreError) as error:
        log.error("cannot start", extra=kv(error=type(error).__name__, detail=error))
        return EXIT_CANNOT_START
    return 0


async def _run(settings: Settings) -> None:
    stop = stop_on_signals()
    engine = open_database(settings.database or sqlite_url(settings.data_dir / "weft.sqlite"))
    try:
        revision = await migrate.upgrade(engine)
        highest_term = await terms.highest(engine)
        log.info("store ready", extra=kv(revision=revision, highest_term=highest_term))
        await _serve(settings, engine, highest_term, stop)
    finally:
        await engine.dispose()


async def _serve(settings: Settings, engine: AsyncEngine, highest_term: int, stop: asyncio.Event) -> None:
    config = Config(settings.lease_ms / 1000, settings.report_ms / 1000, settings.preempt_ms / 1000)
    async with channel(settings.scheduler) as scheduler, channel(settings.predictor) as predictor:
        server = SupervisorServer(Supervisor(config, highest_term=highest_term), engine, scheduler, predictor)
        admin = AdminServer(engine, server)
        await admin.tell_keys()
        with _probes(settings.probes, server, stop) as probes:
            work = asyncio.create_task(server.run(keep_days=settings.keep_days))
            work.add_done_callback(lambda _task: stop.set())  # a failure in there ends the process, with its traceback
            try:
                await serve(
                    lambda grpc_server: _register(grpc_server, server, admin),
                    listen=settings.listen,
                    names=("weft.v1.Supervisor", "weft.v1.Admin"),
                    stop=stop,
                    probes=probes,
                    drain=server.drain,
                )
            finally:
                await _finish(work)


async def _finish(work: "asyncio.Task[None]") -> None:
    """Drained work ends by itself; work that was never drained (a port in use) or hangs is cancelled."""
    await asyncio.wait([work], timeout=FINISH_S)
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


@contextlib.contextmanager
def _probes(listen: str, server: SupervisorServer, stop: asyncio.Event) -> Generator[Probes, None, None]:
    probes = Probes(listen, lambda: "draining" if stop.is_set() else server.journal.trouble)
    probes.start()
    try:
        yield probes
    finally:
        probes.close()


def _register(grpc_server: grpc.aio.Server, server: SupervisorServer, admin: AdminServer) -> None:
    add_SupervisorServicer_to_server(server, grpc_server)
    add_AdminServicer_to_server(admin, grpc_server)
