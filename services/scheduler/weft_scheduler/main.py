"""`python -m weft_scheduler`: settings, logs, probes, serve until SIGTERM."""

import asyncio
import logging
import sys
from collections.abc import Sequence

from weft.telemetry import logs
from weft.telemetry.logs import kv
from weft.telemetry.probes import Probes
from weft.wire.serving import serve, stop_on_signals
from weft_scheduler.errors import SettingsError, TermNotDurable
from weft_scheduler.server import SERVICE, Server
from weft_scheduler.settings import Settings, parse
from weft_scheduler.term import TermFile

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """0 after SIGTERM, 1 where the data directory cannot be used, 2 for wrong flags or an address in use."""
    try:
        settings = parse(argv)
    except SettingsError as error:
        sys.stderr.write(f"weft_scheduler: wrong settings\n{error}\n")
        return 2
    logs.configure("scheduler", level=settings.log_level, fmt=settings.log_format)
    return asyncio.run(run(settings))


async def run(settings: Settings) -> int:
    """The life of the process."""
    stop = stop_on_signals()
    try:
        terms = TermFile(settings.data_dir)
    except TermNotDurable as error:
        log.error("data directory unusable", extra=kv(reason=error))
        return 1
    try:
        return await _serve(settings, terms, stop)
    except TermNotDurable as error:
        log.error("term not durable: no order may be given", extra=kv(reason=error))
        return 1
    finally:
        terms.close()


async def _serve(settings: Settings, terms: TermFile, stop: asyncio.Event) -> int:
    server = Server(settings.config(), terms, stop)
    try:
        probes = Probes(settings.probes, server.not_ready)
    except OSError as error:
        log.error("address in use", extra=kv(probes=settings.probes, reason=error))
        return 2
    probes.start()
    try:
        await serve(
            server.register, listen=settings.listen, names=[SERVICE], stop=stop, probes=probes, drain=server.drain
        )
    except RuntimeError as error:
        log.error("address in use", extra=kv(listen=settings.listen, reason=error))
        return 2
    finally:
        server.close()
        probes.close()
    return 0 if server.failure is None else 1
