# pyright: reportUnusedImport=false
"""The planner and everything that it decides by. Pure: no event loop, network, clock or Kubernetes client.

Tests, the simulator and benchmarks take these names from here: the modules behind them may change.
"""

from weft.artifacts.depot_api import OperationStatus, ResolveRequest
from weft.domain.routes import AdapterStatus, PoolStatus
from weft_operator.core.acceptance import pool_view, reject_adapter, reject_pool
from weft_operator.core.actions import (
    Action,
    AddFinalizer,
    ApplyChild,
    DeleteChild,
    EnsureRunner,
    ForgetSource,
    PublishAdapter,
    PublishPool,
    RecordEvent,
    RemoveFinalizer,
    RemoveRunner,
    Resolve,
    RetainBlobs,
    ScaleChild,
    SetPodDeletionCost,
    SetStatus,
    UnpublishAdapter,
    UnpublishPool,
)
from weft_operator.core.api_keys import (
    BadSecret,
    DeclaredKey,
    Key,
    KeyDeclaration,
    KeyView,
    Secret,
    SecretKey,
    UnreadSecret,
    Withdraw,
    key_events_for,
    next_step,
    orphans,
    parse_key,
    secret_manifest,
    seen_secret,
)
from weft_operator.core.artifacts import (
    MAX_FAILURE_PAUSE_S,
    Resolution,
    Retention,
    VerifiedArtifact,
    from_status,
    jittered,
    source_changed,
    started,
    unreachable,
    updated,
)
from weft_operator.core.canary import owner_uid
from weft_operator.core.chat_templates import template_uid
from weft_operator.core.children import (
    GROUP_LABEL,
    INDEX_LABEL,
    MANAGER,
    MAX_CHILD_NAME_CHARS,
    POOL_LABEL,
    RUNNER_LABEL,
    child_name,
    make_children,
    runner_children,
    template_hash,
)
from weft_operator.core.drift import QUANTITIES, matches, spec_hash, with_spec_hash
from weft_operator.core.expectations import apply_failed, expect, forget, restore_resolutions
from weft_operator.core.pod_template import GRPC_PORT, KV_PORT, PROBES_PORT, TEMPLATE_HASH, make_pod_template
from weft_operator.core.reconcile import (
    PROGRESS_S,
    UNLOAD_GRACE_S,
    live_digests,
    longest_drain_s,
    plan_retention,
    progress_s,
    reconcile_all,
    requeue_at,
    resolve_period_s,
)
from weft_operator.core.registration import ADVANCED
from weft_operator.core.resources import (
    API_VERSION,
    FINALIZER,
    Adapter,
    Group,
    Kind,
    Malformed,
    Object,
    Pool,
    Ref,
    holds,
    parse,
    parse_adapter,
    parse_pool,
    resource_version,
)
from weft_operator.core.rollout import RETRY_S, is_replacing
from weft_operator.core.runner_config import make_runner_config
from weft_operator.core.runner_defaults import CONTAINER_SECURITY, POD_SECURITY, RunnerDefaults
from weft_operator.core.scale_in import SEEN_S
from weft_operator.core.scaling import (
    ANSWER_S,
    Bounds,
    Runner,
    counted_together,
    counts_apart,
    deletion_costs,
    distribute,
    group_of,
    one_for_one,
    phase_groups,
    rollout_limits,
    select_victims,
    sizes,
    target,
    to_start,
)
from weft_operator.core.state import (
    APPLY_RETRY_S,
    Child,
    DesiredState,
    Expectations,
    ForeignObject,
    ObjectKey,
    ObservedState,
    Pod,
    Policy,
    RunnerConfig,
    RunnerProcess,
    RunnerState,
    SharedFolders,
    State,
    runner_pods,
)
from weft_operator.core.status import Condition, events_for, merged
from weft_operator.core.validation import Review, pinned_max, validate
