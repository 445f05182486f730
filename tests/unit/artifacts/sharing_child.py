"""A process that shares a blob folder: `python -m tests.unit.artifacts.sharing_child FOLDER URL KILL_AT DIGEST...`.

It fetches the artifacts, retains them, prints `done`, and stays until its standard input ends. At the KILL_AT-th thing
that it asks of the file system (Python's audit events) it is killed; 0: never.
"""

import os
import signal
import sys
from pathlib import Path

from weft.artifacts.blobs import BlobStore
from weft.artifacts.fetch import FetchLimits, fetch

ASKED = ("open", "fcntl.flock", "os.rename", "os.remove", "os.truncate", "os.utime", "os.mkdir", "os.listdir")


def main(folder: str, url: str, kill_at: str, *digests: str) -> None:
    count = 0

    def audit(event: str, args: tuple[object, ...]) -> None:
        nonlocal count
        del args
        if event in ASKED:
            count += 1
            if count == int(kill_at):
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    store = BlobStore(Path(folder), shared=True)
    store.clean()
    for digest in digests:
        fetch(url, digest, store, limits=FetchLimits(chunk_bytes=1000, pause_s=0.01, stalled_s=60.0))
    store.retain(digests)
    sys.stdout.write(f"done {count}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
