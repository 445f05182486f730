# pyright: reportUnusedImport=false
"""The Kubernetes shell: watches objects with kopf, and sends the planner's actions to the API server.

Tests import these names from here, because the submodules may change.
"""

from weft_operator.kubernetes.admission import PATHS, register, review
from weft_operator.kubernetes.backend import KubernetesBackend
from weft_operator.kubernetes.cache import ObjectCache, strip_unused
from weft_operator.kubernetes.client import ADAPTERS, BY_KIND, KEYS, NODES, OWN, PODS, WATCHED, KubeApi, ResourceKind
from weft_operator.kubernetes.crd_check import PATH, missing_fields
from weft_operator.kubernetes.event_mapping import EventMapper, is_unschedulable, observed_pod, owner_of, pool_of
from weft_operator.kubernetes.events import EventRecorder, event_manifest
from weft_operator.kubernetes.key_secrets import KeySecrets
from weft_operator.kubernetes.observability import Metrics
from weft_operator.kubernetes.resync import WatchHealth, WatchScope, missed
from weft_operator.kubernetes.settings import BadRunnerDefaults, Settings, parse_runner_defaults, read_runner_defaults
from weft_operator.kubernetes.watch import Connection, KubernetesWatches
