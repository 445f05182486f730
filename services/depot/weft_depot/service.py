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
from weft.artifacts.errors import ArtifactError
from weft.printable import printable
from weft.telemetry.logs import kv
from weft_depot import metrics
from weft_depot.core.lanes import Lane, Lanes, Room
from weft_depot.core.news import News, Result
from weft_depot.core.operations import Operation, Operations
from weft_depot.remembered import Remembered
from weft_depot.requests import ResolveRequest
from weft_depot.resolve import Resolver, Verdict

log = logging.getLogger(__name__)
FORGET_EVERY_S = 5.0
KEEP_BROKEN_S = 3600.0  # a download that nobody asks for any more


ROOM = Room(total=16, per_host=8, per_owner=4)


class _Job(NamedTuple):
    operation_id: str
    request: ResolveRequest
    lease: Lease


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
        self._lanes: Lanes[_Job] = Lanes(room)
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
            self._pool.submit(self._work, *started, loop)

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
        """Housekeeping while the process lives."""
        while True:
            self.forget()
            self._operations.check_operations()
            self._lanes.check_lanes()
            for state, count in self._operations.counts().items():
                metrics.OPERATIONS.labels(state).set(count)
            await asyncio.to_thread(self.store.sweep, time.time() - KEEP_BROKEN_S)
            blobs, size_bytes = await asyncio.to_thread(self.store.usage)
            metrics.BLOBS.set(blobs)
            metrics.BLOB_BYTES.set(size_bytes)
            await asyncio.sleep(FORGET_EVERY_S)

    def close(self) -> None:
        """Stop at the next chunk; nothing half-done becomes visible."""
        self._stopping.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _work(self, lane: Lane, job: "_Job", loop: asyncio.AbstractEventLoop) -> None:
        """One resolve, in a thread of the pool; every result goes back to the loop."""
        started, (operation_id, request, lease) = time.monotonic(), job

        def tell(change: Callable[[], Operation]) -> None:
            if not self._stopping.is_set():
                loop.call_soon_threadsafe(self._changed, change)

        def validated(verdict: Verdict) -> None:
            tell(lambda: self._operations.validated(operation_id, verdict, self._now()))

        reason, message, digest = "", "", ""
        try:
            digest = self._resolver.resolve(request, lease, validated, self._tick)
        except Stopping:
            return
        except ArtifactError as error:
            reason, message = str(error.reason), error.message
        except Exception as error:
            log.exception("resolve broke", extra=kv(operation=operation_id, uri=request.uri))
            reason = "SourceUnreachable"
            message = printable(f"the depot could not finish: {type(error).__name__}: {error}")
        metrics.RESOLVES.labels(request.kind, reason).inc()
        metrics.RESOLVE_SECONDS.labels(request.kind).observe(time.monotonic() - started)
        tell(lambda: self._finished(operation_id, request, Result(digest, reason), message))
        if not self._stopping.is_set():
            loop.call_soon_threadsafe(self._ended, lane)

    def _finished(self, operation_id: str, request: ResolveRequest, result: Result, message: str) -> Operation:
        """INFO for news only: the operator asks again about every source all the time."""
        level = logging.INFO if self._news.is_new(request.key, result) else logging.DEBUG
        about = kv(operation=operation_id, uri=request.uri, digest=result.digest, reason=result.reason)
        log.log(level, "resolved", extra=about)
        if result.reason:
            return self._operations.failed(operation_id, result.reason, message, self._now())
        return self._operations.fetched(operation_id, result.digest, self._now())

    def _changed(self, change: Callable[[], Operation]) -> None:
        operation = change()
        self._changes[operation.id].set()
        self._changes[operation.id] = asyncio.Event()

    def _tick(self) -> None:
        if self._stopping.is_set():
            raise Stopping
