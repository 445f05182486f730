"""The controller's own log, beside those of the components."""

import logging
from collections.abc import Generator
from contextlib import contextmanager

from weft.telemetry.logs import TextFormatter
from weft_operator.local.logfile import LogFile

CONTROLLER = "controller"
QUIET = ("httpx2", "httpcore2", "uvicorn.error")  # a line for each request, or each start


@contextmanager
def logging_to(logfile: LogFile, level: str) -> Generator[None]:
    """Send this process's log to a file for as long as the context lasts."""
    handler = _LogFileHandler(logfile)
    handler.setFormatter(TextFormatter(CONTROLLER))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


class _LogFileHandler(logging.Handler):
    def __init__(self, logfile: LogFile) -> None:
        super().__init__()
        self._logfile = logfile

    def emit(self, record: logging.LogRecord) -> None:
        self._logfile.write(self.format(record).encode() + b"\n")
