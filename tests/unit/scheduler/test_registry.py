"""Routes, desired digests, statuses: what follows from the registry, and only when it changes."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.scheduler_driver import Driver, adapter, of, peers
from weft.domain.adapter import AdapterState, AdapterVersion, DesiredChange, Tier
from weft.domain.ids import Epoch, RunnerId
from weft.domain.limits import LimitReport, LimitRule, LimitUse
from weft.domain.machine import Connected, Kind, Peer
from weft.domain.request import Assign, OutcomeReport, Preempt, Reject, RejectReason, Started
from weft.domain.routes import (
    AdapterSpec,
    AdapterStatus,
    CanaryCounts,
    KeyRoute,
    Keys,
    PoolStatus,
    RegistryChange,
    ResyncRoutes,
    RouteBook,
    Routes,
    RoutesApplied,
    Unserved,
)
from weft.domain.runner import OrderedRunner, Resync
from weft_scheduler.core import Stale

POOL = "acme/p"
KEYS = Keys((KeyRoute("hash", "acme", "key"),))


def names(effects: list[Routes]) -> list[str]:
    return [r.model_name for r in effects[-1].routes]


# ------------------------------------------------------------ routes


def test_a_name_routes_to_its_pool_and_digest_and_the_base_to_its_pool(driver: Driver) -> None:
    driver.start("sha256:1")
    (route, base) = driver.state.routes.full().routes
    assert (route.model_name, route.pool, route.digest) == ("acme/sha256:1", POOL, "sha256:1")
    assert (base.model_name, base.pool, base.digest, base.namespace) == ("base", POOL, "", "acme")


def test_an_adapter_without_a_digest_or_without_a_pool_has_no_route(driver: Driver) -> None:
    driver.start()
    effects = driver.change(RegistryChange(False, adapters=(adapter("sha256:9", pool="acme/nowhere"),)))
    effects += driver.wait(1.0)
    assert not of(effects, Routes)
    assert [s.routed for s in of(effects, AdapterStatus)] == [False]


def test_why_an_adapter_is_not_served_goes_to_gateways_until_it_is_served_or_gone(driver: Driver) -> None:
    driver.start("sha256:1")
    served = adapter("sha256:1")
    broken = replace(served, digest="", reason="NotFinite", message="lora_A holds NaN")
    (change,) = of(driver.change(RegistryChange(False, adapters=(broken,))), Routes)
    assert change.removed_models == ("acme/sha256:1",)
    assert change.unserved == (Unserved(served.uid, "acme", "acme/sha256:1", POOL, "NotFinite", "lora_A holds NaN"),)
    assert driver.state.routes.full().unserved == change.unserved
    (change,) = of(driver.change(RegistryChange(False, adapters=(served,))), Routes)
    assert (change.removed_unserved, len(change.routes)) == ((served.uid,), 1)
    driver.change(RegistryChange(False, adapters=(broken,)))
    (change,) = of(driver.change(RegistryChange(False, removed_adapters=(served.uid,))), Routes)
    assert change.removed_unserved == (served.uid,)


def test_the_older_of_two_with_one_name_wins_and_the_other_gets_it_when_that_is_gone(driver: Driver) -> None:
    driver.start()
    older = adapter("sha256:2", uid="old", model_name="acme/x", created_unix_s=5)
    younger = adapter("sha256:1", uid="a-new", model_name="acme/x", created_unix_s=9)
    driver.change(RegistryChange(False, adapters=(younger, older)))
    assert [r.uid for r in driver.state.routes.full().routes] == ["old", "pool:acme/p"]
    assert {s.uid: s.routed for s in of(driver.wait(1.0), AdapterStatus)} == {"old": True, "a-new": False}
    driver.change(RegistryChange(False, removed_adapters=("old",)))
    assert [r.uid for r in driver.state.routes.full().routes] == ["a-new", "pool:acme/p"]


def test_every_gateway_hears_a_change_and_a_new_one_hears_the_last_table(driver: Driver) -> None:
    driver.start("sha256:1")
    assert names(of(driver.gateway("g2"), Routes)) == ["acme/sha256:1", "base"]
    before = driver.state.routes.full()
    effects = driver.registry("sha256:1", "sha256:2")
    assert peers(effects, Routes) == ["g", "g2"]
    one, two = of(effects, Routes)
    assert one is two, "it is encoded once"
    assert (one.full, one.base_version, [r.digest for r in one.routes]) == (False, before.version, ["sha256:2"])
    (gone,) = of(driver.change(RegistryChange(False, removed_adapters=("uid-sha256:1",))), Routes)[:1]
    assert (gone.removed_models, gone.routes, gone.base_version) == (("acme/sha256:1",), (), one.version)


def test_an_adapter_is_reported_once_every_gateway_that_says_so_has_applied_its_route(driver: Driver) -> None:
    driver.start("sha256:1")  # with a gateway that does not say what it has applied
    for name in ("g2", "g3"):
        (table,) = of(driver.gateway(name, applies_routes=True), Routes)
        driver.gateway_sends(RoutesApplied(table.version), name)
    driver.wait(1.0)
    change = of(driver.change(RegistryChange(False, adapters=(adapter("sha256:2"),))), Routes)[0]
    assert not of(driver.wait(5.0), AdapterStatus)
    driver.gateway_sends(RoutesApplied(change.version), "g2")
    driver.gateway_sends(RoutesApplied(change.base_version), "g3")
    assert not of(driver.wait(5.0), AdapterStatus), "g3 may still submit requests of the table before"
    driver.gateway_sends(RoutesApplied(change.version), "g3")
    assert [(s.digest, s.routed) for s in of(driver.wait(1.0), AdapterStatus)] == [("sha256:2", True)]


def test_a_gateway_is_waited_for_until_it_is_gone_and_again_once_it_is_back(driver: Driver) -> None:
    driver.start("sha256:1")
    driver.gateway("g2", applies_routes=True)
    driver.wait(1.0)
    driver.change(RegistryChange(False, adapters=(adapter("sha256:2"),)))
    assert not of(driver.wait(1.0), AdapterStatus)
    driver.close_gateway("g2")
    assert [s.digest for s in of(driver.wait(1.0), AdapterStatus)] == ["sha256:2"]
    (table,) = of(driver.gateway("g2", applies_routes=True), Routes)
    driver.change(RegistryChange(False, adapters=(adapter("sha256:3"),)))
    driver.gateway_sends(RoutesApplied(table.version), "g2")
    assert not of(driver.wait(1.0), AdapterStatus), "that was the table that its stream began with"


def test_a_table_says_again_what_an_adapters_status_says_of_its_generation(driver: Driver) -> None:
    driver.start("sha256:1")
    driver.wait(1.0)
    [uid] = driver.pool().adapters.by_digest["sha256:1"]
    driver.change(RegistryChange(False, adapters=(replace(adapter("sha256:1", uid=uid), generation=7),)))
    assert [s.observed_generation for s in of(driver.wait(1.0), AdapterStatus)] == [7]


def test_a_gateway_whose_table_has_a_gap_gets_all_of_it(driver: Driver) -> None:
    driver.start("sha256:1")
    assert of(driver.gateway_sends(ResyncRoutes()), Routes) == [driver.state.routes.full()]
    assert driver.state.routes.full().full


def test_what_a_gateway_used_of_limits_goes_to_the_others(driver: Driver) -> None:
    driver.start("sha256:1")
    driver.handle(Connected(Peer(Kind.GATEWAY, "g2")))
    uses = (LimitUse(LimitRule("key/a", "", 2), 1, 0, 1),)
    effects = driver.gateway_sends(LimitReport("anything", uses))
    assert (peers(effects, LimitReport), of(effects, LimitReport)) == (["g2"], [LimitReport("g", uses)])


def test_a_pool_that_has_one_more_ready_runner_sends_its_own_row(driver: Driver) -> None:
    driver.start("sha256:1").runner("a")
    (change,) = of(driver.wait(1.0), Routes)
    assert ([p.ready_runners for p in change.pools], change.routes, change.keys) == ([1], (), ())


CHANGES = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(["m1", "m2", "m3"]), st.integers(0, 3), st.booleans()),
    max_size=12,
)


@given(CHANGES)
def test_a_gateway_that_applies_every_change_has_the_table_of_the_scheduler(changes: list[Any]) -> None:
    driver, book = Driver().start(), RouteBook()
    book.apply(driver.state.routes.full())
    for uid, model, created, remove in changes:
        spec = adapter(f"sha256:{uid}", uid=uid, model_name=model, created_unix_s=created)
        change = RegistryChange(False, (), () if remove else (spec,), (), (uid,) if remove else ())
        for message in of(driver.change(change), Routes):
            book.apply(message)
        assert {n: r.uid for n, r in book.routes.items()} == oldest(driver)


def oldest(driver: Driver) -> dict[str, str]:
    """Model name -> uid, by the rule."""
    specs = sorted(driver.pool().adapters.by_uid.values(), key=lambda s: (s.created_unix_s, s.uid), reverse=True)
    return {"base": f"pool:{POOL}"} | {s.model_name: s.uid for s in specs}


def test_the_same_snapshot_again_sends_no_table_and_no_order(driver: Driver) -> None:
    driver.start("sha256:1").runner("a")
    driver.wait(1.0)
    effects = driver.registry("sha256:1")
    assert not of(effects, Routes)
    assert not of(effects, OrderedRunner)


def test_the_context_is_the_least_of_the_ready_runners_and_the_last_known_while_there_is_none(driver: Driver) -> None:
    def context() -> int:
        driver.wait(1.0)
        return driver.state.routes.full().pools[0].max_context_tokens

    driver.start(max_context_tokens=640)
    assert context() == 640, "what the registry says"
    driver.runner("a", max_context_tokens=1600)
    assert context() == 1600
    driver.runner("b", max_context_tokens=800)
    assert context() == 800
    driver.lost("b")
    assert context() == 1600
    driver.lost("a")
    assert context() == 1600


def test_a_pool_checks_drafts_where_all_its_ready_runners_do_and_the_last_did_while_there_is_none(
    driver: Driver,
) -> None:
    def checks() -> bool:
        driver.wait(1.0)
        return driver.state.routes.full().pools[0].checks_drafts

    driver.start()
    assert checks(), "nobody knows yet"
    driver.runner("a", checks_drafts=True)
    assert checks()
    driver.runner("b")
    assert not checks()
    driver.lost("a")
    driver.lost("b")
    assert not checks()
    driver.runner("c", checks_drafts=True)
    assert checks()


def test_the_first_table_waits_a_little_for_the_keys_and_a_change_of_keys_is_told(driver: Driver) -> None:
    driver.gateway()
    assert not of(driver.registry(), Routes)
    driver.supervisor()
    (first,) = of(driver.supervisor_sends(KEYS), Routes)
    assert first.keys_known
    assert first.keys == KEYS.keys
    assert not of(driver.supervisor_sends(KEYS), Routes)
    (second,) = of(driver.supervisor_sends(Keys(())), Routes)
    assert (second.keys, second.removed_keys) == ((), ("hash",))


def test_without_a_supervisor_the_first_table_goes_out_without_keys(driver: Driver) -> None:
    driver.gateway()
    driver.registry()
    assert not of(driver.wait(1.9), Routes)
    (first,) = of(driver.wait(0.2), Routes)
    assert not first.keys_known


# ------------------------------------------------------------ desired digests


def desired_of(order: OrderedRunner) -> DesiredChange:
    assert order.order.desired is not None
    return order.order.desired


def orders(effects: list[Any]) -> list[Any]:
    """(full, digests, removed) of every desired change that is sent."""
    changes = [desired_of(o) for o in of(effects, OrderedRunner)]
    return [(c.full, [a.digest for a in c.adapters], list(c.removed)) for c in changes]


def version(driver: Driver) -> int:
    return driver.pool().adapters.version


def test_a_runner_is_sent_what_it_has_to_hold_once_and_then_what_changes(driver: Driver) -> None:
    driver.start("sha256:1")
    driver.change(RegistryChange(False, adapters=(adapter("sha256:2", pinned=True),)))
    first = driver.runner("a")
    assert orders(first) == [(True, ["sha256:2"], [])], "what is loaded on demand is not on the list"
    assert not orders(driver.runner("a", desired_version=version(driver)))
    more = driver.change(RegistryChange(False, adapters=(adapter("sha256:3", tier=Tier.DISK),)))
    assert orders(more) == [(False, ["sha256:3"], [])]
    before, after = (desired_of(of(e, OrderedRunner)[0]).version for e in (first, more))
    assert after > before


def test_an_adapter_more_that_is_loaded_on_demand_is_sent_to_no_runner(driver: Driver) -> None:
    driver.start("sha256:1").runner("a")
    assert not orders(driver.change(RegistryChange(False, adapters=(adapter("sha256:2"),))))
    assert driver.place("r", "sha256:2").allotment[:2] == (8, 0), "the Assign says what the runner has to know"


def test_what_has_to_be_held_no_more_is_released_and_what_is_deleted_is_removed(driver: Driver) -> None:
    driver.start()
    driver.change(RegistryChange(False, adapters=(adapter("sha256:1", pinned=True), adapter("sha256:2"))))
    driver.runner("a")
    (order,) = of(driver.change(RegistryChange(False, adapters=(adapter("sha256:1"),))), OrderedRunner)
    assert [(a.digest, a.pinned, a.tier) for a in desired_of(order).adapters] == [("sha256:1", False, Tier.UNSPECIFIED)]
    uids = ("uid-sha256:1", "uid-sha256:2")
    assert not orders(driver.change(RegistryChange(False, removed_adapters=uids))), "gateways may still send some"
    assert orders(driver.wait(5.1)) == [(False, [], ["sha256:1", "sha256:2"])]


def test_digests_on_a_runners_disk_that_the_registry_does_not_know_are_removed(driver: Driver) -> None:
    driver.start("sha256:1")
    on_disk = tuple(AdapterState(f"sha256:{i}", Tier.DISK) for i in (1, 2, 3))
    assert orders(driver.runner("a", adapters=on_disk)) == [(True, [], ["sha256:2", "sha256:3"])]


def test_an_order_that_was_lost_on_its_way_is_sent_again_after_a_full_report(served: Driver) -> None:
    assert orders(served.change(RegistryChange(False, adapters=(adapter("sha256:1", pinned=True),))))
    assert not orders(served.runner("a"))
    assert orders(served.runner("a", version=9)) == [(True, ["sha256:1"], [])]
    assert not orders(served.runner("a", version=10, desired_version=version(served)))


def test_runners_that_were_reported_before_the_registry_was_known_are_asked_for_full_reports(driver: Driver) -> None:
    driver.supervisor()
    driver.runner("a", adapters=(AdapterState("sha256:2", Tier.HOST),))
    assert of(driver.registry("sha256:1"), Resync) == [Resync(RunnerId("a", "i1"))]
    driver.reported.clear()
    again = driver.runner("a", version=2, adapters=(AdapterState("sha256:2", Tier.HOST),))
    assert orders(again) == [(True, [], ["sha256:2"])]


def test_a_report_that_does_not_follow_is_answered_by_a_resync(served: Driver) -> None:
    served.report_of("a", free=40)  # lost on its way
    assert of(served.runner("a", free=30), Resync) == [Resync(RunnerId("a", "i1"))]
    assert served.record("a").accounts.free_pages == 100
    served.runner("a", free=20, version=4)
    assert served.record("a").accounts.free_pages == 20


def test_an_empty_list_is_sent_too_but_none_before_the_registry_is_known(driver: Driver) -> None:
    driver.gateway()
    driver.supervisor()
    assert not orders(driver.runner("a"))
    assert orders(driver.registry()) == [(True, [], [])]


def test_a_digest_in_use_stays_until_its_last_stream_ends(driver: Driver) -> None:
    driver.start("sha256:1").runner("a")
    driver.place("r", "sha256:1")
    driver.gateway_sends(_started(driver))
    driver.registry("sha256:2")
    driver.wait(20.0)
    assert driver.pool().adapters.knows("sha256:1")
    assert driver.knows("r")
    driver.outcome("r", digest="sha256:1")
    assert orders(driver.wait(0.1)) == [(False, [], ["sha256:1"])]
    assert not driver.pool().adapters.knows("sha256:1")


@pytest.mark.parametrize(("spec", "drain_s"), [({}, 300.0), ({"drain_s": 600.0}, 600.0)])
def test_streams_of_a_deleted_digest_end_after_its_drain(driver: Any, spec: dict[str, float], drain_s: float) -> None:
    driver.start("sha256:1", **spec).runner("a", max_sequences=1)
    driver.place("running", "sha256:1")
    driver.gateway_sends(_started(driver, "running"))
    driver.submit("waiting", "sha256:1")
    driver.registry(**spec)
    assert not of(driver.wait(drain_s - 1.0), Reject)
    effects = driver.wait(2.0)
    assert [p.request_id for p in of(effects, Preempt)] == ["running"]
    rejects = {r.request_id: r.reason for r in of(effects, Reject)}
    assert rejects == dict.fromkeys(["running", "waiting"], RejectReason.UNKNOWN_ADAPTER)
    assert not driver.pool().adapters.knows("sha256:1")


def test_a_new_request_for_a_digest_just_replaced_is_served_and_refused_later(driver: Driver) -> None:
    driver.start("sha256:1").runner("a")
    driver.registry("sha256:2")
    for name in ("soon", "again"):
        assert of(driver.submit(name, "sha256:1"), Assign)
        driver.outcome(name, digest="sha256:1")
        driver.wait(2.0)
    driver.wait(2.0)
    (late,) = of(driver.submit("late", "sha256:1"), Reject)
    assert late.reason is RejectReason.UNKNOWN_ADAPTER


def test_a_digest_that_comes_back_in_time_keeps_its_streams(driver: Driver) -> None:
    driver.start("sha256:1").runner("a")
    driver.place("r", "sha256:1")
    driver.gateway_sends(_started(driver))
    driver.registry()
    driver.wait(200.0)
    driver.registry("sha256:1")
    assert not of(driver.wait(200.0), Reject)
    assert driver.knows("r")


def test_after_a_restart_streams_of_a_deleted_digest_may_finish(driver: Driver) -> None:
    driver.registry()
    driver.gateway(complete=False)
    driver.supervisor()
    effects = driver.submit(
        "r", "sha256:gone", emitted_tokens=2, epoch=Epoch(1, 1), runner=RunnerId("a", "i1"), reservation_tokens=9
    )
    assert not of(effects, Reject)
    assert driver.pool().adapters.knows("sha256:gone")
    driver.wait(1.0)
    on_disk = (AdapterState("sha256:gone", Tier.DISK),)
    assert orders(driver.runner("a", adapters=on_disk)) == [(True, [], [])], "it is not removed"


def test_an_adapter_on_its_way_to_a_tier_keeps_a_runner_from_serving_and_a_failed_one_does_not(driver: Driver) -> None:
    driver.start(settle=False)
    digests = ("sha256:1", "sha256:2")
    driver.change(RegistryChange(False, adapters=tuple(adapter(d, tier=Tier.HOST) for d in digests)))
    version = driver.pool().adapters.version
    failed, coming = (
        AdapterState("sha256:1", Tier.DISK, error="torn"),
        AdapterState("sha256:2", Tier.DISK, loading=True),
    )
    driver.submit("r")
    for adapters in ((coming,), (failed, coming)):
        assert not of(driver.runner("a", ready=False, desired_version=version, adapters=adapters), Assign)
    again = AdapterState("sha256:1", Tier.DISK, error="torn", loading=True)
    assert of(driver.runner("a", ready=False, desired_version=version, adapters=(again,)), Assign)


def test_a_tier_reaches_the_runners_and_two_of_one_content_get_the_higher(served: Driver) -> None:
    same = "sha256:1"
    adapters = (adapter(same, uid="1", tier=Tier.HOST), adapter(same, uid="2", tier=Tier.DISK, pinned=True))
    (order,) = of(served.change(RegistryChange(False, adapters=adapters)), OrderedRunner)
    (wanted,) = desired_of(order).adapters
    assert (wanted.tier, wanted.pinned) == (Tier.HOST, True)
    assert not of(served.change(RegistryChange(False, adapters=adapters[::-1])), OrderedRunner), "whoever came first"
    (order,) = of(served.change(RegistryChange(False, removed_adapters=("1",))), OrderedRunner)
    assert desired_of(order).adapters[0].tier is Tier.DISK
    served.place("r", same)
    (order,) = of(served.change(RegistryChange(False, removed_adapters=("2",))), OrderedRunner)
    assert desired_of(order).adapters[0].tier is Tier.UNSPECIFIED, "nobody has to wait for one that goes"


def test_a_list_of_an_earlier_process_with_a_higher_number_is_not_taken_for_this_one(driver: Driver) -> None:
    driver.start(settle=False)
    driver.change(RegistryChange(False, adapters=(adapter("sha256:1", pinned=True),)))
    driver.runner("a", desired_version=7 << 32)
    assert of(driver.wait(1.0), AdapterStatus)[-1].unavailable_runners == 1
    driver.runner("a", desired_version=driver.pool().adapters.version)
    assert of(driver.wait(1.0), AdapterStatus)[-1].unavailable_runners == 0


def test_a_runner_that_served_once_is_not_held_back_by_what_is_pinned_later(served: Driver) -> None:
    served.runner("a", ready=False)
    assert of(served.submit("r"), Assign)


def _started(driver: Driver, request_id: str = "r") -> Any:
    return Started(request_id, driver.request(request_id).epoch)


# ------------------------------------------------------------ statuses


def test_statuses_are_told_only_when_they_change(driver: Driver) -> None:
    driver.start("sha256:1")
    version = driver.pool().adapters.version
    driver.runner("a", desired_version=version)
    driver.connect_registry()
    (pool,) = of(effects := driver.wait(1.0), PoolStatus)
    assert pool.ready_runners == 1
    (adapter,) = of(effects, AdapterStatus)
    assert (adapter.uid, adapter.routed, adapter.unavailable_runners) == ("uid-sha256:1", True, 0)
    driver.runner("a", desired_version=version)
    driver.submit("r")
    driver.wait(1.0)
    driver.submit("s")
    assert not of(driver.wait(2.0), PoolStatus) + of(driver.wait(10.0), AdapterStatus), "traffic is not news"


def test_a_ready_runner_more_changes_the_status_of_the_pool_and_of_no_adapter_that_it_serves(driver: Driver) -> None:
    driver.start("sha256:1")
    old = version(driver)
    driver.change(RegistryChange(False, adapters=(adapter("sha256:2", pinned=True),)))
    driver.wait(1.0)
    driver.runner("a", desired_version=version(driver), total_pages=300)
    effects = driver.wait(1.0)
    assert [(s.ready_runners, s.kv_pages) for s in of(effects, PoolStatus)] == [(1, 300)]
    assert not of(effects, AdapterStatus)
    driver.runner("b", desired_version=old)  # Ready with a list from before
    effects = driver.wait(1.0)
    assert [(s.ready_runners, s.kv_pages) for s in of(effects, PoolStatus)] == [(2, 100)]
    assert [(s.digest, s.unavailable_runners) for s in of(effects, AdapterStatus)] == [("sha256:2", 1)]
    driver.lost("b")
    assert [s.unavailable_runners for s in of(driver.wait(1.0), AdapterStatus)] == [0]


def test_why_a_load_failed_is_told_by_runner_four_at_the_most(driver: Driver) -> None:
    driver.start("sha256:1")
    version = driver.pool().adapters.version
    for uuid in "abcdef":
        driver.runner(uuid, adapters=(AdapterState("sha256:1", Tier.DISK, error="torn"),), desired_version=version)
    (status,) = of(driver.wait(1.0), AdapterStatus)
    assert status.load_errors == ("a: torn", "b: torn", "c: torn", "d: torn")
    assert (status.unavailable_runners, status.load_failed) == (6, True), "though all six know it and are Ready"
    for uuid in "abcdef":
        driver.runner(uuid, desired_version=version)
    (status,) = of(driver.wait(1.0), AdapterStatus)
    assert (status.load_errors, status.unavailable_runners, status.load_failed) == ((), 0, False)


def test_a_failed_load_is_everywhere_until_a_ready_runner_serves_the_adapter(driver: Driver) -> None:
    driver.start("sha256:1")
    torn = (AdapterState("sha256:1", Tier.DISK, error="torn"),)
    driver.runner("a", adapters=torn, desired_version=version(driver))
    assert [s.load_failed for s in of(driver.wait(1.0), AdapterStatus)] == [True]
    driver.runner("b", desired_version=version(driver))
    assert [s.load_failed for s in of(driver.wait(1.0), AdapterStatus)] == [False]
    driver.lost("b")
    assert [s.load_failed for s in of(driver.wait(1.0), AdapterStatus)] == [True]


def test_many_adapters_are_told_in_bounded_batches() -> None:
    driver = Driver(status_batch=10)
    driver.registry(*(f"sha256:{i}" for i in range(25)))
    assert [len(of(driver.wait(0.2), AdapterStatus)) for _ in range(4)] == [10, 10, 5, 0]


def test_a_removed_pool_ends_its_requests_and_is_forgotten_with_its_last_runner(served: Driver) -> None:
    served.place("r")
    effects = served.change(RegistryChange(False, removed_pools=(POOL,)))
    assert [r.reason for r in of(effects, Reject)] == [RejectReason.UNKNOWN_POOL]
    assert of(effects, Preempt)
    served.lost("a")
    assert not served.state.pools


@pytest.mark.parametrize("field", ["queue", "reservation"])
def test_a_policy_nobody_has_is_served_by_the_default_and_said(driver: Any, field: str) -> None:
    assert [e.event for e in of(driver.registry(**{field: "magic"}), Stale)] == ["registry"]
    driver.gateway()
    driver.supervisor()
    driver.runner("a")
    assert driver.place("r")


# ------------------------------------------------------------ canaries


def with_canary(of: AdapterSpec, digest: str, weight: int) -> RegistryChange:
    return RegistryChange(False, adapters=(replace(of, versions=(AdapterVersion(digest, 4, weight=weight),)),))


def test_the_ends_of_requests_are_counted_for_a_canary_and_the_content_beside_it(driver: Driver) -> None:
    driver.start("sha256:1")
    [uid] = driver.pool().adapters.by_digest["sha256:1"]
    spec = adapter("sha256:1", uid=uid)
    driver.change(with_canary(spec, "sha256:2", 10))
    assert [a.digest for a in driver.pool().adapters.published.values()] == []

    def ends(name: str, digest: str, *, failed: bool = False) -> list[Any]:
        report = OutcomeReport(name, POOL, digest, 1, False, b"r", model_name=spec.model_name, failed=failed)
        return driver.gateway_sends(report)

    driver.wait(1.0)
    effects = [e for i in range(100) for e in ends(f"s{i}", "sha256:1", failed=i < 2)]
    effects += [e for i in range(10) for e in ends(f"c{i}", "sha256:2", failed=i < 3)]
    effects += ends("c0", "sha256:2", failed=True)  # sent again: it is counted once
    effects += ends("old", "sha256:0")
    assert not of(effects, AdapterStatus), "no status for each request"
    [status] = of(driver.wait(10.0), AdapterStatus)
    assert status.canary == CanaryCounts("sha256:2", 10, 3, 100, 2)
    driver.change(with_canary(spec, "sha256:2", 50))
    driver.connect_registry()
    assert driver.state.registry.canaries[uid][1].requests == 10, "another weight is the same canary"
    driver.change(with_canary(spec, "sha256:3", 50))
    assert driver.state.registry.canaries[uid][1] == CanaryCounts("sha256:3")
    driver.change(RegistryChange(False, adapters=(spec,)))
    assert not driver.state.registry.canaries
    ends("late", "sha256:3")
    assert [s.canary for s in of(driver.wait(10.0), AdapterStatus)] == [None]


@pytest.mark.parametrize(
    ("pinned", "tier", "held"),
    [(True, Tier.UNSPECIFIED, Tier.HOST), (False, Tier.DISK, Tier.DISK), (False, Tier.REMOTE, None)],
)
def test_a_canary_is_held_like_its_adapter(driver: Driver, pinned: bool, tier: Tier, held: Tier | None) -> None:
    driver.start("sha256:1")
    [uid] = driver.pool().adapters.by_digest["sha256:1"]
    spec = replace(adapter("sha256:1", uid=uid), pinned=pinned, tier=tier)
    driver.change(with_canary(spec, "sha256:2", 10))
    adapters = driver.pool().adapters
    found = adapters.published.get("sha256:2")
    assert (found.tier if found else None) == held
    assert "sha256:2" not in adapters.pinned


def test_a_registry_whose_term_is_over_changes_nothing(driver: Driver) -> None:
    driver.start("x")
    driver.connect_registry("registry 2", term=2)
    assert not driver.change(RegistryChange(True))
    assert POOL in driver.state.pools
