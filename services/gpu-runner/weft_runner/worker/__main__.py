"""`python -m weft_runner.worker STEPS LOADS EVENTS MEETING SLOTS`: a rank of its runner's model. Started by it alone.

The numbers are inherited descriptors, see `parallel.worker_group`. A watch ends the process once the runner has closed
its end, in whatever state everything is; it stands before anything is imported that takes time.
"""

import logging
import os
import socket
import sys
import threading

from weft.process import long_lived_imports
from weft_runner.parallel.channel import Channel


def main(argv: list[str]) -> None:
    """Never returns."""
    channels = [Channel(socket.socket(fileno=int(number))) for number in argv[:3]]
    threading.Thread(target=_end_with, args=(channels[1],), name="watch", daemon=True).start()
    with long_lived_imports():
        from weft_runner.worker.loop import serve_child  # torch is imported here

    code = serve_child(channels, [int(number) for number in argv[3:]])
    logging.shutdown()
    os._exit(code)  # other threads may be anywhere


def _end_with(loads: Channel) -> None:
    loads.wait_for_end()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
