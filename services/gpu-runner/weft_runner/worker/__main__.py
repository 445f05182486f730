"""`python -m weft_runner.worker [STEPS LOADS EVENTS MEETING SLOTS]`: a rank of its runner's model. Started by it alone.

The numbers are inherited descriptors, see `parallel.worker_group`. Without them this is a rank beside the first one of
a host of several (`parallel.hosts`), which writes settings, the base's files and the rank to standard input. A watch
ends the process once the end that started it is closed, in whatever state everything is; it stands before anything is
imported that takes time.
"""

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable

from weft.process import CannotStart, long_lived_imports
from weft.telemetry.logs import configure, kv
from weft_runner.errors import RunnerError
from weft_runner.parallel.channel import Channel
from weft_runner.parallel.messages import unpack_message

log = logging.getLogger(__name__)


def main(argv: list[str]) -> None:
    """Never returns."""
    code = _serve_child([int(number) for number in argv]) if argv else _serve_beside()
    logging.shutdown()
    os._exit(code)  # other threads may be anywhere


def _serve_child(files: list[int]) -> int:
    channels = [Channel(socket.socket(fileno=number)) for number in files[:3]]
    _end_after(channels[1].wait_for_end)
    with long_lived_imports():
        from weft_runner.worker.loop import serve_child  # torch is imported here

    return serve_child(channels, files[3:])


def _serve_beside() -> int:
    _, settings, files, rank = unpack_message(sys.stdin.buffer.readline(), lambda _: None)
    _end_after(sys.stdin.buffer.read)
    configure(f"rank {rank}", level=settings.log_level, fmt=settings.log_format)
    with long_lived_imports():
        from weft.wire.tls import load_tls
        from weft_runner.shell.rank_link import join_runner  # torch is imported here
        from weft_runner.worker.loop import LocalHostConfig, serve

    config, never = LocalHostConfig(settings, files), threading.Event()
    try:
        tls = load_tls(settings.tls_dir, "runner")
        return join_runner(settings, tls, rank, lambda channels, meet: serve(channels, meet, config), never)
    except (RunnerError, CannotStart) as error:
        log.error("failed", extra=kv(error=type(error).__name__, detail=error))
    except BaseException:
        log.exception("a rank of the model has failed")
    return 1


def _end_after(wait: Callable[[], object]) -> None:
    def end() -> None:
        wait()
        os._exit(0)

    threading.Thread(target=end, name="watch", daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])
