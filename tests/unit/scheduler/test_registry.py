"""Routes, desired digests, statuses: what follows from the registry, and only when it changes."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_scheduler.core.effects import (
    AdapterStatus,
    Assign,
    Ignored,
    Order,
    PoolStatus,
    Preempt,
    Reject,
    RejectReason,
    SendRoutes,
)
from weft_scheduler.core.events import KeysTold, RegistryChange, RegistryUp, Started
from weft_scheduler.core.routes import routes
from weft_scheduler.core.state import Pool
from weft_scheduler.core.values import AdapterSpec, AdapterView, Epoch, KeyRoute, PoolSpec, RunnerId, Tier

POOL = "acme/p"
Picked = Callable[..., list[Any]]
KEYS = KeysTold("s", (KeyRoute("hash", "acme", "key"),))


def names(effects: list[SendRoutes]) -> list[str]:
    return [r.model_name for r in effects[-1].table.routes]


def digests(effects: list[Order]) -> list[str]:
    return [a.digest for a in effects[-1].desired.adapters]


# ------------------------------------------------------------ routes


def test_a_name_routes_to_its_pool_and_digest_and_the_base_to_its_pool(desk: Any, picked: Picked) -> None:
    desk.start("sha256:1")
    (route, base) = desk.core.context.told.table.routes
    assert (route.model_name, route.pool, route.digest) == ("acme/sha256:1", POOL, "sha256:1")
    assert (base.model_name, base.pool, base.digest, base.namespace) == ("base", POOL, "", "acme")


def test_an_adapter_without_a_digest_or_without_a_pool_has_no_route(desk: Any, picked: Picked, adapter_of: Any) -> None:
    desk.start()
    lonely = (adapter_of(""), adapter_of("sha256:9", pool="acme/nowhere"))
    effects = desk.handle(RegistryChange(False, adapters=lonely)) + desk.wait(1.0)
    assert not picked(effects, SendRoutes)
    assert [s.routed for s in picked(effects, AdapterStatus)] == [False, False]


def test_the_older_of_two_with_one_name_wins_and_the_other_gets_it_when_that_is_gone(
    desk: Any, picked: Picked, adapter_of: Any
) -> None:
    desk.start()
    older = adapter_of("sha256:2", uid="old", model_name="acme/x", created_unix_s=5)
    younger = adapter_of("sha256:1", uid="a-new", model_name="acme/x", created_unix_s=9)
    desk.handle(RegistryChange(False, adapters=(younger, older)))
    assert [r.uid for r in desk.core.context.told.table.routes] == ["old", "pool:acme/p"]
    routed = {s.uid: s.routed for s in picked(desk.wait(1.0), AdapterStatus)}
    assert routed == {"old": True, "a-new": False}
    desk.handle(RegistryChange(False, removed_adapters=("old",)))
    assert [r.uid for r in desk.core.context.told.table.routes] == ["a-new", "pool:acme/p"]


@given(st.permutations([("a", 3), ("b", 1), ("c", 1), ("d", 2)]))
def test_who_wins_a_name_does_not_depend_on_the_order_of_arrival(order: list[tuple[str, int]]) -> None:
    pool = Pool(POOL)
    pool.spec = PoolSpec(POOL, "sha256:base", "base", created_unix_s=9)
    for uid, created in order:
        pool.put_adapter(AdapterSpec(uid, "n", uid, "same", POOL, f"sha256:{uid}", 8, created_unix_s=created))
    assert [r.uid for r in routes([pool])] == ["pool:acme/p", "b"]


def test_every_gateway_hears_a_change_and_a_new_one_hears_the_last_table(desk: Any, picked: Picked) -> None:
    desk.start("sha256:1")
    assert names(picked(desk.gateway("g2"), SendRoutes)) == ["acme/sha256:1", "base"]
    effects = picked(desk.registry("sha256:1", "sha256:2"), SendRoutes)
    assert {e.gateway for e in effects} == {"g", "g2"}
    assert len({e.table.version for e in effects}) == 1


def test_the_same_snapshot_again_sends_no_table_and_no_order(desk: Any, picked: Picked) -> None:
    desk.start("sha256:1")
    desk.runner("a")
    desk.wait(1.0)
    effects = desk.registry("sha256:1")
    assert not picked(effects, SendRoutes)
    assert not picked(effects, Order)


def test_table_versions_grow_across_restarts(new_desk: Any) -> None:
    versions: list[int] = []
    for term in (1, 2):
        desk = new_desk(term=term).start("sha256:1")
        desk.registry("sha256:1", "sha256:2")
        versions.append(desk.core.context.told.table.version)
    assert versions == sorted(versions)
    assert versions[0] < versions[1]


def test_before_any_runner_the_context_is_what_the_registry_says(new_desk: Any) -> None:
    desk = new_desk()
    desk.gateway()
    desk.registry("sha256:1", max_context_tokens=640)
    desk.wait(10.0)
    assert [pool.max_context_tokens for pool in desk.core.context.told.table.pools] == [640]


def test_the_context_is_the_least_of_the_ready_runners_and_the_last_known_while_there_is_none(desk: Any) -> None:
    def context() -> int:
        desk.wait(1.0)
        return desk.core.context.told.table.pools[0].max_context_tokens

    desk.start()
    assert context() == 0
    desk.runner("a", max_context_tokens=1600)
    assert context() == 1600
    desk.runner("b", max_context_tokens=800)
    assert context() == 800
    desk.lost("b")
    assert context() == 1600
    desk.lost("a")
    assert context() == 1600


def test_the_first_table_waits_a_little_for_the_keys_and_a_change_of_keys_is_told(desk: Any, picked: Picked) -> None:
    desk.gateway()
    assert not picked(desk.registry(), SendRoutes)
    desk.supervisor()
    (first,) = picked(desk.handle(KEYS), SendRoutes)
    assert first.table.keys_known
    assert first.table.keys == KEYS.keys
    assert not picked(desk.handle(KEYS), SendRoutes)
    (second,) = picked(desk.handle(KeysTold("s", ())), SendRoutes)
    assert second.table.keys == ()


def test_without_a_supervisor_the_first_table_goes_out_without_keys(desk: Any, picked: Picked) -> None:
    desk.gateway()
    desk.registry()
    assert not picked(desk.wait(1.9), SendRoutes)
    (first,) = picked(desk.wait(0.2), SendRoutes)
    assert not first.table.keys_known


# ------------------------------------------------------------ desired digests


def test_a_runner_is_told_its_pools_list_once_and_again_when_it_changes(desk: Any, picked: Picked) -> None:
    desk.start("sha256:1")
    (order,) = picked(desk.runner("a"), Order)
    assert digests([order]) == ["sha256:1"]
    assert not picked(desk.runner("a", desired_version=order.desired.version), Order)
    (more,) = picked(desk.registry("sha256:1", "sha256:2"), Order)
    assert digests([more]) == ["sha256:1", "sha256:2"]
    assert more.desired.version > order.desired.version


def test_an_empty_list_is_told_too_but_none_before_the_registry_is_known(desk: Any, picked: Picked) -> None:
    desk.gateway()
    desk.supervisor()
    assert not picked(desk.runner("a"), Order)
    (order,) = picked(desk.registry(), Order)
    assert order.desired.adapters == ()


def test_a_digest_in_use_stays_on_the_list_until_its_last_stream_ends(desk: Any, picked: Picked) -> None:
    desk.start("sha256:1")
    desk.runner("a")
    desk.place("r", "sha256:1")
    desk.handle(_started(desk))
    assert not picked(desk.registry("sha256:2"), Order)[1:]
    assert {a.digest for a in desk.core.state.pools[POOL].desired.list.adapters} == {"sha256:1", "sha256:2"}
    desk.wait(20.0)
    assert desk.knows("r")
    desk.outcome("r", digest="sha256:1")
    effects = desk.wait(0.1)
    assert digests(picked(effects, Order)) == ["sha256:2"]


def test_a_stream_of_a_deleted_digest_ends_by_name_when_the_drain_time_is_over(desk: Any, picked: Picked) -> None:
    desk.start("sha256:1")
    desk.runner("a", max_sequences=1)
    desk.place("running", "sha256:1")
    desk.handle(_started(desk, "running"))
    desk.submit("waiting", "sha256:1")
    desk.registry()
    assert not picked(desk.wait(299.0), Reject)
    effects = desk.wait(2.0)
    assert [p.request_id for p in picked(effects, Preempt)] == ["running"]
    rejects = {r.request_id: r.reason for r in picked(effects, Reject)}
    assert rejects == dict.fromkeys(["running", "waiting"], RejectReason.UNKNOWN_ADAPTER)
    assert desk.core.state.pools[POOL].desired.list.adapters == ()


def test_a_pools_own_drain_time_counts_before_the_schedulers(desk: Any, picked: Picked) -> None:
    desk.start("sha256:1", drain_s=600.0)
    desk.runner("a")
    desk.place("r", "sha256:1")
    desk.handle(_started(desk))
    desk.registry(drain_s=600.0)
    assert not picked(desk.wait(599.0), Reject)
    assert [r.request_id for r in picked(desk.wait(2.0), Reject)] == ["r"]


def test_a_new_request_for_a_digest_just_replaced_is_served_and_refused_later(desk: Any, picked: Picked) -> None:
    desk.start("sha256:1")
    desk.runner("a")
    desk.registry("sha256:2")
    assert picked(desk.submit("soon", "sha256:1"), Assign)
    desk.outcome("soon", digest="sha256:1")
    desk.wait(6.0)
    (late,) = picked(desk.submit("late", "sha256:1"), Reject)
    assert late.reason is RejectReason.UNKNOWN_ADAPTER


def test_a_digest_that_comes_back_in_time_keeps_its_streams(desk: Any, picked: Picked) -> None:
    desk.start("sha256:1")
    desk.runner("a")
    desk.place("r", "sha256:1")
    desk.handle(_started(desk))
    desk.registry()
    desk.wait(200.0)
    desk.registry("sha256:1")
    assert not picked(desk.wait(200.0), Reject)
    assert desk.knows("r")


def test_after_a_restart_streams_of_a_deleted_digest_may_finish(desk: Any, picked: Picked) -> None:
    desk.registry()
    desk.gateway(complete=False)
    desk.supervisor()
    effects = desk.submit(
        "r", "sha256:gone", emitted_tokens=2, epoch=Epoch(1, 1), runner=RunnerId("a", "i1"), reservation_tokens=9
    )
    assert not picked(effects, Reject)
    assert desk.core.state.pools[POOL].desired.knows("sha256:gone")
    desk.wait(1.0)  # the list with it is published
    assert digests(picked(desk.runner("a"), Order)) == ["sha256:gone"]


def test_a_pinned_adapter_that_cannot_load_does_not_keep_a_runner_from_serving(
    desk: Any, picked: Picked, adapter_of: Any
) -> None:
    desk.registry()
    desk.gateway()
    desk.supervisor()
    desk.handle(RegistryChange(False, adapters=(adapter_of("sha256:1", pinned=True),)))
    version = desk.core.state.pools[POOL].desired.list.version
    desk.runner("a", ready=False, desired_version=version)
    assert not picked(desk.submit("r"), Assign)
    broken = (AdapterView("sha256:1", False, "torn"),)
    assert picked(desk.runner("a", ready=False, desired_version=version, adapters=broken), Assign)


def test_an_adapter_on_its_way_to_its_tier_keeps_a_runner_from_serving_and_one_that_failed_does_not(
    desk: Any, picked: Picked, adapter_of: Any
) -> None:
    desk.registry()
    desk.gateway()
    desk.supervisor()
    digests = ("sha256:1", "sha256:2")
    desk.handle(RegistryChange(False, adapters=tuple(adapter_of(d, tier=Tier.HOST) for d in digests)))
    version = desk.core.state.pools[POOL].desired.list.version
    failed, coming = AdapterView("sha256:1", False, "torn"), AdapterView("sha256:2", False, loading=True)
    desk.submit("r")
    for adapters in ((coming,), (failed, coming)):
        assert not picked(desk.runner("a", ready=False, desired_version=version, adapters=adapters), Assign)
    again = AdapterView("sha256:1", False, "torn", loading=True)
    assert picked(desk.runner("a", ready=False, desired_version=version, adapters=(again,)), Assign)


def test_a_tier_reaches_the_runners_and_two_of_one_content_get_the_higher(
    desk: Any, picked: Picked, adapter_of: Any
) -> None:
    desk.start()
    desk.runner("a")
    same = "sha256:1"
    adapters = (adapter_of(same, uid="1", tier=Tier.HOST), adapter_of(same, uid="2", tier=Tier.DISK, pinned=True))
    (order,) = picked(desk.handle(RegistryChange(False, adapters=adapters)), Order)
    (wanted,) = order.desired.adapters
    assert (wanted.tier, wanted.pinned) == (Tier.HOST, True)
    assert not picked(desk.handle(RegistryChange(False, adapters=adapters[::-1])), Order), "whoever came first"
    (order,) = picked(desk.handle(RegistryChange(False, removed_adapters=("1",))), Order)
    assert order.desired.adapters[0].tier is Tier.DISK
    desk.place("r", same)
    (order,) = picked(desk.handle(RegistryChange(False, removed_adapters=("2",))), Order)
    assert order.desired.adapters[0].tier is Tier.UNSPECIFIED, "nobody has to wait for one that goes"


def test_a_list_of_an_earlier_process_with_a_higher_number_is_not_taken_for_this_one(desk: Any, picked: Picked) -> None:
    desk.start("sha256:1", settle=False)
    desk.runner("a", desired_version=7 << 32)
    statuses = picked(desk.wait(1.0), AdapterStatus)
    assert statuses[-1].ready_runners == 0
    desk.runner("a", desired_version=desk.core.state.pools[POOL].desired.list.version)
    assert picked(desk.wait(1.0), AdapterStatus)[-1].ready_runners == 1


def test_a_runner_that_served_once_is_not_held_back_by_what_is_pinned_later(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a")
    desk.runner("a", ready=False)
    assert picked(desk.submit("r"), Assign)


def _started(desk: Any, request_id: str = "r") -> Any:
    return Started("g", request_id, desk.request(request_id).epoch)


# ------------------------------------------------------------ statuses


def test_statuses_are_told_only_when_they_change(desk: Any, picked: Picked) -> None:
    desk.handle(RegistryUp())
    desk.start("sha256:1")
    version = desk.core.state.pools[POOL].desired.list.version
    desk.runner("a", desired_version=version)
    (pool,) = picked(effects := desk.wait(1.0), PoolStatus)
    assert (pool.ready_runners, pool.running, pool.queued) == (1, 0, 0)
    (adapter,) = picked(effects, AdapterStatus)
    assert (adapter.uid, adapter.routed, adapter.ready_runners) == ("uid-sha256:1", True, 1)
    desk.runner("a", desired_version=version)
    assert not picked(desk.wait(10.0), PoolStatus) + picked(desk.wait(10.0), AdapterStatus)


def test_a_runner_that_knows_nothing_new_changes_no_adapters_status(desk: Any, picked: Picked) -> None:
    desk.start("sha256:1")
    desk.wait(1.0)
    desk.runner("a", desired_version=0)  # Ready with a list from before
    effects = desk.wait(1.0)
    assert [s.ready_runners for s in picked(effects, PoolStatus)] == [1]
    assert not picked(effects, AdapterStatus)


def test_a_registry_that_comes_again_is_told_everything_once(desk: Any, picked: Picked) -> None:
    desk.start("sha256:1")
    desk.wait(1.0)
    desk.handle(RegistryUp())
    desk.registry("sha256:1")
    effects = desk.wait(1.0)
    assert len(picked(effects, PoolStatus)) == len(picked(effects, AdapterStatus)) == 1


def test_a_ready_runner_counts_for_an_adapter_once_it_has_applied_a_list_with_it(desk: Any, picked: Picked) -> None:
    desk.start("sha256:1")
    old = desk.core.state.pools[POOL].desired.list.version
    desk.runner("a", desired_version=old)
    desk.runner("b", desired_version=old)
    desk.registry("sha256:1", "sha256:2")
    new = desk.core.state.pools[POOL].desired.list.version
    desk.runner("b", desired_version=new)
    ready = {s.digest: s.ready_runners for s in picked(desk.wait(1.0), AdapterStatus)}
    assert ready == {"sha256:1": 2, "sha256:2": 1}


def test_why_a_load_failed_is_told_by_runner_four_at_the_most(desk: Any, picked: Picked) -> None:
    desk.start("sha256:1")
    version = desk.core.state.pools[POOL].desired.list.version
    for uuid in "abcdef":
        desk.runner(uuid, adapters=(AdapterView("sha256:1", False, "torn"),), desired_version=version)
    (status,) = picked(desk.wait(1.0), AdapterStatus)
    assert status.load_errors == ("a: torn", "b: torn", "c: torn", "d: torn")
    assert status.ready_runners == 0, "though all six know it and are Ready"
    for uuid in "abcdef":
        desk.runner(uuid, desired_version=version)
    (status,) = picked(desk.wait(1.0), AdapterStatus)
    assert (status.load_errors, status.ready_runners) == ((), 6)


def test_many_adapters_are_told_in_bounded_batches(new_desk: Any, picked: Picked) -> None:
    desk = new_desk(status_batch=10)
    desk.registry(*(f"sha256:{i}" for i in range(25)))
    batches = [len(picked(desk.wait(0.2), AdapterStatus)) for _ in range(4)]
    assert batches == [10, 10, 5, 0]


def test_a_removed_pool_ends_its_requests_and_is_forgotten_with_its_last_runner(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a")
    desk.place("r")
    effects = desk.handle(RegistryChange(False, removed_pools=(POOL,)))
    assert [r.reason for r in picked(effects, Reject)] == [RejectReason.UNKNOWN_POOL]
    assert picked(effects, Preempt)
    desk.lost("a")
    assert not desk.core.state.pools


@pytest.mark.parametrize("field", ["placement", "queue", "reservation"])
def test_a_policy_nobody_has_is_served_by_the_default_and_said(desk: Any, picked: Picked, field: str) -> None:
    effects = desk.registry(**{field: "magic"})
    assert [e.what for e in picked(effects, Ignored)] == ["registry"]
    desk.gateway()
    desk.supervisor()
    desk.runner("a")
    assert desk.place("r")


def test_two_adapters_with_one_content_are_one_on_the_runners(desk: Any, picked: Picked, adapter_of: Any) -> None:
    desk.start()
    desk.runner("a")
    twins = (adapter_of("sha256:1", uid="x", pinned=True), adapter_of("sha256:1", uid="y", model_name="acme/y"))
    (order,) = picked(desk.handle(RegistryChange(False, adapters=twins)), Order)
    assert [(a.digest, a.pinned) for a in order.desired.adapters] == [("sha256:1", True)]
    assert not picked(desk.handle(RegistryChange(False, removed_adapters=("y",))), Order)
