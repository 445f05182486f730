"""`python -m weft_stage.linked_runner FLAGS`: a runner that gets KV of others over TCP, through a link.

Others are given `--kv-listen` as it stands, 127.0.0.1:PORT; the runner itself listens at `behind` of it, if a link
leads (`weft_trouble.links`). `--shared-memory` as the first argument: pages of this host's runners pass beside the
link.
"""

import sys

from weft_runner.main import main
from weft_runner.shell import kv_transfer

FLAG, SHARED_MEMORY = "--kv-listen", "--shared-memory"
RUNNER = ("weft_stage.runner_up", "weft_stage.linked_runner")


def behind(address: str) -> str:
    """Return where a runner listens of which others know `address`: at the same port of another loopback address."""
    return f"127.0.0.2:{address.rpartition(':')[2]}"


def _on_another_host(receiver: str, stall_s: float) -> None:
    """Give no shared memory, in place of `kv_ring.hand_over`: the other runner is as on another host."""


if __name__ == "__main__":
    flags = sys.argv[1:]
    if flags[0] == SHARED_MEMORY:
        flags = flags[1:]
    else:
        kv_transfer.hand_over = _on_another_host
    at = flags.index(FLAG) + 1
    sys.exit(main([*flags[:at], behind(flags[at]), *flags[at + 1 :]]))
