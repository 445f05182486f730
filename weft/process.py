"""What every process does before it serves: its data directory, its addresses, the errors that stop a start.

Standard library only: the runner imports it.
"""

import fcntl
import gc
import os
import resource
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

M_ARENA_MAX, ARENAS = -8, 2  # of glibc's mallopt
M_MMAP_THRESHOLD, LARGE_BYTES = -3, 128 << 10
EXIT_CANNOT_START = 2  # trying again does not help: `weft up` gives up at once, see ComponentFailed


class CannotStart(Exception):
    """An external fault prevents the start. The message has the fault, its place and the remedy."""


class DataDirInUse(CannotStart):
    """A data directory has one owner, and another process is it."""


class DataDirUnusable(CannotStart):
    """The data directory cannot be made, or not be written to."""


class AddressInUse(CannotStart):
    """An address this process was given cannot be listened on."""

    def __init__(self, flag: str, address: str, reason: str) -> None:
        super().__init__(f"{flag} {address}: {reason}: stop what listens there, or give another address")


@contextmanager
def long_lived_imports() -> Generator[None]:
    """Import what a long-lived process needs in this block, so that it costs little from then on.

    The cyclic collector visits nothing that the imports make, not even when the process ends: modules are no garbage,
    and to search them for some takes a runner's end 0.3 s of CPU time, a service's 0.1 s. And glibc keeps freed memory
    in two arenas instead of eight for each core: a thread's own pool is of little use beside Python's lock, and what is
    left over in each grows for hours.
    """
    _mallopt(M_ARENA_MAX, ARENAS)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_heap_small() -> None:
    """Keep the heap of a process small that reads files and objects in many threads and computes little.

    glibc has one arena, and returns blocks of 128 KiB and more to the system as they are freed. By default the first
    one that is freed raises that bound to its size, and from then on they lie among small blocks.
    """
    _mallopt(M_ARENA_MAX, 1)
    _mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def _mallopt(option: int, value: int) -> None:
    """Set an option of malloc, if the C library is glibc."""
    import ctypes  # 8 ms, which `weft --help` need not wait for

    if set_option := getattr(ctypes.CDLL(None), "mallopt", None):
        set_option(option, value)


def data_root() -> Path:
    """The folder of all data: `$WEFT_DATA_DIR`, else `$XDG_STATE_HOME/weft`, else `~/.local/state/weft`."""
    if folder := os.environ.get("WEFT_DATA_DIR"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "weft"


def serve_root() -> Path:
    """Return the folder of `weft serve`, next to `data_root`, so that neither removes the other's objects."""
    root = data_root()
    return root.with_name(f"{root.name}-serve")


def default_data_dir(component: str) -> Path:
    """Return a component's folder below the common folder."""
    return data_root() / component


@contextmanager
def lock_data_dir(data_dir: Path, component: str) -> Generator[None]:
    """Make a data directory and own it until the block or the process ends, also by kill -9.

    Files that the process makes inside the block belong to its user alone. Raises DataDirInUse, DataDirUnusable.
    """
    old_mask = os.umask(0o077)
    try:
        with _locked(data_dir, component):
            yield
    finally:
        os.umask(old_mask)


@contextmanager
def _locked(data_dir: Path, component: str) -> Generator[None]:
    unusable = f"{data_dir} cannot be used (%s): make it writable, or give another with --data-dir"
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DataDirUnusable(unusable % error.strerror) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"{data_dir} is in use by another {component}: stop that one, or give another with --data-dir"
            raise DataDirInUse(message) from error
        except OSError as error:
            raise DataDirUnusable(unusable % error.strerror) from error
        yield
    finally:
        os.close(lock)


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port`. Raises ValueError with the form that is expected."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 1 << 16):
        raise ValueError(f"address {address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def listen(address: str, flag: str) -> socket.socket:
    """Open a listening socket, so that an address in use stops the start.

    From here on a client may connect; it is answered once the process serves. Raises AddressInUse.
    """
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise AddressInUse(flag, address, error.strerror or str(error)) from error
    listener.setblocking(False)
    return listener


def raise_descriptor_limit() -> int:
    """Let this process open as many descriptors as its host allows. Returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize
