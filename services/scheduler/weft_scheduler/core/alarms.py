"""When to look again: named deadlines, at most one a name, the earliest in O(log n)."""

import heapq
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What a deadline is for; the name beside it says whose."""

    ASSIGN = "assign"  # request: not started, or told to leave and silent
    RESUBMIT = "resubmit"  # gateway: still re-submitting
    ABSENT = "absent"  # runner uuid: no supervisor reports it
    RETIRE = "retire"  # pool: a retired digest's time
    CLASS = "class"  # request: it need not wait for a runner of its numerics class any longer
    RETRY = "retry"  # request: it need not avoid a runner any longer
    FORGIVE = "forgive"  # gateway: its requests need not avoid a runner any longer
    SETTLED = "settled"  # the cluster has had the time to report itself
    FIRST_TABLE = "first_table"  # the route table goes out without the keys
    STATUS = "status"  # gathered statuses go out
    GIVE_BACK = "give_back"  # pool: a surplus has lasted long enough


class Alarm(NamedTuple):
    kind: Kind
    name: str = ""


class Alarms:
    """A heap with lazy deletion: an entry counts only while it is what `_when` says of its name."""

    def __init__(self) -> None:
        self._when: dict[Alarm, float] = {}
        self._heap: list[tuple[float, str, str, Alarm]] = []

    def __contains__(self, alarm: Alarm) -> bool:
        return alarm in self._when

    def set(self, alarm: Alarm, when: float) -> None:
        """Set or move a deadline."""
        if self._when.get(alarm) != when:
            self._when[alarm] = when
            heapq.heappush(self._heap, (when, alarm.kind.value, alarm.name, alarm))
            self._compact()

    def set_earlier(self, alarm: Alarm, when: float) -> None:
        """Set a deadline unless an earlier one is set."""
        if self._when.get(alarm, when) >= when:
            self.set(alarm, when)

    def clear(self, alarm: Alarm) -> None:
        self._when.pop(alarm, None)

    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap and self._when.get(self._heap[0][3]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> Alarm | None:
        """Take out the earliest deadline if it is at or before `now`; ties by kind and name."""
        when = self.next()
        if when is None or when > now:
            return None
        alarm = heapq.heappop(self._heap)[3]
        del self._when[alarm]
        return alarm

    def _compact(self) -> None:
        """Drop void entries when they are the most: the heap stays linear in the live deadlines."""
        if len(self._heap) > 64 + 4 * len(self._when):
            self._heap = [(when, a.kind.value, a.name, a) for a, when in self._when.items()]
            heapq.heapify(self._heap)
