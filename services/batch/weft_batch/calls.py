"""The contract's calls: messages become values, refusals statuses."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio

from weft.domain.batch import COMPLETION_WINDOW, ENDPOINTS, NewFile, Purpose
from weft.domain.text import quoted
from weft.store import batches, files
from weft.store.errors import Absent, Conflict, NotPossible, OverQuota, StoreBusy, StoreError, Superseded
from weft.telemetry.logs import kv
from weft.wire.codec import batch as codec
from weft.wire.codec.batch import BATCH_TO_GATEWAY
from weft.wire.errors import PeerError, peer_errors
from weft.wire.streams import serve_stream
from weft.wire.v1 import batch_pb2 as pb
from weft.wire.v1.batch_pb2_grpc import BatchServicer
from weft_batch import metrics
from weft_batch.errors import StorageError
from weft_batch.server import REPLACED, BatchServer

CODES: dict[type[NotPossible], grpc.StatusCode] = {
    Absent: grpc.StatusCode.NOT_FOUND,
    OverQuota: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Conflict: grpc.StatusCode.FAILED_PRECONDITION,
}
log = logging.getLogger(__name__)
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class BatchCalls(BatchServicer):
    """The calls of one server."""

    def __init__(self, server: BatchServer) -> None:
        self._server = server

    async def UploadFile(  # noqa: N802 (the contract's name)
        self, request_iterator: AsyncIterator[pb.UploadFileRequest], context: Context
    ) -> pb.File:
        async with self._answering(context):
            parts = aiter(request_iterator)
            try:
                new = await _header(parts)
                return codec.FILE.encode(await self._server.files.upload(new, _chunks(parts)))
            except (PeerError, NotPossible, StoreError, StorageError):
                async for _ in parts:
                    pass  # a status that meets a write of the client is lost in its gRPC
                raise
        raise AssertionError("the call was aborted")

    async def GetFile(self, request: pb.FileRequest, context: Context) -> pb.File:  # noqa: N802
        async with self._answering(context):
            return codec.FILE.encode(await files.find(self._server.engine, *codec.file_named(request)))
        raise AssertionError("the call was aborted")

    async def ListFiles(self, request: pb.ListRequest, context: Context) -> pb.FileList:  # noqa: N802
        async with self._answering(context):
            return codec.file_list(*await files.list_page(self._server.engine, codec.PAGE.decode(request)))
        raise AssertionError("the call was aborted")

    async def DeleteFile(self, request: pb.FileRequest, context: Context) -> pb.File:  # noqa: N802
        async with self._answering(context):
            return codec.FILE.encode(await self._server.files.delete(*codec.file_named(request)))
        raise AssertionError("the call was aborted")

    async def ReadFile(self, request: pb.FileRequest, context: Context) -> AsyncIterator[pb.FileChunk]:  # noqa: N802
        async with self._answering(context):
            found = await files.find(self._server.engine, *codec.file_named(request))
            async for block in self._server.files.blocks(found.file_id):
                yield pb.FileChunk(chunk=block)

    async def CreateBatch(self, request: pb.CreateBatchRequest, context: Context) -> pb.BatchJob:  # noqa: N802
        async with self._answering(context):
            new = codec.NEW_BATCH.decode(request)
            if new.endpoint not in ENDPOINTS:
                raise PeerError(f"endpoint is {quoted(new.endpoint)}, not one of {', '.join(ENDPOINTS)}")
            if new.completion_window != COMPLETION_WINDOW:
                raise PeerError(f"completion_window is {quoted(new.completion_window)}, not {COMPLETION_WINDOW!r}")
            job = await self._server.create(new)
            return codec.BATCH.encode(job)
        raise AssertionError("the call was aborted")

    async def GetBatch(self, request: pb.BatchRequest, context: Context) -> pb.BatchJob:  # noqa: N802
        async with self._answering(context):
            return codec.BATCH.encode(await batches.find(self._server.engine, *codec.batch_named(request)))
        raise AssertionError("the call was aborted")

    async def ListBatches(self, request: pb.ListRequest, context: Context) -> pb.BatchList:  # noqa: N802
        async with self._answering(context):
            return codec.batch_list(*await batches.list_page(self._server.engine, codec.PAGE.decode(request)))
        raise AssertionError("the call was aborted")

    async def CancelBatch(self, request: pb.BatchRequest, context: Context) -> pb.BatchJob:  # noqa: N802
        async with self._answering(context):
            job = await self._server.cancel(*codec.batch_named(request))
            return codec.BATCH.encode(job)
        raise AssertionError("the call was aborted")

    async def KeepResponse(  # noqa: N802
        self, request: pb.KeepResponseRequest, context: Context
    ) -> pb.KeepResponseAnswer:
        async with self._answering(context):
            await self._server.responses.keep(codec.RESPONSE.decode(request))
            return pb.KeepResponseAnswer()
        raise AssertionError("the call was aborted")

    async def GetConversation(self, request: pb.ResponseRequest, context: Context) -> pb.Conversation:  # noqa: N802
        async with self._answering(context):
            named = codec.response_named(request)
            return pb.Conversation(bodies=await self._server.responses.conversation(*named, alone=request.alone))
        raise AssertionError("the call was aborted")

    async def DeleteResponse(self, request: pb.ResponseRequest, context: Context) -> pb.DeleteResponseAnswer:  # noqa: N802
        async with self._answering(context):
            await self._server.responses.delete(*codec.response_named(request))
            return pb.DeleteResponseAnswer()
        raise AssertionError("the call was aborted")

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
    async def _answering(self, context: Context) -> AsyncGenerator[None]:
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
        except StoreBusy as error:
            metrics.STORE_FAILURES.inc()
            log.warning("call not answered: the store is busy", extra=kv(error=error))
            await context.abort(grpc.StatusCode.ABORTED, f"the store is busy: {error}; try again")
        except (StoreError, StorageError) as error:
            metrics.STORE_FAILURES.inc()
            log.error("call not answered", extra=kv(error=error))
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{error}; try again")


async def _header(parts: AsyncIterator[pb.UploadFileRequest]) -> NewFile:
    """Read what an upload begins with. Raises PeerError."""
    first = codec.upload_part(await anext(parts, pb.UploadFileRequest()))
    if not isinstance(first, NewFile):
        raise PeerError("an upload begins with its header")
    if first.purpose is not Purpose.BATCH:
        raise PeerError(f"purpose is {first.purpose.value!r}; files for batches have purpose 'batch'")
    return NewFile(first.namespace, _shown_name(first.filename), first.purpose)


async def _chunks(parts: AsyncIterator[pb.UploadFileRequest]) -> AsyncIterator[NewFile | bytes]:
    async for part in parts:
        yield codec.upload_part(part)


def _shown_name(filename: str) -> str:
    """Drop characters that cannot be printed from the client's text; it is never used as a path."""
    return "".join(char for char in filename if char.isprintable()).strip()[:255] or "unnamed"
