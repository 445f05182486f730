"""Who is worked on next, so that what stands still holds up nothing but itself.

A job belongs to a host (a share, a claim, a service that may hang as one) and to an owner (a namespace) on it. At most
`total` jobs run, at most `per_host` of one host, at most `per_owner` of one owner on one host. Hosts take turns, the
owners of a host take turns, the jobs of an owner come in their order. Pure; one loop owns it.
"""

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Job = TypeVar("Job")


class Lane(NamedTuple):
    """Where a job belongs."""

    host: str
    owner: str


@dataclass(frozen=True, slots=True)
class Room:
    """How many jobs may run."""

    total: int
    per_host: int
    per_owner: int

    def __post_init__(self) -> None:
        assert 1 <= self.per_owner <= self.per_host <= self.total, "an owner is part of a host is part of all"


class Lanes(Generic[Job]):
    """What waits, and how many run where."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._waiting: OrderedDict[str, OrderedDict[str, deque[Job]]] = OrderedDict()
        self._hosts: Counter[str] = Counter()
        self._running: Counter[Lane] = Counter()

    def add(self, lane: Lane, job: Job) -> None:
        self._waiting.setdefault(lane.host, OrderedDict()).setdefault(lane.owner, deque()).append(job)

    def end(self, lane: Lane) -> None:
        """One job of this lane has ended."""
        assert self._running[lane] > 0, "ended, but not started"
        self._running -= Counter((lane,))
        self._hosts -= Counter((lane.host,))

    def start(self) -> tuple[Lane, Job] | None:
        """The next job that may run, now running; None when there is none or no room."""
        lane = self._next()
        if lane is None:
            return None
        owners = self._waiting[lane.host]
        job = owners[lane.owner].popleft()
        self._pass_turn(lane)
        self._running[lane] += 1
        self._hosts[lane.host] += 1
        return lane, job

    @property
    def running(self) -> int:
        return self._hosts.total()

    def _next(self) -> Lane | None:
        if self.running >= self._room.total:
            return None
        for host, owners in self._waiting.items():
            if self._hosts[host] >= self._room.per_host:
                continue
            for owner in owners:
                if self._running[Lane(host, owner)] < self._room.per_owner:
                    return Lane(host, owner)
        return None

    def _pass_turn(self, lane: Lane) -> None:
        """To the end of the line, or out of it."""
        owners = self._waiting[lane.host]
        if owners[lane.owner]:
            owners.move_to_end(lane.owner)
        else:
            del owners[lane.owner]
        if owners:
            self._waiting.move_to_end(lane.host)
        else:
            del self._waiting[lane.host]

    def check_lanes(self) -> None:
        """The bounds hold, and nobody waits while there is room."""
        assert self.running <= self._room.total, "too many run"
        assert all(count <= self._room.per_host for count in self._hosts.values()), "too many of one host"
        assert all(count <= self._room.per_owner for count in self._running.values()), "too many of one owner"
        per_host: Counter[str] = Counter()
        for lane, count in self._running.items():
            per_host[lane.host] += count
        assert +per_host == +self._hosts, "hosts are the sum of their owners"
        assert all(jobs for owners in self._waiting.values() for jobs in owners.values()), "an empty line"
