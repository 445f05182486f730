"""A batch service's shell on loopback with a real store and real file storage; gateways are played by the test.

A played gateway is a client of the contract's stream of lines. It answers each line at once unless a test says how.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from sqlalchemy import URL, func, select

from harness.grpc_server import listening
from harness.postgres import DIALECTS
from harness.stored import new_store
from harness.waiting import PATIENCE_S, eventually
from weft.domain.batch import (
    BatchJob,
    BatchStatus,
    CancelLines,
    LineEnds,
    LineReleased,
    LineResult,
    LinesHello,
    NewBatch,
    NewFile,
    Page,
    Purpose,
    RunLine,
    RunLines,
    StoredFile,
)
from weft.store import fencing_terms
from weft.store.database import sqlite_url
from weft.store.models import FileRow
from weft.store.transactions import transact
from weft.telemetry.tracing import Tracer
from weft.wire.codec import batch as codec
from weft.wire.codec.batch import BATCH_TO_GATEWAY, GATEWAY_TO_BATCH, in_messages
from weft.wire.streams import SendQueue, channel
from weft.wire.v1.batch_pb2 import BatchRequest, FileRequest
from weft.wire.v1.batch_pb2_grpc import BatchStub, add_BatchServicer_to_server
from weft_batch.calls import BatchCalls
from weft_batch.server import BatchServer
from weft_batch.storage import FolderStorage
from weft_batch.tenant_files import TenantQuotas

ENDPOINT = "/v1/completions"
CHUNK = 1 << 20
Answer = Callable[[RunLine], LineResult | Any | None]


def input_line(custom_id: object, **body: object) -> bytes:
    request = {"model": "m", "prompt": "p"} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": request}).encode()


def input_file(count: int, first: int = 0) -> bytes:
    return b"".join(input_line(f"id-{i}", n=i) + b"\n" for i in range(first, first + count))


def answer(run: RunLine, status: int = 200) -> LineResult:
    """What a gateway would have answered: the request, echoed."""
    body = json.dumps({"echo": json.loads(run.body)}).encode()
    return LineResult(run.batch_id, run.line, status, f"req-{run.line}", body, 3, 4, 2, 1)


@dataclass
class PlayedGateway:
    """Runs lines by `answers`; None: it keeps the line."""

    stub: BatchStub
    name: str = "g1"
    max_lines: int = 100
    answers: Answer = answer
    runs: Counter = field(default_factory=Counter)  # (batch, line): how often it was to run
    kept: dict[tuple[str, int], RunLine] = field(default_factory=dict)
    cancelled: list[tuple[str, int]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    outbox: SendQueue = field(default_factory=lambda: SendQueue(1 << 20))

    async def run(self) -> None:
        """Until its stream ends."""
        self.outbox = SendQueue(1 << 20)
        self.send(LinesHello(self.name, self.max_lines))
        call = self.stub.Lines(aiter(self.outbox))
        try:
            await call.initial_metadata()  # a read before them can swallow a cancellation (grpc 1.85 `_prepare_rpc`)
            async for envelope in call:
                self._take(BATCH_TO_GATEWAY.decode(envelope))
        finally:
            call.cancel()

    def send(self, message: Any) -> None:
        self.outbox.put(GATEWAY_TO_BATCH.encode(message))

    def end(self, *ends: LineResult | LineReleased) -> None:
        for results in in_messages(end for end in ends if isinstance(end, LineResult)):
            self.send(LineEnds(results))
        if released := [end for end in ends if isinstance(end, LineReleased)]:
            self.send(LineEnds((), released))

    def _take(self, message: RunLines | CancelLines) -> None:
        if isinstance(message, CancelLines):
            self.cancelled += [(message.batch_id, line) for line in message.lines]
            for line in message.lines:
                self.kept.pop((message.batch_id, line), None)
        else:
            self.runs.update((run.batch_id, run.line) for run in message.lines)
            replies = [(run, self.answers(run)) for run in message.lines]
            self.kept |= {(run.batch_id, run.line): run for run, reply in replies if reply is None}
            self.end(*(reply for _, reply in replies if reply is not None))
        self.changed.set()

    async def until(self, condition: Callable[["PlayedGateway"], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition(self):
                self.changed.clear()
                await self.changed.wait()


@dataclass
class Client:
    """Calls as the gateway makes them for a tenant."""

    stub: BatchStub
    namespace: str = "a"

    async def upload(self, content: bytes | Iterable[bytes], filename: str = "in.jsonl") -> StoredFile:
        if isinstance(content, bytes):
            content = [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)]

        async def parts() -> AsyncIterator[Any]:
            yield codec.upload_header(NewFile(self.namespace, filename, Purpose.BATCH))
            for chunk in content:
                yield codec.upload_chunk(chunk)
            yield codec.upload_chunk(b"")

        return codec.FILE.decode(await self.stub.UploadFile(parts()))

    async def content(self, file_id: str) -> bytes:
        parts = self.stub.ReadFile(FileRequest(namespace=self.namespace, file_id=file_id))
        return b"".join([codec.file_chunk(part) async for part in parts])

    async def lines(self, file_id: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (await self.content(file_id)).splitlines()] if file_id else []

    async def files(self, **of: Any) -> list[StoredFile]:
        return codec.stored_files(await self.stub.ListFiles(codec.PAGE.encode(Page(self.namespace, 1000, **of))))[0]

    async def delete(self, file_id: str) -> StoredFile:
        return codec.FILE.decode(await self.stub.DeleteFile(FileRequest(namespace=self.namespace, file_id=file_id)))

    async def create(self, file_id: str, **changes: Any) -> BatchJob:
        new = NewBatch(self.namespace, file_id, **{"endpoint": ENDPOINT} | changes)
        return codec.BATCH.decode(await self.stub.CreateBatch(codec.NEW_BATCH.encode(new)))

    async def batch(self, batch_id: str) -> BatchJob:
        return codec.BATCH.decode(await self.stub.GetBatch(BatchRequest(namespace=self.namespace, batch_id=batch_id)))

    async def cancel(self, batch_id: str) -> BatchJob:
        named = BatchRequest(namespace=self.namespace, batch_id=batch_id)
        return codec.BATCH.decode(await self.stub.CancelBatch(named))

    async def submit(self, content: bytes, **changes: Any) -> BatchJob:
        return await self.create((await self.upload(content)).file_id, **changes)

    async def ended(self, batch_id: str, *, seconds: float = PATIENCE_S) -> BatchJob:
        return await self.until(batch_id, lambda job: job.status.ended, seconds=seconds)

    async def until(
        self, batch_id: str, condition: Callable[[BatchJob], bool], *, seconds: float = PATIENCE_S
    ) -> BatchJob:
        """A batch tells of nothing by itself, so it is asked."""
        async with asyncio.timeout(seconds):
            while not condition(job := await self.batch(batch_id)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            return job

    async def in_status(self, batch_id: str, status: BatchStatus) -> BatchJob:
        return await self.until(batch_id, lambda job: job.status is status)


async def count_rows(engine: Any) -> int:
    query = select(func.count()).select_from(FileRow)
    return await transact(engine, lambda connection: connection.scalar(query))


@dataclass
class World:
    server: BatchServer
    stub: BatchStub
    engine: Any
    storage: Any

    def client(self, namespace: str = "a") -> Client:
        return Client(self.stub, namespace)

    async def nothing_left(self) -> None:
        """Wait until there is neither a row nor a file: the rest of a broken upload goes beside its call."""

        async def is_clean() -> bool:
            return not (self.server._tasks or [*self.storage._folder.iterdir()] or await count_rows(self.engine))

        await eventually(is_clean)

    @asynccontextmanager
    async def gateway(self, name: str = "g1", **how: Any) -> AsyncIterator[PlayedGateway]:
        played = PlayedGateway(self.stub, name, **how)
        running = asyncio.create_task(played.run())
        try:
            yield played
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await running


@asynccontextmanager
async def serving(
    engine: Any,
    storage: Any,
    limits: TenantQuotas | None = None,
    *,
    sole: bool = True,
    lines_in_flight: int = 1000,
    tracer: Tracer | None = None,
) -> AsyncIterator[World]:
    """A service that has started, at an address of its own."""
    term = await fencing_terms.take(engine, "batch")
    limits = replace(limits or TenantQuotas(), response_hours=1, tenant_responses=3)
    server = BatchServer(engine, term, storage, limits, lines_in_flight=lines_in_flight, tracer=tracer)
    await server.load(sole=sole)
    running = asyncio.create_task(server.run(shared=not sole))
    try:
        async with listening(lambda s: add_BatchServicer_to_server(BatchCalls(server), s), grace_s=PATIENCE_S) as at:
            try:
                async with channel(at) as to_server:
                    yield World(server, BatchStub(to_server), engine, storage)
            finally:
                await server.drain()
    finally:
        await running


@pytest.fixture(params=DIALECTS)
async def store(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    with ExitStack() as stack:
        if request.param == "sqlite":
            url = sqlite_url(tmp_path / "batch.sqlite")
        else:
            url = stack.enter_context(request.getfixturevalue("postgres").database())
        async for engine in opened(url):
            yield engine


async def opened(url: URL) -> AsyncIterator[Any]:
    """The store, at the newest revision."""
    engine = await new_store(url)
    yield engine
    await engine.dispose()


@pytest.fixture
def storage(tmp_path: Path) -> FolderStorage:
    return FolderStorage(tmp_path / "files")


@pytest.fixture
async def world(store: Any, storage: FolderStorage) -> AsyncIterator[World]:
    async with serving(store, storage) as world:
        yield world
