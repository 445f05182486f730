"""`python -m weft_scheduler`: settings, logs, probes, serve until SIGTERM."""

import contextlib
import logging
from collections.abc import Sequence

import uvloop

from weft.process import EXIT_CANNOT_START, CannotStart, lock_data_dir
from weft.telemetry import logs
from weft.telemetry.logs import kv
from weft.telemetry.probes import Probes
from weft.telemetry.tracing import tracer
from weft.wire.serving import serve, stop_on_signals
from weft.wire.tls import load_tls
from weft_scheduler.errors import TermNotDurable
from weft_scheduler.server import SERVICE, Server
from weft_scheduler.settings import SchedulerSettings
from weft_scheduler.term_file import TermFile

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """0 after SIGTERM, 1 where no term is durable, 2 for wrong flags, an address or a data directory in use."""
    settings = SchedulerSettings.parse(argv)
    logs.configure("scheduler", level=settings.log_level, fmt=settings.log_format)
    try:
        with lock_data_dir(settings.data_dir, "scheduler"):
            return uvloop.run(run(settings))
    except CannotStart as error:
        log.error("cannot start", extra=kv(error=type(error).__name__, detail=error))
        return EXIT_CANNOT_START


async def run(settings: SchedulerSettings) -> int:
    """Serve until a signal. Raises CannotStart."""
    stop, tls, spans = stop_on_signals(), load_tls(settings.tls_dir, "scheduler"), tracer("scheduler")
    try:
        server = Server(settings.config(), TermFile(settings.data_dir), stop, tracer=spans)
    except TermNotDurable as error:
        log.error("term not durable: no order may be given", extra=kv(reason=error))
        return 1
    probes = Probes(settings.probes, server.not_ready)
    with contextlib.closing(server), contextlib.closing(probes):
        probes.start()
        await serve(
            server.register,
            listen=settings.listen,
            names=[SERVICE],
            stop=stop,
            probes=probes,
            drain=server.drain,
            tls=tls,
        )
    if spans:
        spans.close()
    return 0 if server.failure is None else 1
