"""Files and batches of tenants (the Batch API), and the lines that gateways run for the batch service.

gateway --LinesHello, LineEnds--> batch service --RunLines, CancelLines--> gateway

A tenant is a namespace. Ids are drawn by the batch service and have 128 random bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")  # of lines
COMPLETION_WINDOW, COMPLETION_WINDOW_S = "24h", 24 * 3600  # the only one
MAX_BATCH_ERRORS = 50  # that a failed batch lists


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

    namespace: str
    filename: str
    purpose: Purpose


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A whole file."""

    file_id: str
    filename: str
    purpose: Purpose
    bytes: int
    created_unix_s: int


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list: at most `limit`, behind the id `after` ("": from the beginning), newest first."""

    namespace: str
    limit: int
    after: str = ""
    purpose: Purpose | None = None  # of files; None: all
    oldest_first: bool = False


# ------------------------------------------------------------------ batches


@dataclass(frozen=True, slots=True)
class NewBatch:
    """What a tenant orders."""

    namespace: str
    input_file_id: str
    endpoint: str
    completion_window: str = COMPLETION_WINDOW
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class BatchError:
    """Why a batch failed. `line` counts from 1; 0: the whole file."""

    code: str
    message: str
    line: int = 0
    param: str = ""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A batch as its tenant sees it. Times are 0 and ids "" for what has not happened, or never will."""

    batch_id: str
    input_file_id: str
    endpoint: str
    completion_window: str
    status: BatchStatus
    created_unix_s: int
    expires_unix_s: int
    output_file_id: str = ""
    error_file_id: str = ""
    errors: Sequence[BatchError] = ()
    in_progress_unix_s: int = 0
    finalizing_unix_s: int = 0
    completed_unix_s: int = 0
    failed_unix_s: int = 0
    expired_unix_s: int = 0
    cancelling_unix_s: int = 0
    cancelled_unix_s: int = 0
    total: int = 0  # lines
    completed: int = 0
    failed: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    prompt_tokens: int = 0  # of its completed lines
    completion_tokens: int = 0


# ------------------------------------------------------------------ lines


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response of `/v1/responses` that later ones may continue. `previous_id` "": it began its conversation."""

    namespace: str
    response_id: str
    previous_id: str
    body: bytes  # of the gateway: what was asked, what was answered


@dataclass(frozen=True, slots=True)
class LinesHello:
    """First message of a gateway, and again where its room has changed: how many lines it runs at once (0: none)."""

    gateway_id: str
    max_lines: int


@dataclass(frozen=True, slots=True)
class LineResult:
    """A line's answer. `status` is HTTP's, `body` the JSON that a client of the endpoint would have got."""

    batch_id: str
    line: int
    status: int
    request_id: str
    body: bytes
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LineReleased:
    """The gateway gives the line back without an answer."""

    batch_id: str
    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class LineEnds:
    """Lines that the gateway no longer runs."""

    results: Sequence[LineResult] = ()
    released: Sequence[LineReleased] = ()


@dataclass(frozen=True, slots=True)
class RunLine:
    """Run this line. `body`: JSON of the request. `traceparent`: of the batch's span; "": the batch is not sampled."""

    batch_id: str
    line: int
    namespace: str
    endpoint: str
    body: bytes
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class RunLines:
    """Run each of these."""

    lines: Sequence[RunLine]


@dataclass(frozen=True, slots=True)
class CancelLines:
    """The lines' batch has ended: answer nothing."""

    batch_id: str
    lines: Sequence[int]
