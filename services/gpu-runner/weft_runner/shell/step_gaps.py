"""Memory work between steps: adapters that are packed and KV that is copied where steps compute on the same cores.

Beside a running step such work costs more than its time: the threads of a step meet at every phase, and one that is off
its core holds up the others. So the engine's thread does it between two steps, with all of the step's threads, in
slices of some ten microseconds, for a share of the time that steps take. With no step running it waits for nothing.
A sequence stands still while its KV is copied, and pages are held: so copies have a larger share than adapters.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

ADAPTERS_SHARE, COPIES_SHARE = 0.03, 0.15  # of the steps' time
SAVED = 4.0  # shares of a step that are saved while nothing waits: a copy of a short sequence is done in one go


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Work in slices, one for each step of the iterator. `done` is called after the last or a failed slice."""

    slices: Iterator[None]
    done: Future[None] = field(default_factory=Future[None])


class StepGaps:
    """Tasks in the order in which they came. `wake` is called after one was added, by the thread that added it."""

    def __init__(
        self, wake: Callable[[], None], clock: Callable[[], float] = time.perf_counter, share: float = ADAPTERS_SHARE
    ) -> None:
        self._wake, self._clock, self._share = wake, clock, share
        self._tasks: deque[Task] = deque()
        self._lock = threading.Lock()  # of `_closed`: no task is added after the last was done
        self._closed = False
        self._credit_s = 0.0  # what slices may still take

    @property
    def waiting(self) -> bool:
        return bool(self._tasks)

    def complete(self, slices: Iterator[None]) -> None:
        """Wait until all slices are done. Any thread but the engine's. Raises what one of them raised."""
        self.add(slices).result()

    def add(self, slices: Iterator[None]) -> "Future[None]":
        """Queue slices of work. Any thread. Once closed, the caller does all of it."""
        task = Task(slices)
        with self._lock:
            if not (closed := self._closed):
                self._tasks.append(task)
        if closed:
            while _advance(task):
                pass
        else:
            self._wake()
        return task.done

    # ---- the engine's thread

    def between_steps(self, step_s: float) -> None:
        """Work in the gap between a step that took `step_s` and the next one."""
        self._credit_s = min(self._credit_s + self._share * step_s, SAVED * self._share * step_s)  # debts remain
        if not self._tasks:
            return
        began = self._clock()
        while self._credit_s > 0 and self.advance():
            now = self._clock()
            self._credit_s, began = self._credit_s - (now - began), now

    def advance(self) -> bool:
        """Run one slice. Return whether there was a slice."""
        if not self._tasks:
            return False
        if not _advance(self._tasks[0]):
            self._tasks.popleft()
        return True

    def close(self) -> None:
        """Do all remaining slices now, without pauses."""
        with self._lock:
            self._closed = True
        while self.advance():
            pass


def _advance(task: Task) -> bool:
    """Run one slice, and say whether any is left."""
    try:
        next(task.slices)
    except StopIteration:
        task.done.set_result(None)
    except BaseException as error:  # noqa: BLE001 (it belongs to whoever added the task)
        task.done.set_exception(error)
    else:
        return True
    return False
