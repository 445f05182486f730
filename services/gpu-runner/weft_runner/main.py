"""`python -m weft_runner`: one process, one base model, one engine."""

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from math import inf
from typing import Any, NoReturn

import uvloop

from weft.process import EXIT_CANNOT_START, CannotStart, listen, lock_data_dir, long_lived_imports
from weft.telemetry.logs import configure, kv
from weft.telemetry.probes import Probes
from weft.telemetry.tracing import tracer
from weft.wire.tls import Tls, load_tls
from weft_runner.errors import RunnerError, StoppedAtStart
from weft_runner.settings import RunnerSettings, parse_settings

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None, **overrides: Any) -> int:
    """Exit codes: 0 drained, 1 failed, 2 wrong flags, an address in use or a busy data directory.

    `overrides`: settings for a benchmark's own runner; no flag or variable sets them.
    """
    settings = parse_settings(argv, **overrides)
    configure("runner", level=settings.log_level, fmt=settings.log_format)
    try:
        with lock_data_dir(settings.data_dir, "runner"):
            return _run(settings)
    except CannotStart as error:
        log.error("cannot start", extra=kv(error=type(error).__name__, detail=error))
        return EXIT_CANNOT_START
    except StoppedAtStart as error:
        log.info("stopped before serving", extra=kv(reason=error))
        return 0
    except RunnerError as error:
        log.error("failed", extra=kv(error=type(error).__name__, detail=error))
        return 1


def _serve_rank(settings: RunnerSettings, tls: Tls | None) -> int:
    """Serve as the first rank of a further `--host` until rank 0 closes; its pod starts it anew.

    Asked to stop (SIGTERM) it makes rank 0 drain the runner, and stays meanwhile. Raises RunnerError, CannotStart.
    """
    from weft_runner.executors import require_torch

    require_torch("--host")

    from weft_runner.parallel.hosts import local_ranks
    from weft_runner.shell.depot import DepotSource
    from weft_runner.shell.engine_factory import machine_here
    from weft_runner.shell.process import BASE_WAIT_S, fetch_base
    from weft_runner.shell.rank_link import join_runner, stop_on_sigterm
    from weft_runner.worker.loop import LocalHostConfig, serve

    stopping = stop_on_sigterm()
    probes = Probes(settings.probes, lambda: None, stall_s=inf)  # it ends by itself with rank 0
    probes.start()
    with ExitStack() as ending:
        ending.callback(probes.close)
        source = DepotSource(
            settings.depot, settings.blobs, settings.base_digest, stopping.is_set, tls=tls,
            shared=settings.model_cache is not None,
        )  # fmt: skip
        files = fetch_base(source, BASE_WAIT_S, stopping.is_set)
        machine = machine_here(settings, files)
        ending.enter_context(local_ranks(settings, files, _end_as_lost))
        serve_own = partial(serve, config=LocalHostConfig(settings, files))
        return join_runner(settings, tls, settings.ranks_here[0], serve_own, stopping, machine)


def _end_as_lost(reason: str) -> NoReturn:
    """A rank that this one has started has ended: neither comes to rank 0, or both are lost to it."""
    log.error("this rank ends: %s", reason)
    _end(1)


def _end(code: int) -> NoReturn:
    """The builder's thread may be anywhere."""
    logging.shutdown()
    os._exit(code)


def _run(settings: RunnerSettings) -> int:
    tls = load_tls(settings.tls_dir, "runner", settings.pool.partition("/")[0])
    if settings.host.index:
        _end(_serve_rank(settings, tls))
    listen(settings.listen, "--listen").close()  # an address in use fails at once, before any weight is loaded
    if settings.kv_listen:
        listen(settings.kv_listen, "--kv-listen").close()
    spans = tracer("runner")
    not_ready: list[Callable[[], str | None]] = [lambda: "starting"]
    probes = Probes(settings.probes, lambda: not_ready[-1]())
    probes.start()
    try:
        with long_lived_imports():
            from weft_runner.shell.process import serve_runner  # after everything that fails fast

        return uvloop.run(serve_runner(settings, probes, not_ready.append, tls, spans))
    finally:
        probes.close()
        if spans:
            spans.close()
