"""The depot's loop side: requests in, operations out, work in a bounded pool of threads.

A hanging source holds only threads of its host and namespace; see `core/fair_queue.py`.

Every operation holds a lease on its blobs until it is forgotten, so that a `retain` without its digest removes nothing
from it.

A blob may rot on the depot's disk. Every caller compares a download with its digest. A mismatch is reported with the
next request for the blob (`suspect`). The depot then reads the blob once, and removes it if it is damaged. Then its
watches have changed and its artifact is incomplete, so the operator's next resolve copies it again.
"""

import asyncio
import contextlib
import logging
import math
import secrets
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, TypeGuard

from weft.artifacts.blobs import BlobStore, Lease
from weft.artifacts.depot_api import OperationStatus, ResolveRequest, Verdict
from weft.artifacts.digest import Manifest
from weft.artifacts.errors import ArtifactError, Damaged, Unavailable, UnknownDigest
from weft.domain.lru import ExpiringDict, LruDict
from weft.domain.text import sanitize
from weft.telemetry.invariants import holds
from weft.telemetry.logs import kv
from weft.telemetry.progress import ByteProgress
from weft.wire.multipart import Piece
from weft_depot import metrics
from weft_depot.core.fair_queue import ConcurrencyLimits, FairQueue, QueueKey
from weft_depot.core.operations import Operations
from weft_depot.resolve import Resolver
from weft_depot.uploads import MAX_UNNAMED_ADAPTERS, UnnamedUploads, receive

log = logging.getLogger(__name__)
HOUSEKEEPING_S = 5.0
KEEP_BROKEN_S = 3600.0  # an interrupted download not continued by any operation
CHECK_S = 5.0  # before an answer leaves out the sources of a hanging host
RESULT_S = 900.0  # until an unused result is forgotten
MAX_RESULTS = 20_000  # of the latest requests: a result is logged at INFO if it differs from the previous result
VERIFIED_S = 60.0  # a report about a blob verified within this time is ignored
REFETCH_S = 120.0  # the answer for a blob removed as damaged: 503 within this time, then 404
MAX_SUSPECTS = 64  # blobs that wait to be verified; further reports are answered as if the blob were waiting
MAX_WAIT_S = 3600  # the longest wait that a server may ask for
# Concurrent resolves, a thread each. They mostly wait for the network. A hanging host holds half of them.
LIMITS = ConcurrencyLimits(total=16, per_host=8, per_owner=4)


class _Resolve(NamedTuple):
    operation_id: str
    request: ResolveRequest
    lease: Lease
    progress: ByteProgress


def is_of_disk(error: BaseException) -> TypeGuard[OSError]:
    """Return whether an error is of the disk, not of the network, although both are OSErrors."""
    return isinstance(error, OSError) and not isinstance(
        error, ConnectionError | TimeoutError | ssl.SSLError | socket.gaierror
    )


class _Check(NamedTuple):
    """A check of watches for changed sources, all on one host."""

    watches: list[str]
    changed: "asyncio.Future[list[str]]"


class Stopping(Exception):
    """The process ends. Unfinished work is dropped, and operators ask for it again."""


class Depot:
    """The owner of operations and leases. All methods run on one event loop. The resolver runs in threads."""

    def __init__(
        self,
        resolver: Resolver,
        *,
        limits: ConcurrencyLimits = LIMITS,
        stopping: threading.Event | None = None,
        operations: Operations | None = None,
        now: Callable[[], float] = time.monotonic,
        require_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self._resolver, self._now, self._require_turn = resolver, now, require_turn
        self.store: BlobStore = resolver.store
        self.operations = operations or Operations()
        self._pool = ThreadPoolExecutor(limits.total, thread_name_prefix="resolve")
        self._queue: FairQueue[_Resolve | _Check] = FairQueue(limits)
        self._checks: dict[str, _Check] = {}  # by host
        self._leases: dict[str, Lease] = {}
        self._changes: dict[str, asyncio.Event] = {}  # of unfinished operations
        self._unnamed = UnnamedUploads(MAX_UNNAMED_ADAPTERS * resolver.limits.adapter_bytes)
        self._unfinished: dict[str, _Resolve] = {}
        self._results = ExpiringDict[str, tuple[str, str]](MAX_RESULTS, RESULT_S)  # request key -> digest, reason
        self._suspects: dict[str, asyncio.Task[None]] = {}
        self._verifying = asyncio.Lock()
        self._verified: LruDict[str, float] = LruDict(10_000)
        self._removed: LruDict[str, float] = LruDict(10_000)
        self._rate_limited: LruDict[QueueKey, float] = LruDict(10_000)  # by a 429: the time of its end
        self._stopping = stopping or threading.Event()

    def submit(self, request: ResolveRequest) -> str | None:
        """Start a resolve, or share the running resolve of an equal request. Return its id, or None if too many
        wait."""
        self.forget()
        if running := self.operations.running(request.key):
            return running
        operation_id = secrets.token_hex(8)
        if not self.operations.start(operation_id, request.key):
            return None
        lease = self._leases[operation_id] = self.store.lease()
        self._changes[operation_id] = asyncio.Event()
        resolve = self._unfinished[operation_id] = _Resolve(operation_id, request, lease, ByteProgress())
        self._queue.add(self._resolver.queue_key(request), resolve)
        self._start()
        return operation_id

    async def wait(self, operation_id: str, wait_s: float, *, for_end: bool = False) -> OperationStatus | None:
        """Wait for the operation's next change of state (`for_end`: its end), at most `wait_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while (operation := self.operations.find(operation_id)) and not operation.finished:
                    await self._changes[operation_id].wait()
                    if not for_end:
                        break
        return self.operations.find(operation_id)

    def under_way(self, limit: int) -> list[tuple[str, ResolveRequest, ByteProgress]]:
        """List unfinished resolves, oldest first: id, request, bytes."""
        return [(job.operation_id, job.request, job.progress) for job in islice(self._unfinished.values(), limit)]

    async def upload(self, namespace: str, pieces: AsyncIterator[Piece]) -> Manifest | None:
        """Publish the adapter in a form. Return None if too many operations are unfinished.

        The adapter stays as long as its operation is remembered, then as long as an object names it. Raises
        ArtifactError, FormError.
        """
        self.forget()
        drawn = secrets.token_hex(8)
        if not self.operations.start(drawn, f"upload {drawn}"):
            return None
        lease = self._leases[drawn] = self.store.lease()
        self._changes[drawn] = asyncio.Event()
        answer = OperationStatus("Failed", reason="Interrupted", message="the upload is incomplete")
        try:
            counted = self._unnamed.counted(drawn, namespace, pieces)
            manifest = await receive(self._resolver, namespace, counted, lease)
            self._unnamed.publish(drawn, manifest.digest)
            self.operations.change(drawn, OperationStatus("Validated", verdict={}), self._now())
            answer = OperationStatus("Fetched", manifest.digest)
        except ArtifactError as error:
            answer = replace(answer, reason=str(error.reason), message=error.message)
            raise
        finally:
            if not answer.digest:
                self._unnamed.forget(drawn)
            self.operations.change(drawn, answer, self._now())
            self._changes.pop(drawn).set()
            metrics.RESOLVES.labels("upload", answer.reason).inc()
        log.info("uploaded", extra=kv(namespace=namespace, digest=manifest.digest, bytes=manifest.size_bytes))
        return manifest

    async def changed(self, watches: tuple[str, ...]) -> list[str]:
        """List the watches with changed sources or blobs. A hanging host counts as unchanged for now."""
        by_host = self._resolver.watches.by_host(watches)
        unknown = by_host.pop(None, [])
        checks = [self._check(host, of_host).changed for host, of_host in by_host.items() if host is not None]
        if checks:
            await asyncio.wait(checks, timeout=CHECK_S)
        return unknown + [watch for check in checks if check.done() for watch in check.result()]

    async def retain(self, digests: tuple[str, ...]) -> int:
        """Keep these artifacts and the artifacts held by operations. Return the number of blobs removed.

        Raises LeadershipLost: another depot may have newer blobs in the same folder.
        """
        self._require_turn()
        removed = await asyncio.to_thread(self.store.retain, digests)
        self._unnamed.name(set(digests))
        self._resolver.resolutions.retain({f"sha256:{name}" for name in self.store.names()})
        log.info("blobs retained", extra=kv(digests=len(digests), removed=removed))
        return removed

    def suspect(self, digest: str) -> bool:
        """Record that a download of this blob did not match its digest. Return True if the blob is being verified, or
        will be: the caller should download later.

        A recently verified or removed blob is not read again. If it is here it is intact, and the damage is elsewhere,
        or the report is false.
        """
        if digest in self._suspects:
            return True
        if self._is_recent(self._verified, digest, VERIFIED_S) or self.is_coming_back(digest):
            return False
        if len(self._suspects) < MAX_SUSPECTS:
            self._suspects[digest] = asyncio.create_task(self._verify(digest))
        return True

    def is_coming_back(self, digest: str) -> bool:
        """Return whether this blob was damaged and removed recently."""
        return self._is_recent(self._removed, digest, REFETCH_S)

    def forget(self) -> None:
        """Drop old operations and close their leases."""
        for operation_id in self.operations.forget(self._now()):
            self._leases.pop(operation_id).close()
            self._unnamed.forget(operation_id)

    async def run(self) -> None:
        """Run the housekeeping while the process lives. It survives errors of the disk. Any other exception is a
        bug."""
        while True:
            self.forget()
            holds(self.operations.check_operations)
            holds(self._queue.check_queue)
            for state, count in self.operations.counts().items():
                metrics.OPERATIONS.labels(state).set(count)
            try:
                await asyncio.to_thread(self._tidy)
            except OSError as error:
                metrics.HOUSEKEEPING_FAILURES.inc()
                log.error("housekeeping failed, the next round tries again", extra=kv(error=error))
            await asyncio.sleep(HOUSEKEEPING_S)

    def close(self) -> None:
        """Stop at the next chunk; nothing half-done becomes visible."""
        self._stopping.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _tidy(self) -> None:
        """Do the part of housekeeping with reads of the disk."""
        self.store.sweep(time.time() - KEEP_BROKEN_S)
        blobs, size_bytes = self.store.usage()
        metrics.BLOBS.set(blobs)
        metrics.BLOB_BYTES.set(size_bytes)

    def _is_recent(self, times: LruDict[str, float], digest: str, within_s: float) -> bool:
        at = times.get(digest)
        return at is not None and self._now() - at < within_s

    async def _verify(self, digest: str) -> None:
        try:
            async with self._verifying:  # at most one thread is busy with it
                await asyncio.to_thread(self.store.verify, digest)
        except Damaged as error:
            self.store.discard(digest)
            self._removed[digest] = self._now()
            metrics.DAMAGED.inc()
            log.error("damaged blob removed", extra=kv(digest=digest, difference=error.difference))
        except (UnknownDigest, OSError) as error:
            log.warning("suspected blob not verified", extra=kv(digest=digest, error=error))
        else:
            self._verified[digest] = self._now()
        finally:
            del self._suspects[digest]

    def _check(self, host: str, watches: list[str]) -> _Check:
        """Check watches, one check at a time for each host, queued with the resolves of the host."""
        check = self._checks.get(host)
        if check is None:
            check = self._checks[host] = _Check(watches, asyncio.get_running_loop().create_future())
            self._queue.add(QueueKey(host, f"check {host}"), check)  # a separate owner: no namespace has this name
            self._start()
        return check

    def _start(self) -> None:
        """Start every runnable job."""
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set() and (started := self._queue.start()):
            self._pool.submit(self._work, *started, loop)

    def _ended(self, key: QueueKey) -> None:
        self._queue.end(key)
        self._start()

    def _checked(self, host: str, changed: list[str]) -> None:
        self._checks.pop(host).changed.set_result(changed)

    def _changed(self, operation_id: str, status: OperationStatus) -> None:
        self.operations.change(operation_id, status, self._now())
        self._changes.pop(operation_id).set()
        if status.finished:
            self._unfinished.pop(operation_id, None)
        else:
            self._changes[operation_id] = asyncio.Event()

    def _finished(self, job: _Resolve, answer: OperationStatus, key: QueueKey) -> None:
        """Log a finished job, at INFO if its result is new, since the operator resolves every source repeatedly."""
        request, result = job.request, (answer.digest or "", answer.reason)
        level = logging.DEBUG if self._results.get(request.key, self._now()) == result else logging.INFO
        self._results.put(request.key, result, self._now())
        fields = kv(operation=job.operation_id, uri=request.uri, digest=answer.digest or "", reason=answer.reason)
        log.log(level, "resolved", extra=fields)
        if answer.retry_after_s and self._rate_limited.get(key, 0.0) <= self._now():  # not longer
            self._rate_limited[key] = self._now() + answer.retry_after_s
        self._changed(job.operation_id, answer)

    # ---- in a thread of the pool; every result goes back to the loop

    def _work(self, key: QueueKey, job: _Resolve | _Check, loop: asyncio.AbstractEventLoop) -> None:
        def post(callback: Callable[..., None], *arguments: object) -> None:
            if not self._stopping.is_set():
                loop.call_soon_threadsafe(callback, *arguments)

        if isinstance(job, _Resolve):
            self._resolve(key, job, post)
        else:
            try:
                changed = self._resolver.watches.changed(job.watches)
            except OSError as error:
                log.error("sources not checked", extra=kv(host=key.host, error=error))
                changed = []
            post(self._checked, key.host, changed)
        post(self._ended, key)

    def _resolve(self, key: QueueKey, job: _Resolve, post: Callable[..., None]) -> None:
        started, (operation_id, request, lease, progress) = time.monotonic(), job

        def validated(verdict: Verdict) -> None:
            post(self._changed, operation_id, OperationStatus("Validated", verdict=verdict))

        try:
            self._check_rate_limit(key)
            answer = self._resolver.resolve(request, lease, validated, self._check_cancelled, progress)
        except Stopping:
            return
        except ArtifactError as error:
            wait_s = min(error.retry_after_s, MAX_WAIT_S) if isinstance(error, Unavailable) else 0
            answer = OperationStatus("Failed", reason=str(error.reason), message=error.message, retry_after_s=wait_s)
        except Exception as error:
            if is_of_disk(error):
                log.error("the disk fails", extra=kv(operation=operation_id, uri=request.uri, error=error))
                message = f"the depot's disk fails: {error.strerror or error}"
            else:
                log.exception("resolve failed by a bug", extra=kv(operation=operation_id, uri=request.uri))
                message = f"the depot could not finish: {type(error).__name__}: {error}"
            answer = OperationStatus("Failed", reason="SourceUnreachable", message=sanitize(message))
        metrics.RESOLVES.labels(request.kind, answer.reason).inc()
        metrics.RESOLVE_SECONDS.labels(request.kind).observe(time.monotonic() - started)
        post(self._finished, job, answer, key)

    def _check_rate_limit(self, key: QueueKey) -> None:
        """Refuse a request while a server asks its namespace to wait after a 429."""
        left_s = self._rate_limited.get(key, 0.0) - self._now()
        if left_s > 0:
            seconds = math.ceil(left_s)
            text = f"{key.host} has asked to wait for {seconds} s more; a later request tries again"
            raise Unavailable(text, retry_after_s=seconds)

    def _check_cancelled(self) -> None:
        if self._stopping.is_set():
            raise Stopping
