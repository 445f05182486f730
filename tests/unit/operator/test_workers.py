"""Several workers, late words, and rest: what the loop promises beyond planning."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from harness.waiting import PATIENCE_S
from tests.unit.operator.controlling import FakeBackend, FakeDepot, FakeRegistry, Operator, operator
from tests.unit.operator.planning import adapter_object, adapter_ref, pool_object, pool_ref, stored, verified
from weft.domain.routes import AdapterStatus, PoolSpec, PoolStatus
from weft_operator.controller import Controller, loop
from weft_operator.core import DesiredState
from weft_operator.core.resources import FINALIZER
from weft_operator.core.state import ObjectKey, Pod
from weft_operator.local import ObjectStore

KEY = ObjectKey("Deployment", "default", "base-runners")


TOLD = PoolSpec("default/base", "d", "base", shared_all=True, max_queue=9, min_runners=1, drain_s=60.0)


def with_version(obj: Any, version: object) -> Any:
    return {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(version)}}


@pytest.fixture
def controller() -> Controller:
    """Make a controller that does not run."""
    return Controller(FakeBackend(ObjectStore(lambda: 1e9)), FakeDepot(), FakeRegistry(), desired=DesiredState())


async def ready(op: Operator) -> None:
    """Nothing is marked and nobody works."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            before = op.metrics.reconciles.total()
            for _ in range(20):
                await asyncio.sleep(0)
            if before == op.metrics.reconciles.total():
                return


async def test_objects_are_worked_on_side_by_side_and_one_never_twice_at_once() -> None:
    async with operator(period_s=60.0) as op:
        op.store.apply(pool_object())
        await op.until(pool_ref(), "Available", "True", "RunnersReady")
        op.backend.gate = asyncio.Event()
        for number in range(20):
            op.depot.contents[f"file:a{number}"] = verified("a")
            op.store.apply(adapter_object(f"a{number}"))
        await op.backend.working(lambda: op.backend.most_at_once == loop.WORKERS)
        op.backend.gate.set()
        for number in range(20):
            await op.until(adapter_ref(f"a{number}"), "Ready", "True", "Published")
        assert op.backend.most_at_once == loop.WORKERS


async def test_a_write_that_hangs_keeps_only_its_own_object_waiting() -> None:
    async with operator(period_s=60.0) as op:
        op.store.apply(pool_object())
        await op.until(pool_ref(), "Available", "True", "RunnersReady")
        op.backend.gate = asyncio.Event()
        op.store.apply(adapter_object("upper"))
        await op.backend.working(lambda: op.backend.at_work[adapter_ref("upper")] == 1)
        op.backend.gate = None
        op.store.apply(adapter_object("lower"))
        await op.until(adapter_ref("lower"), "Ready", "True", "Published")
        assert op.conditions(adapter_ref("upper"), "Ready") == []


async def test_the_scheduler_gets_everything_before_anything_is_written() -> None:
    names = ("upper", "lower")
    async with operator() as op:
        await op.serve(*names)
        store = ObjectStore(lambda: 1e9, op.store.objects(), op.store.version)
    depot = FakeDepot()
    depot.down = True  # not even the depot is needed to serve what was served
    async with operator(store, depot) as op:
        op.backend.gate = asyncio.Event()
        await asyncio.sleep(0)
        assert op.registry.started
        assert op.registry.names == {adapter_ref(name): f"acme/{name}" for name in names}
        assert not op.controller.planned.is_set()
        op.backend.gate.set()
        async with asyncio.timeout(PATIENCE_S):
            await op.controller.planned.wait()
        for name in names:
            await op.until(adapter_ref(name), "Ready", "True", "Published")


async def test_an_empty_world_is_planned_at_once() -> None:
    async with operator() as op, asyncio.timeout(PATIENCE_S):
        await op.controller.planned.wait()


def test_versions_are_taken_in_the_order_of_events(controller: Controller) -> None:
    for generation, version in enumerate(("b", "a"), 1):
        named = adapter_object("upper", modelName=version)
        controller.on_object(stored(named, resourceVersion=version, generation=generation))
    assert controller.state.desired.adapters[adapter_ref("upper")].model_name == "a"


def test_the_end_of_an_object_before_this_one_is_no_end_of_this_one(controller: Controller) -> None:
    old = stored(adapter_object("upper"), uid="old", resourceVersion="5")
    controller.on_object(old)
    controller.on_object(stored(adapter_object("upper"), uid="new", resourceVersion="7"))
    controller.on_object(with_version(old, 6), deleted=True)
    assert controller.state.desired.adapters[adapter_ref("upper")].meta.uid == "new"
    controller.on_object(stored(adapter_object("upper"), uid="new", resourceVersion="8"), deleted=True)
    assert controller.state.desired.refs() == []


async def test_what_is_done_is_counted() -> None:
    async with operator(period_s=60.0) as op:
        await op.serve("upper")
        await ready(op)
        assert op.metrics.writes["EnsureRunner"] == 1
        assert op.metrics.writes["SetStatus"] >= 2
        assert op.metrics.writes["RecordEvent"] == len(op.backend.announced) > 0
        assert op.metrics.failures.total() == 0


async def test_a_conflict_is_no_failure_a_bug_is_one_both_are_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "MIN_PAUSE_S", 0.001)
    async with operator(period_s=60.0) as op:
        op.backend.break_next = 4  # conflicts and bugs in turn
        await op.serve("upper")
        assert op.backend.break_next == 0
        assert op.metrics.failures.total() == 2


def test_children_and_pods_are_distinguished_from_what_is_known(controller: Controller) -> None:
    pod = Pod("p", "u1", "runners", "Ready", cost=-1)
    controller.state.expectations.deletion_costs["u1"] = (-1, 0.0)
    controller.on_pod(pool_ref(), "p", pod)
    controller.on_child(pool_ref(), KEY, {"metadata": {"uid": "d"}})
    controller.state.expectations.applied[KEY] = ("intent", "1")
    assert controller.state.observed.pods == {pool_ref(): {"p": pod}}
    controller.on_pod(pool_ref(), "p", replace(pod, uid="u2", cost=None))
    assert controller.state.expectations.deletion_costs == {}  # of the pod before
    controller.on_pod(pool_ref(), "p", None)
    controller.on_child(pool_ref(), KEY, None)
    controller.on_child(pool_ref(), KEY, None)
    observed = controller.state.observed
    assert (observed.pods, observed.children, controller.state.expectations.applied) == ({}, {}, {})


def test_a_deleted_adapter_is_gone_by_the_schedulers_last_word_and_no_other(controller: Controller) -> None:
    obj = stored(adapter_object("upper"), uid="u1", finalizers=[FINALIZER], deletionTimestamp="2026-01-02T00:00:00Z")
    controller.on_object(obj)
    controller.state.expectations.unloading.add("u1")
    for report in (AdapterStatus("d", True), AdapterStatus("d", False)):
        controller.on_adapter_report("u1", report)
        assert controller.state.observed.unloaded == set()
    controller.on_adapter_report("nobody", AdapterStatus("d", False, removed=True))
    controller.on_adapter_report("u1", AdapterStatus("d", False, removed=True))
    assert controller.state.observed.unloaded == {"u1"}
    controller.on_object(with_version(obj, 9), deleted=True)
    assert (controller.state.observed.unloaded, controller.state.expectations.unloading) == (set(), set())


def test_a_late_word_on_a_pool_that_was_withdrawn_is_not_about_the_next_of_its_name(controller: Controller) -> None:
    controller.on_pool_report("default/base", PoolStatus(2, 2, (), 2))
    assert controller.state.observed.pool_reports == {}
