"""The kernels' threads: how many this process may have working at a time, and the pool of them.

A quota may stand at any level of cgroups (version 2 and 1) above the process: the least one counts. A thread beyond it
would make all of them wait in turn at the kernels' barriers.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from weft_kernels.cpu.errors import CallRefused

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_V1_FOLDERS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")
_V1_FILES = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def cpu_quota(mount: Path = MOUNT, membership: Path = MEMBERSHIP, cpus: int | None = None) -> int:
    """Find the whole CPUs that this process may use, at least one. `cpus`: those that its affinity allows."""
    allowed = len(os.sched_getaffinity(0)) if cpus is None else cpus
    return max(1, min([allowed, *(int(quota) for quota in cgroup_cpu_limits(mount, membership))]))


def cgroup_cpu_limits(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> Iterator[float]:
    """Yield the CPUs that each cgroup with a quota grants, from the process's own one up."""
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        roots, files = [mount], ("cpu.max",)  # "0::/path": version 2, all controllers in one tree
        if controllers:
            roots = [mount / name for name in _V1_FOLDERS if "cpu" in controllers.split(",")]
            files = _V1_FILES
        inside = Path(path.lstrip("/"))
        for root in roots:
            for part in (inside, *inside.parents):  # in a container perhaps only the root is there
                texts = [] if ".." in part.parts else [_read(root / part / file) for file in files]
                match " ".join(texts).split():
                    case [quota, period] if quota.isdecimal() and period.isdecimal():
                        yield int(quota) / int(period)
                    case _:  # "max", -1, or no such file
                        pass


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


class ThreadPool:
    """`threads` threads, the calling one included. Ends with `close()`, its `with` block, or its last reference.

    Calls of several Python threads wait for each other. A forked child has no workers: it makes a pool of its own.
    """

    def __init__(self, native: ctypes.CDLL, threads: int) -> None:
        """Start the threads. Raises ValueError below one thread, CallRefused when the system grants no more threads."""
        if threads < 1:
            raise ValueError(f"a pool has at least one thread, not {threads}")
        handle: int | None = native.weft_pool_new(threads)
        if not handle:
            raise CallRefused("weft_pool_new", 0, f"the system grants no {threads} threads")
        self.threads = threads
        self._handle = handle
        self._owner = os.getpid()
        self.lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _free, native, handle, self._owner)
        self._finalizer.atexit = False  # a daemon thread may still be computing then; the threads end with the process

    def close(self) -> None:
        """Wait for a call under way and end the threads. Harmless when closed."""
        with self.lock:
            self._finalizer()

    @property
    def handle(self) -> int:
        """The pool for one native call, which holds `lock`. Raises ValueError when closed, or in a forked process."""
        if not self._finalizer.alive:
            raise ValueError("this pool of threads is closed")
        if os.getpid() != self._owner:
            raise ValueError("this pool of threads belongs to the process that this one was forked from")
        return self._handle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _free(native: ctypes.CDLL, handle: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child would wait for threads that it does not have
        native.weft_pool_free(handle)
