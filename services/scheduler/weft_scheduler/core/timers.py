"""Named deadlines, at most one a name, the earliest in O(log n)."""

import heapq
from enum import Enum
from typing import NamedTuple


class TimerKind(Enum):
    """What a deadline is for; the name beside it says whose. At one moment the order is that of the values."""

    ADAPTER_DRAIN = "adapter_drain"  # pool, adapter: a draining digest's grace or deadline
    ASSIGN_TIMEOUT = "assign_timeout"  # request: not started, or stopping while its gateway is silent
    AVOIDANCE = "avoidance"  # request: a runner that it avoids may be used again
    CLASS_WAIT = "class_wait"  # request: it need not wait for its numerics class any longer
    FIRST_ROUTES = "first_routes"  # the route table is published without the keys
    GATEWAY_AVOIDANCE = "gateway_avoidance"  # gateway: a runner that its requests avoid may be used again
    RESUBMIT = "resubmit"  # gateway: it counts as complete
    RUNNER_UNREPORTED = "runner_unreported"  # runner uuid: no supervisor reports it
    SCALE_DOWN = "scale_down"  # pool: a surplus has lasted long enough
    STARTUP_GRACE = "startup_grace"  # the cluster has had the time to report itself
    STATUS = "status"  # gathered statuses are published


class Timer(NamedTuple):
    kind: TimerKind
    name: str = ""
    adapter: str = ""


class TimerQueue:
    """A heap with lazy deletion: an entry counts only while it is what `_when` says of its name."""

    def __init__(self) -> None:
        self._when: dict[Timer, float] = {}
        self._heap: list[tuple[float, str, str, str, Timer]] = []

    def __contains__(self, timer: Timer) -> bool:
        return timer in self._when

    def set(self, timer: Timer, when: float) -> None:
        """Set a deadline, or change it."""
        if self._when.get(timer) != when:
            self._when[timer] = when
            heapq.heappush(self._heap, (when, timer.kind.value, timer.name, timer.adapter, timer))
            self._compact()

    def set_earlier(self, timer: Timer, when: float) -> None:
        """Set a deadline unless an earlier one is set."""
        if self._when.get(timer, when) >= when:
            self.set(timer, when)

    def clear(self, timer: Timer) -> None:
        self._when.pop(timer, None)

    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap and self._when.get(self._heap[0][-1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> Timer | None:
        """Take out the earliest deadline if it is at or before `now`; ties by kind and name."""
        when = self.next()
        if when is None or when > now:
            return None
        timer = heapq.heappop(self._heap)[-1]
        del self._when[timer]
        return timer

    def _compact(self) -> None:
        """Drop void entries when they are the majority: the heap stays linear in the live deadlines."""
        if len(self._heap) > 64 + 4 * len(self._when):
            self._heap = [(when, t.kind.value, t.name, t.adapter, t) for t, when in self._when.items()]
            heapq.heapify(self._heap)
