"""What several folders share. One worker runs a file, so nobody else uses a server at the same time."""

import logging
import signal
from collections.abc import Iterator

import pytest

from harness.postgres import Postgres, postgres_server
from harness.quick import one_ssl_context  # noqa: F401 (a fixture)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def main_here() -> Iterator[None]:
    """The `main` of a component sets this process's logging and signal handlers: put back afterwards."""
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    root = logging.getLogger()
    handlers = root.handlers[:]
    loggers = [root, *(known for known in root.manager.loggerDict.values() if isinstance(known, logging.Logger))]
    levels = [logger.level for logger in loggers]
    yield
    for number, handler in signals.items():
        signal.signal(number, handler)
    root.handlers = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
