"""The shell of the machine: streams of lines, a loop around it, and background work on inputs and outputs."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from operator import attrgetter
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from weft.domain.batch import (
    MAX_BODY_BYTES,
    BatchError,
    BatchJob,
    BatchStatus,
    LineEnds,
    LineReleased,
    LineResult,
    LinesHello,
    NewBatch,
    RunLine,
    RunLines,
)
from weft.domain.machine import Closed, Connected, Kind, Peer, Received, Send
from weft.machine_shell import MachineShell
from weft.store import batches, fencing_terms, responses
from weft.store.batches import StoredResult, UnfinishedBatch
from weft.store.errors import Conflict, StoreFull, StoreUnavailable, Superseded
from weft.store.files import ROLE
from weft.store.transactions import in_turn_of
from weft.telemetry.invariants import InvariantViolated
from weft.telemetry.logs import kv
from weft.telemetry.probes import Shortages
from weft.telemetry.tracing import RequestSpan, Tracer
from weft.turnstile import Turnstile
from weft.wire.codec.batch import GATEWAY_TO_BATCH, in_messages
from weft.wire.errors import PeerError
from weft.wire.streams import SendQueue
from weft.wire.v1 import batch_pb2 as pb
from weft_batch import metrics
from weft_batch.core import batches as machine
from weft_batch.core.input_lines import BadLine, GoodLine, InputReader, LineIndex, read_line
from weft_batch.errors import BytesMissing, StorageError, StorageFull
from weft_batch.inputs import InputFile, InputLines, blocks, parse_piece
from weft_batch.output_files import OutputFiles
from weft_batch.results import MAX_PAUSE_S, MIN_PAUSE_S, ResultWriter, answer_record, bad_line_record, failure_record
from weft_batch.storage import FileStorage
from weft_batch.tenant_files import TenantFiles, TenantQuotas, now_unix_ms

DRAIN_S = 2.0
UPDATE_EVERY_S = 1.0
SWEEP_EVERY_S = 600.0
KEEP_MS = 90 * 86_400_000  # an ended batch is listed for so long, a quarter; files stay until they are deleted
UPLOAD_S = 3_600.0  # a longer upload counts as interrupted, if several services share the store
# Lines at gateways and on their way to the store: more than a few gateways run at the same time (128 each), and few
# enough to hold in memory with their answers.
LINES_IN_FLIGHT = 2_000
JOBS_AT_ONCE = 16  # inputs to read, and batches with files to write; a tenant has at most half of them
PIECES_AT_ONCE = 1  # parts of inputs to parse: the interpreter cannot do more at the same time
PIECE_BYTES = 128 << 10  # tens of milliseconds
INPUT_CHANGED = b'{"error": {"code": "input_changed", "message": "the input file is damaged"}}'  # after it was read
REPLACED = "a newer batch service has taken over"
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _OpenBatch:
    """The shell's knowledge of an unfinished batch."""

    namespace: str
    job: BatchJob
    input: InputFile | None = None  # None: not read yet
    custom_ids: dict[int, str] = field(default_factory=dict[int, str])  # of lines at gateways
    span: RequestSpan | None = None  # None: not sampled

    def end_span(self, status: BatchStatus) -> None:
        """End the span with the batch's status at the end of the work of this process."""
        if self.span is not None:
            about = {"weft.batch_id": self.job.batch_id, "weft.namespace": self.namespace or None}
            self.span.end("batch", {**about, "weft.batch.status": status.value, "weft.batch.lines": self.job.total})
            self.span = None


@dataclass(slots=True, eq=False)
class _Stream:
    """A connection of a gateway, unknown before its hello."""

    outbox: SendQueue[Any] = field(default_factory=SendQueue[Any])
    peer: Peer | None = None


class BatchServer:
    """The owner of the machine. Everything but blocking I/O runs in a single event loop. Events enter only through
    `handle`."""

    def __init__(
        self, engine: AsyncEngine, term: int, storage: FileStorage, limits: TenantQuotas, *,
        lines_in_flight: int = LINES_IN_FLIGHT, tracer: Tracer | None = None,
    ) -> None:  # fmt: skip
        self._tracer = tracer
        self.core = machine.Batches(lines_in_flight=lines_in_flight)
        self.shortages = Shortages()
        self._writer = ResultWriter(engine, term, self._stored, self.met_full)
        self.engine, self.term, self.storage, self.limits = engine, term, storage, limits
        self.files = TenantFiles(engine, term, storage, limits, self._spawn)
        self._lines = InputLines(storage)
        self._open: dict[str, _OpenBatch] = {}
        self._sent: defaultdict[tuple[Peer, str], list[int]] = defaultdict(list)  # by the current event
        self._streams: dict[Peer, _Stream] = {}
        self._connections: set[_Stream] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._jobs, self._pieces = Turnstile(JOBS_AT_ONCE), Turnstile(PIECES_AT_ONCE)
        self._closed = asyncio.Event()
        self._shell = MachineShell(self.core, self._perform, handle=self._handle, on_failure=self._closed.set)
        self._counters = machine.LineCounters()
        self.replaced = False

    def met_full(self, error: Exception) -> None:
        """Record a failed write for want of room."""
        metrics.STORE_FAILURES.inc()
        self.shortages.note(f"storage is full: {error}")
        log.error("not stored: storage is full", extra=kv(error=error))

    @property
    def trouble(self) -> str | None:
        """The reason if the service is not ready."""
        return REPLACED if self.replaced else self._writer.trouble

    def handle(self, event: machine.Event) -> None:
        """Feed the machine an event, unless this service has ended or is replaced."""
        if not (self.replaced or self._closed.is_set()):
            self._shell.feed(event)

    def _handle(self, event: machine.Event, now: float) -> Iterator[machine.Effect]:
        """Yield the effects of an event. Afterwards send lines of the same batch and gateway together."""
        yield from self.core.handle(event, now)
        lines_by_gateway, self._sent = self._sent, defaultdict(list)
        for (peer, batch_id), lines in lines_by_gateway.items():
            if (batch := self._open.get(batch_id)) and (stream := self._streams.get(peer)):
                self._spawn(self._send_lines(stream, batch, lines))

    def _perform(self, effect: machine.Effect) -> None:
        match effect:
            case machine.Give():
                self._sent[effect.peer, effect.batch_id].append(effect.line)
            case Send():
                if stream := self._streams.get(effect.peer):
                    stream.outbox.put(effect.message)
            case machine.StoreResult(result):
                custom_id = self._open[result.batch_id].custom_ids.pop(result.line, None)
                to_record = answer_record if isinstance(result, LineResult) else failure_record
                self._writer.put(to_record(result, custom_id))  # pyright: ignore[reportArgumentType] (by its type)
            case machine.Validate():
                self._spawn(self._validate(effect.batch_id))
            case machine.Finalize():
                self._spawn(self._finalize(effect.batch_id, effect.ending))

    async def load(self, *, sole: bool) -> None:
        """Continue after the previous process. `sole`: no other process can be writing files.

        Raises StoreError, StorageError.
        """
        removed = await asyncio.to_thread(self.storage.clean)
        await self.files.sweep(now_unix_ms() + 1 if sole else now_unix_ms() - round(1000 * UPLOAD_S))
        for batch_id in await batches.ended_with_results(self.engine):
            await batches.drop_results(self.engine, batch_id)
        unfinished = await batches.unfinished(self.engine)
        log.info("batches found", extra=kv(unfinished=len(unfinished), temporary_files_removed=removed))
        for batch in unfinished:
            self._add(batch)

    async def run(self, *, shared: bool) -> None:
        """Run the writer and periodic work, until drained or until a failure. `shared`: another service may take
        over."""
        work = [self._writer.run(), self._housekeeping()]
        if shared:
            work.append(self._watch_term())
        self._shell.observe_after(UPDATE_EVERY_S, self._observe)
        running = [asyncio.create_task(self._fenced(coroutine)) for coroutine in work]
        try:
            await self._closed.wait()
        finally:
            self._shell.close()
            for task in (*running, *self._tasks):
                task.cancel()
            await asyncio.gather(*running, *self._tasks, return_exceptions=True)
        if self._shell.failure is not None:
            raise self._shell.failure

    async def drain(self) -> None:
        """Store the received results (within `DRAIN_S`; other lines run again), then end streams and `run`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self._writer.drained()
        for batch in self._open.values():
            batch.end_span(batch.job.status)
        self._end_streams()
        self._closed.set()

    # ------------------------------------------------------------------------------------------ batches

    async def create(self, new: NewBatch) -> BatchJob:
        """Store and start a batch. Raises Absent, OverQuota, Conflict, Superseded, StoreUnavailable."""

        def created(job: BatchJob) -> None:
            log.info("batch created", extra=kv(batch_id=job.batch_id, namespace=new.namespace))
            self._add(UnfinishedBatch(new.namespace, job, job.status, b""))

        return await batches.create(
            self.engine, self.term, new, f"batch_{secrets.token_hex(16)}", now_unix_ms=now_unix_ms(),
            max_unfinished=self.limits.tenant_batches, on_commit=created,
        )  # fmt: skip

    async def cancel(self, namespace: str, batch_id: str) -> BatchJob:
        """Cancel a batch. Raises Absent, Conflict, Superseded, StoreUnavailable."""

        def cancelled(job: BatchJob) -> None:
            log.info("batch cancelled", extra=kv(batch_id=job.batch_id))
            self.handle(machine.CancelAsked(job.batch_id))

        return await batches.cancel(
            self.engine, self.term, namespace, batch_id, now_unix_ms=now_unix_ms(), on_commit=cancelled
        )

    def _add(self, batch: UnfinishedBatch) -> None:
        job, ending = batch.job, None
        if batch.ending in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
            ending = BatchStatus.CANCELLED
        elif job.status is BatchStatus.FINALIZING:
            ending = batch.ending
        read = InputFile(job.input_file_id, LineIndex.from_bytes(batch.line_index)) if batch.line_index else None
        span = self._tracer.begin({}, now_unix_ms()) if self._tracer else None
        self._open[job.batch_id] = _OpenBatch(batch.namespace, job, read, span=span)
        expires_s = time.monotonic() + job.expires_unix_s - time.time()
        order = (job.created_unix_s, job.batch_id)
        self.handle(machine.Added(job.batch_id, batch.namespace, order, expires_s, ending))

    async def _validate(self, batch_id: str) -> None:
        """Read the input, unless an earlier process has. Bad lines get results before a good line runs."""
        batch = self._open[batch_id]

        async def read_input() -> None:
            if batch.input is None and not await self._read_input(batch):
                self._on_deleted(batch, BatchStatus.FAILED)
                return
            finished = await batches.finished_lines(self.engine, batch_id)
            self.handle(machine.Validated(batch_id, batch.job.total, finished))

        await self._until_done("input not read: trying again", batch, read_input)

    async def _read_input(self, batch: _OpenBatch) -> bool:
        """Read and judge an input. Return False if no line can run, and the batch has failed."""
        job, limits = batch.job, self.limits
        reader = InputReader(job.endpoint, max_lines=limits.max_lines, max_line_bytes=limits.max_line_bytes)
        try:
            async for block in blocks(self.storage, job.input_file_id):
                for start in range(0, len(block), PIECE_BYTES):
                    await self._judge(batch, reader.feed(block[start : start + PIECE_BYTES]))
                if reader.too_many:
                    break
            await self._judge(batch, reader.finish())
            errors = reader.failure()
        except BytesMissing:
            errors = [BatchError("input_file_missing", "the bytes of the input file are not in storage")]
        if errors:
            await batches.mark_failed(self.engine, self.term, job.batch_id, errors, now_unix_ms=now_unix_ms())
            await batches.drop_results(self.engine, job.batch_id)
            log.info("batch failed", extra=kv(batch_id=job.batch_id, code=errors[0].code, line=errors[0].line))
            return False
        index = reader.index.to_bytes()
        await batches.mark_validated(
            self.engine, self.term, job.batch_id, reader.total, index, now_unix_ms=now_unix_ms()
        )
        batch.job = await batches.find(self.engine, batch.namespace, job.batch_id)
        batch.input = InputFile(job.input_file_id, reader.index)
        log.info("batch begins", extra=kv(batch_id=job.batch_id, lines=reader.total, bad=reader.total - reader.good))
        return True

    async def _judge(self, batch: _OpenBatch, bad_lines: Iterator[tuple[int, BadLine]]) -> None:
        """Judge a piece of an input in its tenant's turns, and store its bad lines in parts."""
        records = (bad_line_record(batch.job.batch_id, *bad_line) for bad_line in bad_lines)
        while True:
            take = partial(list[StoredResult], islice(records, batches.MAX_RESULTS))
            part = await parse_piece(self._pieces, batch.namespace, take)
            metrics.stored(batch.namespace, [False] * await batches.add_results(self.engine, self.term, part))
            if len(part) < batches.MAX_RESULTS:
                return

    async def _finalize(self, batch_id: str, ending: BatchStatus) -> None:
        batch = self._open[batch_id]

        async def write_files() -> None:
            await batches.begin_finalizing(self.engine, self.term, batch_id, ending, now_unix_ms=now_unix_ms())
            await OutputFiles(
                self.engine, self.term, self.storage, self._pieces, batch.namespace, batch.job, ending
            ).write()

        await self._until_done("files of a batch not written: trying again", batch, write_files)
        log.info("batch ended", extra=kv(batch_id=batch_id, status=ending.value))
        self._on_deleted(batch, ending)

    def _on_deleted(self, batch: _OpenBatch, status: BatchStatus) -> None:
        del self._open[batch.job.batch_id]
        metrics.ENDED.labels(metrics.label(batch.namespace), status.value).inc()
        batch.end_span(status)
        self.handle(machine.BatchGone(batch.job.batch_id))

    async def _until_done(self, failure: str, batch: _OpenBatch, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat the work in its tenant's turns, with bounded pauses, while store or storage is unavailable.

        Raises Superseded.
        """
        pause_s = MIN_PAUSE_S
        while True:
            try:
                with in_turn_of(batch.namespace):
                    async with self._jobs.turn(batch.namespace):
                        return await work()
            except (StoreFull, StorageFull) as error:
                self.met_full(error)
            except (StoreUnavailable, Conflict, StorageError) as error:
                metrics.STORE_FAILURES.inc()
                log.error(failure, extra=kv(batch_id=batch.job.batch_id, pause_s=pause_s, error=error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    # ------------------------------------------------------------------------------------------ lines

    @contextmanager
    def stream(self) -> Generator[tuple[SendQueue[Any], Callable[[pb.GatewayToBatch], None]]]:
        """Open a gateway's stream for the length of the block. Yield its queue, and the receiver of its messages."""
        stream = _Stream()
        self._connections.add(stream)
        try:
            yield stream.outbox, partial(self._from_gateway, stream)
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
            raise PeerError("a stream belongs to a single gateway")
        elif self._streams.get(stream.peer) is stream:
            self.handle(Received(stream.peer, message))

    async def _send_lines(self, stream: _Stream, batch: _OpenBatch, lines: Sequence[int]) -> None:
        """Read lines and send them. Skip lines if their batch ends or their gateway is lost in the meantime."""
        batch_id, peer = batch.job.batch_id, stream.peer
        assert batch.input, "the input of lines has been read"
        assert peer, "a stream gets lines after its hello"
        about = batch.namespace, batch.job.endpoint
        traceparent = batch.span.traceparent if batch.span else ""
        runs, results, released = list[RunLine](), list[LineResult](), list[LineReleased]()
        for _, numbers in groupby(lines, batch.input.index.block):
            numbers = list(numbers)
            try:
                raw_lines = await self._lines.block(batch.input, numbers[0])
            except StorageError as error:
                log.warning("lines not read", extra=kv(batch_id=batch_id, line=numbers[0], error=error))
                released += [LineReleased(batch_id, line, "its input cannot be read now") for line in numbers]
                continue
            read_all = partial(_read_lines, raw_lines, numbers, batch.job.endpoint)
            for line, read in await parse_piece(self._pieces, batch.namespace, read_all):
                if isinstance(read, GoodLine):
                    runs.append(RunLine(batch_id, line, *about, read.body, traceparent))
                    batch.custom_ids[line] = read.custom_id
                else:
                    results.append(LineResult(batch_id, line, 400, "", INPUT_CHANGED))
        if self._streams.get(peer) is not stream:
            return
        for part in in_messages(run for run in runs if self.core.is_at(peer, batch_id, run.line)):
            stream.outbox.put(RunLines(part))
        if results or released:
            self.handle(Received(peer, LineEnds(results, released)))

    def _stored(self, results: Sequence[StoredResult]) -> None:
        for batch_id, of_batch in groupby(results, attrgetter("batch_id")):
            metrics.stored(self._open[batch_id].namespace, [result.succeeded for result in of_batch])
        self.handle(machine.LinesStored([(result.batch_id, result.line) for result in results]))

    # ------------------------------------------------------------------------------------------ time, ends

    def _observe(self) -> None:
        self._counters = metrics.update(self.core, self._counters)
        if broken := self._shell.check_idle():
            self._shell.fail(InvariantViolated(broken))  # the next process restores the state from the store

    async def _housekeeping(self) -> None:
        """Delete the bytes of removed files, and batches that ended long ago."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            try:
                await self.files.sweep(now_unix_ms() - round(1000 * UPLOAD_S))
                await responses.forget(self.engine, now_unix_ms=now_unix_ms())
                await batches.forget(self.engine, before_unix_ms=now_unix_ms() - KEEP_MS)
            except StoreUnavailable as error:
                log.warning("housekeeping not done", extra=kv(error=error))

    async def _watch_term(self) -> None:
        """Watch for a newer term. Raises Superseded."""
        while True:
            await asyncio.sleep(UPDATE_EVERY_S)
            with contextlib.suppress(StoreUnavailable):
                if (term := await fencing_terms.highest(self.engine, ROLE)) > self.term:
                    raise Superseded(f"term {term} was taken")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._fenced(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fenced(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work of a term. A replaced service sends no more lines. Any other failure ends the process."""
        try:
            await work
        except Superseded as error:
            self.give_up(error)
        except Exception as error:  # noqa: BLE001 (`run` raises it)
            self._shell.fail(error)

    def give_up(self, error: Superseded) -> None:
        """Send no more lines: a newer service has taken over."""
        if not self.replaced:
            log.warning(REPLACED, extra=kv(term=self.term, reason=error))
            self.replaced = True
            self._shell.close()
            self._end_streams()

    def _end_streams(self) -> None:
        for stream in self._connections:
            stream.outbox.close()  # gateways reconnect to the next service


def _read_lines(
    block: Mapping[int, bytes], numbers: Sequence[int], endpoint: str
) -> list[tuple[int, GoodLine | BadLine]]:
    """Parse lines of a block, by their numbers. A line missing in the file is a bad line."""
    return [(line, read_line(block.get(line, b""), endpoint, MAX_BODY_BYTES)) for line in numbers]
