"""`python -m weft_runner`: one process, one base model, one engine."""

import asyncio
import logging
import socket
from collections.abc import Callable

from weft.telemetry.logs import configure, kv
from weft.telemetry.probes import Probes, split_address
from weft_runner.errors import AddressInUse, DataDirectoryBusy, RunnerError
from weft_runner.identity import own_directory
from weft_runner.settings import Settings, parse_settings

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 drained, 1 failed, 2 wrong flags, an address in use or a busy data directory."""
    settings = parse_settings(argv)
    configure("runner", level=settings.log_level, fmt=settings.log_format)
    try:
        with own_directory(settings.data_dir):
            return _run(settings)
    except (AddressInUse, DataDirectoryBusy) as error:
        log.error("cannot start", extra=kv(error=type(error).__name__, detail=error))
        return 2
    except RunnerError as error:
        log.error("failed", extra=kv(error=type(error).__name__, detail=error))
        return 1


def _run(settings: Settings) -> int:
    check_free(settings.listen)
    not_ready: list[Callable[[], str | None]] = [lambda: "starting"]
    try:
        probes = Probes(settings.probes, lambda: not_ready[-1]())
    except OSError as error:
        raise AddressInUse(f"--probes {settings.probes}: {error.strerror}") from error
    probes.start()
    try:
        from weft_runner.process import serve_runner  # torch is imported here, after everything that fails fast

        return asyncio.run(serve_runner(settings, probes, not_ready.append))
    finally:
        probes.close()


def check_free(address: str) -> None:
    """Fail at once, before any weight is loaded. Raises AddressInUse."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise AddressInUse(f"--listen {address}: {error.strerror}") from error
