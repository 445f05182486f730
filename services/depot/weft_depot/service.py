"""The depot's loop side: requests in, operations out, work in a bounded pool of threads.

A source that stands still holds the threads of its own host and nobody else's; see `core/lanes.py`.

Every operation holds a lease on its blobs until it is forgotten, so a `retain` that does not know its digest yet takes
nothing away from it.
"""

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from weft.artifacts.blobs import BlobStore, Lease
from weft.artifacts.digest import Digest
from weft.artifacts.errors import ArtifactError
from weft.domain.text import sanitize
from weft.telemetry.invariants import holds
from weft.telemetry.logs import kv
from weft_depot import metrics
from weft_depot.core.lanes import Lane, Lanes, Room
from weft_depot.core.news import News, Result
from weft_depot.core.operations import Operation, Operations
from weft_depot.remembered import Remembered
from weft_depot.requests import ResolveRequest
from weft_depot.resolve import Resolved, Resolver, Verdict

log = logging.getLogger(__name__)
FORGET_EVERY_S = 5.0
KEEP_BROKEN_S = 3600.0  # a download that nobody asks for any more
LOOK_S = 5.0  # before an answer goes without what a host has not said yet
LOOKS = ""  # who looks, in a lane: no namespace has that name


ROOM = Room(total=16, per_host=8, per_owner=4)


class _Job(NamedTuple):
    operation_id: str
    request: ResolveRequest
    lease: Lease


class _Look(NamedTuple):
    """At the sources of some watches, all on one host."""

    watches: list[str]
    changed: "asyncio.Future[list[str]]"


class Stopping(Exception):
    """The process ends; unfinished work is dropped and asked for again."""


class Depot:
    """Owns operations and leases. All methods run on one event loop; the resolver runs in threads."""

    def __init__(
        self,
        resolver: Resolver,
        *,
        room: Room | None = None,
        stopping: threading.Event | None = None,
        operations: Operations | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resolver, self._now = resolver, now
        self._operations = operations or Operations()
        room = room or ROOM
        self._pool = ThreadPoolExecutor(room.total, thread_name_prefix="resolve")
        self._lanes: Lanes[_Job | _Look] = Lanes(room)
        self._looks: dict[str, _Look] = {}  # by host
        self._leases: dict[str, Lease] = {}
        self._changes: dict[str, asyncio.Event] = {}
        self._news = News()
        self._stopping = stopping or threading.Event()

    @property
    def store(self) -> BlobStore:
        return self._resolver.store

    @property
    def remembered(self) -> Remembered:
        return self._resolver.remembered

    def find(self, operation_id: str) -> Operation | None:
        return self._operations.find(operation_id)

    def submit(self, request: ResolveRequest) -> Operation | None:
        """Start a resolve, or share the one that runs for an equal request; None when too many wait."""
        self.forget()
        if running := self._operations.running(request.key):
            return running
        operation = self._operations.start(secrets.token_hex(8), request.key, self._now())
        if operation is None:
            return None
        self._leases[operation.id] = self.store.lease()
        self._changes[operation.id] = asyncio.Event()
        self._lanes.add(self._resolver.lane(request), _Job(operation.id, request, self._leases[operation.id]))
        self._start()
        return operation

    def _start(self) -> None:
        """Everything that may run, runs."""
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set() and (started := self._lanes.start()):
            self._pool.submit(self._do, *started, loop)

    def _ended(self, lane: Lane) -> None:
        self._lanes.end(lane)
        self._start()

    async def wait(self, operation_id: str, wait_s: float) -> Operation | None:
        """The operation, at the latest after its next change of state or `wait_s`."""
        operation = self.find(operation_id)
        if operation is None or operation.finished or wait_s <= 0:
            return operation
        with contextlib.suppress(TimeoutError):  # no news is an answer too: the state as it is
            await asyncio.wait_for(self._changes[operation_id].wait(), wait_s)
        return self.find(operation_id)

    async def wait_for_end(self, operation_id: str, wait_s: float) -> Operation | None:
        """The operation, once it has finished or after `wait_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while (operation := self.find(operation_id)) and not operation.finished:
                    await self._changes[operation_id].wait()
        return self.find(operation_id)

    async def changed(self, watches: tuple[str, ...]) -> list[str]:
        """Those whose source or blobs are not what they were. A host that stands still says nothing for now."""
        by_host = self._resolver.watched.by_host(watches)
        unknown = by_host.pop(None, [])
        looks = [self._look(host, of_host).changed for host, of_host in by_host.items() if host is not None]
        if looks:
            await asyncio.wait(looks, timeout=LOOK_S)
        return unknown + [watch for look in looks if look.done() for watch in look.result()]

    def _look(self, host: str, watches: list[str]) -> _Look:
        """One at a time for each host, in turn with what is read there."""
        look = self._looks.get(host)
        if look is None:
            look = self._looks[host] = _Look(watches, asyncio.get_running_loop().create_future())
            self._lanes.add(Lane(host, LOOKS), look)
            self._start()
        return look

    def _looked(self, host: str, look: _Look, changed: list[str]) -> None:
        del self._looks[host]
        look.changed.set_result(changed)

    async def retain(self, digests: tuple[str, ...]) -> int:
        """Keep these artifacts and what operations hold; returns the blobs removed."""
        removed = await asyncio.to_thread(self.store.retain, digests)
        self.remembered.retain(set(digests))
        log.info("blobs retained", extra=kv(digests=len(digests), removed=removed))
        return removed

    def forget(self) -> None:
        """Drop old operations and give their leases back."""
        for operation_id in self._operations.forget(self._now()):
            self._leases.pop(operation_id).close()
            del self._changes[operation_id]

    async def run(self) -> None:
        """Housekeeping while the process lives. It survives trouble with the disk; any other exception is a bug."""
        while True:
            self.forget()
            holds(self._operations.check_operations)
            holds(self._lanes.check_lanes)
            for state, count in self._operations.counts().items():
                metrics.OPERATIONS.labels(state).set(count)
            try:
                await asyncio.to_thread(self._tidy)
            except OSError as error:
                metrics.HOUSEKEEPING_FAILURES.inc()
                log.error("housekeeping failed, the next round tries again", extra=kv(error=error))
            await asyncio.sleep(FORGET_EVERY_S)

    def _tidy(self) -> None:
        """What reads the disk."""
        self.store.sweep(time.time() - KEEP_BROKEN_S)
        blobs, size_bytes = self.store.usage()
        metrics.BLOBS.set(blobs)
        metrics.BLOB_BYTES.set(size_bytes)

    def close(self) -> None:
        """Stop at the next chunk; nothing half-done becomes visible."""
        self._stopping.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _do(self, lane: Lane, job: _Job | _Look, loop: asyncio.AbstractEventLoop) -> None:
        """One job, in a thread of the pool; every result goes back to the loop."""
        if isinstance(job, _Job):
            self._work(job, loop)
        else:
            try:
                changed = self._resolver.watched.changed(job.watches)
            except OSError as error:
                log.error("sources were not looked at", extra=kv(host=lane.host, error=error))
                changed = []
            if not self._stopping.is_set():
                loop.call_soon_threadsafe(self._looked, lane.host, job, changed)
        if not self._stopping.is_set():
            loop.call_soon_threadsafe(self._ended, lane)

    def _work(self, job: _Job, loop: asyncio.AbstractEventLoop) -> None:
        started, (operation_id, request, lease) = time.monotonic(), job

        def tell(change: Callable[[], Operation]) -> None:
            if not self._stopping.is_set():
                loop.call_soon_threadsafe(self._changed, change)

        def validated(verdict: Verdict) -> None:
            tell(lambda: self._operations.validated(operation_id, verdict, self._now()))

        reason, message, found = "", "", Resolved(Digest(""))
        try:
            found = self._resolver.resolve(request, lease, validated, self._tick)
        except Stopping:
            return
        except ArtifactError as error:
            reason, message = str(error.reason), error.message
        except Exception as error:
            log.exception("resolve broke", extra=kv(operation=operation_id, uri=request.uri))
            reason = "SourceUnreachable"
            message = sanitize(f"the depot could not finish: {type(error).__name__}: {error}")
        metrics.RESOLVES.labels(request.kind, reason).inc()
        metrics.RESOLVE_SECONDS.labels(request.kind).observe(time.monotonic() - started)
        tell(lambda: self._finished(operation_id, request, found, reason, message))

    def _finished(
        self, operation_id: str, request: ResolveRequest, found: Resolved, reason: str, message: str
    ) -> Operation:
        """INFO for news only: the operator asks again about every source all the time."""
        result = Result(found.digest, reason)
        level = logging.INFO if self._news.is_new(request.key, result) else logging.DEBUG
        about = kv(operation=operation_id, uri=request.uri, digest=result.digest, reason=result.reason)
        log.log(level, "resolved", extra=about)
        if result.reason:
            return self._operations.failed(operation_id, result.reason, message, self._now())
        return self._operations.fetched(operation_id, found.digest, self._now(), found.watch)

    def _changed(self, change: Callable[[], Operation]) -> None:
        operation = change()
        self._changes[operation.id].set()
        self._changes[operation.id] = asyncio.Event()

    def _tick(self) -> None:
        if self._stopping.is_set():
            raise Stopping
