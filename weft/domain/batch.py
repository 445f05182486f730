"""Files and batches of tenants (the Batch API), and the lines that gateways run for the batch service.

gateway --LinesHello, LineEnds--> batch service --RunLines, CancelLines--> gateway

A tenant is a namespace. Ids are drawn by the batch service and have 128 random bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from weft.domain.bounds import (
    MAX_DETAIL_CHARS,
    MAX_NAME_CHARS,
    Any32,
    Any64,
    Bound,
    Detail,
    ListedOf,
    Name,
    Namespace,
    Text,
    Tokens,
    Trace,
)

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")  # of lines
COMPLETION_WINDOW, COMPLETION_WINDOW_S = "24h", 24 * 3600  # the only one
MAX_BATCH_ERRORS = 50  # that a failed batch lists
MAX_FILE_BYTES = 200 << 20  # of an uploaded file, as at OpenAI: the gateway and the batch service refuse a larger one
MAX_CHUNK_BYTES = 1 << 20  # of a file, in one message
MAX_BODY_BYTES = 48 << 20  # of a request or an answer: beneath gRPC's 64 MiB
MAX_CONVERSATION_BYTES = 4 << 20  # of a stored response with its input, and of all that one request continues
MAX_FILENAME = 1_000
MAX_LINES_AT_ONCE = 1 << 16
MAX_PAGE_ENTRIES = 10_000  # OpenAI's for files
METADATA_PAIRS, METADATA_KEY, METADATA_VALUE = 16, 64, 512  # OpenAI's
Filename = Annotated[str, Bound(MAX_FILENAME, subject="a filename")]
FileId = Annotated[str, Bound(MAX_NAME_CHARS, 1, "a file's id")]
BatchId = Annotated[str, Bound(MAX_NAME_CHARS, 1, "a batch's id")]
ResponseId = Annotated[str, Bound(MAX_NAME_CHARS, 1, "a response's id")]
Line = Annotated[int, Bound(1 << 31, 1, "a line's number")]
Chunk = Annotated[bytes, Bound(MAX_CHUNK_BYTES, subject="a chunk's length")]
Body = Annotated[bytes, Bound(MAX_BODY_BYTES, subject="a body's length")]
MetadataText = Annotated[str, Bound(METADATA_VALUE, subject="a value of metadata")]
MetadataKey = Annotated[str, Bound(METADATA_KEY, subject="a key of metadata")]
Metadata = Annotated[Mapping[MetadataKey, MetadataText], Bound(METADATA_PAIRS, subject="the number of metadata pairs")]


class Purpose(Enum):
    """What a file is for."""

    BATCH = "batch"  # a tenant's input
    BATCH_OUTPUT = "batch_output"  # written by the batch service: answers, or errors


class BatchStatus(Enum):
    """The life of a batch, in OpenAI's words."""

    VALIDATING = "validating"  # its input is read
    FAILED = "failed"  # no line of its input can run
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"  # its output is written
    COMPLETED = "completed"
    EXPIRED = "expired"  # its window ended: finished lines are in its output, all others among its errors
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in ENDED


ENDED = frozenset((BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED))


# ------------------------------------------------------------------ files


@dataclass(frozen=True, slots=True)
class NewFile:
    """What an upload begins with. `filename` is the client's text, never a path."""

    namespace: Namespace
    filename: Filename
    purpose: Purpose


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A whole file."""

    file_id: FileId
    filename: Filename
    purpose: Purpose
    bytes: Any64
    created_unix_s: Any64


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list: at most `limit` entries behind the id `after` ("": from the beginning), newest first."""

    namespace: Namespace
    limit: Annotated[int, Bound(MAX_PAGE_ENTRIES, 1, "a list's limit")]
    after: Text = ""
    purpose: Purpose | None = None  # of files; None: all
    oldest_first: bool = False


# ------------------------------------------------------------------ batches


@dataclass(frozen=True, slots=True)
class NewBatch:
    """What a tenant orders."""

    namespace: Namespace
    input_file_id: Name
    endpoint: Name
    completion_window: Name = COMPLETION_WINDOW
    metadata: Metadata = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class BatchError:
    """Why a batch failed. `line` counts from 1; 0: the whole file."""

    code: Text
    message: Annotated[str, Bound(MAX_DETAIL_CHARS, subject="an error's message")]
    line: Any32 = 0
    param: Text = ""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A batch as its tenant sees it. Times are 0 and ids "" for what has not happened, or never will."""

    batch_id: BatchId
    input_file_id: Name
    endpoint: Text
    completion_window: Text
    status: BatchStatus
    created_unix_s: Any64
    expires_unix_s: Any64
    output_file_id: Text = ""
    error_file_id: Text = ""
    errors: Annotated[Sequence[BatchError], Bound(MAX_BATCH_ERRORS, subject="the number of a batch's errors")] = ()
    in_progress_unix_s: Any64 = 0
    finalizing_unix_s: Any64 = 0
    completed_unix_s: Any64 = 0
    failed_unix_s: Any64 = 0
    expired_unix_s: Any64 = 0
    cancelling_unix_s: Any64 = 0
    cancelled_unix_s: Any64 = 0
    total: Any32 = 0  # lines
    completed: Any32 = 0
    failed: Any32 = 0
    metadata: Metadata = field(default_factory=dict[str, str])
    prompt_tokens: Any64 = 0  # of its completed lines
    completion_tokens: Any64 = 0
    cached_tokens: Any64 = 0  # of the prompts
    reasoning_tokens: Any64 = 0  # of the answers


# ------------------------------------------------------------------ lines


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response of `/v1/responses` that later ones may continue. `previous_id`: "" for the first."""

    namespace: Namespace
    response_id: ResponseId
    previous_id: Annotated[str, Bound(MAX_NAME_CHARS, subject="a response's id")]
    # The gateway's own: what was asked, what was answered.
    body: Annotated[bytes, Bound(MAX_CONVERSATION_BYTES, subject="a response's length")]


def no_response(response_id: str) -> str:
    """Return the refusal of a response that its caller may not read, or that is not stored: one text for both."""
    return f"there is no response {response_id}: it was not kept, was deleted or has expired"


@dataclass(frozen=True, slots=True)
class LinesHello:
    """First message of a gateway, and again where its room has changed: how many lines it runs at once (0: none)."""

    gateway_id: Annotated[str, Bound(128, 1, "a gateway's id")]
    max_lines: Annotated[int, Bound(MAX_LINES_AT_ONCE, subject="a gateway's lines at once")]


@dataclass(frozen=True, slots=True)
class LineResult:
    """A line's answer. `status` is HTTP's, `body` the JSON that a client of the endpoint would have got."""

    batch_id: BatchId
    line: Line
    status: Annotated[int, Bound(599, 100, "a line's status")]
    request_id: Text
    body: Body
    prompt_tokens: Tokens = 0
    completion_tokens: Tokens = 0
    cached_tokens: Tokens = 0
    reasoning_tokens: Tokens = 0


@dataclass(frozen=True, slots=True)
class LineReleased:
    """The gateway gives the line back without an answer."""

    batch_id: BatchId
    line: Line
    reason: Detail


@dataclass(frozen=True, slots=True)
class LineEnds:
    """Lines that the gateway no longer runs."""

    results: ListedOf[LineResult] = ()
    released: ListedOf[LineReleased] = ()


@dataclass(frozen=True, slots=True)
class RunLine:
    """Run this line. `body`: JSON of the request. `traceparent`: of the batch's span; "": the batch is not sampled."""

    batch_id: BatchId
    line: Line
    namespace: Namespace
    endpoint: Name
    body: Body
    traceparent: Trace = ""


@dataclass(frozen=True, slots=True)
class RunLines:
    """Run each of these."""

    lines: ListedOf[RunLine]


@dataclass(frozen=True, slots=True)
class CancelLines:
    """The lines' batch has ended: answer nothing."""

    batch_id: BatchId
    lines: ListedOf[Line]
