from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BatchStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BATCH_STATUS_UNSPECIFIED: _ClassVar[BatchStatus]
    BATCH_STATUS_VALIDATING: _ClassVar[BatchStatus]
    BATCH_STATUS_FAILED: _ClassVar[BatchStatus]
    BATCH_STATUS_IN_PROGRESS: _ClassVar[BatchStatus]
    BATCH_STATUS_FINALIZING: _ClassVar[BatchStatus]
    BATCH_STATUS_COMPLETED: _ClassVar[BatchStatus]
    BATCH_STATUS_EXPIRED: _ClassVar[BatchStatus]
    BATCH_STATUS_CANCELLING: _ClassVar[BatchStatus]
    BATCH_STATUS_CANCELLED: _ClassVar[BatchStatus]
BATCH_STATUS_UNSPECIFIED: BatchStatus
BATCH_STATUS_VALIDATING: BatchStatus
BATCH_STATUS_FAILED: BatchStatus
BATCH_STATUS_IN_PROGRESS: BatchStatus
BATCH_STATUS_FINALIZING: BatchStatus
BATCH_STATUS_COMPLETED: BatchStatus
BATCH_STATUS_EXPIRED: BatchStatus
BATCH_STATUS_CANCELLING: BatchStatus
BATCH_STATUS_CANCELLED: BatchStatus

class UploadFileRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: UploadFileHeader
    chunk: bytes
    def __init__(self, header: _Optional[_Union[UploadFileHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class UploadFileHeader(_message.Message):
    __slots__ = ("namespace", "filename", "purpose")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FILENAME_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    filename: str
    purpose: str
    def __init__(self, namespace: _Optional[str] = ..., filename: _Optional[str] = ..., purpose: _Optional[str] = ...) -> None: ...

class File(_message.Message):
    __slots__ = ("file_id", "filename", "purpose", "bytes", "created_unix_s")
    FILE_ID_FIELD_NUMBER: _ClassVar[int]
    FILENAME_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    file_id: str
    filename: str
    purpose: str
    bytes: int
    created_unix_s: int
    def __init__(self, file_id: _Optional[str] = ..., filename: _Optional[str] = ..., purpose: _Optional[str] = ..., bytes: _Optional[int] = ..., created_unix_s: _Optional[int] = ...) -> None: ...

class FileRequest(_message.Message):
    __slots__ = ("namespace", "file_id")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FILE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    file_id: str
    def __init__(self, namespace: _Optional[str] = ..., file_id: _Optional[str] = ...) -> None: ...

class FileChunk(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    def __init__(self, chunk: _Optional[bytes] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("namespace", "after", "limit", "purpose", "oldest_first")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    after: str
    limit: int
    purpose: str
    oldest_first: bool
    def __init__(self, namespace: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ..., purpose: _Optional[str] = ..., oldest_first: _Optional[bool] = ...) -> None: ...

class FileList(_message.Message):
    __slots__ = ("files", "has_more")
    FILES_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[File]
    has_more: bool
    def __init__(self, files: _Optional[_Iterable[_Union[File, _Mapping]]] = ..., has_more: _Optional[bool] = ...) -> None: ...

class KeepResponseRequest(_message.Message):
    __slots__ = ("namespace", "response_id", "previous_id", "body")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_ID_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_ID_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    response_id: str
    previous_id: str
    body: bytes
    def __init__(self, namespace: _Optional[str] = ..., response_id: _Optional[str] = ..., previous_id: _Optional[str] = ..., body: _Optional[bytes] = ...) -> None: ...

class KeepResponseAnswer(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResponseRequest(_message.Message):
    __slots__ = ("namespace", "response_id", "alone")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_ID_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    response_id: str
    alone: bool
    def __init__(self, namespace: _Optional[str] = ..., response_id: _Optional[str] = ..., alone: _Optional[bool] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("bodies",)
    BODIES_FIELD_NUMBER: _ClassVar[int]
    bodies: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, bodies: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DeleteResponseAnswer(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CreateBatchRequest(_message.Message):
    __slots__ = ("namespace", "input_file_id", "endpoint", "completion_window", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    INPUT_FILE_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_WINDOW_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, namespace: _Optional[str] = ..., input_file_id: _Optional[str] = ..., endpoint: _Optional[str] = ..., completion_window: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class BatchRequest(_message.Message):
    __slots__ = ("namespace", "batch_id")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    batch_id: str
    def __init__(self, namespace: _Optional[str] = ..., batch_id: _Optional[str] = ...) -> None: ...

class BatchJob(_message.Message):
    __slots__ = ("batch_id", "input_file_id", "endpoint", "completion_window", "status", "output_file_id", "error_file_id", "errors", "created_unix_s", "in_progress_unix_s", "expires_unix_s", "finalizing_unix_s", "completed_unix_s", "failed_unix_s", "expired_unix_s", "cancelling_unix_s", "cancelled_unix_s", "total", "completed", "failed", "metadata", "prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    INPUT_FILE_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_WINDOW_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FILE_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FILE_ID_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    IN_PROGRESS_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    FINALIZING_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    FAILED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CANCELLING_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    input_file_id: str
    endpoint: str
    completion_window: str
    status: BatchStatus
    output_file_id: str
    error_file_id: str
    errors: _containers.RepeatedCompositeFieldContainer[BatchError]
    created_unix_s: int
    in_progress_unix_s: int
    expires_unix_s: int
    finalizing_unix_s: int
    completed_unix_s: int
    failed_unix_s: int
    expired_unix_s: int
    cancelling_unix_s: int
    cancelled_unix_s: int
    total: int
    completed: int
    failed: int
    metadata: _containers.ScalarMap[str, str]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    def __init__(self, batch_id: _Optional[str] = ..., input_file_id: _Optional[str] = ..., endpoint: _Optional[str] = ..., completion_window: _Optional[str] = ..., status: _Optional[_Union[BatchStatus, str]] = ..., output_file_id: _Optional[str] = ..., error_file_id: _Optional[str] = ..., errors: _Optional[_Iterable[_Union[BatchError, _Mapping]]] = ..., created_unix_s: _Optional[int] = ..., in_progress_unix_s: _Optional[int] = ..., expires_unix_s: _Optional[int] = ..., finalizing_unix_s: _Optional[int] = ..., completed_unix_s: _Optional[int] = ..., failed_unix_s: _Optional[int] = ..., expired_unix_s: _Optional[int] = ..., cancelling_unix_s: _Optional[int] = ..., cancelled_unix_s: _Optional[int] = ..., total: _Optional[int] = ..., completed: _Optional[int] = ..., failed: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ...) -> None: ...

class BatchError(_message.Message):
    __slots__ = ("code", "message", "line", "param")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    line: int
    param: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., line: _Optional[int] = ..., param: _Optional[str] = ...) -> None: ...

class BatchList(_message.Message):
    __slots__ = ("batches", "has_more")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[BatchJob]
    has_more: bool
    def __init__(self, batches: _Optional[_Iterable[_Union[BatchJob, _Mapping]]] = ..., has_more: _Optional[bool] = ...) -> None: ...

class GatewayToBatch(_message.Message):
    __slots__ = ("hello", "ends")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    hello: LinesHello
    ends: LineEnds
    def __init__(self, hello: _Optional[_Union[LinesHello, _Mapping]] = ..., ends: _Optional[_Union[LineEnds, _Mapping]] = ...) -> None: ...

class LinesHello(_message.Message):
    __slots__ = ("gateway_id", "max_lines")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_LINES_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    max_lines: int
    def __init__(self, gateway_id: _Optional[str] = ..., max_lines: _Optional[int] = ...) -> None: ...

class LineEnds(_message.Message):
    __slots__ = ("results", "released")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[LineResult]
    released: _containers.RepeatedCompositeFieldContainer[LineReleased]
    def __init__(self, results: _Optional[_Iterable[_Union[LineResult, _Mapping]]] = ..., released: _Optional[_Iterable[_Union[LineReleased, _Mapping]]] = ...) -> None: ...

class LineResult(_message.Message):
    __slots__ = ("batch_id", "line", "status", "request_id", "body", "prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    line: int
    status: int
    request_id: str
    body: bytes
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    def __init__(self, batch_id: _Optional[str] = ..., line: _Optional[int] = ..., status: _Optional[int] = ..., request_id: _Optional[str] = ..., body: _Optional[bytes] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ...) -> None: ...

class LineReleased(_message.Message):
    __slots__ = ("batch_id", "line", "reason")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    line: int
    reason: str
    def __init__(self, batch_id: _Optional[str] = ..., line: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class BatchToGateway(_message.Message):
    __slots__ = ("run", "cancel")
    RUN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    run: RunLines
    cancel: CancelLines
    def __init__(self, run: _Optional[_Union[RunLines, _Mapping]] = ..., cancel: _Optional[_Union[CancelLines, _Mapping]] = ...) -> None: ...

class RunLines(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedCompositeFieldContainer[RunLine]
    def __init__(self, lines: _Optional[_Iterable[_Union[RunLine, _Mapping]]] = ...) -> None: ...

class RunLine(_message.Message):
    __slots__ = ("batch_id", "line", "namespace", "endpoint", "body", "traceparent")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    line: int
    namespace: str
    endpoint: str
    body: bytes
    traceparent: str
    def __init__(self, batch_id: _Optional[str] = ..., line: _Optional[int] = ..., namespace: _Optional[str] = ..., endpoint: _Optional[str] = ..., body: _Optional[bytes] = ..., traceparent: _Optional[str] = ...) -> None: ...

class CancelLines(_message.Message):
    __slots__ = ("batch_id", "lines")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    lines: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, batch_id: _Optional[str] = ..., lines: _Optional[_Iterable[int]] = ...) -> None: ...
