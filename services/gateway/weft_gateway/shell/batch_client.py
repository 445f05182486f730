"""Calls to the batch service for callers of the API. What it refuses becomes an error here and nowhere else."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar, cast

import grpc
import grpc.aio

from weft.domain.batch import BatchJob, KeptResponse, NewBatch, NewFile, Page, StoredFile
from weft.wire.codec import batch as codec
from weft.wire.streams import channel
from weft.wire.tls import Tls
from weft.wire.v1 import batch_pb2, batch_pb2_grpc
from weft_gateway.errors import (
    ApiError,
    BadRequest,
    InsufficientStorage,
    Internal,
    NotConfigured,
    NotFound,
    QuotaReached,
    ServiceUnavailable,
    TooLate,
)

CALL_S = 15.0  # of everything but the bytes of files
_ERRORS: dict[grpc.StatusCode, type[ApiError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: BadRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QuotaReached,
    grpc.StatusCode.FAILED_PRECONDITION: TooLate,
}
_LATER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
UploadCall: TypeAlias = "grpc.aio.StreamUnaryCall[batch_pb2.UploadFileRequest, batch_pb2.File]"
T = TypeVar("T")


class BatchClient:
    """One channel to the batch service; `address` "": there is none. Each call raises ApiError."""

    def __init__(self, address: str, tls: Tls | None) -> None:
        self._channel = channel(address, tls, "batch", hurried=False) if address else None
        self._stub = batch_pb2_grpc.BatchStub(self._channel) if self._channel else None

    @property
    def configured(self) -> bool:
        return self._stub is not None

    @property
    def stub(self) -> batch_pb2_grpc.BatchStub:
        """Raises NotConfigured."""
        if self._stub is None:
            raise NotConfigured(
                "Files, batches and kept responses are not served here: this gateway has no batch service. "
                "Start it with `--batch HOST:PORT`; the chart does with `batch.enabled: true`.",
                code="batch_not_configured",
            )
        return self._stub

    async def close(self) -> None:
        if self._channel:
            await self._channel.close(None)

    async def upload(self, new: NewFile, chunks: AsyncIterator[bytes]) -> StoredFile:
        """Send a file as its chunks come. An exception of `chunks` ends the upload: nothing is kept."""
        call = self.stub.UploadFile()
        try:
            with _refusals():
                try:
                    await _write(call, codec.upload_header(new))
                    async for chunk in chunks:
                        if chunk:
                            await _write(call, codec.upload_chunk(chunk))
                    await _write(call, codec.upload_chunk(b""))  # it is whole
                    await call.done_writing()
                except asyncio.InvalidStateError:
                    pass  # the service has ended the call: its status says why
                return codec.FILE.decode(await call)
        finally:
            call.cancel()

    async def file(self, namespace: str, file_id: str) -> StoredFile:
        request = batch_pb2.FileRequest(namespace=namespace, file_id=file_id)
        return codec.FILE.decode(await _called(self.stub.GetFile(request, timeout=CALL_S)))

    async def files(self, page: Page) -> tuple[list[StoredFile], bool]:
        return codec.stored_files(await _called(self.stub.ListFiles(codec.PAGE.encode(page), timeout=CALL_S)))

    async def delete_file(self, namespace: str, file_id: str) -> StoredFile:
        request = batch_pb2.FileRequest(namespace=namespace, file_id=file_id)
        return codec.FILE.decode(await _called(self.stub.DeleteFile(request, timeout=CALL_S)))

    async def read(self, namespace: str, file_id: str) -> AsyncGenerator[bytes]:
        """The bytes of a file."""
        with _refusals():
            call = self.stub.ReadFile(batch_pb2.FileRequest(namespace=namespace, file_id=file_id))
            try:
                async for message in call:
                    yield codec.file_chunk(message)
            finally:
                call.cancel()

    async def keep_response(self, new: KeptResponse) -> None:
        await _called(self.stub.KeepResponse(codec.RESPONSE.encode(new), timeout=CALL_S))

    async def conversation(self, namespace: str, response_id: str, *, alone: bool = False) -> Sequence[bytes]:
        """The body of a response, and unless `alone` those of all before it, the eldest first."""
        request = batch_pb2.ResponseRequest(namespace=namespace, response_id=response_id, alone=alone)
        return (await _called(self.stub.GetConversation(request, timeout=CALL_S))).bodies

    async def delete_response(self, namespace: str, response_id: str) -> None:
        request = batch_pb2.ResponseRequest(namespace=namespace, response_id=response_id)
        await _called(self.stub.DeleteResponse(request, timeout=CALL_S))

    async def create(self, new: NewBatch) -> BatchJob:
        return codec.BATCH.decode(await _called(self.stub.CreateBatch(codec.NEW_BATCH.encode(new), timeout=CALL_S)))

    async def batch(self, namespace: str, batch_id: str) -> BatchJob:
        request = batch_pb2.BatchRequest(namespace=namespace, batch_id=batch_id)
        return codec.BATCH.decode(await _called(self.stub.GetBatch(request, timeout=CALL_S)))

    async def batches(self, page: Page) -> tuple[list[BatchJob], bool]:
        return codec.batch_jobs(await _called(self.stub.ListBatches(codec.PAGE.encode(page), timeout=CALL_S)))

    async def cancel(self, namespace: str, batch_id: str) -> BatchJob:
        request = batch_pb2.BatchRequest(namespace=namespace, batch_id=batch_id)
        return codec.BATCH.decode(await _called(self.stub.CancelBatch(request, timeout=CALL_S)))


async def _write(call: UploadCall, message: batch_pb2.UploadFileRequest) -> None:
    """Raises ServiceUnavailable: of a call that ends while it is written to, gRPC loses the status."""
    try:
        await call.write(message)
    except grpc.aio.AioRpcError as error:
        text = "The batch service ended the upload; nothing of it is kept."
        raise ServiceUnavailable(text, code="batch_unavailable", retry_after_ms=1000) from error


async def _called(call: Awaitable[T]) -> T:
    with _refusals():
        return await call


@contextmanager
def _refusals() -> Generator[None]:
    """The sentence of a refusal is written for the client; any other failure is named for the operator's logs only."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        code, details, trailers = error.code(), error.details() or "", [*cast(Any, error.trailing_metadata() or ())]
        if kind := _ERRORS.get(code):
            raise kind(details) from error
        if code is grpc.StatusCode.ABORTED:
            text = "The store of files and batches is busy; nothing was changed. Try again."
            raise ServiceUnavailable(text, code="batch_busy", retry_after_ms=1000) from error
        if codec.STORAGE_FULL in trailers:
            text = f"The batch service's storage is full: {details}. Nothing was stored; what is stored can be read."
            raise InsufficientStorage(text, code="batch_full") from error
        if code in _LATER:
            text = (
                "The batch service does not answer; files and batches are kept, and running batches go on once it does."
            )
            raise ServiceUnavailable(text, code="batch_unavailable", retry_after_ms=1000) from error
        raise Internal(f"The batch service failed ({code.name}); its logs say why.") from error
