"""The loop: events queue objects, workers plan the queued objects, the backend carries the actions out.

Several workers share the queue, never two on the same object. An object queued ten times while it waits, or while a
worker has it, is planned once afterwards. A failed action is not repeated by itself: its object is planned again after
a pause (doubling, bounded), from the state at that time.

`Controller` is the loop of pools and adapters; `keys.py` has the loop of APIKeys. Each has its own queue and workers,
so a hanging supervisor delays no adapter.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TypeVar

from weft.domain.routes import AdapterStatus, PoolStatus
from weft.telemetry.logs import kv
from weft_operator.controller.clock import Clock, unix_clock
from weft_operator.controller.interfaces import (
    Backend,
    ClusterAction,
    DepotApi,
    NoMetrics,
    ReconcileMetrics,
    RegistryApi,
    RegistryUpdate,
)
from weft_operator.controller.resolver import SourceResolver
from weft_operator.controller.workqueue import TokenBucket, WorkQueue
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
from weft_operator.core.expectations import apply_failed, expect, forget, found_foreign, restore_resolutions
from weft_operator.core.reconcile import known_refs, reconcile, requeue_at
from weft_operator.core.resources import Malformed, Meta, Object, Ref, parse, ref_of
from weft_operator.core.state import ClusterState, DesiredState, ObjectKey, Pod, RunnerProcess
from weft_operator.errors import ChildExists, ChildRefused, OperatorError, StaleWrite

log = logging.getLogger(__name__)

MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 10.0
RESYNC_S, MAX_RESYNCED = 30.0, 150  # between two slices of all objects, planned for no reason; objects of a slice
WORKERS = 8

K = TypeVar("K")
V = TypeVar("V")


class Loop(ABC):
    """Queued objects, and the workers that reconcile them. A subclass implements `reconcile` for its kinds."""

    def __init__(self, backend: Backend, clock: Clock | None, metrics: ReconcileMetrics | None) -> None:
        self._backend, self._metrics = backend, metrics or NoMetrics()
        self._clock = clock or unix_clock()
        self._queue = WorkQueue(self._clock)
        self._failures: dict[Ref, int] = {}
        self._budget = TokenBucket()
        self._left_alone = set[Ref]()

    @abstractmethod
    async def reconcile(self, ref: Ref) -> float | None:
        """Bring an object to its desired state. Return the time of the next attempt without events, or None."""

    async def _work(self) -> None:
        """Reconcile one queued object after another until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(WORKERS):
                tasks.create_task(self._worker())

    async def _worker(self) -> None:
        while True:
            ref = await self._queue.get()
            try:
                if (pause_s := self._budget.pause_s(ref, self._clock())) > 0:
                    self._leave_alone(ref, pause_s)
                else:
                    await self._attempt(ref)
            finally:
                self._queue.done(ref)
            await asyncio.sleep(0)

    def _leave_alone(self, ref: Ref, pause_s: float) -> None:
        if ref not in self._left_alone:  # a line for the first of all changes meanwhile
            log.warning("written too often, left alone", extra=kv(kind=ref.kind, object=str(ref), pause_s=pause_s))
            self._left_alone.add(ref)
        self._queue.add_at(ref, self._clock() + pause_s)

    async def _attempt(self, ref: Ref) -> None:
        self._left_alone.discard(ref)
        began, failed = time.perf_counter(), False
        try:
            due_at = await self.reconcile(ref)
        except Exception as error:  # noqa: BLE001 (one bad object must not stop the others; it is logged)
            self._again(ref, error)
            failed = not isinstance(error, StaleWrite)
        else:
            self._failures.pop(ref, None)
            if due_at is not None:
                self._queue.add_at(ref, due_at)
        self._metrics.reconciled(ref.kind, time.perf_counter() - began, failed=failed)

    def _again(self, ref: Ref, error: Exception) -> None:
        failures = self._failures[ref] = self._failures.get(ref, 0) + 1
        pause_s = min(MIN_PAUSE_S * 2 ** min(failures - 1, 10), MAX_PAUSE_S)
        expected = isinstance(error, StaleWrite)
        fields = kv(kind=ref.kind, object=str(ref), failures=failures, pause_s=pause_s, error=repr(error))
        is_named = isinstance(error, OperatorError)  # its message is all there is to know
        level = logging.DEBUG if expected else logging.WARNING if is_named else logging.ERROR
        log.log(level, "planned again later", extra=fields, exc_info=not is_named)
        self._queue.add_at(ref, self._clock() + pause_s)

    async def _order(self, ref: Ref, action: ClusterAction) -> None:
        """Carry out an action on an object with the backend. It counts against the object's budget of writes."""
        self._budget.take(ref, self._clock())
        backend = self._backend
        match action:
            case SetStatus():
                await backend.set_status(action)
            case AddFinalizer():
                await backend.add_finalizer(action)
            case RemoveFinalizer():
                await backend.remove_finalizer(action)
            case RecordEvent():
                await backend.record_event(action)
            case ApplyChild():
                await backend.apply_child(action)
            case DeleteChild():
                await backend.delete_child(action)
            case ScaleChild():
                await backend.scale_child(action)
            case SetPodDeletionCost():
                await backend.set_pod_deletion_cost(action)
            case EnsureRunner():
                await backend.ensure_runner(action)
            case RemoveRunner():
                await backend.remove_runner(action)
        self._metrics.wrote(type(action).__name__)

    def _forget(self, ref: Ref) -> None:
        """Forget a deleted object. A new object of its name starts afresh."""
        self._budget.forget(ref)
        self._left_alone.discard(ref)


class Controller(Loop):
    """Pools and adapters: plans from `desired` and updates it. One event loop owns the `ClusterState`.

    Feed it with `on_*`, also long before `run()`: a waiting replica is then ready to lead at once. A slow resync plans
    everything, so a lost event costs time, not correctness.
    """

    def __init__(
        self,
        backend: Backend,
        depot: DepotApi,
        registry: RegistryApi,
        *,
        desired: DesiredState,
        clock: Clock | None = None,
        metrics: ReconcileMetrics | None = None,
    ) -> None:
        super().__init__(backend, clock, metrics)
        self.state = ClusterState(desired)
        self.planned = asyncio.Event()  # every object present at the start was planned once
        self._first: set[Ref] = set()
        self._registry = registry
        self._depot = SourceResolver(depot, self.state, clock=self._clock, mark=self._queue.add)

    def load(self, objects: Iterable[Object]) -> None:
        """Take in the complete list before `run()`, if runners and scheduler start together with this controller.

        The stored readiness is then void.
        """
        for resource in map(parse, objects):
            self.state.desired.add(resource)
            if resource.meta.ref.kind == "ServingPool":
                self.state.observed.pool_reports[str(resource.meta.ref)] = PoolStatus(0)
            else:
                self.state.observed.adapter_reports[resource.meta.uid] = AdapterStatus("", False, 0)

    async def run(self) -> None:
        """Plan until cancelled. All known objects are published to the scheduler before anything is written."""
        self.state.expectations.retention.started_at = self._clock()
        restore_resolutions(self.state, self._clock())
        self._first = set(self.state.desired.refs())
        for ref in self.state.desired.refs():
            await self._publish_known(ref)
        self._registry.start()
        self._queue.add(self._first)
        if not self._first:
            self.planned.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._work())
                tasks.create_task(self._resync())
                tasks.create_task(self._depot.watch())
                tasks.create_task(self._depot.run_gc())
        finally:
            self._depot.close()

    # ------------------------------------------------------------------------------------------- events

    def on_object(self, obj: Object, *, deleted: bool = False) -> None:
        """Take in a new, changed or deleted object. The caller keeps the order of its versions."""
        ref = ref_of(obj)
        resource = parse(obj, self.state.desired.get(ref))
        recorded = self.state.desired.meta(ref)
        if recorded is not None and _is_known(resource.meta, recorded, deleted):
            return
        if recorded is not None and (deleted or recorded.uid != resource.meta.uid):
            self._depot.forget(recorded.uid)
            self._forget(ref)
            forget(recorded.uid, ref, self.state)
        if isinstance(resource, Malformed) and not deleted:
            log.warning("spec cannot be read", extra=kv(kind=ref.kind, object=str(ref), error=resource.message))
        self._queue.add(self.state.desired.drop(ref) if deleted else self.state.desired.put(resource))

    def on_runner(self, pool: Ref, index: int, runner: RunnerProcess | None) -> None:
        """Take in the changed state of a runner process; None: it is gone."""
        if _put(self.state.observed.runners, pool, index, runner):
            self._queue.add([pool])

    def on_child(self, pool: Ref, key: ObjectKey, obj: Object | None) -> None:
        """Take in a changed child of a pool; None: it is gone. The caller keeps the order of versions."""
        if _put(self.state.observed.children, pool, key, obj):
            self._queue.add([pool])
        self.state.observed.foreign.get(pool, {}).pop(key, None)
        if obj is None:
            self.state.expectations.applied.pop(key, None)

    def on_pod(self, pool: Ref, name: str, pod: Pod | None) -> None:
        """Take in the changed state of a runner's pod; None: it is gone."""
        previous = self.state.observed.pods.get(pool, {}).get(name)
        if previous is not None and (pod is None or pod.uid != previous.uid):
            self.state.expectations.deletion_costs.pop(previous.uid, None)
        if _put(self.state.observed.pods, pool, name, pod):
            self._queue.add([pool])

    def on_node(self, name: str, *, unschedulable: bool) -> None:
        """Note that a node takes no new pods any more, takes them again, or is gone."""
        nodes = self.state.observed.unschedulable_nodes
        if unschedulable == (name in nodes):
            return
        (nodes.add if unschedulable else nodes.remove)(name)
        pods = self.state.observed.pods
        self._queue.add([ref for ref, node_pods in pods.items() if any(pod.node == name for pod in node_pods.values())])

    def on_pool_report(self, pool: str, report: PoolStatus) -> None:
        """Take the scheduler's report of a pool. A report about an unpublished pool is dropped."""
        namespace, _, name = pool.partition("/")
        ref = Ref("ServingPool", namespace, name)
        if ref not in self.state.expectations.pools:
            return
        previous, self.state.observed.pool_reports[pool] = self.state.observed.pool_reports.get(pool), report
        if report != previous:
            self._queue.add([ref])
        if report.ready_runners > 0 and not (previous and previous.ready_runners):
            self._queue.add(
                a.meta.ref for a in self.state.desired.adapters_of(ref) if a.status.get("pool") not in (None, pool)
            )

    def on_adapter_report(self, uid: str, report: AdapterStatus) -> None:
        """Take in the scheduler's report of an adapter."""
        ref = self.state.desired.by_uid.get(uid)
        if ref is None:
            return
        if uid in self.state.expectations.unloading:
            if report.removed and uid not in self.state.observed.unloaded:
                self.state.observed.unloaded.add(uid)
                self._queue.add([ref])
        elif (entry := self.state.expectations.adapters.get(ref)) and entry.digest:  # else it was unpublished meanwhile
            previous, self.state.observed.adapter_reports[uid] = self.state.observed.adapter_reports.get(uid), report
            if report != previous:
                self._queue.add([ref])

    # --------------------------------------------------------------------------------------------- work

    async def _publish_known(self, ref: Ref) -> None:
        """Carry out the part of an object's plan that publishes it to the scheduler."""
        try:
            for action in reconcile(ref, self.state, self._clock()):
                if isinstance(action, RegistryUpdate):
                    await self._carry_out(ref, action)
        except Exception as error:  # noqa: BLE001 (as in `_attempt`)
            self._again(ref, error)

    async def reconcile(self, ref: Ref) -> float | None:
        try:
            for action in reconcile(ref, self.state, self._clock()):
                await self._carry_out(ref, action)
        finally:
            self._first.discard(ref)
            if not self._first:
                self.planned.set()
        return requeue_at(ref, self.state, self._clock())

    async def _carry_out(self, ref: Ref, action: Action) -> None:
        match action:
            case Resolve():
                self._depot.resolve(action)
            case ForgetSource():
                self._depot.forget(action.uid)
            case PublishPool() | UnpublishPool() | PublishAdapter() | UnpublishAdapter():
                self._registry.update(action)
                self._depot.schedule_gc()
            case RetainBlobs():
                raise AssertionError("the list of kept digests belongs to no single object")
            case ApplyChild() | DeleteChild():
                await self._change_child(ref, action)
            case _:
                await self._order(ref, action)
        expect(action, self.state, self._clock())

    async def _change_child(self, ref: Ref, action: ApplyChild | DeleteChild) -> None:
        """Execute a change of a child. A refused or foreign child is planned again with this knowledge."""
        child = action.child if isinstance(action, ApplyChild) else action.successor
        try:
            await self._order(ref, action)
        except StaleWrite as error:
            if isinstance(action, ApplyChild):
                there = error.obj if isinstance(error, ChildExists) else None
                found_foreign(action, there, self.state, self._clock())
            raise
        except ChildRefused as error:
            assert child is not None, "nothing else is refused"
            apply_failed(action.pool, child, error.message, self.state, self._clock())
            raise

    async def _resync(self) -> None:
        left = list[Ref]()
        while True:
            await asyncio.sleep(RESYNC_S)
            left = left or list(known_refs(self.state))
            self._queue.add(left[:MAX_RESYNCED])
            del left[:MAX_RESYNCED]


def _is_known(meta: Meta, recorded: Meta, deleted: bool) -> bool:
    """Whether an event is old: the end of an earlier object of the same name, or the known version."""
    if meta.uid != recorded.uid:
        return deleted
    return not deleted and meta.resource_version == recorded.resource_version


def _put(table: dict[Ref, dict[K, V]], pool: Ref, key: K, value: V | None) -> bool:
    """Set or remove an entry of a pool. Returns False if it was known."""
    entries = table.setdefault(pool, {})
    changed = entries.get(key) != value
    if value is not None:
        entries[key] = value
    else:
        entries.pop(key, None)
    if not entries:
        del table[pool]
    return changed
