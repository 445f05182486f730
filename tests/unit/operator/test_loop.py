"""The loop around the planner: the real controller; `controlling.py` says what is faked."""

import asyncio
import time
from collections.abc import Collection, Iterable
from dataclasses import replace

import pytest

from harness.waiting import PATIENCE_S
from tests.unit.operator.controlling import FakeDepot, operator
from tests.unit.operator.planning import adapter_object, adapter_ref, digest, pool_object, pool_ref, verified
from weft.artifacts.depot_api import ResolveRequest
from weft_operator.controller import SourceResolver, loop, resolver
from weft_operator.core import ClusterState, DesiredState, OperatorPolicy, Ref
from weft_operator.core.artifacts import Resolution
from weft_operator.local import ObjectStore


async def test_a_depot_that_is_down_changes_nothing_and_is_found_again() -> None:
    async with operator() as op:
        op.depot.down = True
        op.store.apply(pool_object())
        await op.until(pool_ref(), "Fetched", "Unknown", "Resolving")
        op.depot.down = False
        await op.until(pool_ref(), "Fetched", "True", "Fetched")


async def test_a_deleted_adapter_leaves_the_registry_and_its_source_alone() -> None:
    async with operator() as op:
        await op.serve("upper")
        op.store.delete(adapter_ref("upper"))
        op.store.apply(adapter_object("lower"))
        await op.until(adapter_ref("lower"), "Ready", "True", "Published")
        assert op.registry.names == {adapter_ref("lower"): "acme/lower"}


async def test_the_depot_gets_the_list_to_keep_when_something_has_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "PAUSE_S", 0.01)
    jump = [0.0]
    async with operator(clock=lambda: time.time() + jump[0]) as op:
        await op.serve("upper", drainSeconds=3600)
        op.depot.contents["file:upper"] = verified("d")
        await op.until_digest(adapter_ref("upper"), digest("d"))  # the one before drains from now on
        op.depot.refuse_lists = 1  # it is told again
        jump[0] = 3601.0
        op.depot.contents["file:upper"] = verified("e")
        async with asyncio.timeout(PATIENCE_S):
            kept = await op.depot.kept.get()
        assert kept >= {digest("b"), digest("d"), digest("e")}
        assert digest("a") not in kept
        assert op.depot.refuse_lists == 0


async def test_what_drains_one_after_the_other_is_dropped_with_a_few_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "PAUSE_S", 0.2)
    depot, now = FakeDepot(), time.time()
    state = ClusterState(DesiredState(OperatorPolicy(longest_drain_s=0.0)))
    retention = state.expectations.retention
    retention.last_sent = frozenset()
    for number in range(200):
        retention.left(digest("a") + str(number), now, number / 1000)
    keeping, lists = asyncio.create_task(SourceResolver(depot, state, clock=time.time, mark=lambda _: None).run_gc()), 0
    try:
        async with asyncio.timeout(PATIENCE_S):
            while retention.kept_until:
                await depot.kept.get()
                lists += 1
    finally:
        keeping.cancel()
    assert lists <= 5


async def test_watched_sources_are_asked_about_together_and_planned_on_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "RESYNC_S", 3600.0)
    async with operator() as op:
        op.depot.contents["file:base"] = replace(op.depot.contents["file:base"], watch="base")
        op.depot.contents |= {f"file:a{number}": replace(verified("a"), watch=f"a{number}") for number in range(10)}
        op.store.apply(pool_object())
        for number in range(10):
            op.store.apply(adapter_object(f"a{number}"))
        for number in range(10):
            await op.until(adapter_ref(f"a{number}"), "Ready", "True", "Published")
        all_of_them = {"base", *(f"a{number}" for number in range(10))}
        await op.depot.until_looked(all_of_them)
        op.depot.asked.clear()
        reconciles = op.metrics.reconciles["LoRAAdapter"]
        for _ in range(3):
            await op.depot.until_looked(all_of_them)
        assert (op.depot.asked, op.metrics.reconciles["LoRAAdapter"]) == ([], reconciles)
        op.depot.contents["file:a7"] = replace(verified("d"), watch="a7, edited")
        op.depot.edited = {"a7"}
        await op.until_digest(adapter_ref("a7"), digest("d"))
        assert op.depot.asked == ["file:a7"]
        await op.depot.until_looked(all_of_them - {"a7"} | {"a7, edited"})


class WaitingDepot(FakeDepot):
    """Holds a question for as long as it may wait."""

    async def changed(self, watches: Collection[str], wait_s: float) -> frozenset[str]:
        await super().changed(watches, wait_s)
        await asyncio.sleep(wait_s)
        return frozenset()


async def test_a_source_that_is_resolved_ends_a_question_that_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "WATCH_S", 3600.0)
    async with operator(depot=(depot := WaitingDepot())) as op:
        for name in ("base", "upper", "lower"):
            depot.contents[f"file:{name}"] = replace(verified(name[0]), watch=name)
        op.store.apply(pool_object())
        await depot.until_looked({"base"})
        op.store.apply(adapter_object("upper"))
        await depot.until_looked({"base", "upper"})
        op.store.apply(adapter_object("lower"))
        await depot.until_looked({"base", "upper", "lower"})


async def test_everything_is_planned_again_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "RESYNC_S", 0.01)
    monkeypatch.setattr(loop, "MAX_RESYNCED", 4)
    async with operator(period_s=3600.0) as op:
        op.store.apply(pool_object())
        for number in range(10):
            op.depot.contents[f"file:a{number}"] = verified("a")
            op.store.apply(adapter_object(f"a{number}"))
        for number in range(10):
            await op.until(adapter_ref(f"a{number}"), "Ready", "True", "Published")
        slices, add = asyncio.Queue[list[Ref]](), op.controller._queue.add  # pyright: ignore[reportPrivateUsage]

        def added(refs: Iterable[Ref]) -> None:
            slices.put_nowait(refs := list(refs))
            add(refs)

        monkeypatch.setattr(op.controller._queue, "add", added)  # pyright: ignore[reportPrivateUsage]
        left = {pool_ref(), *(adapter_ref(f"a{number}") for number in range(10))}
        async with asyncio.timeout(PATIENCE_S):
            while left:
                refs = await slices.get()
                assert len(refs) <= 4
                left.difference_update(refs)


async def test_an_object_that_leaves_while_its_source_is_asked_about_does_not_end_the_questions() -> None:
    """The object's resolution stays until its deletion has been planned."""
    depot, state = FakeDepot(), ClusterState(DesiredState(OperatorPolicy(resolve_period_s=0.01)))
    request = ResolveRequest("adapter", "file:a", "acme")
    state.observed.resolutions["uid"] = Resolution(request, replace(verified("a"), watch="a"))
    depot.edited = {"a"}
    watching = asyncio.create_task(SourceResolver(depot, state, clock=time.time, mark=lambda _: None).watch())
    try:
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(3):
                assert await depot.looked.get() == {"a"}
        assert not watching.done()
    finally:
        watching.cancel()


async def test_resolutions_are_bounded() -> None:
    async with operator() as op:
        op.store.apply(pool_object(drainSeconds=1))
        for number in range(50):
            op.depot.contents[f"file:a{number}"] = verified("a")
            op.store.apply(adapter_object(f"a{number}"))
        for number in range(50):
            await op.until(adapter_ref(f"a{number}"), "Ready", "True", "Published")
        assert 1 < op.depot.most_at_once <= resolver.RESOLVES_OF_NAMESPACE


async def test_a_new_source_does_not_wait_behind_those_that_a_new_leader_resolves_again() -> None:
    names = [f"a{number}" for number in range(resolver.RESOLVES_OF_NAMESPACE * 2)]
    async with operator() as op:
        op.store.apply(pool_object())
        for name in names:
            op.depot.contents[f"file:{name}"] = verified("a")
            op.store.apply(adapter_object(name))
            await op.until(adapter_ref(name), "Ready", "True", "Published")
        store = op.store
    depot = FakeDepot()
    depot.stuck |= {f"file:{name}" for name in names}
    async with operator(ObjectStore(lambda: 1e9, store.objects(), store.version), depot) as op:
        await op.until(pool_ref(), "Available", "True", "RunnersReady")
        op.store.apply(adapter_object("upper"))
        await op.until(adapter_ref("upper"), "Ready", "True", "Published")
        assert op.depot.at_once == resolver.RESOLVES_AGAIN


async def test_sources_that_stand_still_hold_up_no_other_namespace() -> None:
    async with operator() as op:
        op.store.apply(pool_object(allowedNamespaces=["*"]))
        await op.until(pool_ref(), "Fetched", "True", "Fetched")
        slow = [f"slow{number}" for number in range(resolver.RESOLVES_OF_NAMESPACE + 5)]
        op.depot.stuck |= {f"file:{name}" for name in slow}
        for name in slow:
            op.store.apply(adapter_object(name, namespace="globex"))
        await op.until(adapter_ref(slow[-1], "globex"), "Validated", "Unknown", "Resolving")
        op.store.apply(adapter_object("upper"))
        await op.until(adapter_ref("upper"), "Ready", "True", "Published")
        assert op.depot.at_once >= resolver.RESOLVES_OF_NAMESPACE


async def test_many_namespaces_together_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "RESOLVES_AT_ONCE", 3)
    async with operator() as op:
        op.store.apply(pool_object(allowedNamespaces=["*"]))
        for number in range(20):
            op.depot.contents[f"file:a{number}"] = verified("a")
            op.store.apply(adapter_object(f"a{number}", namespace=f"n{number}"))
        for number in range(20):
            await op.until(adapter_ref(f"a{number}", f"n{number}"), "Ready", "True", "Published")
        assert op.depot.most_at_once == 3


async def test_what_drained_is_dropped_while_a_source_stands_still() -> None:
    jump = [0.0]
    async with operator(clock=lambda: time.time() + jump[0]) as op:
        await op.serve("upper", drainSeconds=1)
        op.depot.stuck.add("file:slow")
        op.store.apply(adapter_object("slow"))
        op.store.delete(adapter_ref("upper"))
        op.store.apply(adapter_object("lower"))
        await op.until(adapter_ref("lower"), "Ready", "True", "Published")
        jump[0] = 10_000.0
        op.depot.contents["file:lower"] = verified("e")  # its drain begins, and wakes who keeps the list
        async with asyncio.timeout(PATIENCE_S):
            while digest("a") in (kept := await op.depot.kept.get()):
                pass
        assert digest("b") in kept
