from weft.wire.v1 import common_pb2 as _common_pb2
from weft.wire.v1 import supervisor_pb2 as _supervisor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GatewayToScheduler(_message.Message):
    __slots__ = ("hello", "submit", "failed", "cancel", "started", "outcome_report", "resubmit_complete", "resync_routes", "limit_report", "fleet_query", "routes_applied", "runner_checked", "following")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_REPORT_FIELD_NUMBER: _ClassVar[int]
    RESUBMIT_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    RESYNC_ROUTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_REPORT_FIELD_NUMBER: _ClassVar[int]
    FLEET_QUERY_FIELD_NUMBER: _ClassVar[int]
    ROUTES_APPLIED_FIELD_NUMBER: _ClassVar[int]
    RUNNER_CHECKED_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    hello: GatewayHello
    submit: Submit
    failed: Failed
    cancel: Cancel
    started: Started
    outcome_report: OutcomeReport
    resubmit_complete: ResubmitComplete
    resync_routes: ResyncRoutes
    limit_report: LimitReport
    fleet_query: FleetQuery
    routes_applied: RoutesApplied
    runner_checked: RunnerChecked
    following: _containers.RepeatedCompositeFieldContainer[GatewayToScheduler]
    def __init__(self, hello: _Optional[_Union[GatewayHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., outcome_report: _Optional[_Union[OutcomeReport, _Mapping]] = ..., resubmit_complete: _Optional[_Union[ResubmitComplete, _Mapping]] = ..., resync_routes: _Optional[_Union[ResyncRoutes, _Mapping]] = ..., limit_report: _Optional[_Union[LimitReport, _Mapping]] = ..., fleet_query: _Optional[_Union[FleetQuery, _Mapping]] = ..., routes_applied: _Optional[_Union[RoutesApplied, _Mapping]] = ..., runner_checked: _Optional[_Union[RunnerChecked, _Mapping]] = ..., following: _Optional[_Iterable[_Union[GatewayToScheduler, _Mapping]]] = ...) -> None: ...

class GatewayHello(_message.Message):
    __slots__ = ("gateway", "applies_routes")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    APPLIES_ROUTES_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    applies_routes: bool
    def __init__(self, gateway: _Optional[str] = ..., applies_routes: _Optional[bool] = ...) -> None: ...

class RoutesApplied(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class ResubmitComplete(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResyncRoutes(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FleetQuery(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OutcomeReport(_message.Message):
    __slots__ = ("request_id", "pool", "adapter", "completion_tokens", "censored", "record", "ttft_ms", "total_ms", "model_name", "failed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CENSORED_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    pool: str
    adapter: str
    completion_tokens: int
    censored: bool
    record: bytes
    ttft_ms: int
    total_ms: int
    model_name: str
    failed: bool
    def __init__(self, request_id: _Optional[str] = ..., pool: _Optional[str] = ..., adapter: _Optional[str] = ..., completion_tokens: _Optional[int] = ..., censored: _Optional[bool] = ..., record: _Optional[bytes] = ..., ttft_ms: _Optional[int] = ..., total_ms: _Optional[int] = ..., model_name: _Optional[str] = ..., failed: _Optional[bool] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "pool", "namespace", "model_name", "adapter", "prompt_tokens", "emitted_tokens", "max_tokens", "p50_tokens", "p90_tokens", "waited_ms", "epoch", "runner", "migrations", "reservation_tokens", "start_emitted_tokens", "numerics_class", "p10_tokens", "p99_tokens", "bucket_tokens", "preemptions", "token_runner", "priority", "traceparent", "open_ended")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    P50_TOKENS_FIELD_NUMBER: _ClassVar[int]
    P90_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    START_EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_CLASS_FIELD_NUMBER: _ClassVar[int]
    P10_TOKENS_FIELD_NUMBER: _ClassVar[int]
    P99_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_RUNNER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    OPEN_ENDED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    pool: str
    namespace: str
    model_name: str
    adapter: str
    prompt_tokens: int
    emitted_tokens: int
    max_tokens: int
    p50_tokens: int
    p90_tokens: int
    waited_ms: int
    epoch: _common_pb2.Epoch
    runner: _common_pb2.RunnerId
    migrations: int
    reservation_tokens: int
    start_emitted_tokens: int
    numerics_class: str
    p10_tokens: int
    p99_tokens: int
    bucket_tokens: int
    preemptions: int
    token_runner: _common_pb2.RunnerId
    priority: _common_pb2.Priority
    traceparent: str
    open_ended: bool
    def __init__(self, request_id: _Optional[str] = ..., pool: _Optional[str] = ..., namespace: _Optional[str] = ..., model_name: _Optional[str] = ..., adapter: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., emitted_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., p50_tokens: _Optional[int] = ..., p90_tokens: _Optional[int] = ..., waited_ms: _Optional[int] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., runner: _Optional[_Union[_common_pb2.RunnerId, _Mapping]] = ..., migrations: _Optional[int] = ..., reservation_tokens: _Optional[int] = ..., start_emitted_tokens: _Optional[int] = ..., numerics_class: _Optional[str] = ..., p10_tokens: _Optional[int] = ..., p99_tokens: _Optional[int] = ..., bucket_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., token_runner: _Optional[_Union[_common_pb2.RunnerId, _Mapping]] = ..., priority: _Optional[_Union[_common_pb2.Priority, str]] = ..., traceparent: _Optional[str] = ..., open_ended: _Optional[bool] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("request_id", "epoch", "reason", "emitted_tokens", "free_pages", "detail", "runner")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Failed.Reason]
        SESSION_LOST: _ClassVar[Failed.Reason]
        NO_CAPACITY: _ClassVar[Failed.Reason]
        PREEMPTED: _ClassVar[Failed.Reason]
        DRAINED: _ClassVar[Failed.Reason]
        LOAD_FAILED: _ClassVar[Failed.Reason]
        RUNNER_ERROR: _ClassVar[Failed.Reason]
        KV_LOST: _ClassVar[Failed.Reason]
        RUNNER_FULL: _ClassVar[Failed.Reason]
    REASON_UNSPECIFIED: Failed.Reason
    SESSION_LOST: Failed.Reason
    NO_CAPACITY: Failed.Reason
    PREEMPTED: Failed.Reason
    DRAINED: Failed.Reason
    LOAD_FAILED: Failed.Reason
    RUNNER_ERROR: Failed.Reason
    KV_LOST: Failed.Reason
    RUNNER_FULL: Failed.Reason
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    reason: Failed.Reason
    emitted_tokens: int
    free_pages: int
    detail: str
    runner: _common_pb2.RunnerId
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., reason: _Optional[_Union[Failed.Reason, str]] = ..., emitted_tokens: _Optional[int] = ..., free_pages: _Optional[int] = ..., detail: _Optional[str] = ..., runner: _Optional[_Union[_common_pb2.RunnerId, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "emitted_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    emitted_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., emitted_tokens: _Optional[int] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "epoch", "handed_off")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HANDED_OFF_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    handed_off: bool
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., handed_off: _Optional[bool] = ...) -> None: ...

class SchedulerToGateway(_message.Message):
    __slots__ = ("assign", "preempt", "reject", "routes", "outcome_ack", "runner_gone", "limit_report", "fleet")
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    PREEMPT_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_ACK_FIELD_NUMBER: _ClassVar[int]
    RUNNER_GONE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_REPORT_FIELD_NUMBER: _ClassVar[int]
    FLEET_FIELD_NUMBER: _ClassVar[int]
    assign: Assign
    preempt: Preempt
    reject: Reject
    routes: Routes
    outcome_ack: OutcomeAck
    runner_gone: RunnerGone
    limit_report: LimitReport
    fleet: Fleet
    def __init__(self, assign: _Optional[_Union[Assign, _Mapping]] = ..., preempt: _Optional[_Union[Preempt, _Mapping]] = ..., reject: _Optional[_Union[Reject, _Mapping]] = ..., routes: _Optional[_Union[Routes, _Mapping]] = ..., outcome_ack: _Optional[_Union[OutcomeAck, _Mapping]] = ..., runner_gone: _Optional[_Union[RunnerGone, _Mapping]] = ..., limit_report: _Optional[_Union[LimitReport, _Mapping]] = ..., fleet: _Optional[_Union[Fleet, _Mapping]] = ...) -> None: ...

class LimitReport(_message.Message):
    __slots__ = ("gateway", "uses")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    uses: _containers.RepeatedCompositeFieldContainer[LimitUse]
    def __init__(self, gateway: _Optional[str] = ..., uses: _Optional[_Iterable[_Union[LimitUse, _Mapping]]] = ...) -> None: ...

class LimitUse(_message.Message):
    __slots__ = ("rule", "requests", "tokens", "concurrent")
    RULE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONCURRENT_FIELD_NUMBER: _ClassVar[int]
    rule: _supervisor_pb2.LimitRule
    requests: int
    tokens: int
    concurrent: int
    def __init__(self, rule: _Optional[_Union[_supervisor_pb2.LimitRule, _Mapping]] = ..., requests: _Optional[int] = ..., tokens: _Optional[int] = ..., concurrent: _Optional[int] = ...) -> None: ...

class Assign(_message.Message):
    __slots__ = ("request_id", "epoch", "runner", "address", "reservation_tokens", "numerics_class", "rank", "adapter_bytes", "token_runner", "delay_ms", "by_page", "leaves", "stays", "kv_address", "parks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_CLASS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_RUNNER_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    BY_PAGE_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PARKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    runner: _common_pb2.RunnerId
    address: str
    reservation_tokens: int
    numerics_class: str
    rank: int
    adapter_bytes: int
    token_runner: TokenRunner
    delay_ms: int
    by_page: bool
    leaves: bool
    stays: bool
    kv_address: str
    parks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., runner: _Optional[_Union[_common_pb2.RunnerId, _Mapping]] = ..., address: _Optional[str] = ..., reservation_tokens: _Optional[int] = ..., numerics_class: _Optional[str] = ..., rank: _Optional[int] = ..., adapter_bytes: _Optional[int] = ..., token_runner: _Optional[_Union[TokenRunner, _Mapping]] = ..., delay_ms: _Optional[int] = ..., by_page: _Optional[bool] = ..., leaves: _Optional[bool] = ..., stays: _Optional[bool] = ..., kv_address: _Optional[str] = ..., parks: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenRunner(_message.Message):
    __slots__ = ("runner", "address", "kv_address", "numerics_class")
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_CLASS_FIELD_NUMBER: _ClassVar[int]
    runner: _common_pb2.RunnerId
    address: str
    kv_address: str
    numerics_class: str
    def __init__(self, runner: _Optional[_Union[_common_pb2.RunnerId, _Mapping]] = ..., address: _Optional[str] = ..., kv_address: _Optional[str] = ..., numerics_class: _Optional[str] = ...) -> None: ...

class Preempt(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ...) -> None: ...

class Fleet(_message.Message):
    __slots__ = ("runners", "left_out")
    RUNNERS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    runners: _containers.RepeatedCompositeFieldContainer[FleetRunner]
    left_out: int
    def __init__(self, runners: _Optional[_Iterable[_Union[FleetRunner, _Mapping]]] = ..., left_out: _Optional[int] = ...) -> None: ...

class FleetRunner(_message.Message):
    __slots__ = ("name", "pool", "ready", "draining", "role", "sequences", "max_sequences", "best_batch", "used_pages", "free_pages", "adapter_pages", "total_pages", "page_tokens", "tokens", "pending_prompt_tokens", "adapters", "adapters_left_out", "incarnation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    BEST_BATCH_FIELD_NUMBER: _ClassVar[int]
    USED_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PENDING_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    pool: str
    ready: bool
    draining: bool
    role: str
    sequences: int
    max_sequences: int
    best_batch: int
    used_pages: int
    free_pages: int
    adapter_pages: int
    total_pages: int
    page_tokens: int
    tokens: int
    pending_prompt_tokens: int
    adapters: _containers.RepeatedCompositeFieldContainer[FleetAdapter]
    adapters_left_out: int
    incarnation: str
    def __init__(self, name: _Optional[str] = ..., pool: _Optional[str] = ..., ready: _Optional[bool] = ..., draining: _Optional[bool] = ..., role: _Optional[str] = ..., sequences: _Optional[int] = ..., max_sequences: _Optional[int] = ..., best_batch: _Optional[int] = ..., used_pages: _Optional[int] = ..., free_pages: _Optional[int] = ..., adapter_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., page_tokens: _Optional[int] = ..., tokens: _Optional[int] = ..., pending_prompt_tokens: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[FleetAdapter, _Mapping]]] = ..., adapters_left_out: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...

class FleetAdapter(_message.Message):
    __slots__ = ("digest", "tier", "running", "loading", "error")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    digest: str
    tier: _supervisor_pb2.AdapterState.Tier
    running: int
    loading: bool
    error: str
    def __init__(self, digest: _Optional[str] = ..., tier: _Optional[_Union[_supervisor_pb2.AdapterState.Tier, str]] = ..., running: _Optional[int] = ..., loading: _Optional[bool] = ..., error: _Optional[str] = ...) -> None: ...

class RunnerGone(_message.Message):
    __slots__ = ("runner", "unless_alive")
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    UNLESS_ALIVE_FIELD_NUMBER: _ClassVar[int]
    runner: _common_pb2.RunnerId
    unless_alive: bool
    def __init__(self, runner: _Optional[_Union[_common_pb2.RunnerId, _Mapping]] = ..., unless_alive: _Optional[bool] = ...) -> None: ...

class RunnerChecked(_message.Message):
    __slots__ = ("runner", "alive")
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    runner: _common_pb2.RunnerId
    alive: bool
    def __init__(self, runner: _Optional[_Union[_common_pb2.RunnerId, _Mapping]] = ..., alive: _Optional[bool] = ...) -> None: ...

class Reject(_message.Message):
    __slots__ = ("request_id", "reason", "message", "retry_after_ms")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Reject.Reason]
        QUEUE_FULL: _ClassVar[Reject.Reason]
        TOO_LARGE: _ClassVar[Reject.Reason]
        UNKNOWN_POOL: _ClassVar[Reject.Reason]
        TOO_MANY_MIGRATIONS: _ClassVar[Reject.Reason]
        ADAPTER_FAILED: _ClassVar[Reject.Reason]
        UNKNOWN_ADAPTER: _ClassVar[Reject.Reason]
        SLO_UNATTAINABLE: _ClassVar[Reject.Reason]
        RUNNER_FULL: _ClassVar[Reject.Reason]
    REASON_UNSPECIFIED: Reject.Reason
    QUEUE_FULL: Reject.Reason
    TOO_LARGE: Reject.Reason
    UNKNOWN_POOL: Reject.Reason
    TOO_MANY_MIGRATIONS: Reject.Reason
    ADAPTER_FAILED: Reject.Reason
    UNKNOWN_ADAPTER: Reject.Reason
    SLO_UNATTAINABLE: Reject.Reason
    RUNNER_FULL: Reject.Reason
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: Reject.Reason
    message: str
    retry_after_ms: int
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[_Union[Reject.Reason, str]] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class OutcomeAck(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Routes(_message.Message):
    __slots__ = ("version", "routes", "pools", "keys", "keys_known", "full", "base_version", "removed_models", "removed_pools", "removed_keys", "unserved", "removed_unserved", "more")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    KEYS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    REMOVED_MODELS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_POOLS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_KEYS_FIELD_NUMBER: _ClassVar[int]
    UNSERVED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_UNSERVED_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    version: int
    routes: _containers.RepeatedCompositeFieldContainer[Route]
    pools: _containers.RepeatedCompositeFieldContainer[PoolRoute]
    keys: _containers.RepeatedCompositeFieldContainer[KeyRoute]
    keys_known: bool
    full: bool
    base_version: int
    removed_models: _containers.RepeatedScalarFieldContainer[str]
    removed_pools: _containers.RepeatedScalarFieldContainer[str]
    removed_keys: _containers.RepeatedScalarFieldContainer[str]
    unserved: _containers.RepeatedCompositeFieldContainer[Unserved]
    removed_unserved: _containers.RepeatedScalarFieldContainer[str]
    more: bool
    def __init__(self, version: _Optional[int] = ..., routes: _Optional[_Iterable[_Union[Route, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[PoolRoute, _Mapping]]] = ..., keys: _Optional[_Iterable[_Union[KeyRoute, _Mapping]]] = ..., keys_known: _Optional[bool] = ..., full: _Optional[bool] = ..., base_version: _Optional[int] = ..., removed_models: _Optional[_Iterable[str]] = ..., removed_pools: _Optional[_Iterable[str]] = ..., removed_keys: _Optional[_Iterable[str]] = ..., unserved: _Optional[_Iterable[_Union[Unserved, _Mapping]]] = ..., removed_unserved: _Optional[_Iterable[str]] = ..., more: _Optional[bool] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("model_name", "namespace", "pool", "digest", "rank", "uid", "created_unix_s", "version", "versions", "eos_token_ids", "own_chat_template", "chat_template", "chat_template_fault")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OWN_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FAULT_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    namespace: str
    pool: str
    digest: str
    rank: int
    uid: str
    created_unix_s: int
    version: str
    versions: _containers.RepeatedCompositeFieldContainer[AdapterVersion]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    own_chat_template: bool
    chat_template: str
    chat_template_fault: str
    def __init__(self, model_name: _Optional[str] = ..., namespace: _Optional[str] = ..., pool: _Optional[str] = ..., digest: _Optional[str] = ..., rank: _Optional[int] = ..., uid: _Optional[str] = ..., created_unix_s: _Optional[int] = ..., version: _Optional[str] = ..., versions: _Optional[_Iterable[_Union[AdapterVersion, _Mapping]]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., own_chat_template: _Optional[bool] = ..., chat_template: _Optional[str] = ..., chat_template_fault: _Optional[str] = ...) -> None: ...

class AdapterVersion(_message.Message):
    __slots__ = ("digest", "rank", "bytes", "name", "weight", "eos_token_ids", "own_chat_template")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OWN_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    rank: int
    bytes: int
    name: str
    weight: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    own_chat_template: bool
    def __init__(self, digest: _Optional[str] = ..., rank: _Optional[int] = ..., bytes: _Optional[int] = ..., name: _Optional[str] = ..., weight: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., own_chat_template: _Optional[bool] = ...) -> None: ...

class Unserved(_message.Message):
    __slots__ = ("uid", "namespace", "model_name", "pool", "reason", "message")
    UID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    uid: str
    namespace: str
    model_name: str
    pool: str
    reason: str
    message: str
    def __init__(self, uid: _Optional[str] = ..., namespace: _Optional[str] = ..., model_name: _Optional[str] = ..., pool: _Optional[str] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class PoolRoute(_message.Message):
    __slots__ = ("name", "base_digest", "base_model_name", "max_context_tokens", "ready_runners", "shared_all", "shared_namespaces", "tool_call_parser", "embeds_only", "max_output_tokens", "sampling_defaults", "chat_template", "chat_template_fault", "checks_drafts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READY_RUNNERS_FIELD_NUMBER: _ClassVar[int]
    SHARED_ALL_FIELD_NUMBER: _ClassVar[int]
    SHARED_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_PARSER_FIELD_NUMBER: _ClassVar[int]
    EMBEDS_ONLY_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FAULT_FIELD_NUMBER: _ClassVar[int]
    CHECKS_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    base_digest: str
    base_model_name: str
    max_context_tokens: int
    ready_runners: int
    shared_all: bool
    shared_namespaces: _containers.RepeatedScalarFieldContainer[str]
    tool_call_parser: str
    embeds_only: bool
    max_output_tokens: int
    sampling_defaults: SamplingDefaults
    chat_template: str
    chat_template_fault: str
    checks_drafts: bool
    def __init__(self, name: _Optional[str] = ..., base_digest: _Optional[str] = ..., base_model_name: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., ready_runners: _Optional[int] = ..., shared_all: _Optional[bool] = ..., shared_namespaces: _Optional[_Iterable[str]] = ..., tool_call_parser: _Optional[str] = ..., embeds_only: _Optional[bool] = ..., max_output_tokens: _Optional[int] = ..., sampling_defaults: _Optional[_Union[SamplingDefaults, _Mapping]] = ..., chat_template: _Optional[str] = ..., chat_template_fault: _Optional[str] = ..., checks_drafts: _Optional[bool] = ...) -> None: ...

class SamplingDefaults(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class KeyRoute(_message.Message):
    __slots__ = ("key_hash", "namespace", "key_id", "scope", "models", "expires_unix_ms", "limits")
    KEY_HASH_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    key_hash: str
    namespace: str
    key_id: str
    scope: _supervisor_pb2.KeyScope
    models: _containers.RepeatedScalarFieldContainer[str]
    expires_unix_ms: int
    limits: _containers.RepeatedCompositeFieldContainer[_supervisor_pb2.LimitRule]
    def __init__(self, key_hash: _Optional[str] = ..., namespace: _Optional[str] = ..., key_id: _Optional[str] = ..., scope: _Optional[_Union[_supervisor_pb2.KeyScope, str]] = ..., models: _Optional[_Iterable[str]] = ..., expires_unix_ms: _Optional[int] = ..., limits: _Optional[_Iterable[_Union[_supervisor_pb2.LimitRule, _Mapping]]] = ...) -> None: ...

class SupervisorToScheduler(_message.Message):
    __slots__ = ("hello", "report", "outcome_ack", "keys", "keys_confirmed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_ACK_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    KEYS_CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    hello: SupervisorHello
    report: ClusterReport
    outcome_ack: OutcomeAck
    keys: Keys
    keys_confirmed: KeysConfirmed
    def __init__(self, hello: _Optional[_Union[SupervisorHello, _Mapping]] = ..., report: _Optional[_Union[ClusterReport, _Mapping]] = ..., outcome_ack: _Optional[_Union[OutcomeAck, _Mapping]] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ..., keys_confirmed: _Optional[_Union[KeysConfirmed, _Mapping]] = ...) -> None: ...

class SupervisorHello(_message.Message):
    __slots__ = ("supervisor", "highest_term")
    SUPERVISOR_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_TERM_FIELD_NUMBER: _ClassVar[int]
    supervisor: str
    highest_term: int
    def __init__(self, supervisor: _Optional[str] = ..., highest_term: _Optional[int] = ...) -> None: ...

class ClusterReport(_message.Message):
    __slots__ = ("lost", "preempts", "reports")
    LOST_FIELD_NUMBER: _ClassVar[int]
    PREEMPTS_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedCompositeFieldContainer[_common_pb2.RunnerId]
    preempts: _containers.RepeatedCompositeFieldContainer[PreemptDecision]
    reports: _containers.RepeatedCompositeFieldContainer[_supervisor_pb2.ReportedRunner]
    def __init__(self, lost: _Optional[_Iterable[_Union[_common_pb2.RunnerId, _Mapping]]] = ..., preempts: _Optional[_Iterable[_Union[PreemptDecision, _Mapping]]] = ..., reports: _Optional[_Iterable[_Union[_supervisor_pb2.ReportedRunner, _Mapping]]] = ...) -> None: ...

class PreemptDecision(_message.Message):
    __slots__ = ("runner", "request_id", "epoch", "for_request_id", "reservation_tokens")
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FOR_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    runner: _common_pb2.RunnerId
    request_id: str
    epoch: _common_pb2.Epoch
    for_request_id: str
    reservation_tokens: int
    def __init__(self, runner: _Optional[_Union[_common_pb2.RunnerId, _Mapping]] = ..., request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., for_request_id: _Optional[str] = ..., reservation_tokens: _Optional[int] = ...) -> None: ...

class Keys(_message.Message):
    __slots__ = ("keys", "version")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[KeyRoute]
    version: int
    def __init__(self, keys: _Optional[_Iterable[_Union[KeyRoute, _Mapping]]] = ..., version: _Optional[int] = ...) -> None: ...

class KeysConfirmed(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class SchedulerToSupervisor(_message.Message):
    __slots__ = ("hello", "orders", "outcome_report", "resync", "following")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_REPORT_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    hello: SchedulerHello
    orders: RunnerOrders
    outcome_report: OutcomeReport
    resync: _supervisor_pb2.Resync
    following: _containers.RepeatedCompositeFieldContainer[SchedulerToSupervisor]
    def __init__(self, hello: _Optional[_Union[SchedulerHello, _Mapping]] = ..., orders: _Optional[_Union[RunnerOrders, _Mapping]] = ..., outcome_report: _Optional[_Union[OutcomeReport, _Mapping]] = ..., resync: _Optional[_Union[_supervisor_pb2.Resync, _Mapping]] = ..., following: _Optional[_Iterable[_Union[SchedulerToSupervisor, _Mapping]]] = ...) -> None: ...

class SchedulerHello(_message.Message):
    __slots__ = ("term",)
    TERM_FIELD_NUMBER: _ClassVar[int]
    term: int
    def __init__(self, term: _Optional[int] = ...) -> None: ...

class RunnerOrders(_message.Message):
    __slots__ = ("runner", "order")
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    runner: _common_pb2.RunnerId
    order: _supervisor_pb2.RunnerOrder
    def __init__(self, runner: _Optional[_Union[_common_pb2.RunnerId, _Mapping]] = ..., order: _Optional[_Union[_supervisor_pb2.RunnerOrder, _Mapping]] = ...) -> None: ...

class RegistryToScheduler(_message.Message):
    __slots__ = ("version", "snapshot", "pools", "adapters", "removed_pools", "removed_adapters", "term")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_POOLS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    version: int
    snapshot: bool
    pools: _containers.RepeatedCompositeFieldContainer[PoolDesired]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterDesired]
    removed_pools: _containers.RepeatedScalarFieldContainer[str]
    removed_adapters: _containers.RepeatedScalarFieldContainer[str]
    term: int
    def __init__(self, version: _Optional[int] = ..., snapshot: _Optional[bool] = ..., pools: _Optional[_Iterable[_Union[PoolDesired, _Mapping]]] = ..., adapters: _Optional[_Iterable[_Union[AdapterDesired, _Mapping]]] = ..., removed_pools: _Optional[_Iterable[str]] = ..., removed_adapters: _Optional[_Iterable[str]] = ..., term: _Optional[int] = ...) -> None: ...

class PoolDesired(_message.Message):
    __slots__ = ("route", "max_queue", "queue", "reservation", "created_unix_s", "min_runners", "drain_s", "max_runners", "idle_s", "consolidation", "tenant_weights", "slo_ttft_ms", "slo_token_time_ms", "slo_reject", "phases", "kv_across_classes", "groups", "generation")
    class TenantWeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    MIN_RUNNERS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNERS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    CONSOLIDATION_FIELD_NUMBER: _ClassVar[int]
    TENANT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SLO_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    SLO_TOKEN_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    SLO_REJECT_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    KV_ACROSS_CLASSES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    route: PoolRoute
    max_queue: int
    queue: str
    reservation: str
    created_unix_s: int
    min_runners: int
    drain_s: int
    max_runners: int
    idle_s: int
    consolidation: str
    tenant_weights: _containers.ScalarMap[str, int]
    slo_ttft_ms: int
    slo_token_time_ms: int
    slo_reject: bool
    phases: str
    kv_across_classes: bool
    groups: _containers.RepeatedCompositeFieldContainer[PhaseGroups]
    generation: int
    def __init__(self, route: _Optional[_Union[PoolRoute, _Mapping]] = ..., max_queue: _Optional[int] = ..., queue: _Optional[str] = ..., reservation: _Optional[str] = ..., created_unix_s: _Optional[int] = ..., min_runners: _Optional[int] = ..., drain_s: _Optional[int] = ..., max_runners: _Optional[int] = ..., idle_s: _Optional[int] = ..., consolidation: _Optional[str] = ..., tenant_weights: _Optional[_Mapping[str, int]] = ..., slo_ttft_ms: _Optional[int] = ..., slo_token_time_ms: _Optional[int] = ..., slo_reject: _Optional[bool] = ..., phases: _Optional[str] = ..., kv_across_classes: _Optional[bool] = ..., groups: _Optional[_Iterable[_Union[PhaseGroups, _Mapping]]] = ..., generation: _Optional[int] = ...) -> None: ...

class PhaseGroups(_message.Message):
    __slots__ = ("phase", "min_runners", "max_runners")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ANY: _ClassVar[PhaseGroups.Phase]
        PROMPT: _ClassVar[PhaseGroups.Phase]
        TOKEN: _ClassVar[PhaseGroups.Phase]
    ANY: PhaseGroups.Phase
    PROMPT: PhaseGroups.Phase
    TOKEN: PhaseGroups.Phase
    PHASE_FIELD_NUMBER: _ClassVar[int]
    MIN_RUNNERS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNERS_FIELD_NUMBER: _ClassVar[int]
    phase: PhaseGroups.Phase
    min_runners: int
    max_runners: int
    def __init__(self, phase: _Optional[_Union[PhaseGroups.Phase, str]] = ..., min_runners: _Optional[int] = ..., max_runners: _Optional[int] = ...) -> None: ...

class AdapterDesired(_message.Message):
    __slots__ = ("route", "bytes", "pinned", "reason", "message", "tier", "generation")
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    route: Route
    bytes: int
    pinned: bool
    reason: str
    message: str
    tier: _supervisor_pb2.AdapterState.Tier
    generation: int
    def __init__(self, route: _Optional[_Union[Route, _Mapping]] = ..., bytes: _Optional[int] = ..., pinned: _Optional[bool] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., tier: _Optional[_Union[_supervisor_pb2.AdapterState.Tier, str]] = ..., generation: _Optional[int] = ...) -> None: ...

class SchedulerToRegistry(_message.Message):
    __slots__ = ("pool", "adapter")
    POOL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    pool: PoolStatus
    adapter: AdapterStatus
    def __init__(self, pool: _Optional[_Union[PoolStatus, _Mapping]] = ..., adapter: _Optional[_Union[AdapterStatus, _Mapping]] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("pool", "ready_runners", "wanted_runners", "victims", "slo", "roles", "wanted", "kv_pages", "observed_generation")
    POOL_FIELD_NUMBER: _ClassVar[int]
    READY_RUNNERS_FIELD_NUMBER: _ClassVar[int]
    WANTED_RUNNERS_FIELD_NUMBER: _ClassVar[int]
    VICTIMS_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    pool: str
    ready_runners: int
    wanted_runners: int
    victims: _containers.RepeatedScalarFieldContainer[str]
    slo: SloAttainment
    roles: RoleCounts
    wanted: PhaseCounts
    kv_pages: int
    observed_generation: int
    def __init__(self, pool: _Optional[str] = ..., ready_runners: _Optional[int] = ..., wanted_runners: _Optional[int] = ..., victims: _Optional[_Iterable[str]] = ..., slo: _Optional[_Union[SloAttainment, _Mapping]] = ..., roles: _Optional[_Union[RoleCounts, _Mapping]] = ..., wanted: _Optional[_Union[PhaseCounts, _Mapping]] = ..., kv_pages: _Optional[int] = ..., observed_generation: _Optional[int] = ...) -> None: ...

class PhaseCounts(_message.Message):
    __slots__ = ("prompt", "token", "any")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ANY_FIELD_NUMBER: _ClassVar[int]
    prompt: int
    token: int
    any: int
    def __init__(self, prompt: _Optional[int] = ..., token: _Optional[int] = ..., any: _Optional[int] = ...) -> None: ...

class RoleCounts(_message.Message):
    __slots__ = ("prompt", "token", "mixed", "why")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    MIXED_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    prompt: int
    token: int
    mixed: int
    why: str
    def __init__(self, prompt: _Optional[int] = ..., token: _Optional[int] = ..., mixed: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class SloAttainment(_message.Message):
    __slots__ = ("attained", "ttft", "token_time")
    ATTAINED_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TIME_FIELD_NUMBER: _ClassVar[int]
    attained: int
    ttft: int
    token_time: int
    def __init__(self, attained: _Optional[int] = ..., ttft: _Optional[int] = ..., token_time: _Optional[int] = ...) -> None: ...

class AdapterStatus(_message.Message):
    __slots__ = ("uid", "digest", "routed", "unavailable_runners", "load_errors", "load_failed", "removed", "canary", "observed_generation")
    UID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROUTED_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_RUNNERS_FIELD_NUMBER: _ClassVar[int]
    LOAD_ERRORS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FAILED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    uid: str
    digest: str
    routed: bool
    unavailable_runners: int
    load_errors: _containers.RepeatedScalarFieldContainer[str]
    load_failed: bool
    removed: bool
    canary: CanaryCounts
    observed_generation: int
    def __init__(self, uid: _Optional[str] = ..., digest: _Optional[str] = ..., routed: _Optional[bool] = ..., unavailable_runners: _Optional[int] = ..., load_errors: _Optional[_Iterable[str]] = ..., load_failed: _Optional[bool] = ..., removed: _Optional[bool] = ..., canary: _Optional[_Union[CanaryCounts, _Mapping]] = ..., observed_generation: _Optional[int] = ...) -> None: ...

class CanaryCounts(_message.Message):
    __slots__ = ("digest", "requests", "failed", "stable_requests", "stable_failed")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    STABLE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    STABLE_FAILED_FIELD_NUMBER: _ClassVar[int]
    digest: str
    requests: int
    failed: int
    stable_requests: int
    stable_failed: int
    def __init__(self, digest: _Optional[str] = ..., requests: _Optional[int] = ..., failed: _Optional[int] = ..., stable_requests: _Optional[int] = ..., stable_failed: _Optional[int] = ...) -> None: ...
