"""A unix socket in a folder of any depth: the kernel allows about 107 characters for its path.

Where /proc is there, the folder is reached through an open descriptor, so only the file's name counts.
"""

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

SHORT_ENOUGH = 100


def listen(path: Path) -> socket.socket:
    """A listening socket there, readable by its owner alone; what was left there is replaced."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        with _reachable(path) as name:
            sock.bind(name)
    finally:
        os.umask(before)
    sock.listen(128)
    sock.setblocking(False)
    return sock


def connect(path: Path, timeout_s: float | None) -> socket.socket:
    """A connected socket. Raises OSError when nobody listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        with _reachable(path) as name:
            sock.connect(name)
    except OSError:
        sock.close()
        raise
    return sock


@contextmanager
def _reachable(path: Path) -> Generator[str]:
    if len(os.fsencode(path)) <= SHORT_ENOUGH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
