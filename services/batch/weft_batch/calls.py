"""The contract's calls: messages become values, and refusals become statuses."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio

from weft.domain.batch import COMPLETION_WINDOW, ENDPOINTS, NewFile, Purpose
from weft.domain.text import quoted
from weft.domain.turns import TenantSlots
from weft.store import batches, files, responses
from weft.store.errors import Absent, Conflict, NotPossible, OverQuota, StoreBusy, StoreError, StoreFull, Superseded
from weft.store.transactions import PLATFORM, in_turn_of
from weft.telemetry.logs import kv
from weft.wire.codec import batch as codec
from weft.wire.codec.batch import BATCH_TO_GATEWAY
from weft.wire.errors import PeerError, peer_errors
from weft.wire.streams import serve_stream
from weft.wire.v1 import batch_pb2 as pb
from weft.wire.v1.batch_pb2_grpc import BatchServicer
from weft_batch import metrics
from weft_batch.errors import StorageError, StorageFull
from weft_batch.inputs import blocks
from weft_batch.server import REPLACED, BatchServer
from weft_batch.tenant_files import now_unix_ms

CODES: dict[type[NotPossible], grpc.StatusCode] = {
    Absent: grpc.StatusCode.NOT_FOUND,
    OverQuota: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Conflict: grpc.StatusCode.FAILED_PRECONDITION,
}
MAX_UPLOADS = 256  # at the same time; a tenant has at most half of them
log = logging.getLogger(__name__)
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


def _answered(call: Callable[["BatchCalls", Asked], Awaitable[Answer]]) -> Any:
    """Make a call of the contract. Its refusals become statuses."""

    async def answer(self: "BatchCalls", request: Asked, context: Context) -> Answer:
        async with self.answering(context):
            with in_turn_of(getattr(request, "namespace", PLATFORM)):
                return await call(self, request)
        raise AssertionError("the call was aborted")

    return answer


class BatchCalls(BatchServicer):
    """The gRPC calls of a server."""

    def __init__(self, server: BatchServer) -> None:
        self._server, self._uploads = server, TenantSlots(MAX_UPLOADS)

    @contextmanager
    def _upload_slot(self, namespace: str) -> Generator[None]:
        """Hold an upload slot for the length of the block. Raises OverQuota."""
        if not self._uploads.take(namespace):
            raise OverQuota("too many uploads of files are under way; try again when an upload has ended")
        try:
            yield
        finally:
            self._uploads.give(namespace)

    @_answered
    async def UploadFile(self, request_iterator: AsyncIterator[pb.UploadFileRequest]) -> pb.File:  # noqa: N802
        parts = aiter(request_iterator)
        try:
            new = await _header(parts)
            chunks = (codec.upload_part(part) async for part in parts)
            with self._upload_slot(new.namespace), in_turn_of(new.namespace):
                return codec.FILE.encode(await self._server.files.upload(new, chunks))
        except (PeerError, NotPossible, StoreError, StorageError):
            async for _ in parts:
                pass  # the client's gRPC loses a status that arrives during a write
            raise

    @_answered
    async def GetFile(self, request: pb.FileRequest) -> pb.File:  # noqa: N802
        return codec.FILE.encode(await files.find(self._server.engine, *codec.file_named(request)))

    @_answered
    async def ListFiles(self, request: pb.ListRequest) -> pb.FileList:  # noqa: N802
        return codec.file_list(*await files.list_page(self._server.engine, codec.PAGE.decode(request)))

    @_answered
    async def DeleteFile(self, request: pb.FileRequest) -> pb.File:  # noqa: N802
        return codec.FILE.encode(await self._server.files.delete(*codec.file_named(request)))

    async def ReadFile(self, request: pb.FileRequest, context: Context) -> AsyncIterator[pb.FileChunk]:  # noqa: N802
        async with self.answering(context):
            with in_turn_of(request.namespace):
                file = await files.find(self._server.engine, *codec.file_named(request))
            async for block in blocks(self._server.storage, file.file_id):
                yield pb.FileChunk(chunk=block)

    @_answered
    async def CreateBatch(self, request: pb.CreateBatchRequest) -> pb.BatchJob:  # noqa: N802
        new = codec.NEW_BATCH.decode(request)
        if new.endpoint not in ENDPOINTS:
            raise PeerError(f"endpoint is {quoted(new.endpoint)}, not one of {', '.join(ENDPOINTS)}")
        if new.completion_window != COMPLETION_WINDOW:
            raise PeerError(f"completion_window is {quoted(new.completion_window)}, not {COMPLETION_WINDOW!r}")
        job = await self._server.create(new)
        return codec.BATCH.encode(job)

    @_answered
    async def GetBatch(self, request: pb.BatchRequest) -> pb.BatchJob:  # noqa: N802
        return codec.BATCH.encode(await batches.find(self._server.engine, *codec.batch_named(request)))

    @_answered
    async def ListBatches(self, request: pb.ListRequest) -> pb.BatchList:  # noqa: N802
        return codec.batch_list(*await batches.list_page(self._server.engine, codec.PAGE.decode(request)))

    @_answered
    async def CancelBatch(self, request: pb.BatchRequest) -> pb.BatchJob:  # noqa: N802
        job = await self._server.cancel(*codec.batch_named(request))
        return codec.BATCH.encode(job)

    @_answered
    async def KeepResponse(self, request: pb.KeepResponseRequest) -> pb.KeepResponseAnswer:  # noqa: N802
        limits, now = self._server.limits, now_unix_ms()
        new, expires = codec.RESPONSE.decode(request), now + 3_600_000 * limits.response_hours
        await responses.keep(
            self._server.engine, new, now_unix_ms=now, expires_unix_ms=expires, max_responses=limits.tenant_responses,
            max_bytes=limits.tenant_bytes,
        )  # fmt: skip
        return pb.KeepResponseAnswer()

    @_answered
    async def GetConversation(self, request: pb.ResponseRequest) -> pb.Conversation:  # noqa: N802
        engine, named, now = self._server.engine, codec.response_named(request), now_unix_ms()
        if request.alone:
            return pb.Conversation(bodies=[await responses.find(engine, *named, now_unix_ms=now)])
        return pb.Conversation(bodies=await responses.conversation(engine, *named, now_unix_ms=now))

    @_answered
    async def DeleteResponse(self, request: pb.ResponseRequest) -> pb.DeleteResponseAnswer:  # noqa: N802
        await responses.remove(self._server.engine, *codec.response_named(request))
        return pb.DeleteResponseAnswer()

    async def Lines(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.GatewayToBatch], context: Context
    ) -> AsyncIterator[pb.BatchToGateway]:
        server = self._server
        async with peer_errors("gateway", context):
            if server.replaced:
                await context.abort(grpc.StatusCode.UNAVAILABLE, REPLACED)
            with server.stream() as (outbox, on_message):
                async for message in serve_stream(request_iterator, context, outbox, on_message):
                    yield BATCH_TO_GATEWAY.encode(message)

    @asynccontextmanager
    async def answering(self, context: Context) -> AsyncGenerator[None]:
        """Turn refusals of a call into its status."""
        try:
            if self._server.replaced:
                raise Superseded(REPLACED)
            yield
        except PeerError as error:
            await context.abort(error.code, str(error))
        except NotPossible as error:
            await context.abort(CODES[type(error)], str(error))
        except Superseded as error:
            self._server.give_up(error)
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{REPLACED}; try again")
        except (StoreFull, StorageFull) as error:
            self._server.met_full(error)
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error), (codec.STORAGE_FULL,))
        except StoreBusy as error:
            metrics.STORE_FAILURES.inc()
            log.warning("call not answered: the store is busy", extra=kv(error=error))
            await context.abort(grpc.StatusCode.ABORTED, f"the store is busy: {error}; try again")
        except (StoreError, StorageError) as error:
            metrics.STORE_FAILURES.inc()
            log.error("call not answered", extra=kv(error=error))
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{error}; try again")


async def _header(parts: AsyncIterator[pb.UploadFileRequest]) -> NewFile:
    """Read the header of an upload. Raises PeerError."""
    first = codec.upload_part(await anext(parts, pb.UploadFileRequest()))
    if not isinstance(first, NewFile):
        raise PeerError("an upload begins with its header")
    if first.purpose is not Purpose.BATCH:
        raise PeerError(f"purpose is {first.purpose.value!r}; files for batches have purpose 'batch'")
    return NewFile(first.namespace, _shown_name(first.filename), first.purpose)


def _shown_name(filename: str) -> str:
    """Return the client's file name without unprintable characters. It is never used as a path."""
    return "".join(char for char in filename if char.isprintable()).strip()[:255] or "unnamed"
