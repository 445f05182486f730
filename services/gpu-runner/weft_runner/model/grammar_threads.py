"""Threads that compute for grammars beside the steps, and no longer than SHORT_S at the priority of the steps.

A job that takes longer goes on at a lower priority on its thread, and another thread takes the next ones: it delays
neither the steps, as far as `nice` goes, nor the jobs behind it. What is known to be long, as compiling is, runs on
threads that have that priority from the beginning.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

SHORT_S = 1e-3
LONG_THREADS = 2
MAX_DEMOTED = 4  # at a time; the jobs behind the last of them wait
NICE = 10  # a tenth of a processor that a step's thread wants; with 19 a busy machine might never come to it

Jobs = SimpleQueue[Callable[[], None] | None]


class _Worker:
    """A thread that takes jobs until it is demoted."""

    def __init__(self, jobs: Jobs, busy: threading.Event | None) -> None:
        """`busy`: set as a job begins; None: of the lower priority at once."""
        self._jobs, self._busy = jobs, busy
        self.began: float | None = None  # of the present job, monotonic
        self.demoted = busy is None
        self.thread = threading.Thread(target=self._run, name="grammars", daemon=True)
        self.thread.start()

    def demote(self) -> None:
        """Let the present job be its last, at the lower priority."""
        self.demoted = True
        if (thread := self.thread.native_id) is not None:
            _lower(thread)

    def _run(self) -> None:
        if self._busy is None:
            _lower(threading.get_native_id())
        while (job := self._jobs.get()) is not None:
            if self._busy is not None:
                self.began = time.monotonic()
                self._busy.set()
            job()
            self.began = None
            if self.demoted and self._busy is not None:
                return


def _lower(thread: int) -> None:
    with contextlib.suppress(OSError):  # it has just ended, or the system has no priorities of threads
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICE)


class GrammarThreads:
    """`put` by any one thread. The threads start with the first job. Jobs raise nothing."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._short: Jobs = SimpleQueue()
        self._long: Jobs = SimpleQueue()
        self._busy = threading.Event()
        self._closing = False
        self._started = False

    def put(self, job: Callable[[], None], *, long: bool) -> None:
        """Have it done. `long`: it is expected to take longer than SHORT_S."""
        if not self._started:
            self._started = True
            for _ in range(LONG_THREADS):
                _Worker(self._long, None)
            threading.Thread(target=self._watch, name="grammar priorities", daemon=True).start()
        (self._long if long else self._short).put(job)

    def close(self) -> None:
        """What has begun is not waited for: a hostile grammar may take long."""
        self._closing = True
        for jobs, n_threads in ((self._short, self._most), (self._long, LONG_THREADS)):
            for _ in range(n_threads):
                jobs.put(None)
        self._busy.set()

    def _watch(self) -> None:
        """Demote who has worked too long, as long as somebody works."""
        workers = [_Worker(self._short, self._busy) for _ in range(self._most)]
        demoted: list[_Worker] = []
        while not self._closing:
            self._busy.wait()
            self._busy.clear()
            while not self._closing and any(one.demoted or one.began is not None for one in workers):
                time.sleep(SHORT_S)
                latest = time.monotonic() - SHORT_S
                demoted = [worker for worker in demoted if worker.thread.is_alive()]
                for i, worker in enumerate(workers):
                    if worker.demoted or ((began := worker.began) is not None and began <= latest):
                        if not worker.demoted:
                            worker.demote()
                        if len(demoted) < MAX_DEMOTED:
                            demoted.append(worker)
                            workers[i] = _Worker(self._short, self._busy)
