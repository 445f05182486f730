"""The loop around a machine that the asyncio services share: events in, effects out, one timer, looks at its state."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from weft.domain.machine import TICK, Machine, Received, Tick
from weft.telemetry.invariants import violation

E = TypeVar("E")  # events
F = TypeVar("F")  # effects


class MachineShell(Generic[E, F]):
    """Feeds a machine and keeps its timer. One event loop owns both.

    `perform` does what follows from an event, one effect after the other. `handle` is called in place of the machine's
    own, where something surrounds it. `quiet`: events and messages that are no activity, but for a TICK that has
    effects. `on_failure` has to end the process; without it what a TICK or a look raises goes to the event loop's log,
    and the machine goes on.
    """

    def __init__(
        self,
        machine: Machine[E | Tick, F],
        perform: Callable[[F], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        handle: Callable[[E | Tick, float], Iterable[F]] | None = None,
        quiet: tuple[type, ...] = (),
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self._machine, self._handle, self._perform, self._clock = machine, handle or machine.handle, perform, clock
        self._quiet, self._on_failure = quiet, on_failure
        self.failure: Exception | None = None
        self._events: deque[E | Tick] = deque()
        self._feeding = self._active = self._unchecked = self._unseen = False
        self._observe: Callable[[], None] | None = None
        self._observe_s = 0.0
        self._observing: asyncio.Handle | None = None
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0  # uvloop's handle of what is due at once does not say when

    def feed(self, event: E | Tick) -> None:
        """Handle an event completely. Events caused by its effects wait. Raises errors of all of it, or the failure."""
        if self.failure is not None:
            raise self.failure
        if not isinstance(event.message if isinstance(event, Received) else event, self._quiet):
            self._active = self._unseen = True
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                event = self._events.popleft()
                for effect in self._handle(event, self._clock()):
                    if event is TICK:
                        self._active = self._unseen = True
                    self._perform(effect)
        finally:
            self._feeding = False
            deadline = self._machine.next_deadline()  # of an event that failed, too: the machine may go on
            if deadline is not None and (self._timer is None or deadline < self._timer_at):
                self._set_timer(deadline)  # most events renew a later one, which leaves the timer alone
            if self._unseen and self._observing is None and self._observe is not None:
                self._observe_later()

    def fail(self, error: Exception) -> None:
        """Take no more events and have the process ended; the first error counts."""
        if self.failure is None and self._on_failure is not None:
            self.failure = error
            self._on_failure()

    def check_idle(self) -> str | None:
        """Check the machine once after each activity, at the first call without any since. Returns what is broken."""
        due = self._unchecked and not self._active
        self._active, self._unchecked = False, self._active
        return violation(self._machine.check) if due else None

    def observe_after(self, seconds: float, observe: Callable[[], None]) -> None:
        """Look at the machine now, and so long after an activity; again until nothing has happened since the last look.

        So what a look shows is never older, and a machine at rest wakes nobody.
        """
        self._observe_s, self._observe = seconds, observe
        self._observe_now()

    def close(self) -> None:
        """Cancel the timers; a later event sets them again."""
        self._cancel_timer()
        if self._observing is not None:
            self._observing.cancel()
            self._observing = None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _observe_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._observing = loop.call_at(loop.time() + self._observe_s, self._observe_now)

    def _observe_now(self) -> None:
        assert self._observe is not None
        self._observing, self._unseen = None, False
        try:
            self._observe()
        except Exception as error:
            if self._on_failure is None:
                raise
            self.fail(error)
            return
        if self._unseen or self._unchecked:
            self._observe_later()

    def _set_timer(self, deadline: float) -> None:
        """Keep one timer, never later than the next deadline: an early one finds nothing due, and is set again."""
        self._cancel_timer()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(loop.time() + max(0.0, deadline - self._clock()), self._tick)
        self._timer_at = deadline

    def _tick(self) -> None:
        self._timer = None
        try:
            self.feed(TICK)
        except Exception as error:
            if self._on_failure is None:
                raise
            self.fail(error)  # nobody has fed it who could hear of it
