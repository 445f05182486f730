"""`weft bench histories`: what many clients did and saw, and whether that is allowed.

Publishers apply, change and delete the same adapters at the same time, each content with a digest of its own; readers
ask two gateways for them all the time and note which digest answered (`x-weft-model-digest`); others make keys, use and
revoke them.
Every call is recorded with its begin and end, and once everything is over the history is checked, as Jepsen does:

- a request that begins after somebody saw Ready for a generation is answered by that content or a newer one, and only
  by one whose apply had begun before the answer came;
- a request that begins after a deletion was seen (the object is gone) finds nothing until it is applied again;
- a request is answered while the adapter was seen Ready before it began and no deletion began before it ended;
- a key that was revoked is refused when a request begins more than 2 s after the revocation returned, and one that a
  gateway accepted once is accepted by that gateway until its revocation begins;
- the store has one outcome of each request that was accepted, and usage counts as many.

*wrong* counts what is not allowed.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from weft_stage.lines import Line, Origin

REVOKED_S = 2.0  # after it a revoked key opens nothing
ALL = "all clients"


@dataclass(frozen=True, slots=True)
class Applied:
    """A content of an adapter, in the order in which the store of objects took them. `life`: of the name, from 0."""

    name: str
    life: int
    generation: int
    digest: str
    begin: float


@dataclass(frozen=True, slots=True)
class SeenReady:
    """Somebody read the object, and it was Ready with that generation observed."""

    name: str
    life: int
    generation: int
    at: float


@dataclass(frozen=True, slots=True)
class Deleted:
    """`end`: the object was gone, and gateways had a moment where the deletion does not wait for them."""

    name: str
    life: int
    begin: float
    end: float


Event = TypeVar("Event", Applied, SeenReady, Deleted)


@dataclass(frozen=True, slots=True)
class Read:
    """A request for an adapter. `digest`: of the content that answered; empty: there is no such model."""

    name: str
    begin: float
    end: float
    digest: str


@dataclass(frozen=True, slots=True)
class KeyUsed:
    key: str
    begin: float
    end: float
    accepted: bool
    gateway: int = 0


@dataclass(frozen=True, slots=True)
class Revoked:
    key: str
    begin: float
    end: float


@dataclass(slots=True)
class History:
    """Events of each kind, in any order; seconds on one clock."""

    applied: list[Applied] = field(default_factory=list[Applied])
    ready: list[SeenReady] = field(default_factory=list[SeenReady])
    deleted: list[Deleted] = field(default_factory=list[Deleted])
    reads: list[Read] = field(default_factory=list[Read])
    used: list[KeyUsed] = field(default_factory=list[KeyUsed])
    revoked: list[Revoked] = field(default_factory=list[Revoked])

    def check(self) -> Iterator[str]:
        """A sentence for each event that may not be."""
        yield from self._wrong_reads()
        yield from self._wrong_keys()

    def _wrong_reads(self) -> Iterator[str]:
        versions, ready = _by_name(self.applied), _by_name(self.ready)
        deleted = _by_name(self.deleted)
        for read in self.reads:
            floor = max(((r.life, r.generation) for r in ready[read.name] if r.at < read.begin), default=(-1, -1))
            gone = max((d.life for d in deleted[read.name] if d.end < read.begin), default=-1)
            going = {d.life for d in deleted[read.name] if d.begin < read.end}
            what = f"{read.name}, read from {read.begin:.3f} to {read.end:.3f}"
            if not read.digest:
                if floor[0] > gone and floor[0] not in going:
                    yield f"{what}: not found, though life {floor[0]}, generation {floor[1]} was Ready before"
                continue
            may = [v for v in versions[read.name] if v.digest == read.digest and v.begin < read.end]
            if not may:
                yield f"{what}: answered by {read.digest}, which nobody had applied"
            elif all(v.life <= gone for v in may):
                yield f"{what}: answered by life {may[-1].life}, which was gone"
            elif all((v.life, v.generation) < floor for v in may):
                found = max((v.life, v.generation) for v in may)
                yield f"{what}: answered by {found}, though {floor} was Ready before (life, generation)"

    def _wrong_keys(self) -> Iterator[str]:
        ends = {one.key: one for one in self.revoked}
        known = dict[tuple[str, int], float]()
        for use in sorted(self.used, key=lambda use: use.end):
            revoked, at = ends.get(use.key), (use.key, use.gateway)
            if use.accepted:
                known.setdefault(at, use.end)
                if revoked and use.begin > revoked.end + REVOKED_S:
                    yield f"key {use.key}, used at {use.begin:.3f}: accepted, though revoked at {revoked.end:.3f}"
            elif use.begin > known.get(at, use.begin) and (revoked is None or use.end < revoked.begin):
                yield f"key {use.key}, used at {use.begin:.3f}: refused, though it was known at {known[at]:.3f}"


def lines(origin: Origin, history: History, wrong: Sequence[str], outcomes: Mapping[str, int]) -> Iterator[Line]:
    """The figures of a history. `outcomes`: of the store, by what is counted."""
    counts = {
        "contents applied": len(history.applied),
        "deletions": len(history.deleted),
        "requests answered": sum(bool(read.digest) for read in history.reads),
        "requests not found": sum(not read.digest for read in history.reads),
        "uses of keys": len(history.used),
        "revocations": len(history.revoked),
        **outcomes,
    }
    for what, count in counts.items():
        yield origin.line(ALL, what, count, "times")
    yield origin.line(ALL, "wrong", len(wrong), "times", target="<= 0")


def _by_name(events: Iterable[Event]) -> Mapping[str, list[Event]]:
    found = defaultdict[str, list[Event]](list)
    for event in events:
        found[event.name].append(event)
    return found
