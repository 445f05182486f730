"""Gateway <-> batch service: files, batches, and the stream of lines."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from weft.domain.batch import (
    MAX_CHUNK_BYTES,
    BatchJob,
    CancelLines,
    KeptResponse,
    LineEnds,
    LineResult,
    LinesHello,
    NewBatch,
    NewFile,
    Page,
    RunLine,
    RunLines,
    StoredFile,
)
from weft.wire.codec.direction import Direction
from weft.wire.codec.pairs import Pair
from weft.wire.codec.values import check_non_empty, check_number, check_text
from weft.wire.errors import PeerError
from weft.wire.v1 import batch_pb2 as pb

STORAGE_FULL = "weft-reason", "storage_full"  # trailing metadata of a call that is UNAVAILABLE for want of room
MESSAGE_BYTES = 1 << 20  # of bodies in one message, unless one alone has more
NEW_FILE = Pair(NewFile, pb.UploadFileHeader)
FILE = Pair(StoredFile, pb.File)
PAGE = Pair(Page, pb.ListRequest)
NEW_BATCH = Pair(NewBatch, pb.CreateBatchRequest)
BATCH = Pair(BatchJob, pb.BatchJob)
RESPONSE = Pair(KeptResponse, pb.KeepResponseRequest)


# ------------------------------------------------------------------ files


def upload_header(new: NewFile) -> pb.UploadFileRequest:
    return pb.UploadFileRequest(header=NEW_FILE.encode(new))


def upload_chunk(chunk: bytes) -> pb.UploadFileRequest:
    assert len(chunk) <= MAX_CHUNK_BYTES, "a chunk is at most 1 MiB"
    return pb.UploadFileRequest(chunk=chunk)


def upload_part(m: pb.UploadFileRequest) -> NewFile | bytes:
    """Read the header of an upload, or a chunk. Raises PeerError."""
    match m.WhichOneof("message"):
        case "header":
            return NEW_FILE.decode(m.header)
        case "chunk":
            return file_chunk(m)
        case _:
            raise PeerError("a gateway sent an unknown part of an upload")


def file_chunk(m: pb.UploadFileRequest | pb.FileChunk) -> bytes:
    """Read a chunk of a file. Raises PeerError."""
    check_number(len(m.chunk), "a chunk's length", MAX_CHUNK_BYTES)
    return m.chunk


def file_named(m: pb.FileRequest) -> tuple[str, str]:
    """Read (namespace, file id). Raises PeerError."""
    return check_text(m.namespace, "a namespace"), check_non_empty(m.file_id, "a file's id")


def file_list(files: Sequence[StoredFile], has_more: bool) -> pb.FileList:
    return pb.FileList(files=map(FILE.encode, files), has_more=has_more)


def stored_files(m: pb.FileList) -> tuple[list[StoredFile], bool]:
    """Read the files, and whether there are more. Raises PeerError."""
    return [FILE.decode(file) for file in m.files], m.has_more


# ------------------------------------------------------------------ responses and batches


def response_named(m: pb.ResponseRequest) -> tuple[str, str]:
    """Read (namespace, response id). Raises PeerError."""
    return check_text(m.namespace, "a namespace"), check_non_empty(m.response_id, "a response's id")


def batch_named(m: pb.BatchRequest) -> tuple[str, str]:
    """Read (namespace, batch id). Raises PeerError."""
    return check_text(m.namespace, "a namespace"), check_non_empty(m.batch_id, "a batch's id")


def batch_list(jobs: Sequence[BatchJob], has_more: bool) -> pb.BatchList:
    return pb.BatchList(batches=map(BATCH.encode, jobs), has_more=has_more)


def batch_jobs(m: pb.BatchList) -> tuple[list[BatchJob], bool]:
    """Read the batches, and whether there are more. Raises PeerError."""
    return [BATCH.decode(job) for job in m.batches], m.has_more


# ------------------------------------------------------------------ lines


L = TypeVar("L", LineResult, RunLine)


def in_messages(lines: Iterable[L]) -> Iterator[list[L]]:
    """Split lines into parts that fit a message."""
    part, size = list[L](), 0
    for line in lines:
        if part and size + len(line.body) > MESSAGE_BYTES:
            yield part
            part, size = [], 0
        part.append(line)
        size += len(line.body)
    if part:
        yield part


GATEWAY_TO_BATCH: Direction[pb.GatewayToBatch, LinesHello | LineEnds] = Direction(
    pb.GatewayToBatch, "gateway", hello=LinesHello, ends=LineEnds
)
BATCH_TO_GATEWAY: Direction[pb.BatchToGateway, RunLines | CancelLines] = Direction(
    pb.BatchToGateway, "batch service", run=RunLines, cancel=CancelLines
)
