"""The actions of a plan. Each describes a result, so carrying it out twice is harmless."""

from dataclasses import dataclass
from typing import Literal

from weft.artifacts.depot_api import ResolveRequest
from weft.domain.routes import AdapterSpec, PoolSpec
from weft_operator.core.resources import Object, Ref
from weft_operator.core.state import Child, ObjectKey, RunnerConfig


@dataclass(frozen=True, slots=True)
class Resolve:
    """Have the depot resolve a source. Its answer is an observation, later."""

    ref: Ref
    uid: str
    request: ResolveRequest


@dataclass(frozen=True, slots=True)
class ForgetSource:
    """Forget the depot's answers about a source."""

    uid: str


@dataclass(frozen=True, slots=True)
class PublishPool:
    """Publish a pool to the scheduler, in place of its earlier entry."""

    ref: Ref
    entry: PoolSpec


@dataclass(frozen=True, slots=True)
class UnpublishPool:
    ref: Ref


@dataclass(frozen=True, slots=True)
class PublishAdapter:
    """Publish an adapter to the scheduler, in place of its earlier entry."""

    ref: Ref
    entry: AdapterSpec


@dataclass(frozen=True, slots=True)
class UnpublishAdapter:
    """Have the scheduler forget an adapter. `unload`: its object waits until no runner holds it any more."""

    ref: Ref
    uid: str
    unload: bool = False


@dataclass(frozen=True, slots=True)
class EnsureRunner:
    """Have a runner with this pool and index, started with exactly this launch."""

    pool: Ref
    index: int
    launch: RunnerConfig


@dataclass(frozen=True, slots=True)
class RemoveRunner:
    """Have no runner with this pool and index: it drains, then ends."""

    pool: Ref
    index: int


@dataclass(frozen=True, slots=True)
class ApplyChild:
    """Apply this object to the cluster, with each named field (server-side apply, forced).

    `resource_version`: of the known object; None: no object was known.
    """

    pool: Ref
    child: Child
    resource_version: str | None


@dataclass(frozen=True, slots=True)
class DeleteChild:
    """Delete an object of exactly this uid in the background.

    `successor`: the object to apply next. Before the deletion, a dry run asks the API server whether it would accept
    the successor.
    """

    pool: Ref
    kind: str
    namespace: str
    name: str
    uid: str
    successor: Child | None = None

    @property
    def key(self) -> ObjectKey:
        return ObjectKey(self.kind, self.namespace, self.name)


@dataclass(frozen=True, slots=True)
class ScaleChild:
    """Set the replicas of a Deployment of exactly this version; the rest stays.

    The pool no longer names its group, or the group must still wait for its new template.
    """

    pool: Ref
    key: ObjectKey
    uid: str
    resource_version: str
    replicas: int


@dataclass(frozen=True, slots=True)
class SetPodDeletionCost:
    """Set the annotation `controller.kubernetes.io/pod-deletion-cost` of the pod of exactly this uid."""

    pool: Ref
    namespace: str
    name: str
    uid: str
    cost: int


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """Record an Event about an object, after its status. A lost Event does no harm."""

    ref: Ref
    uid: str
    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class SetStatus:
    """Write the whole status, fenced by the object's version in the plan."""

    ref: Ref
    uid: str
    resource_version: str
    status: Object


@dataclass(frozen=True, slots=True)
class AddFinalizer:
    """Add the finalizer before an adapter is first published: it does not vanish while runners hold it."""

    ref: Ref
    uid: str
    resource_version: str
    finalizer: str


@dataclass(frozen=True, slots=True)
class RemoveFinalizer:
    ref: Ref
    uid: str
    resource_version: str
    finalizer: str


@dataclass(frozen=True, slots=True)
class RetainBlobs:
    """Send the complete list of digests for the depot to keep."""

    digests: frozenset[str]


Action = (
    Resolve
    | ForgetSource
    | PublishPool
    | UnpublishPool
    | PublishAdapter
    | UnpublishAdapter
    | EnsureRunner
    | RemoveRunner
    | ApplyChild
    | DeleteChild
    | ScaleChild
    | SetPodDeletionCost
    | RecordEvent
    | SetStatus
    | AddFinalizer
    | RemoveFinalizer
    | RetainBlobs
)
