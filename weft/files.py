"""Files that are replaced whole, full disks, sockets by their path. Standard library only: the runner imports it."""

import errno
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

SOCKET_PATH_BYTES = 100  # the kernel allows about 107


def is_disk_full(error: OSError) -> bool:
    """Return whether a disk, or the quota of a user on it, has no room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def socket_name(path: Path) -> Generator[str]:
    """Name a unix socket in a folder of any depth: where the path is long, through an open descriptor of the folder."""
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def connect_socket(path: Path, timeout_s: float | None) -> socket.socket:
    """Connect to a unix socket in a folder of any depth. Raises OSError when nobody listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        with socket_name(path) as name:
            sock.connect(name)
    except OSError:
        sock.close()
        raise
    return sock


def write_atomically(path: Path, data: bytes | memoryview, mode: int = 0o600, *, durable: bool = True) -> None:
    """Replace a file, durable when it returns; after a crash it is the old one or the new one, whole.

    Not `durable`: that holds for crashes of the process; after one of the machine it may be gone or damaged.

    One writer of a path at a time: the temporary name is fixed, so that crashes leave at most one behind.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    temporary.replace(path)
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names that were made or replaced in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
