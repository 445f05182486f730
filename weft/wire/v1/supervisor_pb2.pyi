from weft.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_MIXED: _ClassVar[Role]
    ROLE_PROMPT: _ClassVar[Role]
    ROLE_TOKEN: _ClassVar[Role]

class Parking(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PARKING_NONE: _ClassVar[Parking]
    PARKING_PARKED: _ClassVar[Parking]
    PARKING_OVER: _ClassVar[Parking]

class KeyScope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KEY_SCOPE_INFERENCE: _ClassVar[KeyScope]
    KEY_SCOPE_READ_ONLY: _ClassVar[KeyScope]
    KEY_SCOPE_METRICS: _ClassVar[KeyScope]
    KEY_SCOPE_PLATFORM: _ClassVar[KeyScope]
ROLE_UNSPECIFIED: Role
ROLE_MIXED: Role
ROLE_PROMPT: Role
ROLE_TOKEN: Role
PARKING_NONE: Parking
PARKING_PARKED: Parking
PARKING_OVER: Parking
KEY_SCOPE_INFERENCE: KeyScope
KEY_SCOPE_READ_ONLY: KeyScope
KEY_SCOPE_METRICS: KeyScope
KEY_SCOPE_PLATFORM: KeyScope

class RunnerToSupervisor(_message.Message):
    __slots__ = ("hello", "report", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: RunnerHello
    report: RunnerReport
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[RunnerHello, _Mapping]] = ..., report: _Optional[_Union[RunnerReport, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class RunnerHello(_message.Message):
    __slots__ = ("runner", "address", "pool", "base_digest", "numerics_class", "page_tokens", "total_pages", "max_sequences", "max_adapters", "max_rank", "max_context_tokens", "name", "best_batch", "step_ms_1", "step_ms_best", "prefill_tokens_per_s", "page_bytes", "kv_address", "kv_layout", "role", "kv_bytes_per_s", "swaps", "checks_drafts")
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_CLASS_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEST_BATCH_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_1_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_BEST_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SWAPS_FIELD_NUMBER: _ClassVar[int]
    CHECKS_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    runner: _common_pb2.RunnerId
    address: str
    pool: str
    base_digest: str
    numerics_class: str
    page_tokens: int
    total_pages: int
    max_sequences: int
    max_adapters: int
    max_rank: int
    max_context_tokens: int
    name: str
    best_batch: int
    step_ms_1: float
    step_ms_best: float
    prefill_tokens_per_s: float
    page_bytes: int
    kv_address: str
    kv_layout: str
    role: Role
    kv_bytes_per_s: float
    swaps: bool
    checks_drafts: bool
    def __init__(self, runner: _Optional[_Union[_common_pb2.RunnerId, _Mapping]] = ..., address: _Optional[str] = ..., pool: _Optional[str] = ..., base_digest: _Optional[str] = ..., numerics_class: _Optional[str] = ..., page_tokens: _Optional[int] = ..., total_pages: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_adapters: _Optional[int] = ..., max_rank: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., name: _Optional[str] = ..., best_batch: _Optional[int] = ..., step_ms_1: _Optional[float] = ..., step_ms_best: _Optional[float] = ..., prefill_tokens_per_s: _Optional[float] = ..., page_bytes: _Optional[int] = ..., kv_address: _Optional[str] = ..., kv_layout: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., kv_bytes_per_s: _Optional[float] = ..., swaps: _Optional[bool] = ..., checks_drafts: _Optional[bool] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RunnerReport(_message.Message):
    __slots__ = ("version", "full", "free_pages", "used_pages", "adapter_pages", "draining", "ready", "desired_version", "iterations", "forwards", "grown_pages", "doublings", "tokens", "prefix_reused_tokens", "role", "pending_prompt_tokens", "offload", "drafts", "accepted_tokens", "sequences", "ended", "adapters", "removed_adapters", "overruns", "progress")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    USED_PAGES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_PAGES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DESIRED_VERSION_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    GROWN_PAGES_FIELD_NUMBER: _ClassVar[int]
    DOUBLINGS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PENDING_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OFFLOAD_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    OVERRUNS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    version: int
    full: bool
    free_pages: int
    used_pages: int
    adapter_pages: int
    draining: bool
    ready: bool
    desired_version: int
    iterations: int
    forwards: int
    grown_pages: int
    doublings: int
    tokens: int
    prefix_reused_tokens: int
    role: Role
    pending_prompt_tokens: int
    offload: OffloadState
    drafts: int
    accepted_tokens: int
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceState]
    ended: _containers.RepeatedScalarFieldContainer[str]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterState]
    removed_adapters: _containers.RepeatedScalarFieldContainer[str]
    overruns: _containers.RepeatedCompositeFieldContainer[Overrun]
    progress: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, version: _Optional[int] = ..., full: _Optional[bool] = ..., free_pages: _Optional[int] = ..., used_pages: _Optional[int] = ..., adapter_pages: _Optional[int] = ..., draining: _Optional[bool] = ..., ready: _Optional[bool] = ..., desired_version: _Optional[int] = ..., iterations: _Optional[int] = ..., forwards: _Optional[int] = ..., grown_pages: _Optional[int] = ..., doublings: _Optional[int] = ..., tokens: _Optional[int] = ..., prefix_reused_tokens: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., pending_prompt_tokens: _Optional[int] = ..., offload: _Optional[_Union[OffloadState, _Mapping]] = ..., drafts: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[SequenceState, _Mapping]]] = ..., ended: _Optional[_Iterable[str]] = ..., adapters: _Optional[_Iterable[_Union[AdapterState, _Mapping]]] = ..., removed_adapters: _Optional[_Iterable[str]] = ..., overruns: _Optional[_Iterable[_Union[Overrun, _Mapping]]] = ..., progress: _Optional[_Iterable[int]] = ...) -> None: ...

class OffloadState(_message.Message):
    __slots__ = ("resident_share", "disk_bytes_per_s", "predicted_ms", "measured_ms", "alone_ms", "disk_bound")
    RESIDENT_SHARE_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_MS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_MS_FIELD_NUMBER: _ClassVar[int]
    ALONE_MS_FIELD_NUMBER: _ClassVar[int]
    DISK_BOUND_FIELD_NUMBER: _ClassVar[int]
    resident_share: float
    disk_bytes_per_s: float
    predicted_ms: float
    measured_ms: float
    alone_ms: float
    disk_bound: bool
    def __init__(self, resident_share: _Optional[float] = ..., disk_bytes_per_s: _Optional[float] = ..., predicted_ms: _Optional[float] = ..., measured_ms: _Optional[float] = ..., alone_ms: _Optional[float] = ..., disk_bound: _Optional[bool] = ...) -> None: ...

class ReportedRunner(_message.Message):
    __slots__ = ("runner", "report", "spec")
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    runner: _common_pb2.RunnerId
    report: RunnerReport
    spec: RunnerHello
    def __init__(self, runner: _Optional[_Union[_common_pb2.RunnerId, _Mapping]] = ..., report: _Optional[_Union[RunnerReport, _Mapping]] = ..., spec: _Optional[_Union[RunnerHello, _Mapping]] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ("runner",)
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    runner: _common_pb2.RunnerId
    def __init__(self, runner: _Optional[_Union[_common_pb2.RunnerId, _Mapping]] = ...) -> None: ...

class SequenceState(_message.Message):
    __slots__ = ("request_id", "epoch", "gateway", "adapter", "reserved_pages", "arrived_ms", "reservation_tokens", "stays", "priority", "parking")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    RESERVED_PAGES_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_MS_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PARKING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    gateway: str
    adapter: str
    reserved_pages: int
    arrived_ms: int
    reservation_tokens: int
    stays: bool
    priority: _common_pb2.Priority
    parking: Parking
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., gateway: _Optional[str] = ..., adapter: _Optional[str] = ..., reserved_pages: _Optional[int] = ..., arrived_ms: _Optional[int] = ..., reservation_tokens: _Optional[int] = ..., stays: _Optional[bool] = ..., priority: _Optional[_Union[_common_pb2.Priority, str]] = ..., parking: _Optional[_Union[Parking, str]] = ...) -> None: ...

class AdapterState(_message.Message):
    __slots__ = ("digest", "tier", "running", "bytes", "loading", "error", "rank", "shortfall")
    class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TIER_UNSPECIFIED: _ClassVar[AdapterState.Tier]
        REMOTE: _ClassVar[AdapterState.Tier]
        DISK: _ClassVar[AdapterState.Tier]
        HOST: _ClassVar[AdapterState.Tier]
        DEVICE: _ClassVar[AdapterState.Tier]
    TIER_UNSPECIFIED: AdapterState.Tier
    REMOTE: AdapterState.Tier
    DISK: AdapterState.Tier
    HOST: AdapterState.Tier
    DEVICE: AdapterState.Tier
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SHORTFALL_FIELD_NUMBER: _ClassVar[int]
    digest: str
    tier: AdapterState.Tier
    running: int
    bytes: int
    loading: bool
    error: str
    rank: int
    shortfall: str
    def __init__(self, digest: _Optional[str] = ..., tier: _Optional[_Union[AdapterState.Tier, str]] = ..., running: _Optional[int] = ..., bytes: _Optional[int] = ..., loading: _Optional[bool] = ..., error: _Optional[str] = ..., rank: _Optional[int] = ..., shortfall: _Optional[str] = ...) -> None: ...

class Overrun(_message.Message):
    __slots__ = ("request_id", "epoch", "wanted_pages", "reservation_tokens", "leaves")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WANTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: _common_pb2.Epoch
    wanted_pages: int
    reservation_tokens: int
    leaves: bool
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[_Union[_common_pb2.Epoch, _Mapping]] = ..., wanted_pages: _Optional[int] = ..., reservation_tokens: _Optional[int] = ..., leaves: _Optional[bool] = ...) -> None: ...

class SupervisorToRunner(_message.Message):
    __slots__ = ("registered", "order", "resync")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    registered: Registered
    order: RunnerOrder
    resync: Resync
    def __init__(self, registered: _Optional[_Union[Registered, _Mapping]] = ..., order: _Optional[_Union[RunnerOrder, _Mapping]] = ..., resync: _Optional[_Union[Resync, _Mapping]] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("lease_ms", "report_ms")
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    REPORT_MS_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    report_ms: int
    def __init__(self, lease_ms: _Optional[int] = ..., report_ms: _Optional[int] = ...) -> None: ...

class RunnerOrder(_message.Message):
    __slots__ = ("drain", "desired", "role")
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    drain: bool
    desired: DesiredChange
    role: Role
    def __init__(self, drain: _Optional[bool] = ..., desired: _Optional[_Union[DesiredChange, _Mapping]] = ..., role: _Optional[_Union[Role, str]] = ...) -> None: ...

class DesiredChange(_message.Message):
    __slots__ = ("version", "full", "adapters", "removed")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    version: int
    full: bool
    adapters: _containers.RepeatedCompositeFieldContainer[DesiredAdapter]
    removed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[int] = ..., full: _Optional[bool] = ..., adapters: _Optional[_Iterable[_Union[DesiredAdapter, _Mapping]]] = ..., removed: _Optional[_Iterable[str]] = ...) -> None: ...

class DesiredAdapter(_message.Message):
    __slots__ = ("digest", "rank", "bytes", "pinned", "tier", "model_names")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAMES_FIELD_NUMBER: _ClassVar[int]
    digest: str
    rank: int
    bytes: int
    pinned: bool
    tier: AdapterState.Tier
    model_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digest: _Optional[str] = ..., rank: _Optional[int] = ..., bytes: _Optional[int] = ..., pinned: _Optional[bool] = ..., tier: _Optional[_Union[AdapterState.Tier, str]] = ..., model_names: _Optional[_Iterable[str]] = ...) -> None: ...

class CreateKeyRequest(_message.Message):
    __slots__ = ("namespace", "note", "scope", "models", "expires_unix_ms")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    note: str
    scope: KeyScope
    models: _containers.RepeatedScalarFieldContainer[str]
    expires_unix_ms: int
    def __init__(self, namespace: _Optional[str] = ..., note: _Optional[str] = ..., scope: _Optional[_Union[KeyScope, str]] = ..., models: _Optional[_Iterable[str]] = ..., expires_unix_ms: _Optional[int] = ...) -> None: ...

class CreateKeyResponse(_message.Message):
    __slots__ = ("key", "key_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    key: str
    key_id: str
    def __init__(self, key: _Optional[str] = ..., key_id: _Optional[str] = ...) -> None: ...

class RevokeKeyRequest(_message.Message):
    __slots__ = ("key_id",)
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    def __init__(self, key_id: _Optional[str] = ...) -> None: ...

class RevokeKeyResponse(_message.Message):
    __slots__ = ("existed",)
    EXISTED_FIELD_NUMBER: _ClassVar[int]
    existed: bool
    def __init__(self, existed: _Optional[bool] = ...) -> None: ...

class ListKeysRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListKeysResponse(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[KeyInfo]
    def __init__(self, keys: _Optional[_Iterable[_Union[KeyInfo, _Mapping]]] = ...) -> None: ...

class KeyInfo(_message.Message):
    __slots__ = ("key_id", "namespace", "note", "created_unix_s", "revoked", "scope", "models", "expires_unix_ms")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    namespace: str
    note: str
    created_unix_s: int
    revoked: bool
    scope: KeyScope
    models: _containers.RepeatedScalarFieldContainer[str]
    expires_unix_ms: int
    def __init__(self, key_id: _Optional[str] = ..., namespace: _Optional[str] = ..., note: _Optional[str] = ..., created_unix_s: _Optional[int] = ..., revoked: _Optional[bool] = ..., scope: _Optional[_Union[KeyScope, str]] = ..., models: _Optional[_Iterable[str]] = ..., expires_unix_ms: _Optional[int] = ...) -> None: ...

class KeyDeclaration(_message.Message):
    __slots__ = ("owner", "namespace", "note", "key_hash", "scope", "models", "expires_unix_ms", "limits")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    KEY_HASH_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    namespace: str
    note: str
    key_hash: str
    scope: KeyScope
    models: _containers.RepeatedScalarFieldContainer[str]
    expires_unix_ms: int
    limits: LimitRule
    def __init__(self, owner: _Optional[str] = ..., namespace: _Optional[str] = ..., note: _Optional[str] = ..., key_hash: _Optional[str] = ..., scope: _Optional[_Union[KeyScope, str]] = ..., models: _Optional[_Iterable[str]] = ..., expires_unix_ms: _Optional[int] = ..., limits: _Optional[_Union[LimitRule, _Mapping]] = ...) -> None: ...

class DeclareKeyResponse(_message.Message):
    __slots__ = ("outcome", "key_id")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[DeclareKeyResponse.Outcome]
        DECLARED: _ClassVar[DeclareKeyResponse.Outcome]
        TAKEN: _ClassVar[DeclareKeyResponse.Outcome]
        REVOKED: _ClassVar[DeclareKeyResponse.Outcome]
    OUTCOME_UNSPECIFIED: DeclareKeyResponse.Outcome
    DECLARED: DeclareKeyResponse.Outcome
    TAKEN: DeclareKeyResponse.Outcome
    REVOKED: DeclareKeyResponse.Outcome
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    outcome: DeclareKeyResponse.Outcome
    key_id: str
    def __init__(self, outcome: _Optional[_Union[DeclareKeyResponse.Outcome, str]] = ..., key_id: _Optional[str] = ...) -> None: ...

class WithdrawKeyRequest(_message.Message):
    __slots__ = ("owner",)
    OWNER_FIELD_NUMBER: _ClassVar[int]
    owner: str
    def __init__(self, owner: _Optional[str] = ...) -> None: ...

class WithdrawKeyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListDeclaredKeysRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListDeclaredKeysResponse(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[DeclaredKey]
    def __init__(self, keys: _Optional[_Iterable[_Union[DeclaredKey, _Mapping]]] = ...) -> None: ...

class DeclaredKey(_message.Message):
    __slots__ = ("key_id", "revoked", "declaration")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    DECLARATION_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    revoked: bool
    declaration: KeyDeclaration
    def __init__(self, key_id: _Optional[str] = ..., revoked: _Optional[bool] = ..., declaration: _Optional[_Union[KeyDeclaration, _Mapping]] = ...) -> None: ...

class LimitRule(_message.Message):
    __slots__ = ("subject", "model", "requests_per_minute", "tokens_per_minute", "concurrent", "tokens_per_day", "spent_until_unix_ms")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    CONCURRENT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_DAY_FIELD_NUMBER: _ClassVar[int]
    SPENT_UNTIL_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    subject: str
    model: str
    requests_per_minute: int
    tokens_per_minute: int
    concurrent: int
    tokens_per_day: int
    spent_until_unix_ms: int
    def __init__(self, subject: _Optional[str] = ..., model: _Optional[str] = ..., requests_per_minute: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., concurrent: _Optional[int] = ..., tokens_per_day: _Optional[int] = ..., spent_until_unix_ms: _Optional[int] = ...) -> None: ...

class SetLimitResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLimitsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLimitsResponse(_message.Message):
    __slots__ = ("limits",)
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    limits: _containers.RepeatedCompositeFieldContainer[LimitRule]
    def __init__(self, limits: _Optional[_Iterable[_Union[LimitRule, _Mapping]]] = ...) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ("since_day", "namespace", "by_key")
    SINCE_DAY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BY_KEY_FIELD_NUMBER: _ClassVar[int]
    since_day: int
    namespace: str
    by_key: bool
    def __init__(self, since_day: _Optional[int] = ..., namespace: _Optional[str] = ..., by_key: _Optional[bool] = ...) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("rows", "more")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[UsageOfDay]
    more: bool
    def __init__(self, rows: _Optional[_Iterable[_Union[UsageOfDay, _Mapping]]] = ..., more: _Optional[bool] = ...) -> None: ...

class UsageOfDay(_message.Message):
    __slots__ = ("day", "namespace", "model_name", "requests", "prompt_tokens", "completion_tokens", "key_id")
    DAY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    day: int
    namespace: str
    model_name: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    key_id: str
    def __init__(self, day: _Optional[int] = ..., namespace: _Optional[str] = ..., model_name: _Optional[str] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., key_id: _Optional[str] = ...) -> None: ...

class ListRunnersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRunnersResponse(_message.Message):
    __slots__ = ("runners", "grows", "preempts", "doublings")
    RUNNERS_FIELD_NUMBER: _ClassVar[int]
    GROWS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTS_FIELD_NUMBER: _ClassVar[int]
    DOUBLINGS_FIELD_NUMBER: _ClassVar[int]
    runners: _containers.RepeatedCompositeFieldContainer[ReportedRunner]
    grows: int
    preempts: int
    doublings: int
    def __init__(self, runners: _Optional[_Iterable[_Union[ReportedRunner, _Mapping]]] = ..., grows: _Optional[int] = ..., preempts: _Optional[int] = ..., doublings: _Optional[int] = ...) -> None: ...
