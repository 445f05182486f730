# pyright: reportUnusedImport=false
"""The planner and all its rules. Pure: no event loop, network, clock or Kubernetes client.

Other packages import only these names, from here: the modules of this package may change.
"""

from weft.artifacts.depot_api import OperationStatus
from weft_operator.core.acceptance import resolution_from_status
from weft_operator.core.actions import (
    EnsureRunner,
    PublishAdapter,
    PublishPool,
    RecordEvent,
    RemoveRunner,
    Resolve,
    RetainBlobs,
    SetStatus,
    UnpublishAdapter,
    UnpublishPool,
)
from weft_operator.core.artifacts import updated
from weft_operator.core.expectations import expect
from weft_operator.core.pod_template import GRPC_PORT, KV_PORT, PROBES_PORT
from weft_operator.core.reconcile import known_refs, reconcile_all, requeue_at
from weft_operator.core.resources import AdapterObject, Object, PoolObject, Ref, parse, parse_pool
from weft_operator.core.runner_config import make_runner_config
from weft_operator.core.runner_defaults import CONTAINER_SECURITY, POD_SECURITY, RunnerDefaults
from weft_operator.core.state import (
    ClusterState,
    DesiredState,
    OperatorPolicy,
    RunnerProcess,
    RunnerState,
    SharedFolders,
)
