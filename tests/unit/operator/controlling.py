"""The real controller with small fakes of its Protocols: a depot, a registry and a backend; the store is real."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from harness.waiting import PATIENCE_S
from tests.unit.operator.planning import adapter_object, adapter_ref, failed, fetched_base, pool_object, verified
from weft.artifacts.depot_api import ResolveRequest
from weft.domain.routes import AdapterStatus, PoolStatus
from weft_operator.controller import Controller
from weft_operator.core import (
    DesiredState,
    EnsureRunner,
    Object,
    OperationStatus,
    OperatorPolicy,
    PublishAdapter,
    PublishPool,
    RecordEvent,
    Ref,
    RemoveRunner,
    RunnerProcess,
    SetStatus,
    UnpublishAdapter,
    UnpublishPool,
)
from weft_operator.core.actions import RemoveFinalizer
from weft_operator.core.resources import Kind
from weft_operator.errors import DepotUnavailable, StaleWrite
from weft_operator.local import ObjectStore


class FakeDepot:
    """Answers from a table; may be down."""

    def __init__(self) -> None:
        self.contents = {"file:base": fetched_base(), "file:upper": verified("a"), "file:lower": verified("c")}
        self.down = False
        self.asked: list[str] = []
        self.looked: asyncio.Queue[set[str]] = asyncio.Queue()
        self.edited: set[str] = set()  # watches
        self.kept: asyncio.Queue[frozenset[str]] = asyncio.Queue()
        self.refuse_lists = 0
        self.at_once = self.most_at_once = 0
        self.stuck: set[str] = set()  # URIs that never come to an end

    async def resolve(self, request: ResolveRequest, on_step: Callable[[OperationStatus], None]) -> OperationStatus:
        self.asked.append(request.uri)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        for _ in range(5):
            await asyncio.sleep(0)
        if request.uri in self.stuck:
            await asyncio.Event().wait()
        self.at_once -= 1
        if self.down:
            raise DepotUnavailable("connection refused")
        on_step(OperationStatus("Validated", None, {"rank": 8}))
        return self.contents.get(request.uri, failed("SourceNotFound"))

    async def changed(self, watches: Collection[str], wait_s: float) -> frozenset[str]:
        self.looked.put_nowait(set(watches))
        return frozenset(self.edited.intersection(watches))

    async def until_looked(self, watches: set[str]) -> None:
        """Wait until it is asked about exactly these, from now on."""
        while not self.looked.empty():
            self.looked.get_nowait()
        async with asyncio.timeout(PATIENCE_S):
            while await self.looked.get() != watches:
                pass

    async def retain(self, digests: frozenset[str]) -> None:
        if self.refuse_lists:
            self.refuse_lists -= 1
            raise DepotUnavailable("connection refused")
        self.kept.put_nowait(digests)


class FakeRegistry:
    """Routes what it is told, at once, once it may."""

    def __init__(self) -> None:
        self.controller: Controller | None = None
        self.started = False
        self.told: list[object] = []
        self.names: dict[Ref, str] = {}

    def start(self) -> None:
        self.started = True

    def update(self, action: PublishPool | UnpublishPool | PublishAdapter | UnpublishAdapter) -> None:
        self.told.append(action)
        if isinstance(action, PublishAdapter):
            self.names[action.ref] = action.entry.model_name
            report = AdapterStatus(action.entry.digest, True, observed_generation=action.entry.generation)
            asyncio.get_running_loop().call_soon(self._controller().on_adapter_report, action.entry.uid, report)
        elif isinstance(action, UnpublishAdapter):
            del self.names[action.ref]
        elif isinstance(action, PublishPool):
            asyncio.get_running_loop().call_soon(self._controller().on_pool_report, action.entry.name, PoolStatus(1))

    def _controller(self) -> Controller:
        assert self.controller is not None
        return self.controller


class FakeBackend:
    """Writes into the real store; starts what it is told to."""

    def __init__(self, store: ObjectStore) -> None:
        self.store, self.controller = store, None
        self.gate: asyncio.Event | None = None  # while it is there and not set, writes do not come back
        self.at_work: Counter[Ref] = Counter()
        self.most_at_once = 0
        self.runners: set[tuple[Ref, int]] = set()
        self.break_next = 0
        self.announced: list[RecordEvent] = []
        self._begun = asyncio.Event()

    async def working(self, enough: Callable[[], bool]) -> None:
        """Wait until what is being written is enough."""
        async with asyncio.timeout(PATIENCE_S):
            while not enough():
                self._begun.clear()
                await self._begun.wait()

    async def set_status(self, action: SetStatus) -> Object:
        self.at_work[action.ref] += 1
        assert self.at_work[action.ref] == 1, "one object in two hands"
        self.most_at_once = max(self.most_at_once, self.at_work.total())
        self._begun.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0)
            return self.write(action)
        finally:
            self.at_work[action.ref] -= 1

    def write(self, action: SetStatus) -> Object:
        if self.break_next:
            self.break_next -= 1
            raise StaleWrite("changed meanwhile") if self.break_next % 2 else RuntimeError("disk on fire")
        return self.store.set_status(action.ref, action.uid, action.resource_version, action.status)

    async def remove_finalizer(self, action: RemoveFinalizer) -> None:
        self.store.remove_finalizer(action.ref, action.uid, action.resource_version, action.finalizer)

    async def ensure_runner(self, action: EnsureRunner) -> None:
        self.runners.add((action.pool, action.index))
        asyncio.get_running_loop().call_soon(self.tell, action)

    async def _of_a_cluster(self, action: Any) -> Any:
        raise AssertionError(action)

    add_finalizer = apply_child = delete_child = scale_child = set_pod_deletion_cost = _of_a_cluster

    async def record_event(self, action: RecordEvent) -> None:
        self.announced.append(action)

    async def remove_runner(self, action: RemoveRunner) -> None:
        self.runners.discard((action.pool, action.index))
        asyncio.get_running_loop().call_soon(self.tell, action)

    def tell(self, action: EnsureRunner | RemoveRunner) -> None:
        state = RunnerProcess(action.launch, "Ready") if isinstance(action, EnsureRunner) else None
        assert isinstance(self.controller, Controller)
        self.controller.on_runner(action.pool, action.index, state)


class CountingMeter:
    """What was done, by kind and by action."""

    def __init__(self) -> None:
        self.reconciles: Counter[Kind] = Counter()
        self.failures: Counter[Kind] = Counter()
        self.writes: Counter[str] = Counter()

    def reconciled(self, kind: Kind, seconds: float, *, failed: bool) -> None:
        assert seconds >= 0
        self.reconciles[kind] += 1
        self.failures[kind] += failed

    def wrote(self, action: str) -> None:
        self.writes[action] += 1


@dataclass
class Operator:
    """A running controller whose objects can be awaited."""

    controller: Controller
    store: ObjectStore
    depot: FakeDepot
    registry: FakeRegistry
    backend: FakeBackend
    metrics: CountingMeter
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.store.listen(lambda _: self._changed.set())

    async def serve(self, *names: str, **spec: Any) -> None:
        """Apply a pool and, one after the other, adapters of these names, each until it is Ready."""
        self.store.apply(pool_object(**spec))
        for name in names:
            self.store.apply(adapter_object(name))
            await self.until(adapter_ref(name), "Ready", "True", "Published")

    async def until(self, ref: Ref, kind: str, status: str, reason: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (status, reason) not in self.conditions(ref, kind):
                self._changed.clear()
                await self._changed.wait()

    async def until_digest(self, ref: Ref, wanted: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.store.get(ref).get("status", {}).get("digest") != wanted:
                self._changed.clear()
                await self._changed.wait()

    def conditions(self, ref: Ref, kind: str) -> list[tuple[str, str]]:
        obj = self.store.find(ref) or {}
        return [(c["status"], c["reason"]) for c in obj.get("status", {}).get("conditions", ()) if c["type"] == kind]


@asynccontextmanager
async def operator(
    store: ObjectStore | None = None,
    depot: FakeDepot | None = None,
    clock: Callable[[], float] = time.time,
    period_s: float = 0.01,
) -> AsyncIterator[Operator]:
    store, depot = store or ObjectStore(lambda: 1e9), depot or FakeDepot()
    registry, backend = FakeRegistry(), FakeBackend(store)
    policy, metrics = OperatorPolicy(resolve_period_s=period_s, longest_drain_s=0.0), CountingMeter()
    controller = Controller(backend, depot, registry, desired=DesiredState(policy), clock=clock, metrics=metrics)
    registry.controller = backend.controller = controller  # type: ignore[assignment]
    controller.load(store.objects())
    store.listen(lambda event: controller.on_object(event.object, deleted=event.type == "DELETED"))
    running = asyncio.create_task(controller.run())
    try:
        yield Operator(controller, store, depot, registry, backend, metrics)
    finally:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
