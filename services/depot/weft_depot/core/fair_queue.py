"""A queue that is fair to hosts and owners: a hanging host delays only its jobs, and an owner's hosts delay only the
owner.

A job belongs to a host (a share, a claim, a service, which hangs as a unit) and to an owner (a namespace) on it. At
most `total` jobs run. At most `per_host` jobs run of a host, and as many of an owner. At most `per_owner` jobs run of
an owner on a host. Hosts take turns, the owners of a host take turns, and the jobs of an owner run in order. A single
loop owns it.
"""

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Job = TypeVar("Job")


class QueueKey(NamedTuple):
    """The host and the owner of a job."""

    host: str
    owner: str


@dataclass(frozen=True, slots=True)
class ConcurrencyLimits:
    """The most jobs that may run: in all, of a host or an owner, of an owner on a host."""

    total: int
    per_host: int
    per_owner: int

    def __post_init__(self) -> None:
        assert 1 <= self.per_owner <= self.per_host <= self.total, "an owner is part of a host is part of all"


class FairQueue(Generic[Job]):
    """The waiting jobs, and the number of running jobs for each key."""

    def __init__(self, limits: ConcurrencyLimits) -> None:
        self._limits = limits
        self._waiting: OrderedDict[str, OrderedDict[str, deque[Job]]] = OrderedDict()
        self._waiting_owners: Counter[str] = Counter()  # jobs of each
        self._hosts: Counter[str] = Counter()
        self._owners: Counter[str] = Counter()
        self._running: Counter[QueueKey] = Counter()

    @property
    def running(self) -> int:
        return self._hosts.total()

    def add(self, key: QueueKey, job: Job) -> None:
        self._waiting.setdefault(key.host, OrderedDict()).setdefault(key.owner, deque()).append(job)
        self._waiting_owners[key.owner] += 1

    def end(self, key: QueueKey) -> None:
        """End a job of this key."""
        assert self._running[key] > 0, "ended, but not started"
        self._running -= Counter((key,))
        self._hosts -= Counter((key.host,))
        self._owners -= Counter((key.owner,))

    def start(self) -> tuple[QueueKey, Job] | None:
        """Start the next runnable job. Return None if no waiting job may run."""
        key = self._next()
        if key is None:
            return None
        owners = self._waiting[key.host]
        job = owners[key.owner].popleft()
        # The owner and the host had their turn: both go to the end of their lines, or leave them.
        if owners[key.owner]:
            owners.move_to_end(key.owner)
        else:
            del owners[key.owner]
        if owners:
            self._waiting.move_to_end(key.host)
        else:
            del self._waiting[key.host]
        self._waiting_owners[key.owner] -= 1
        if not self._waiting_owners[key.owner]:
            del self._waiting_owners[key.owner]
        self._running[key] += 1
        self._hosts[key.host] += 1
        self._owners[key.owner] += 1
        return key, job

    def _next(self) -> QueueKey | None:
        if self.running >= self._limits.total or not any(map(self._may_run_more, self._waiting_owners)):
            return None  # saves a look at each host of an owner with its full share: it may have thousands
        for host, owners in self._waiting.items():
            if self._hosts[host] >= self._limits.per_host:
                continue
            for owner in owners:
                if self._may_run_more(owner) and self._running[QueueKey(host, owner)] < self._limits.per_owner:
                    return QueueKey(host, owner)
        return None

    def _may_run_more(self, owner: str) -> bool:
        return self._owners[owner] < self._limits.per_host

    def check_queue(self) -> None:
        """Check the limits and the consistency of all counts."""
        assert self.running <= self._limits.total, "too many run"
        assert all(count <= self._limits.per_host for count in self._hosts.values()), "too many of one host"
        assert all(count <= self._limits.per_host for count in self._owners.values()), "too many of one owner"
        assert all(count <= self._limits.per_owner for count in self._running.values()), "too many per owner and host"
        per_host, per_owner = Counter[str](), Counter[str]()
        for key, count in self._running.items():
            per_host[key.host] += count
            per_owner[key.owner] += count
        assert +per_host == +self._hosts, "hosts are the sum of their owners"
        assert +per_owner == +self._owners, "owners are the sum of their hosts"
        waiting = Counter[str]()
        for owners in self._waiting.values():
            waiting.update({owner: len(jobs) for owner, jobs in owners.items()})
        assert waiting == self._waiting_owners, "the waiting owners do not match the waiting jobs"
        assert all(jobs for owners in self._waiting.values() for jobs in owners.values()), "an empty line"
