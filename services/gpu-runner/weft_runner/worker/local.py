"""`python -m weft_runner.worker.local`: a rank beside the first one of a host of several (`parallel.hosts`).

The process that starts it writes settings, the base's files and the rank to its standard input. It ends when that
input does.
"""

import logging
import os
import pickle
import sys
import threading

from weft.process import CannotStart, long_lived_imports
from weft.telemetry.logs import configure, kv
from weft.wire.tls import load_tls
from weft_runner.errors import RunnerError

log = logging.getLogger(__name__)


def main() -> None:
    """Never returns."""
    settings, files, rank = pickle.load(sys.stdin.buffer)  # noqa: S301 (of this runner's own process)
    threading.Thread(target=_end_with_input, name="input", daemon=True).start()
    configure(f"rank {rank}", level=settings.log_level, fmt=settings.log_format)
    with long_lived_imports():
        from weft_runner.shell.rank_link import join_runner  # torch is imported here
        from weft_runner.worker.loop import LocalHostConfig, serve

    own, never = LocalHostConfig(settings, files), threading.Event()
    try:
        tls = load_tls(settings.tls_dir, "runner")
        code = join_runner(settings, tls, rank, lambda channels, meet: serve(channels, meet, own), never)
    except (RunnerError, CannotStart) as error:
        log.error("failed", extra=kv(error=type(error).__name__, detail=error))
        code = 1
    except BaseException:
        log.exception("a rank of the model has failed")
        code = 1
    logging.shutdown()
    os._exit(code)  # other threads may be anywhere


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
