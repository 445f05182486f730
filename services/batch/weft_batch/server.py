"""The shell: calls of gateways, their streams of lines, one loop around the machine, work on files beside it."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeAlias

import grpc
import grpc.aio
from sqlalchemy.ext.asyncio import AsyncEngine

from weft.domain.batch import (
    COMPLETION_WINDOW,
    ENDPOINTS,
    BatchError,
    BatchJob,
    BatchStatus,
    LineEnds,
    LineReleased,
    LineResult,
    LinesHello,
    NewFile,
    Purpose,
    RunLine,
    RunLines,
)
from weft.domain.machine import TICK, Closed, Connected, Kind, Peer, Received, Send
from weft.domain.text import quoted
from weft.store import batches, fencing_terms, files
from weft.store.batches import StoredResult, UnfinishedBatch
from weft.store.errors import Absent, Conflict, NotPossible, OverQuota, StoreError, StoreUnavailable, Superseded
from weft.store.files import ROLE
from weft.telemetry.invariants import IdleCheck, InvariantViolated, violation
from weft.telemetry.logs import kv
from weft.wire.codec import batch as codec
from weft.wire.codec.batch import BATCH_TO_GATEWAY, GATEWAY_TO_BATCH, MAX_BODY_BYTES, in_messages
from weft.wire.errors import PeerError, peer_errors
from weft.wire.streams import SendQueue, serve_stream
from weft.wire.v1 import batch_pb2 as pb
from weft.wire.v1.batch_pb2_grpc import BatchServicer
from weft_batch import metrics, records
from weft_batch.core.batches import (
    Added,
    Batches,
    BatchGone,
    CancelAsked,
    Event,
    Finalize,
    Give,
    LineCounters,
    LineFailed,
    LinesStored,
    StoreResult,
    Validate,
    Validated,
)
from weft_batch.core.input_lines import COMPRESSED, BadLine, GoodLine, InputReader, compression, read_line
from weft_batch.core.line_index import LineIndex
from weft_batch.errors import BytesMissing, StorageError
from weft_batch.inputs import InputFile, InputLines, blocks
from weft_batch.output_files import EndingBatch, OutputFiles
from weft_batch.result_writer import PAUSE_MAX_S, PAUSE_MIN_S, ResultWriter
from weft_batch.storage import FileStorage, FileWriter

DRAIN_S = 2.0
UPDATE_EVERY_S = 1.0
SWEEP_EVERY_S = 600.0
UPLOAD_S = 3_600.0  # an upload that takes longer is taken for broken off, where others share the store
WORK_AT_ONCE = 2  # inputs that are read, batches whose files are written
MAGIC_BYTES = max(map(len, COMPRESSED))
CODES: dict[type[NotPossible], grpc.StatusCode] = {
    Absent: grpc.StatusCode.NOT_FOUND,
    OverQuota: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Conflict: grpc.StatusCode.FAILED_PRECONDITION,
}
INPUT_CHANGED = b'{"error": {"code": "input_changed", "message": "the input file is damaged"}}'  # after it was read
REPLACED = "a newer batch service has taken over"
log = logging.getLogger(__name__)
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(frozen=True, slots=True)
class TenantQuotas:
    """Quotas of a tenant, and bounds of a batch."""

    max_lines: int = 50_000
    max_line_bytes: int = 1 << 20
    max_file_bytes: int = 200 << 20
    tenant_bytes: int = 10 << 30
    tenant_files: int = 1_000
    tenant_batches: int = 64


@dataclass(slots=True)
class _OpenBatch:
    """What the shell knows of a batch that has not ended."""

    namespace: str
    job: BatchJob
    input: InputFile | None = None  # None: it is still to be read
    custom_ids: dict[int, str] = field(default_factory=dict[int, str])  # of lines that are out


@dataclass(slots=True, eq=False)
class _Stream:
    """One connection of a gateway; nothing is known of it before its hello."""

    outbox: SendQueue[Any] = field(default_factory=SendQueue[Any])
    peer: Peer | None = None


class BatchServer(BatchServicer):
    """Owns the machine. Everything but blocking I/O runs in one event loop; `handle` is the only way in."""

    def __init__(
        self, engine: AsyncEngine, term: int, storage: FileStorage, limits: TenantQuotas, *, lines_in_flight: int
    ) -> None:
        self.core = Batches(lines_in_flight=lines_in_flight)
        self.writer = ResultWriter(engine, term, self._stored)
        self._engine, self._term, self._storage, self._limits = engine, term, storage, limits
        self._lines = InputLines(storage)
        self._open: dict[str, _OpenBatch] = {}
        self._streams: dict[Peer, _Stream] = {}
        self._connections: set[_Stream] = set()
        self._uploading: dict[str, int] = {}  # namespace: bytes of uploads that are not whole
        self._tasks: set[asyncio.Task[None]] = set()
        self._work = asyncio.Semaphore(WORK_AT_ONCE)
        self._wake, self._closed = asyncio.Event(), asyncio.Event()
        self._idle = IdleCheck()
        self._failed: BaseException | None = None
        self._replaced = False

    @property
    def trouble(self) -> str | None:
        """Why it is not ready."""
        return REPLACED if self._replaced else self.writer.trouble

    def handle(self, event: Event) -> None:
        """What follows from an event."""
        if self._replaced or self._closed.is_set():
            return
        self._idle.active()
        given: defaultdict[tuple[Peer, str], list[int]] = defaultdict(list)
        for effect in self.core.handle(event, time.monotonic()):
            match effect:
                case Give():
                    given[effect.peer, effect.batch_id].append(effect.line)
                case Send():
                    if stream := self._streams.get(effect.peer):
                        stream.outbox.put(effect.message)
                case StoreResult():
                    self._store(effect.result)
                case Validate():
                    self._spawn(self._validate(effect.batch_id))
                case Finalize():
                    self._spawn(self._finalize(effect.batch_id, effect.ending))
        for (peer, batch_id), lines in given.items():
            if (batch := self._open.get(batch_id)) and (stream := self._streams.get(peer)):
                self._spawn(self._send_lines(stream, batch, lines))
        self._wake.set()

    async def load(self, *, sole: bool) -> None:
        """Go on where the process before this one ended. `sole`: no other can be writing files.

        Raises StoreError, StorageError.
        """
        removed = await asyncio.to_thread(self._storage.clean)
        await self._sweep(now_unix_ms() + 1 if sole else now_unix_ms() - round(1000 * UPLOAD_S))
        for batch_id in await batches.ended_with_results(self._engine):
            await batches.drop_results(self._engine, batch_id)
        unfinished = await batches.unfinished(self._engine)
        log.info("batches found", extra=kv(unfinished=len(unfinished), temporary_files_removed=removed))
        for batch in unfinished:
            self._add(batch)

    async def run(self, *, shared: bool, keep_days: int) -> None:
        """Writer and timers, until drained or one of them fails. `shared`: another service may take over."""
        work = [self.writer.run(), self._tick(), self._update_metrics(), self._housekeeping(keep_days)]
        if shared:
            work.append(self._watch_term())
        running = [asyncio.create_task(self._fenced(one)) for one in work]
        try:
            await self._closed.wait()
        finally:
            for task in (*running, *self._tasks):
                task.cancel()
            await asyncio.gather(*running, *self._tasks, return_exceptions=True)
        if self._failed is not None:
            raise self._failed

    async def drain(self) -> None:
        """Store the results that have come (within `DRAIN_S`; other lines run again), then end streams and `run`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self.writer.drained()
        self._end_streams()
        self._closed.set()

    # ------------------------------------------------------------------------------------------ files

    async def UploadFile(  # noqa: N802 (the contract's name)
        self, request_iterator: AsyncIterator[pb.UploadFileRequest], context: Context
    ) -> pb.File:
        async with self._answering(context):
            parts = aiter(request_iterator)
            try:
                return codec.file_message(await self._upload(await _header(parts), parts))
            except (PeerError, NotPossible, StoreError, StorageError):
                async for _ in parts:
                    pass  # a status that meets a write of the client is lost in its gRPC
                raise
        raise AssertionError("the call was aborted")

    async def _upload(self, new: NewFile, parts: AsyncIterator[pb.UploadFileRequest]) -> Any:
        """Stream the parts into storage. Whatever ends this before the end leaves no file."""
        file_id, limits = _draw_file_id(), self._limits
        stored = await files.begin(
            self._engine, self._term, new, file_id, now_unix_ms=now_unix_ms(), max_files=limits.tenant_files
        )
        writer, size, whole = None, 0, False
        try:
            writer = await asyncio.to_thread(self._storage.writer, file_id)
            start = b""
            async for message in parts:
                chunk = codec.upload_part(message)
                if isinstance(chunk, NewFile):
                    raise PeerError("an upload has one header")
                whole = not chunk
                if len(start) < MAGIC_BYTES and (packed := compression(start := (start + chunk)[:MAGIC_BYTES])):
                    raise PeerError(f"the file is packed with {packed}; send the JSON lines themselves")
                size += len(chunk)
                metrics.UPLOADED_BYTES.inc(len(chunk))
                others = self._count_upload(new.namespace, len(chunk)) - size
                if size > limits.max_file_bytes:
                    raise OverQuota(f"the file is larger than {limits.max_file_bytes} bytes")
                if stored + others + size > limits.tenant_bytes:
                    raise files.over_bytes(stored + others + size, limits.tenant_bytes)
                await asyncio.to_thread(writer.write, chunk)
            if not whole:  # a call that is cancelled ends like any other
                raise PeerError("the upload broke off")
            await asyncio.to_thread(writer.close)
            return await files.complete(self._engine, self._term, file_id, size, max_bytes=limits.tenant_bytes)
        except BaseException:
            self._spawn(self._remove_unfinished(file_id, writer))
            raise
        finally:
            self._count_upload(new.namespace, -size)

    def _count_upload(self, namespace: str, size: int) -> int:
        """Bytes of this tenant's uploads that are not whole, after the change."""
        now = self._uploading.get(namespace, 0) + size
        if now:
            self._uploading[namespace] = now
        else:
            self._uploading.pop(namespace, None)
        return now

    async def _remove_unfinished(self, file_id: str, writer: FileWriter | None) -> None:
        if writer is not None:
            await asyncio.to_thread(writer.abandon)
        with contextlib.suppress(StoreUnavailable):  # it is swept then
            if await files.mark_abandoned(self._engine, file_id):
                await self._remove(file_id)

    async def _remove(self, file_id: str) -> None:
        """The bytes, then the row that names them. What fails is swept later."""
        try:
            await asyncio.to_thread(self._storage.delete, file_id)
            await files.forget(self._engine, file_id)
        except (StorageError, StoreUnavailable) as error:
            metrics.STORE_FAILURES.inc()
            log.warning("file not deleted yet", extra=kv(file_id=file_id, error=error))

    async def GetFile(self, request: pb.FileRequest, context: Context) -> pb.File:  # noqa: N802
        async with self._answering(context):
            return codec.file_message(await files.find(self._engine, *codec.file_named(request)))
        raise AssertionError("the call was aborted")

    async def ListFiles(self, request: pb.ListRequest, context: Context) -> pb.FileList:  # noqa: N802
        async with self._answering(context):
            return codec.file_list(*await files.listed(self._engine, codec.page(request)))
        raise AssertionError("the call was aborted")

    async def DeleteFile(self, request: pb.FileRequest, context: Context) -> pb.File:  # noqa: N802
        async with self._answering(context):
            gone = await files.mark_deleting(self._engine, self._term, *codec.file_named(request))
            await self._remove(gone.file_id)
            return codec.file_message(gone)
        raise AssertionError("the call was aborted")

    async def ReadFile(self, request: pb.FileRequest, context: Context) -> AsyncIterator[pb.FileChunk]:  # noqa: N802
        async with self._answering(context):
            found = await files.find(self._engine, *codec.file_named(request))
            async for block in blocks(self._storage, found.file_id):
                yield pb.FileChunk(chunk=block)

    # ------------------------------------------------------------------------------------------ batches

    async def CreateBatch(self, request: pb.CreateBatchRequest, context: Context) -> pb.BatchJob:  # noqa: N802
        async with self._answering(context):
            new = codec.new_batch(request)
            if new.endpoint not in ENDPOINTS:
                raise PeerError(f"endpoint is {quoted(new.endpoint)}, not one of {', '.join(ENDPOINTS)}")
            if new.completion_window != COMPLETION_WINDOW:
                raise PeerError(f"completion_window is {quoted(new.completion_window)}, not {COMPLETION_WINDOW!r}")
            job = await batches.create(
                self._engine,
                self._term,
                new,
                f"batch_{secrets.token_hex(16)}",
                now_unix_ms=now_unix_ms(),
                max_unfinished=self._limits.tenant_batches,
            )
            log.info("batch created", extra=kv(batch_id=job.batch_id, namespace=new.namespace))
            self._add(UnfinishedBatch(new.namespace, job, job.status, b""))
            return codec.batch_message(job)
        raise AssertionError("the call was aborted")

    async def GetBatch(self, request: pb.BatchRequest, context: Context) -> pb.BatchJob:  # noqa: N802
        async with self._answering(context):
            return codec.batch_message(await batches.find(self._engine, *codec.batch_named(request)))
        raise AssertionError("the call was aborted")

    async def ListBatches(self, request: pb.ListRequest, context: Context) -> pb.BatchList:  # noqa: N802
        async with self._answering(context):
            return codec.batch_list(*await batches.listed(self._engine, codec.page(request)))
        raise AssertionError("the call was aborted")

    async def CancelBatch(self, request: pb.BatchRequest, context: Context) -> pb.BatchJob:  # noqa: N802
        async with self._answering(context):
            named = codec.batch_named(request)
            job = await batches.cancel(self._engine, self._term, *named, now_unix_ms=now_unix_ms())
            log.info("batch cancelled", extra=kv(batch_id=job.batch_id))
            self.handle(CancelAsked(job.batch_id))
            return codec.batch_message(job)
        raise AssertionError("the call was aborted")

    def _add(self, batch: UnfinishedBatch) -> None:
        job, ending = batch.job, None
        if batch.ending in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
            ending = BatchStatus.CANCELLED
        elif job.status is BatchStatus.FINALIZING:
            ending = batch.ending
        read = InputFile(job.input_file_id, LineIndex.from_bytes(batch.line_index)) if batch.line_index else None
        self._open[job.batch_id] = _OpenBatch(batch.namespace, job, read)
        expires_s = time.monotonic() + job.expires_unix_s - time.time()
        order = (job.created_unix_s, job.batch_id)
        self.handle(Added(job.batch_id, batch.namespace, order, expires_s, ending))

    async def _validate(self, batch_id: str) -> None:
        """Read the input, unless an earlier process has. Its bad lines have results before a good one runs."""
        batch = self._open[batch_id]

        async def read_input() -> None:
            if batch.input is None and not await self._read_input(batch):
                del self._open[batch_id]
                metrics.ENDED.labels(metrics.label(batch.namespace), BatchStatus.FAILED.value).inc()
                self.handle(BatchGone(batch_id))
                return
            finished = await batches.finished_lines(self._engine, batch_id)
            self.handle(Validated(batch_id, batch.job.total, finished))

        await self._until_done("input not read: trying again", batch_id, read_input)

    async def _read_input(self, batch: _OpenBatch) -> bool:
        """False: no line of it can run, and the batch has failed."""
        job, limits = batch.job, self._limits
        reader = InputReader(job.endpoint, max_lines=limits.max_lines, max_line_bytes=limits.max_line_bytes)
        try:
            async for block in blocks(self._storage, job.input_file_id):
                await self._store_bad(batch, await asyncio.to_thread(_judged, reader, block))
                if reader.too_many:
                    break
            await self._store_bad(batch, list(reader.finish()))
            errors = reader.failure()
        except BytesMissing:
            errors = [BatchError("input_file_missing", "the bytes of the input file are not in storage")]
        if errors:
            await batches.failed(self._engine, self._term, job.batch_id, errors, now_unix_ms=now_unix_ms())
            await batches.drop_results(self._engine, job.batch_id)
            log.info("batch failed", extra=kv(batch_id=job.batch_id, code=errors[0].code, line=errors[0].line))
            return False
        index = reader.index.to_bytes()
        await batches.validated(self._engine, self._term, job.batch_id, reader.total, index, now_unix_ms=now_unix_ms())
        batch.job = await batches.find(self._engine, batch.namespace, job.batch_id)
        batch.input = InputFile(job.input_file_id, reader.index)
        log.info("batch begins", extra=kv(batch_id=job.batch_id, lines=reader.total, bad=reader.total - reader.good))
        return True

    async def _store_bad(self, batch: _OpenBatch, bad: Sequence[tuple[int, BadLine]]) -> None:
        for start in range(0, len(bad), batches.MAX_RESULTS):
            part = [records.refused(batch.job.batch_id, *found) for found in bad[start : start + batches.MAX_RESULTS]]
            metrics.stored(batch.namespace, [False] * await batches.add_results(self._engine, self._term, part))

    async def _finalize(self, batch_id: str, ending: BatchStatus) -> None:
        batch = self._open[batch_id]
        of = EndingBatch(batch_id, batch.namespace, batch.job.endpoint, batch.job.input_file_id, ending)

        async def write_files() -> None:
            await batches.finalizing(self._engine, self._term, batch_id, ending, now_unix_ms=now_unix_ms())
            await OutputFiles(self._engine, self._term, self._storage, of, _draw_file_id, now_unix_ms).write()

        await self._until_done("files of a batch not written: trying again", batch_id, write_files)
        del self._open[batch_id]
        metrics.ENDED.labels(metrics.label(batch.namespace), ending.value).inc()
        log.info("batch ended", extra=kv(batch_id=batch_id, status=ending.value))
        self.handle(BatchGone(batch_id))

    async def _until_done(self, what: str, batch_id: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do it again, with bounded pauses, while store or storage cannot be used. Raises Superseded."""
        pause_s = PAUSE_MIN_S
        while True:
            try:
                async with self._work:
                    return await work()
            except (StoreUnavailable, Conflict, StorageError) as error:
                metrics.STORE_FAILURES.inc()
                log.error(what, extra=kv(batch_id=batch_id, pause_s=pause_s, error=error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    # ------------------------------------------------------------------------------------------ lines

    async def Lines(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.GatewayToBatch], context: Context
    ) -> AsyncIterator[pb.BatchToGateway]:
        stream = _Stream()
        async with peer_errors("gateway", context):
            if self._replaced:
                await context.abort(grpc.StatusCode.UNAVAILABLE, REPLACED)
            self._connections.add(stream)
            try:
                on_message = partial(self._from_gateway, stream)
                async for message in serve_stream(request_iterator, context, stream.outbox, on_message):
                    yield BATCH_TO_GATEWAY.encode(message)
            finally:
                self._connections.discard(stream)
                if stream.peer and self._streams.get(stream.peer) is stream:
                    del self._streams[stream.peer]
                    self.handle(Closed(stream.peer))

    def _from_gateway(self, stream: _Stream, envelope: pb.GatewayToBatch) -> None:
        message = GATEWAY_TO_BATCH.decode(envelope)
        if isinstance(message, LinesHello) and stream.peer is None:
            stream.peer = Peer(Kind.GATEWAY, message.gateway_id)
            if (older := self._streams.pop(stream.peer, None)) is not None:
                older.outbox.close()
                self.handle(Closed(stream.peer))
            self._streams[stream.peer] = stream
            self.handle(Connected(stream.peer, message))
        elif stream.peer is None:
            raise PeerError(f"{envelope.WhichOneof('message')} before the hello")
        elif isinstance(message, LinesHello) and message.gateway_id != stream.peer.name:
            raise PeerError("a stream is of one gateway")
        elif self._streams.get(stream.peer) is stream:
            self.handle(Received(stream.peer, message))

    async def _send_lines(self, stream: _Stream, batch: _OpenBatch, lines: Sequence[int]) -> None:
        """Read lines and send them, but for those whose batch ends or whose gateway is lost meanwhile."""
        batch_id, peer = batch.job.batch_id, stream.peer
        assert batch.input, "lines are of an input that is read"
        assert peer, "a stream gets lines after its hello"
        runs, results, released = list[RunLine](), list[LineResult](), list[LineReleased]()
        for _, numbers in groupby(lines, batch.input.index.block):
            numbers = list(numbers)
            try:
                found = await self._lines.block(batch.input, numbers[0])
            except StorageError as error:
                log.warning("lines not read", extra=kv(batch_id=batch_id, line=numbers[0], error=error))
                released += [LineReleased(batch_id, line, "its input cannot be read now") for line in numbers]
                continue
            for line in numbers:
                read = read_line(found.get(line, b""), batch.job.endpoint, MAX_BODY_BYTES)
                if isinstance(read, GoodLine):
                    runs.append(RunLine(batch_id, line, batch.namespace, batch.job.endpoint, read.body))
                    batch.custom_ids[line] = read.custom_id
                else:
                    results.append(LineResult(batch_id, line, 400, "", INPUT_CHANGED))
        if self._streams.get(peer) is not stream:
            return
        for part in in_messages(run for run in runs if self.core.is_at(peer, batch_id, run.line)):
            stream.outbox.put(RunLines(part))
        if results or released:
            self.handle(Received(peer, LineEnds(results, released)))

    def _store(self, result: LineResult | LineFailed) -> None:
        custom_id = self._open[result.batch_id].custom_ids.pop(result.line, None)
        of = records.answered if isinstance(result, LineResult) else records.unanswered
        self.writer.put(of(result, custom_id))  # pyright: ignore[reportArgumentType] (by its type)

    def _stored(self, results: Sequence[StoredResult]) -> None:
        for batch_id, of_batch in groupby(results, attrgetter("batch_id")):
            metrics.stored(self._open[batch_id].namespace, [result.succeeded for result in of_batch])
        self.handle(LinesStored([(result.batch_id, result.line) for result in results]))

    # ------------------------------------------------------------------------------------------ time, ends

    async def _tick(self) -> None:
        while True:
            self._wake.clear()
            deadline = self.core.next_deadline()
            if deadline is not None and deadline <= time.monotonic():
                self.handle(TICK)
                await asyncio.sleep(0)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                    await self._wake.wait()

    async def _update_metrics(self) -> None:
        counters = LineCounters()
        while True:
            counters = metrics.update(self.core, counters)
            if self._idle.due() and (broken := violation(self.core.check)):
                raise InvariantViolated(broken)  # the next process knows all from the store
            await asyncio.sleep(UPDATE_EVERY_S)

    async def _housekeeping(self, keep_days: int) -> None:
        """Delete the bytes of files that are gone, and batches that ended long ago."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            try:
                await self._sweep(now_unix_ms() - round(1000 * UPLOAD_S))
                await batches.forget(self._engine, before_unix_ms=now_unix_ms() - keep_days * 86_400_000)
            except StoreUnavailable as error:
                log.warning("housekeeping not done", extra=kv(error=error))

    async def _sweep(self, before_unix_ms: int) -> None:
        for file_id in await files.abandoned(self._engine, before_unix_ms=before_unix_ms):
            if await files.mark_abandoned(self._engine, file_id):
                await self._remove(file_id)

    async def _watch_term(self) -> None:
        """Raises Superseded."""
        while True:
            await asyncio.sleep(UPDATE_EVERY_S)
            with contextlib.suppress(StoreUnavailable):
                if (term := await fencing_terms.highest(self._engine, ROLE)) > self._term:
                    raise Superseded(f"term {term} was taken")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._fenced(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fenced(self, work: Coroutine[Any, Any, None]) -> None:
        """A replaced service stops giving out lines and waits for its end; any other failure ends the process."""
        try:
            await work
        except Superseded as error:
            self._give_up(error)
        except Exception as error:  # noqa: BLE001 (`run` raises it)
            self._failed = self._failed or error
            self._closed.set()

    def _give_up(self, error: Superseded) -> None:
        if not self._replaced:
            log.warning(REPLACED, extra=kv(term=self._term, reason=error))
            self._replaced = True
            self._end_streams()

    def _end_streams(self) -> None:
        for stream in self._connections:
            stream.outbox.close()  # gateways reconnect to the service that serves next

    @asynccontextmanager
    async def _answering(self, context: Context) -> AsyncGenerator[None]:
        """Around a call: refusals become its status."""
        try:
            if self._replaced:
                raise Superseded(REPLACED)
            yield
        except PeerError as error:
            await context.abort(error.code, str(error))
        except NotPossible as error:
            await context.abort(CODES[type(error)], str(error))
        except Superseded as error:
            self._give_up(error)
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{REPLACED}; try again")
        except (StoreError, StorageError) as error:
            metrics.STORE_FAILURES.inc()
            log.error("call not answered", extra=kv(error=error))
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{error}; try again")


async def _header(parts: AsyncIterator[pb.UploadFileRequest]) -> NewFile:
    """What an upload begins with. Raises PeerError."""
    first = codec.upload_part(await anext(parts, pb.UploadFileRequest()))
    if not isinstance(first, NewFile):
        raise PeerError("an upload begins with its header")
    if first.purpose is not Purpose.BATCH:
        raise PeerError(f"purpose is {first.purpose.value!r}; files for batches have purpose 'batch'")
    return NewFile(first.namespace, _shown_name(first.filename), first.purpose)


def _judged(reader: InputReader, block: bytes) -> list[tuple[int, BadLine]]:
    return list(reader.feed(block))


def now_unix_ms() -> int:
    return time.time_ns() // 1_000_000


def _draw_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def _shown_name(filename: str) -> str:
    """The client's text without characters that cannot be printed; never used as a path."""
    return "".join(char for char in filename if char.isprintable()).strip()[:255] or "unnamed"
