"""Leadership by a Lease: the shell of `lease.py`.

A process leads at most once. When it cannot be sure any more that it leads it ends: whatever it remembers may be old,
and a new start is the one path that is tested every day.
"""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any, Protocol

from weft.clocks import Clock, micro_time, since_boot
from weft.leadership.errors import LeadershipLost, LeaseChanged, LeaseUnavailable
from weft.leadership.lease import (
    Acquire,
    CreateLease,
    Leadership,
    LeaseCandidate,
    LeaseRecord,
    LeaseTimings,
    Wait,
    decide,
)
from weft.telemetry.logs import kv

Json = dict[str, Any]
log = logging.getLogger(__name__)


def new_identity() -> str:
    """Draw a name for this start of this process: a restarted one is another candidate."""
    return f"{socket.gethostname()}_{os.getpid()}_{secrets.token_hex(4)}"


class LeaseStore(Protocol):
    """The store of the Lease (`weft.leadership.lease_api`). Its string names it."""

    def read(self) -> Awaitable[Json | None]: ...

    def create(self, spec: Json, *, timeout_s: float) -> Awaitable[Json]: ...

    def replace(self, spec: Json, *, uid: str, version: str, timeout_s: float) -> Awaitable[Json]: ...


class Election:
    """One candidate for one Lease.

    With `outlast`, a leader that gets no answer from the API server goes on until one tells that somebody else leads:
    for a process whose peers refuse lower terms, and whose work must not depend on that server.
    """

    def __init__(
        self,
        lease: LeaseStore,
        *,
        identity: str,
        terms: LeaseTimings,
        outlast: bool = False,
        clock: Clock = since_boot,
        wall: Clock = time.time,
    ) -> None:
        self._lease, self._outlast = lease, outlast
        self._terms, self._clock, self._wall = terms, clock, wall
        self._candidate = LeaseCandidate(identity)
        self._leading: Leadership | None = None
        self._uid = ""  # of the Lease that was seen last: without it a PUT would make a deleted one anew

    @property
    def leading(self) -> bool:
        """Whether this process leads, for certain."""
        return self._leading is not None and self._leading.holds(self._terms, self._clock())

    def require(self) -> None:
        """Check that this process leads for certain. Raises LeadershipLost."""
        if not self.leading:
            raise LeadershipLost(f"{self._lease} was not renewed in time")

    async def acquire(self) -> int:
        """Wait until this process leads. Returns the term of its leadership."""
        while True:
            try:
                pause_s = await self._try()
            except LeaseUnavailable as error:
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
            assert self._leading is not None
            try:
                await self._renew()
            except LeaseChanged:
                await self._read_again()
            except LeaseUnavailable as error:
                log.warning("the Lease cannot be renewed", extra=kv(error=str(error), goes_on=self._outlast))
                if self._outlast:
                    self._leading = replace(self._leading, renewed_at=self._clock())

    async def release(self) -> None:
        """Give the Lease back, so that nobody has to wait for it to run out."""
        if not self.leading:
            return
        leading, self._leading = self._leading, None
        assert leading is not None
        try:
            await self._put(holder="", term=leading.term, version=leading.version)
        except (LeaseUnavailable, LeaseChanged) as error:
            log.warning("the Lease cannot be given back", extra=kv(error=str(error)))

    async def _try(self) -> float:
        """Look at the Lease and try once. Returns how long to wait until the next try."""
        lease = await self._lease.read()
        now = self._clock()
        self._uid = "" if lease is None else lease["metadata"]["uid"]
        self._candidate = self._candidate.observe(None if lease is None else lease_record(lease), now)
        try:
            match decide(self._candidate, self._terms, now, self._wall()):
                case Wait(seconds):
                    return seconds
                case CreateLease(term):
                    written = await self._create(term)
                case Acquire(version, term):
                    written = await self._put(holder=self._candidate.identity, term=term, version=version)
        except LeaseChanged:
            return self._terms.renew_s / 10  # somebody else was faster
        self._uid = written["metadata"]["uid"]
        self._leading = Leadership(term, written["metadata"]["resourceVersion"], now)
        return 0.0

    async def _renew(self) -> None:
        assert self._leading is not None
        sent_at, term = self._clock(), self._leading.term
        written = await self._put(holder=self._candidate.identity, term=term, version=self._leading.version)
        self._leading = Leadership(term, written["metadata"]["resourceVersion"], sent_at)

    async def _read_again(self) -> None:
        """Read the Lease after a write met another version: a renewal of our own whose answer was lost, or
        another's."""
        assert self._leading is not None
        try:
            lease = await self._lease.read()
        except LeaseUnavailable as error:
            log.warning("the Lease cannot be read", extra=kv(error=str(error)))
            return
        record = None if lease is None else lease_record(lease)
        ours = record is not None and record.holder == self._candidate.identity
        if record is None or not ours or record.transitions != self._leading.term:
            holder = "nobody" if record is None else record.holder or "nobody"
            self._leading = None
            raise LeadershipLost(f"{self._lease} is held by {holder}")
        self._leading = replace(self._leading, version=record.version)

    async def _create(self, term: int) -> Json:
        return await self._lease.create(self._spec(self._candidate.identity, term), timeout_s=self._terms.write_s)

    async def _put(self, *, holder: str, term: int, version: str) -> Json:
        spec = self._spec(holder, term)
        return await self._lease.replace(spec, uid=self._uid, version=version, timeout_s=self._terms.write_s)

    def _spec(self, holder: str, term: int) -> Json:
        return {
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, round(self._terms.duration_s)),
            "leaseTransitions": term,
            "renewTime": micro_time(self._wall()),
        }


def lease_record(lease: Json) -> LeaseRecord:
    """Read a Lease for the decisions. Fields that somebody removed count as nothing."""
    spec: Any = lease.get("spec") or {}
    return LeaseRecord(
        holder=spec.get("holderIdentity") or "",
        transitions=int(spec.get("leaseTransitions") or 0),
        duration_s=float(spec.get("leaseDurationSeconds") or 0),
        version=lease["metadata"]["resourceVersion"],
    )
