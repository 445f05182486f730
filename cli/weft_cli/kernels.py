"""Builds the CPU kernels before a stack starts: else its runners would wait for a compiler, or start over and over."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec

from weft_cli.errors import BadInput, CommandError
from weft_cli.output import note

TOLD = ("weft_kernels.cpu.build", "weft_kernels.cpu.compiler")  # loggers of what takes long


def prepare_kernels(executor: str | None) -> None:
    """Build the kernels for this CPU if need be, unless no runner will look for them.

    Raises CommandError if there are none, and no torch for another executor; BadInput for a wrong $WEFT_CPU_LEVEL.
    """
    if executor in ("cuda", "reference"):
        return
    from weft_kernels.cpu.errors import LevelUnusable, NativeUnavailable
    from weft_kernels.cpu.library import load

    try:
        with _telling():
            load(here=True)
    except LevelUnusable as error:
        raise BadInput(f"$WEFT_CPU_LEVEL: {error}") from error
    except NativeUnavailable as error:
        if executor == "cpu" or find_spec("torch") is None:
            raise CommandError(f"nothing here can compute: {error.reason}") from error
        note(f"weft: no CPU kernels: {error.reason}")


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(f"weft: {record.getMessage()}")


@contextmanager
def _telling() -> Generator[None]:
    handler, loggers = _Notes(), [logging.getLogger(name) for name in TOLD]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
