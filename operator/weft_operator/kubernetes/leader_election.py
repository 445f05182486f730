"""Leader election by a `coordination.k8s.io` Lease: pure decisions, and the election that carries them out.

The rule is client-go's: nobody's clock is compared with anybody else's. A candidate looks at the Lease and measures, on
its own clock, for how long it has not changed; after the duration that the Lease itself names it is free. A leader
counts from the moment at which it *sent* its last successful renewal and stops acting `deadline_s` later, which is
sooner than anybody else may begin: from then on no request of its is under way either (`write_s`).

The term of a leadership is the Lease's `leaseTransitions`. It has to grow also when somebody deletes the Lease, so a
new one does not begin at zero but at a number of seconds: fewer leaderships than seconds pass.

A process leads at most once. When it cannot be sure any more that it leads it ends: whatever it remembers may be old,
and a new start is the one path that is tested every day.
"""

import asyncio
import logging
import os
import secrets
import socket
import time
from dataclasses import dataclass, replace
from typing import Any

from weft.telemetry.logs import kv
from weft_operator.controller.clock import Clock, since_boot
from weft_operator.core.resources import Object
from weft_operator.errors import KubernetesError, LeadershipLost, StaleWrite
from weft_operator.kubernetes.backend import micro_time
from weft_operator.kubernetes.client import LEASES, Api

TERM_EPOCH_S = 1_735_689_600  # 2025-01-01; seconds since then fit the field's 31 bits until 2093


@dataclass(frozen=True, slots=True)
class LeaseTimings:
    """The times of a leadership, in seconds."""

    duration_s: float = 15.0  # a Lease that has not changed for so long is free

    @property
    def renew_s(self) -> float:
        """How often a leader renews."""
        return self.duration_s / 6

    @property
    def deadline_s(self) -> float:
        """A leader that could not renew for so long stops acting."""
        return self.duration_s * 2 / 3

    @property
    def write_s(self) -> float:
        """The longest that one write may be under way: one sent at the deadline ends before anybody else begins."""
        return self.duration_s / 3


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A Lease as it was read. `version` is its resourceVersion; no holder: given back."""

    holder: str
    transitions: int
    duration_s: float
    version: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """One process's view. `since` is its own clock when it first saw the Lease as it is."""

    identity: str
    seen: LeaseRecord | None = None
    since: float = 0.0

    def look(self, seen: LeaseRecord | None, now: float) -> "Candidate":
        """Take in what was read. An unchanged Lease keeps its age."""
        if self.seen is not None and seen is not None and seen.version == self.seen.version:
            return self
        return replace(self, seen=seen, since=now)


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
    """Another one leads. The Lease is read again after so many seconds at most."""

    seconds: float


def decide(candidate: Candidate, terms: LeaseTimings, now: float, unix_s: float) -> CreateLease | Acquire | Wait:
    """What a candidate that does not lead does next. `unix_s` is the wall clock, for the term of a new Lease."""
    seen = candidate.seen
    if seen is None:
        return CreateLease(first_term(unix_s))
    free_at = candidate.since + max(seen.duration_s, terms.duration_s)
    held = seen.holder not in ("", candidate.identity)  # its own name: a write of its own whose answer was lost
    if held and now < free_at:
        return Wait(min(free_at - now, terms.renew_s))
    return Acquire(seen.version, max(seen.transitions + 1, 1))


def first_term(unix_s: float) -> int:
    """The term of a Lease that is new: above every term of one that was deleted."""
    return max(1, int(unix_s) - TERM_EPOCH_S)


@dataclass(frozen=True, slots=True)
class Leadership:
    """A leadership. `renewed_at` is this process's clock just before the last successful renewal was sent."""

    term: int
    version: str
    renewed_at: float

    def holds(self, terms: LeaseTimings, now: float) -> bool:
        """May this process act? It may not even ask for more once this is False: it ends."""
        return now < self.renewed_at + terms.deadline_s


log = logging.getLogger(__name__)


def new_identity() -> str:
    """Of this start of this process: a restarted one is somebody else."""
    return f"{socket.gethostname()}_{os.getpid()}_{secrets.token_hex(4)}"


class Election:
    """One candidate for one Lease."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        *,
        identity: str,
        terms: LeaseTimings,
        clock: Clock = since_boot,
        wall: Clock = time.time,
    ) -> None:
        self._api, self._namespace, self._name = api, namespace, name
        self._terms, self._clock, self._wall = terms, clock, wall
        self._candidate = Candidate(identity)
        self._leading: Leadership | None = None
        self._uid = ""  # of the Lease that was seen last: without it a PUT would make a deleted one anew

    @property
    def leading(self) -> bool:
        """Does this process lead, for certain?"""
        return self._leading is not None and self._leading.holds(self._terms, self._clock())

    def require(self) -> None:
        """Raises LeadershipLost unless this process leads for certain."""
        if not self.leading:
            raise LeadershipLost(f"Lease {self._namespace}/{self._name} was not renewed in time")

    async def acquire(self) -> int:
        """Wait until this process leads; the term of its leadership."""
        while True:
            try:
                pause_s = await self._try()
            except KubernetesError as error:
                log.warning("the Lease cannot be read or written", extra=kv(error=str(error)))
                pause_s = self._terms.renew_s
            if self._leading is not None:
                log.info("leading", extra=kv(identity=self._candidate.identity, term=self._leading.term))
                return self._leading.term
            await asyncio.sleep(pause_s)

    async def hold(self) -> None:
        """Renew until leadership is lost. Raises LeadershipLost."""
        while True:
            await asyncio.sleep(self._terms.renew_s)
            self.require()
            try:
                await self._renew()
            except StaleWrite:
                await self._look_again()
            except KubernetesError as error:
                log.warning("the Lease cannot be renewed", extra=kv(error=str(error)))

    async def release(self) -> None:
        """Give the Lease back, so that nobody has to wait for it to run out."""
        if not self.leading:
            return
        leading, self._leading = self._leading, None
        assert leading is not None
        try:
            await self._put(holder="", term=leading.term, version=leading.version)
        except (KubernetesError, StaleWrite) as error:
            log.warning("the Lease cannot be given back", extra=kv(error=str(error)))

    async def _try(self) -> float:
        """One look, one attempt; how long to wait until the next."""
        lease = await self._api.get(LEASES, self._namespace, self._name)
        now = self._clock()
        self._uid = "" if lease is None else lease["metadata"]["uid"]
        self._candidate = self._candidate.look(None if lease is None else lease_record(lease), now)
        try:
            match decide(self._candidate, self._terms, now, self._wall()):
                case Wait(seconds):
                    return seconds
                case CreateLease(term):
                    written = await self._create(term)
                case Acquire(version, term):
                    written = await self._put(holder=self._candidate.identity, term=term, version=version)
        except StaleWrite:
            return self._terms.renew_s / 10  # somebody else was faster
        self._uid = written["metadata"]["uid"]
        self._leading = Leadership(term, written["metadata"]["resourceVersion"], now)
        return 0.0

    async def _renew(self) -> None:
        assert self._leading is not None
        sent_at, term = self._clock(), self._leading.term
        written = await self._put(holder=self._candidate.identity, term=term, version=self._leading.version)
        self._leading = Leadership(term, written["metadata"]["resourceVersion"], sent_at)

    async def _look_again(self) -> None:
        """The Lease is another one than was written last: by a renewal of our own whose answer was lost, or not."""
        assert self._leading is not None
        try:
            lease = await self._api.get(LEASES, self._namespace, self._name)
        except KubernetesError as error:
            log.warning("the Lease cannot be read", extra=kv(error=str(error)))
            return
        found = None if lease is None else lease_record(lease)
        ours = found is not None and found.holder == self._candidate.identity
        if found is None or not ours or found.transitions != self._leading.term:
            holder = "nobody" if found is None else found.holder or "nobody"
            self._leading = None
            raise LeadershipLost(f"Lease {self._namespace}/{self._name} is held by {holder}")
        self._leading = replace(self._leading, version=found.version)

    async def _create(self, term: int) -> Object:
        body = self._body(self._candidate.identity, term)
        return await self._api.request("POST", LEASES.path(self._namespace), body=body, timeout_s=self._terms.write_s)

    async def _put(self, *, holder: str, term: int, version: str) -> Object:
        body = self._body(holder, term, version)
        path = LEASES.path(self._namespace, self._name)
        return await self._api.request("PUT", path, body=body, timeout_s=self._terms.write_s)

    def _body(self, holder: str, term: int, version: str = "") -> dict[str, Any]:
        now = micro_time(self._wall())
        metadata = {"namespace": self._namespace, "name": self._name}
        fence = {"uid": self._uid, "resourceVersion": version} if version else {}
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {**metadata, **fence},
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": max(1, round(self._terms.duration_s)),
                "leaseTransitions": term,
                "renewTime": now,
            },
        }


def lease_record(lease: Object) -> LeaseRecord:
    """A Lease as the decisions need it. Fields that somebody removed count as nothing."""
    spec: Any = lease.get("spec") or {}
    return LeaseRecord(
        holder=spec.get("holderIdentity") or "",
        transitions=int(spec.get("leaseTransitions") or 0),
        duration_s=float(spec.get("leaseDurationSeconds") or 0),
        version=lease["metadata"]["resourceVersion"],
    )
