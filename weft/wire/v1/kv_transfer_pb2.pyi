from weft.wire.v1 import common_pb2 as _common_pb2
from weft.wire.v1 import runner_pb2 as _runner_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvFromSender(_message.Message):
    __slots__ = ("hello", "offer", "pages", "complete")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    hello: KvHello
    offer: KvOffer
    pages: KvPages
    complete: KvComplete
    def __init__(self, hello: _Optional[_Union[KvHello, _Mapping]] = ..., offer: _Optional[_Union[KvOffer, _Mapping]] = ..., pages: _Optional[_Union[KvPages, _Mapping]] = ..., complete: _Optional[_Union[KvComplete, _Mapping]] = ...) -> None: ...

class KvFromReceiver(_message.Message):
    __slots__ = ("ready", "accept", "refuse", "ack")
    READY_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    ready: KvReady
    accept: KvAccept
    refuse: KvRefuse
    ack: KvAck
    def __init__(self, ready: _Optional[_Union[KvReady, _Mapping]] = ..., accept: _Optional[_Union[KvAccept, _Mapping]] = ..., refuse: _Optional[_Union[KvRefuse, _Mapping]] = ..., ack: _Optional[_Union[KvAck, _Mapping]] = ...) -> None: ...

class KvHello(_message.Message):
    __slots__ = ("runner", "incarnation", "pool", "base_digest", "kv_layout")
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    runner: _common_pb2.RunnerId
    incarnation: str
    pool: str
    base_digest: str
    kv_layout: str
    def __init__(self, runner: _Optional[_Union[_common_pb2.RunnerId, _Mapping]] = ..., incarnation: _Optional[str] = ..., pool: _Optional[str] = ..., base_digest: _Optional[str] = ..., kv_layout: _Optional[str] = ...) -> None: ...

class KvReady(_message.Message):
    __slots__ = ("runner", "shard_addresses")
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    SHARD_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    runner: _common_pb2.RunnerId
    shard_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, runner: _Optional[_Union[_common_pb2.RunnerId, _Mapping]] = ..., shard_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class KvOffer(_message.Message):
    __slots__ = ("request_id", "epoch", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    adapter: str
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., adapter: _Optional[str] = ...) -> None: ...

class KvAccept(_message.Message):
    __slots__ = ("request_id", "epoch", "first_page")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    first_page: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., first_page: _Optional[int] = ...) -> None: ...

class KvRefuse(_message.Message):
    __slots__ = ("request_id", "epoch", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class KvPages(_message.Message):
    __slots__ = ("request_id", "epoch", "first_page", "pages", "first_layer", "layers", "bytes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    first_page: int
    pages: int
    first_layer: int
    layers: int
    bytes: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., first_page: _Optional[int] = ..., pages: _Optional[int] = ..., first_layer: _Optional[int] = ..., layers: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class KvComplete(_message.Message):
    __slots__ = ("request_id", "epoch", "in_kv", "tokens", "logprobs", "cached_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IN_KV_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    in_kv: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _runner_pb2.SequenceLogprobs
    cached_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., in_kv: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[_runner_pb2.SequenceLogprobs, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class KvAck(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ...) -> None: ...
