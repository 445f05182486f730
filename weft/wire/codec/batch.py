"""Gateway <-> batch service: files, batches, and the stream of lines."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from weft.domain.batch import (
    MAX_BATCH_ERRORS,
    BatchError,
    BatchJob,
    BatchStatus,
    CancelLines,
    KeptResponse,
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
from weft.wire.codec.direction import Direction, Entry
from weft.wire.codec.values import MAX_DETAIL, MAX_TOKENS, enum, inverted, named, number, same_named, text
from weft.wire.errors import PeerError
from weft.wire.v1 import batch_pb2 as pb

MAX_CHUNK_BYTES = 1 << 20  # of a file, in one message
MAX_BODY_BYTES = 48 << 20  # of a request or an answer: beneath gRPC's 64 MiB
MAX_RESPONSE_BYTES = 8 << 20
MESSAGE_BYTES = 1 << 20  # of bodies in one message, unless one alone has more
MAX_FILENAME = 1_000
MAX_LINE = 1 << 31
MAX_LINES_AT_ONCE = 1 << 16
MAX_PAGE = 10_000  # OpenAI's for files
METADATA_PAIRS, METADATA_KEY, METADATA_VALUE = 16, 64, 512  # OpenAI's
STATUS: dict[BatchStatus, Any] = {status: pb.BatchStatus.Value(f"BATCH_STATUS_{status.name}") for status in BatchStatus}
STATUSES = inverted(STATUS)
PURPOSES = {purpose.value: purpose for purpose in Purpose}


# ------------------------------------------------------------------ files


def fill_new_file(new: NewFile, m: pb.UploadFileHeader) -> None:
    m.namespace, m.filename, m.purpose = new.namespace, new.filename, new.purpose.value


def new_file(m: pb.UploadFileHeader) -> NewFile:
    """Raises PeerError."""
    return NewFile(text(m.namespace, "a namespace"), text(m.filename, "a filename", MAX_FILENAME), _purpose(m.purpose))


def upload_header(new: NewFile) -> pb.UploadFileRequest:
    request = pb.UploadFileRequest()
    fill_new_file(new, request.header)
    return request


def upload_chunk(chunk: bytes) -> pb.UploadFileRequest:
    assert len(chunk) <= MAX_CHUNK_BYTES, "a chunk is at most 1 MiB"
    return pb.UploadFileRequest(chunk=chunk)


def upload_part(m: pb.UploadFileRequest) -> NewFile | bytes:
    """The header, or a chunk. Raises PeerError."""
    match m.WhichOneof("message"):
        case "header":
            return new_file(m.header)
        case "chunk":
            return _chunk(m.chunk)
        case _:
            raise PeerError("a gateway sent an unknown part of an upload")


def file_chunk(m: pb.FileChunk) -> bytes:
    """Raises PeerError."""
    return _chunk(m.chunk)


def _chunk(chunk: bytes) -> bytes:
    number(len(chunk), "a chunk's length", MAX_CHUNK_BYTES)
    return chunk


def file_message(file: StoredFile) -> pb.File:
    return pb.File(purpose=file.purpose.value, **same_named(file, "purpose"))


def stored_file(m: pb.File) -> StoredFile:
    """Raises PeerError."""
    file_id, filename = named(m.file_id, "a file's id"), text(m.filename, "a filename", MAX_FILENAME)
    return StoredFile(file_id, filename, _purpose(m.purpose), m.bytes, m.created_unix_s)


def file_request(namespace: str, file_id: str) -> pb.FileRequest:
    return pb.FileRequest(namespace=namespace, file_id=file_id)


def file_named(m: pb.FileRequest) -> tuple[str, str]:
    """(namespace, file id). Raises PeerError."""
    return text(m.namespace, "a namespace"), named(m.file_id, "a file's id")


def file_list(files: Sequence[StoredFile], has_more: bool) -> pb.FileList:
    return pb.FileList(files=map(file_message, files), has_more=has_more)


def stored_files(m: pb.FileList) -> tuple[list[StoredFile], bool]:
    """The files, and whether there are more. Raises PeerError."""
    return [stored_file(file) for file in m.files], m.has_more


def list_request(page: Page) -> pb.ListRequest:
    purpose = page.purpose.value if page.purpose else ""
    return pb.ListRequest(purpose=purpose, **same_named(page, "purpose"))


def page(m: pb.ListRequest) -> Page:
    """Raises PeerError."""
    return Page(
        namespace=text(m.namespace, "a namespace"),
        limit=number(m.limit, "a list's limit", MAX_PAGE, least=1),
        after=text(m.after, "an id"),
        purpose=_purpose(m.purpose) if m.purpose else None,
        oldest_first=m.oldest_first,
    )


def _purpose(value: str) -> Purpose:
    if (purpose := PURPOSES.get(value)) is None:
        raise PeerError(f"purpose {value[:60]!r} is not {' or '.join(map(repr, PURPOSES))}")
    return purpose


# ------------------------------------------------------------------ responses


def keep_response_request(new: KeptResponse) -> pb.KeepResponseRequest:
    return pb.KeepResponseRequest(**same_named(new))


def kept_response(m: pb.KeepResponseRequest) -> KeptResponse:
    """Raises PeerError."""
    number(len(m.body), "a response's length", MAX_RESPONSE_BYTES)
    return KeptResponse(
        namespace=text(m.namespace, "a namespace"),
        response_id=named(m.response_id, "a response's id"),
        previous_id=text(m.previous_id, "a response's id"),
        body=m.body,
    )


def response_request(namespace: str, response_id: str, *, alone: bool = False) -> pb.ResponseRequest:
    return pb.ResponseRequest(namespace=namespace, response_id=response_id, alone=alone)


def response_named(m: pb.ResponseRequest) -> tuple[str, str]:
    """(namespace, response id). Raises PeerError."""
    return text(m.namespace, "a namespace"), named(m.response_id, "a response's id")


# ------------------------------------------------------------------ batches


def create_batch_request(new: NewBatch) -> pb.CreateBatchRequest:
    return pb.CreateBatchRequest(metadata=dict(new.metadata), **same_named(new, "metadata"))


def new_batch(m: pb.CreateBatchRequest) -> NewBatch:
    """Raises PeerError."""
    return NewBatch(
        namespace=text(m.namespace, "a namespace"),
        input_file_id=named(m.input_file_id, "input_file_id"),
        endpoint=named(m.endpoint, "endpoint"),
        completion_window=named(m.completion_window, "completion_window"),
        metadata=_metadata(m.metadata),
    )


def _metadata(given: Mapping[str, str]) -> dict[str, str]:
    number(len(given), "the number of metadata pairs", METADATA_PAIRS)
    return {
        text(key, "a key of metadata", METADATA_KEY): text(given[key], "a value of metadata", METADATA_VALUE)
        for key in sorted(given)
    }


def batch_request(namespace: str, batch_id: str) -> pb.BatchRequest:
    return pb.BatchRequest(namespace=namespace, batch_id=batch_id)


def batch_named(m: pb.BatchRequest) -> tuple[str, str]:
    """(namespace, batch id). Raises PeerError."""
    return text(m.namespace, "a namespace"), named(m.batch_id, "a batch's id")


def batch_message(job: BatchJob) -> pb.BatchJob:
    return pb.BatchJob(
        status=STATUS[job.status],
        errors=[pb.BatchError(**same_named(error)) for error in job.errors],
        metadata=dict(job.metadata),
        **same_named(job, "status", "errors", "metadata"),
    )


def batch_job(m: pb.BatchJob) -> BatchJob:
    """Raises PeerError."""
    number(len(m.errors), "the number of a batch's errors", MAX_BATCH_ERRORS)
    return BatchJob(
        batch_id=named(m.batch_id, "a batch's id"),
        input_file_id=named(m.input_file_id, "a file's id"),
        endpoint=text(m.endpoint, "an endpoint"),
        completion_window=text(m.completion_window, "a completion window"),
        status=enum(STATUSES, m.status, "a batch's status"),
        output_file_id=text(m.output_file_id, "a file's id"),
        error_file_id=text(m.error_file_id, "a file's id"),
        errors=tuple([_error(error) for error in m.errors]),
        metadata=_metadata(m.metadata),
        **{name: getattr(m, name) for name in _PLAIN},
    )


_PLAIN = (
    "created_unix_s", "expires_unix_s", "in_progress_unix_s", "finalizing_unix_s", "completed_unix_s", "failed_unix_s",
    "expired_unix_s", "cancelling_unix_s", "cancelled_unix_s", "total", "completed", "failed", "prompt_tokens",
    "completion_tokens",
)  # fmt: skip


def _error(m: pb.BatchError) -> BatchError:
    code, message = text(m.code, "an error's code"), text(m.message, "an error's message", MAX_DETAIL)
    return BatchError(code, message, m.line, text(m.param, "an error's param"))


def batch_list(jobs: Sequence[BatchJob], has_more: bool) -> pb.BatchList:
    return pb.BatchList(batches=map(batch_message, jobs), has_more=has_more)


def batch_jobs(m: pb.BatchList) -> tuple[list[BatchJob], bool]:
    """The batches, and whether there are more. Raises PeerError."""
    return [batch_job(job) for job in m.batches], m.has_more


# ------------------------------------------------------------------ lines


L = TypeVar("L", LineResult, RunLine)


def in_messages(lines: Iterable[L]) -> Iterator[list[L]]:
    """Lines in parts that fit a message."""
    part, size = list[L](), 0
    for line in lines:
        if part and size + len(line.body) > MESSAGE_BYTES:
            yield part
            part, size = [], 0
        part.append(line)
        size += len(line.body)
    if part:
        yield part


def _fill_hello(hello: LinesHello, m: pb.LinesHello) -> None:
    m.gateway_id, m.max_lines = hello.gateway_id, hello.max_lines


def _fill_ends(ends: LineEnds, m: pb.LineEnds) -> None:
    for result in ends.results:
        m.results.add(**same_named(result))
    for released in ends.released:
        m.released.add(batch_id=released.batch_id, line=released.line, reason=released.reason[:MAX_DETAIL])


def _fill_run(run: RunLines, m: pb.RunLines) -> None:
    for line in run.lines:
        m.lines.add(**same_named(line))


def _fill_cancel(cancel: CancelLines, m: pb.CancelLines) -> None:
    m.batch_id = cancel.batch_id
    m.lines.extend(cancel.lines)


def _hello(m: pb.LinesHello) -> LinesHello:
    lines = number(m.max_lines, "a gateway's lines at once", MAX_LINES_AT_ONCE)
    return LinesHello(named(m.gateway_id, "a gateway's id", 128), lines)


def _ends(m: pb.LineEnds) -> LineEnds:
    return LineEnds([_result(result) for result in m.results], [_released(released) for released in m.released])


def _result(m: pb.LineResult) -> LineResult:
    return LineResult(
        *_line(m),
        status=number(m.status, "a line's status", 599, least=100),
        request_id=text(m.request_id, "a request id"),
        body=_body(m.body),
        prompt_tokens=number(m.prompt_tokens, "prompt_tokens", MAX_TOKENS),
        completion_tokens=number(m.completion_tokens, "completion_tokens", MAX_TOKENS),
    )


def _released(m: pb.LineReleased) -> LineReleased:
    return LineReleased(*_line(m), m.reason[:MAX_DETAIL])


def _run(m: pb.RunLines) -> RunLines:
    return RunLines([_run_line(line) for line in m.lines])


def _run_line(m: pb.RunLine) -> RunLine:
    namespace, endpoint = text(m.namespace, "a namespace"), named(m.endpoint, "an endpoint")
    return RunLine(*_line(m), namespace, endpoint, _body(m.body), text(m.traceparent, "a trace context"))


def _cancel(m: pb.CancelLines) -> CancelLines:
    return CancelLines(named(m.batch_id, "a batch's id"), [_line_number(line) for line in m.lines])


def _line(m: pb.LineResult | pb.LineReleased | pb.RunLine) -> tuple[str, int]:
    return named(m.batch_id, "a batch's id"), _line_number(m.line)


def _line_number(line: int) -> int:
    return number(line, "a line's number", MAX_LINE, least=1)


def _body(body: bytes) -> bytes:
    number(len(body), "a body's length", MAX_BODY_BYTES)
    return body


GATEWAY_TO_BATCH: Direction[pb.GatewayToBatch, LinesHello | LineEnds] = Direction(
    pb.GatewayToBatch,
    "gateway",
    Entry("hello", LinesHello, _fill_hello, _hello),
    Entry("ends", LineEnds, _fill_ends, _ends),
)
BATCH_TO_GATEWAY: Direction[pb.BatchToGateway, RunLines | CancelLines] = Direction(
    pb.BatchToGateway,
    "batch service",
    Entry("run", RunLines, _fill_run, _run),
    Entry("cancel", CancelLines, _fill_cancel, _cancel),
)
