"""The loop around the planner: the real controller; depot, registry and backend are small fakes of its Protocols."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.operator.planning import (
    adapter_object,
    adapter_ref,
    digest,
    failed,
    fetched_base,
    good,
    pool_object,
    pool_ref,
)
from weft_operator import reconcile
from weft_operator.actions import (
    EnsureRunner,
    PublishAdapter,
    PublishPool,
    RemoveFinalizer,
    RemoveRunner,
    SetStatus,
    WithdrawAdapter,
    WithdrawPool,
)
from weft_operator.errors import DepotUnavailable, NoEffect
from weft_operator.local.objects import ObjectStore
from weft_operator.observe import AdapterReport, PoolReport, RunnerProcess
from weft_operator.plan import Policy
from weft_operator.queue import Queue
from weft_operator.reconcile import Controller
from weft_operator.resolution import Answer, Request
from weft_operator.resources import Object, Ref


class FakeDepot:
    """Answers from a table; may be down."""

    def __init__(self) -> None:
        self.contents = {"file:base": fetched_base(), "file:upper": good("a"), "file:lower": good("c")}
        self.down = False
        self.asked: list[str] = []
        self.kept: asyncio.Queue[frozenset[str]] = asyncio.Queue()
        self.refuse_lists = 0
        self.at_once = self.most_at_once = 0

    async def resolve(self, request: Request, on_step: Callable[[Answer], None]) -> Answer:
        self.asked.append(request.uri)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        for _ in range(5):
            await asyncio.sleep(0)
        self.at_once -= 1
        if self.down:
            raise DepotUnavailable("connection refused")
        on_step(Answer("Validated", None, {"rank": 8}))
        return self.contents.get(request.uri, failed("SourceNotFound"))

    async def retain(self, digests: frozenset[str]) -> None:
        assert self.at_once == 0, "a list was told while something was being fetched"
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

    def tell(self, action: PublishPool | WithdrawPool | PublishAdapter | WithdrawAdapter) -> None:
        self.told.append(action)
        if isinstance(action, PublishAdapter):
            self.names[action.ref] = action.entry.model_name
            report = AdapterReport(action.entry.digest, True, 1)
            asyncio.get_running_loop().call_soon(self._controller().on_adapter_report, action.entry.uid, report)
        elif isinstance(action, WithdrawAdapter):
            del self.names[action.ref]
        elif isinstance(action, PublishPool):
            asyncio.get_running_loop().call_soon(self._controller().on_pool_report, action.entry.pool, PoolReport(1))

    def _controller(self) -> Controller:
        assert self.controller is not None
        return self.controller


class FakeBackend:
    """Writes into the real store; starts what it is told to."""

    def __init__(self, store: ObjectStore) -> None:
        self.store, self.controller = store, None
        self.runners: set[tuple[Ref, int]] = set()
        self.break_next = 0

    def set_status(self, action: SetStatus) -> Object:
        if self.break_next:
            self.break_next -= 1
            raise NoEffect("changed meanwhile") if self.break_next % 2 else RuntimeError("disk on fire")
        return self.store.set_status(action.ref, action.uid, action.resource_version, action.status)

    def remove_finalizer(self, action: RemoveFinalizer) -> None:
        self.store.remove_finalizer(action.ref, action.uid, action.resource_version, action.finalizer)

    def ensure_runner(self, action: EnsureRunner) -> None:
        self.runners.add((action.pool, action.index))
        asyncio.get_running_loop().call_soon(self.tell, action)

    def remove_runner(self, action: RemoveRunner) -> None:
        self.runners.discard((action.pool, action.index))
        asyncio.get_running_loop().call_soon(self.tell, action)

    def tell(self, action: EnsureRunner | RemoveRunner) -> None:
        state = RunnerProcess(action.launch, "Ready") if isinstance(action, EnsureRunner) else None
        assert isinstance(self.controller, Controller)
        self.controller.on_runner(action.pool, action.index, state)


class Operator:
    """A running controller whose objects can be awaited."""

    def __init__(self, store: ObjectStore, depot: FakeDepot, registry: FakeRegistry, backend: FakeBackend) -> None:
        self.store, self.depot, self.registry, self.backend = store, depot, registry, backend
        self._changed = asyncio.Event()
        store.listen(lambda _: self._changed.set())

    async def until(self, ref: Ref, kind: str, status: str, reason: str) -> None:
        async with asyncio.timeout(10):
            while (status, reason) not in self.conditions(ref, kind):
                self._changed.clear()
                await self._changed.wait()

    async def until_digest(self, ref: Ref, wanted: str) -> None:
        async with asyncio.timeout(10):
            while self.store.get(ref).get("status", {}).get("digest") != wanted:
                self._changed.clear()
                await self._changed.wait()

    def conditions(self, ref: Ref, kind: str) -> list[tuple[str, str]]:
        obj = self.store.find(ref) or {}
        return [(c["status"], c["reason"]) for c in obj.get("status", {}).get("conditions", ()) if c["type"] == kind]


@asynccontextmanager
async def operator(
    store: ObjectStore | None = None, depot: FakeDepot | None = None, clock: Callable[[], float] = time.time
) -> AsyncIterator[Operator]:
    store, depot = store or ObjectStore(lambda: 1e9), depot or FakeDepot()
    registry, backend = FakeRegistry(), FakeBackend(store)
    policy = Policy(resolve_period_s=0.01, longest_drain_s=0.0)
    controller = Controller(backend, depot, registry, policy=policy, clock=clock)
    registry.controller = backend.controller = controller  # type: ignore[assignment]
    controller.load(store.objects(), nothing_runs=True)
    store.listen(lambda event: controller.on_object(event.object, gone=event.type == "DELETED"))
    running = asyncio.create_task(controller.run())
    try:
        yield Operator(store, depot, registry, backend)
    finally:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_objects_become_ready() -> None:
    async with operator() as op:
        op.store.apply(pool_object())
        op.store.apply(adapter_object("upper"))
        await op.until(adapter_ref("upper"), "Ready", "True", "Published")
        await op.until(pool_ref(), "Available", "True", "RunnersReady")
        assert op.registry.names == {adapter_ref("upper"): "acme/upper"}
        assert op.backend.runners == {(pool_ref(), 0)}


async def test_a_start_tells_the_registry_nothing_before_everything_that_is_known() -> None:
    async with operator() as op:
        op.store.apply(pool_object())
        for name in ("upper", "lower"):
            op.store.apply(adapter_object(name))
            await op.until(adapter_ref(name), "Ready", "True", "Published")
        store = op.store
    depot = FakeDepot()
    depot.down = True  # not even the depot is needed to serve what was served
    again = ObjectStore(lambda: 1e9, store.objects(), store.version)
    async with operator(again, depot) as op:
        await op.until(adapter_ref("lower"), "Ready", "True", "Published")
        await op.until(adapter_ref("upper"), "Ready", "True", "Published")


async def test_an_edited_source_is_found_and_published() -> None:
    async with operator() as op:
        op.store.apply(pool_object())
        op.store.apply(adapter_object("upper"))
        await op.until(adapter_ref("upper"), "Ready", "True", "Published")
        op.depot.contents["file:upper"] = failed("NotFinite", validated=True)
        await op.until(adapter_ref("upper"), "Fetched", "False", "NotFinite")
        assert op.conditions(adapter_ref("upper"), "Ready") == [("True", "Published")]
        op.depot.contents["file:upper"] = good("d")
        await op.until(adapter_ref("upper"), "Fetched", "True", "Fetched")
        assert op.store.get(adapter_ref("upper"))["status"]["digest"] == digest("d")


async def test_a_depot_that_is_down_changes_nothing_and_is_found_again() -> None:
    async with operator() as op:
        op.depot.down = True
        op.store.apply(pool_object())
        await op.until(pool_ref(), "Fetched", "Unknown", "Resolving")
        op.depot.down = False
        await op.until(pool_ref(), "Fetched", "True", "Fetched")


async def test_a_write_that_fails_is_planned_again_and_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "PAUSE_MIN_S", 0.001)
    async with operator() as op:
        op.backend.break_next = 4
        op.store.apply(pool_object())
        op.store.apply(adapter_object("upper"))
        await op.until(adapter_ref("upper"), "Ready", "True", "Published")
        assert op.backend.break_next == 0


async def test_a_deleted_adapter_leaves_the_registry_and_its_source_alone() -> None:
    async with operator() as op:
        op.store.apply(pool_object())
        op.store.apply(adapter_object("upper"))
        await op.until(adapter_ref("upper"), "Ready", "True", "Published")
        op.store.delete(adapter_ref("upper"))
        op.store.apply(adapter_object("lower"))
        await op.until(adapter_ref("lower"), "Ready", "True", "Published")
        assert op.registry.names == {adapter_ref("lower"): "acme/lower"}


async def test_the_depot_is_told_what_to_keep_when_something_has_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "PAUSE_MAX_S", 0.01)
    jump = [0.0]
    async with operator(clock=lambda: time.time() + jump[0]) as op:
        op.store.apply(pool_object(drainSeconds=3600))
        op.store.apply(adapter_object("upper"))
        await op.until(adapter_ref("upper"), "Ready", "True", "Published")
        op.depot.contents["file:upper"] = good("d")
        await op.until_digest(adapter_ref("upper"), digest("d"))  # the one before drains from now on
        op.depot.refuse_lists = 1  # it is told again
        jump[0] = 3601.0
        op.depot.contents["file:upper"] = good("e")
        async with asyncio.timeout(10):
            kept = await op.depot.kept.get()
        assert kept >= {digest("b"), digest("d"), digest("e")}
        assert digest("a") not in kept
        assert op.depot.refuse_lists == 0


async def test_resolutions_are_bounded() -> None:
    async with operator() as op:
        op.store.apply(pool_object(drainSeconds=1))
        for number in range(50):
            op.depot.contents[f"file:a{number}"] = good("a")
            op.store.apply(adapter_object(f"a{number}"))
        for number in range(50):
            await op.until(adapter_ref(f"a{number}"), "Ready", "True", "Published")
        assert 1 < op.depot.most_at_once <= reconcile.RESOLVES_AT_ONCE


async def test_a_marked_object_comes_once_and_in_its_time() -> None:
    now = [0.0]
    queue = Queue(lambda: now[0])
    queue.add([pool_ref("a"), pool_ref("b")])
    queue.add([pool_ref("a")])
    queue.add_at(pool_ref("c"), 5.0)
    queue.add_at(pool_ref("d"), 9.0)
    queue.add_at(pool_ref("d"), 4.0)  # the last one said counts
    assert [await queue.get(), await queue.get()] == [pool_ref("a"), pool_ref("b")]
    now[0] = 4.5
    assert await queue.get() == pool_ref("d")
    now[0] = 10.0
    assert await queue.get() == pool_ref("c")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await queue.get()


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 10)), max_size=30))
async def test_every_marked_object_comes_and_none_comes_early(marks: list[tuple[str, float]]) -> None:
    now = [0.0]
    queue = Queue(lambda: now[0])
    due: dict[Ref, float] = {}
    for name, when in marks:
        queue.add_at(pool_ref(name), when)
        due[pool_ref(name)] = when
    for when in sorted(set(due.values())):
        now[0] = when
        expected = {ref for ref, at in due.items() if at == when}
        assert {await queue.get() for _ in expected} == expected
