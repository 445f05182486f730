from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_INTERACTIVE: _ClassVar[Priority]
    PRIORITY_BATCH: _ClassVar[Priority]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_FAILED: _ClassVar[FinishReason]
PRIORITY_INTERACTIVE: Priority
PRIORITY_BATCH: Priority
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_FAILED: FinishReason

class Epoch(_message.Message):
    __slots__ = ("term", "counter")
    TERM_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    term: int
    counter: int
    def __init__(self, term: _Optional[int] = ..., counter: _Optional[int] = ...) -> None: ...

class RunnerId(_message.Message):
    __slots__ = ("uuid", "incarnation")
    UUID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    incarnation: str
    def __init__(self, uuid: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("request_id", "pool", "namespace", "model_name", "adapter", "prompt_tokens", "completion_tokens", "finish", "error", "censored", "predicted_p50_tokens", "predicted_p90_tokens", "model_version", "ttft_ms", "total_ms", "migrations", "doublings", "finished_unix_ms", "choice", "key_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CENSORED_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_P50_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_P90_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    DOUBLINGS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    pool: str
    namespace: str
    model_name: str
    adapter: str
    prompt_tokens: int
    completion_tokens: int
    finish: FinishReason
    error: str
    censored: bool
    predicted_p50_tokens: int
    predicted_p90_tokens: int
    model_version: str
    ttft_ms: int
    total_ms: int
    migrations: int
    doublings: int
    finished_unix_ms: int
    choice: int
    key_id: str
    def __init__(self, request_id: _Optional[str] = ..., pool: _Optional[str] = ..., namespace: _Optional[str] = ..., model_name: _Optional[str] = ..., adapter: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., finish: _Optional[_Union[FinishReason, str]] = ..., error: _Optional[str] = ..., censored: _Optional[bool] = ..., predicted_p50_tokens: _Optional[int] = ..., predicted_p90_tokens: _Optional[int] = ..., model_version: _Optional[str] = ..., ttft_ms: _Optional[int] = ..., total_ms: _Optional[int] = ..., migrations: _Optional[int] = ..., doublings: _Optional[int] = ..., finished_unix_ms: _Optional[int] = ..., choice: _Optional[int] = ..., key_id: _Optional[str] = ...) -> None: ...
