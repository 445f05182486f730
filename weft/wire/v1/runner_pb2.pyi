from weft.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GatewayToRunner(_message.Message):
    __slots__ = ("hello", "start", "stop", "freeze", "following")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    FREEZE_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    hello: SessionHello
    start: Start
    stop: Stop
    freeze: Freeze
    following: _containers.RepeatedCompositeFieldContainer[GatewayToRunner]
    def __init__(self, hello: _Optional[_Union[SessionHello, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., freeze: _Optional[_Union[Freeze, _Mapping]] = ..., following: _Optional[_Iterable[_Union[GatewayToRunner, _Mapping]]] = ...) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("gateway", "incarnation")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    incarnation: str
    def __init__(self, gateway: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("request_id", "epoch", "adapter", "prompt", "emitted", "max_tokens", "reservation_tokens", "sampling", "client_request_id", "cache_salt", "rank", "adapter_bytes", "waited_ms", "delay_ms", "by_page", "leaves", "stays", "kv_to", "kv_from", "priority", "model_name", "traceparent", "parks", "draft")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CLIENT_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    BY_PAGE_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    KV_TO_FIELD_NUMBER: _ClassVar[int]
    KV_FROM_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PARKS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    adapter: str
    prompt: _containers.RepeatedScalarFieldContainer[int]
    emitted: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    reservation_tokens: int
    sampling: Sampling
    client_request_id: str
    cache_salt: str
    rank: int
    adapter_bytes: int
    waited_ms: int
    delay_ms: int
    by_page: bool
    leaves: bool
    stays: bool
    kv_to: KvTarget
    kv_from: _common_pb2.RunnerId
    priority: _common_pb2.Priority
    model_name: str
    traceparent: str
    parks: _containers.RepeatedScalarFieldContainer[str]
    draft: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., adapter: _Optional[str] = ..., prompt: _Optional[_Iterable[int]] = ..., emitted: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., reservation_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., client_request_id: _Optional[str] = ..., cache_salt: _Optional[str] = ..., rank: _Optional[int] = ..., adapter_bytes: _Optional[int] = ..., waited_ms: _Optional[int] = ..., delay_ms: _Optional[int] = ..., by_page: _Optional[bool] = ..., leaves: _Optional[bool] = ..., stays: _Optional[bool] = ..., kv_to: _Optional[_Union[KvTarget, _Mapping]] = ..., kv_from: _Optional[_Union[_common_pb2.RunnerId, _Mapping]] = ..., priority: _Optional[_Union[_common_pb2.Priority, str]] = ..., model_name: _Optional[str] = ..., traceparent: _Optional[str] = ..., parks: _Optional[_Iterable[str]] = ..., draft: _Optional[_Iterable[int]] = ...) -> None: ...

class KvTarget(_message.Message):
    __slots__ = ("runner", "address")
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    runner: _common_pb2.RunnerId
    address: str
    def __init__(self, runner: _Optional[_Union[_common_pb2.RunnerId, _Mapping]] = ..., address: _Optional[str] = ...) -> None: ...

class Freeze(_message.Message):
    __slots__ = ("request_id", "epoch", "next_epoch", "to")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    next_epoch: _common_pb2.Epoch
    to: KvTarget
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., next_epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., to: _Optional[_Union[KvTarget, _Mapping]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("seed", "choice", "temperature", "top_p", "ignore_eos", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "top_logprobs", "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "bad_words", "allowed_token_ids", "grammar", "prompt_logprobs", "pooling", "eos_token_ids")
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    seed: int
    choice: int
    temperature: float
    top_p: float
    ignore_eos: bool
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[TokenBias]
    logprobs: bool
    top_logprobs: int
    top_k: int
    min_p: float
    repetition_penalty: float
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    grammar: str
    prompt_logprobs: int
    pooling: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seed: _Optional[int] = ..., choice: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., ignore_eos: _Optional[bool] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[TokenBias, _Mapping]]] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., grammar: _Optional[str] = ..., prompt_logprobs: _Optional[int] = ..., pooling: _Optional[bool] = ..., eos_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenBias(_message.Message):
    __slots__ = ("token", "bias")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token: int
    bias: float
    def __init__(self, token: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("request_id", "epoch", "finish", "preempted")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    finish: _common_pb2.FinishReason
    preempted: bool
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., finish: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., preempted: _Optional[bool] = ...) -> None: ...

class RunnerToGateway(_message.Message):
    __slots__ = ("ready", "step", "no_capacity", "ended", "draining", "frozen", "prompt_logprobs", "pooled_state", "following")
    READY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NO_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLED_STATE_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    ready: SessionReady
    step: Step
    no_capacity: NoCapacity
    ended: Ended
    draining: Draining
    frozen: Frozen
    prompt_logprobs: PromptLogprobs
    pooled_state: PooledState
    following: _containers.RepeatedCompositeFieldContainer[RunnerToGateway]
    def __init__(self, ready: _Optional[_Union[SessionReady, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., no_capacity: _Optional[_Union[NoCapacity, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., frozen: _Optional[_Union[Frozen, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., pooled_state: _Optional[_Union[PooledState, _Mapping]] = ..., following: _Optional[_Iterable[_Union[RunnerToGateway, _Mapping]]] = ...) -> None: ...

class SessionReady(_message.Message):
    __slots__ = ("runner",)
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    runner: _common_pb2.RunnerId
    def __init__(self, runner: _Optional[_Union[_common_pb2.RunnerId, _Mapping]] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("iteration", "request_ids", "terms", "counters", "positions", "tokens", "token_counts", "finish_reasons", "doublings", "logprobs", "cached_tokens", "accepted_draft_tokens", "rejected_draft_tokens")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    DOUBLINGS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    iteration: int
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    terms: _containers.RepeatedScalarFieldContainer[int]
    counters: _containers.RepeatedScalarFieldContainer[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    finish_reasons: _containers.RepeatedScalarFieldContainer[_common_pb2.FinishReason]
    doublings: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[SequenceLogprobs]
    cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted_draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    rejected_draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, iteration: _Optional[int] = ..., request_ids: _Optional[_Iterable[str]] = ..., terms: _Optional[_Iterable[int]] = ..., counters: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., finish_reasons: _Optional[_Iterable[_Union[_common_pb2.FinishReason, str]]] = ..., doublings: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[SequenceLogprobs, _Mapping]]] = ..., cached_tokens: _Optional[_Iterable[int]] = ..., accepted_draft_tokens: _Optional[_Iterable[int]] = ..., rejected_draft_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class SequenceLogprobs(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("logprob", "top_tokens", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("request_id", "epoch", "first", "logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    first: int
    logprobs: SequenceLogprobs
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., first: _Optional[int] = ..., logprobs: _Optional[_Union[SequenceLogprobs, _Mapping]] = ...) -> None: ...

class PooledState(_message.Message):
    __slots__ = ("request_id", "epoch", "vector")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    vector: bytes
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., vector: _Optional[bytes] = ...) -> None: ...

class NoCapacity(_message.Message):
    __slots__ = ("request_id", "epoch", "free_pages", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    free_pages: int
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., free_pages: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("request_id", "epoch", "reason", "detail", "emitted_tokens")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Ended.Reason]
        DRAINED: _ClassVar[Ended.Reason]
        LOAD_FAILED: _ClassVar[Ended.Reason]
        INTERNAL: _ClassVar[Ended.Reason]
        UNKNOWN_ADAPTER: _ClassVar[Ended.Reason]
        KV_LOST: _ClassVar[Ended.Reason]
        GRAMMAR: _ClassVar[Ended.Reason]
        RUNNER_FULL: _ClassVar[Ended.Reason]
    REASON_UNSPECIFIED: Ended.Reason
    DRAINED: Ended.Reason
    LOAD_FAILED: Ended.Reason
    INTERNAL: Ended.Reason
    UNKNOWN_ADAPTER: Ended.Reason
    KV_LOST: Ended.Reason
    GRAMMAR: Ended.Reason
    RUNNER_FULL: Ended.Reason
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    reason: Ended.Reason
    detail: str
    emitted_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., reason: _Optional[_Union[Ended.Reason, str]] = ..., detail: _Optional[str] = ..., emitted_tokens: _Optional[int] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Frozen(_message.Message):
    __slots__ = ("request_id", "epoch", "emitted_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    emitted_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., emitted_tokens: _Optional[int] = ...) -> None: ...
