"""Interfaces of the loop's dependencies: a backend, the depot, the scheduler's registry, a counter."""

from collections.abc import Callable, Collection
from typing import Protocol

from weft.artifacts.depot_api import OperationStatus, ResolveRequest
from weft_operator.core.actions import (
    AddFinalizer,
    ApplyChild,
    DeleteChild,
    EnsureRunner,
    PublishAdapter,
    PublishPool,
    RecordEvent,
    RemoveFinalizer,
    RemoveRunner,
    ScaleChild,
    SetPodDeletionCost,
    SetStatus,
    UnpublishAdapter,
    UnpublishPool,
)
from weft_operator.core.resources import Kind

RegistryUpdate = PublishPool | UnpublishPool | PublishAdapter | UnpublishAdapter
ClusterAction = (
    SetStatus
    | AddFinalizer
    | RemoveFinalizer
    | RecordEvent
    | ApplyChild
    | DeleteChild
    | ScaleChild
    | SetPodDeletionCost
    | EnsureRunner
    | RemoveRunner
)


class Backend(Protocol):
    """The part that differs between a cluster and a single machine.

    Every method raises StaleWrite when the object is gone or newer than the action's version. The change comes back as
    an event (`on_*`), before the method returns or later.
    """

    async def set_status(self, action: SetStatus) -> None: ...

    async def add_finalizer(self, action: AddFinalizer) -> None: ...

    async def remove_finalizer(self, action: RemoveFinalizer) -> None: ...

    async def record_event(self, action: RecordEvent) -> None: ...

    async def apply_child(self, action: ApplyChild) -> None: ...

    async def delete_child(self, action: DeleteChild) -> None: ...

    async def scale_child(self, action: ScaleChild) -> None: ...

    async def set_pod_deletion_cost(self, action: SetPodDeletionCost) -> None: ...

    async def ensure_runner(self, action: EnsureRunner) -> None: ...

    async def remove_runner(self, action: RemoveRunner) -> None: ...


class DepotApi(Protocol):
    """A client of the depot. Raises DepotUnavailable."""

    async def resolve(self, request: ResolveRequest, on_step: Callable[[OperationStatus], None]) -> OperationStatus: ...

    async def changed(self, watches: Collection[str], wait_s: float) -> frozenset[str]: ...

    async def retain(self, digests: frozenset[str]) -> None: ...


class RegistryApi(Protocol):
    """A client of the scheduler's registry. Does not fail: each connection begins with the whole table."""

    def update(self, action: RegistryUpdate) -> None: ...

    def start(self) -> None:
        """Publish from now on: the table is complete."""
        ...


class ReconcileMetrics(Protocol):
    """A counter of completed work. Must not block, must not raise."""

    def reconciled(self, kind: Kind, seconds: float, *, failed: bool) -> None:
        """Count a plan of an object with its executed actions."""
        ...

    def wrote(self, action: str) -> None:
        """Count an executed action of this name."""
        ...


class NoMetrics:
    """A counter that counts nothing."""

    def reconciled(self, kind: Kind, seconds: float, *, failed: bool) -> None:
        pass

    def wrote(self, action: str) -> None:
        pass
