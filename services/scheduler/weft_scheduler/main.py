"""`python -m weft_scheduler`: settings, logs, probes, serve until SIGTERM."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial

import uvloop

from weft.leadership.standby import Turn, holder_name, turn_of
from weft.process import EXIT_CANNOT_START, CannotStart, lock_data_dir
from weft.telemetry import logs
from weft.telemetry.logs import kv
from weft.telemetry.probes import Probes
from weft.telemetry.tracing import tracer
from weft.wire.serving import serve, stop_on_signals
from weft.wire.tls import load_tls
from weft_scheduler.errors import TermNotDurable
from weft_scheduler.metrics import LEADER
from weft_scheduler.server import SERVICE, Server
from weft_scheduler.settings import SchedulerSettings
from weft_scheduler.term_file import TermFile

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 after SIGTERM, 1 without a durable term or if another scheduler acts, 2 if it cannot start.

    It cannot start with wrong flags, an address or a data directory in use, no API server for its Lease.
    """
    settings = SchedulerSettings.parse(argv)
    logs.configure("scheduler", level=settings.log_level, fmt=settings.log_format)
    try:
        with lock_data_dir(settings.data_dir, "scheduler"):
            return uvloop.run(run(settings))
    except CannotStart as error:
        log.error("cannot start", extra=kv(error=type(error).__name__, detail=error))
        return EXIT_CANNOT_START


async def run(settings: SchedulerSettings) -> int:
    """Stand by where there is a Lease, then serve until a signal or until the Lease is lost. Raises CannotStart."""
    stop, servers = stop_on_signals(), list[Server]()

    def not_ready() -> str | None:
        if settings.lease:
            return None  # a standby is ready to act; and while pods are replaced, peers may be at another one
        return servers[0].not_ready() if servers else "starting"

    probes = Probes(settings.probes, not_ready)
    with contextlib.closing(probes):
        probes.start()
        identity = partial(holder_name, settings.data_dir)
        async with turn_of(settings, identity, stop, probes, LEADER) as turn:
            if turn is None:
                return 0
            return await _act(settings, stop, probes, turn, servers)


async def _act(
    settings: SchedulerSettings, stop: asyncio.Event, probes: Probes, turn: Turn, servers: list[Server]
) -> int:
    tls, spans = load_tls(settings.tls_dir, "scheduler"), tracer("scheduler")
    try:
        server = Server(settings.config(), TermFile(settings.data_dir), stop, turn=turn, tracer=spans)
    except TermNotDurable as error:
        log.error("term not durable: no order may be given", extra=kv(reason=error))
        return 1
    servers.append(server)
    with contextlib.closing(server):
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
    return 0 if server.failure is None and turn.lost is None else 1
