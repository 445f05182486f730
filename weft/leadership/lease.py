"""Decisions on a `coordination.k8s.io` Lease: who leads. Pure.

The rule is client-go's: nobody's clock is compared with anybody else's. A candidate looks at the Lease and measures, on
its own clock, for how long it has not changed; after the duration that the Lease itself names it is free. A leader
counts from the moment at which it *sent* its last successful renewal and stops acting `deadline_s` later, which is
sooner than anybody else may begin: from then on no request of its is under way either (`write_s`).

The term of a leadership is the Lease's `leaseTransitions`. It has to grow also when somebody deletes the Lease, so a
new one does not begin at zero but at a number of seconds: fewer leaderships than seconds pass.
"""

from dataclasses import dataclass, replace

TERM_EPOCH_S = 1_735_689_600  # 2025-01-01; seconds since then fit the field's 31 bits until 2093


@dataclass(frozen=True, slots=True)
class LeaseTimings:
    """The times of a leadership, in seconds."""

    duration_s: float = 15.0  # a Lease that has not changed for so long is free

    @property
    def renew_s(self) -> float:
        """The time between two renewals of a leader."""
        return self.duration_s / 6

    @property
    def deadline_s(self) -> float:
        """The time without a renewal after which a leader stops acting."""
        return self.duration_s * 2 / 3

    @property
    def write_s(self) -> float:
        """The longest time of a write: a write sent at the deadline ends before any successor begins."""
        return self.duration_s / 3


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A Lease as it was read. `version` is its resourceVersion; no holder: given back."""

    holder: str
    transitions: int
    duration_s: float
    version: str


@dataclass(frozen=True, slots=True)
class LeaseCandidate:
    """One process's view. `since_s` is its own clock when it first saw the Lease as it is."""

    identity: str
    seen: LeaseRecord | None = None
    since_s: float = 0.0

    def observe(self, seen: LeaseRecord | None, now: float) -> "LeaseCandidate":
        """Take in what was read. An unchanged Lease keeps its age."""
        if self.seen is not None and seen is not None and seen.version == self.seen.version:
            return self
        return replace(self, seen=seen, since_s=now)


@dataclass(frozen=True, slots=True)
class CreateLease:
    """There is no Lease: make one, with this term."""

    term: int


@dataclass(frozen=True, slots=True)
class Acquire:
    """The Lease is free: take it over from exactly this version, with this term."""

    version: str
    term: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Another process leads: look again after at most `seconds`."""

    seconds: float


def decide(candidate: LeaseCandidate, terms: LeaseTimings, now: float, unix_s: float) -> CreateLease | Acquire | Wait:
    """Decide what a candidate that does not lead does next. `unix_s` is the wall clock, for the term of a new Lease."""
    seen = candidate.seen
    if seen is None:
        return CreateLease(first_term(unix_s))
    free_at = candidate.since_s + max(seen.duration_s, terms.duration_s)
    is_held = seen.holder not in ("", candidate.identity)  # its own name: a write of its own whose answer was lost
    if is_held and now < free_at:
        return Wait(min(free_at - now, terms.renew_s))
    return Acquire(seen.version, max(seen.transitions + 1, 1))


def first_term(unix_s: float) -> int:
    """Return the term of a new Lease: above every term of a deleted Lease."""
    return max(1, int(unix_s) - TERM_EPOCH_S)


@dataclass(frozen=True, slots=True)
class Leadership:
    """A leadership. `renewed_at` is this process's clock just before the last successful renewal was sent."""

    term: int
    version: str
    renewed_at: float

    def holds(self, terms: LeaseTimings, now: float) -> bool:
        """Whether this process may act. Once this is False it may not even ask for more: it ends."""
        return now < self.renewed_at + terms.deadline_s
