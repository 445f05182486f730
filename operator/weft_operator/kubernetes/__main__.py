"""The command `python -m weft_operator.kubernetes`: settings, logs, then a replica until SIGTERM."""

import logging
import sys
from collections.abc import Sequence

import uvloop

from weft.process import EXIT_CANNOT_START, CannotStart, keep_heap_small
from weft.telemetry import logs
from weft.telemetry.logs import kv
from weft_operator.kubernetes.manager import run
from weft_operator.kubernetes.settings import Settings

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process. Returns 0 after SIGTERM, 1 when leadership or a watch was lost, 2 for wrong flags, files,
    credentials or addresses."""
    settings = Settings.parse(argv)
    keep_heap_small()
    logs.configure("operator", level=settings.log_level, fmt=settings.log_format)
    try:
        return uvloop.run(run(settings))
    except CannotStart as error:
        log.error("cannot start", extra=kv(error=type(error).__name__, detail=error))
        return EXIT_CANNOT_START


if __name__ == "__main__":
    sys.exit(main())
