# pyright: reportUnusedImport=false
"""The planner and everything that it decides by. Pure: no event loop, network, clock or Kubernetes client.

Tests, the simulator and benchmarks take these names from here: the modules behind them may change.
"""

from weft.artifacts.depot_api import OperationStatus, ResolveRequest
from weft.domain.routes import AdapterStatus, PoolStatus
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
    DeclaredKey,
    Key,
    KeyDeclaration,
    KeyView,
    Secret,
    UnreadSecret,
    Withdraw,
    parse_key,
)
from weft_operator.core.artifacts import Resolution
from weft_operator.core.reconcile import reconcile_all, requeue_at
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
    parse,
    parse_adapter,
    parse_pool,
    resource_version,
)
from weft_operator.core.runner_defaults import RunnerDefaults
from weft_operator.core.state import (
    Child,
    DesiredState,
    ObjectKey,
    ObservedState,
    Pod,
    Policy,
    RunnerConfig,
    RunnerProcess,
    RunnerState,
    State,
)
from weft_operator.core.validation import validate
