"""The kernels' threads: one pool for each engine, used by one call at a time."""

import ctypes
import os
import threading
import weakref
from types import TracebackType
from typing import Self

from weft_kernels.cpu.errors import CallRefused


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
