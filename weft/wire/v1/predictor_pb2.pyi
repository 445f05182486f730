from weft.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PredictRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[PredictItem]
    def __init__(self, items: _Optional[_Iterable[_Union[PredictItem, _Mapping]]] = ...) -> None: ...

class PredictItem(_message.Message):
    __slots__ = ("request_id", "prompt_text", "pool", "model_name", "prompt_tokens", "max_tokens", "namespace", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_text: str
    pool: str
    model_name: str
    prompt_tokens: int
    max_tokens: int
    namespace: str
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_text: _Optional[str] = ..., pool: _Optional[str] = ..., model_name: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., namespace: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class PredictResponse(_message.Message):
    __slots__ = ("items", "model_version")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Prediction]
    model_version: str
    def __init__(self, items: _Optional[_Iterable[_Union[Prediction, _Mapping]]] = ..., model_version: _Optional[str] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("request_id", "p50_tokens", "p90_tokens", "bucket_tokens", "p10_tokens", "p99_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    P50_TOKENS_FIELD_NUMBER: _ClassVar[int]
    P90_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    P10_TOKENS_FIELD_NUMBER: _ClassVar[int]
    P99_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    p50_tokens: int
    p90_tokens: int
    bucket_tokens: int
    p10_tokens: int
    p99_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., p50_tokens: _Optional[int] = ..., p90_tokens: _Optional[int] = ..., bucket_tokens: _Optional[int] = ..., p10_tokens: _Optional[int] = ..., p99_tokens: _Optional[int] = ...) -> None: ...

class ObserveRequest(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[_common_pb2.Outcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[_common_pb2.Outcome, _Mapping]]] = ...) -> None: ...

class ObserveAck(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...
