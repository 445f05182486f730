"""Running requests leave runners that should go, with their KV where that is cheaper than computing it again."""

from dataclasses import replace

import pytest

from harness.scheduler_driver import SPEC, Driver, of
from weft.domain.request import Assign, FailReason, Preempt, Started
from weft_scheduler.core.effects import Effect, KvMigration
from weft_scheduler.core.policy.phases.kv_cost import FREEZE_S, transfer_is_cheaper

KV = {"kv_address": "tcp:1", "kv_layout": "m", "page_bytes": 1 << 14, "prefill_tokens_per_s": 1000.0}


def computing(driver: Driver, uuid: str, *, draining: bool = False, **in_kv: int) -> list[Effect]:
    """Report these requests, each with its tokens in KV."""
    reported = driver.report_of(uuid, *(driver.view(r) for r in in_kv), free=80, draining=draining)
    return driver.reports(reported._replace(report=reported.report._replace(progress=[*in_kv.values()])))


def loaded(driver: Driver, **kv_bytes_per_s: float) -> Driver:
    """Runner a computes r1 and will be the first to go; b computes r2 and r3."""
    driver.start(min_runners=2, max_runners=2).runner("a", **KV, kv_bytes_per_s=kv_bytes_per_s.get("a", 0.0))
    driver.place("r1", prompt_tokens=64)
    driver.runner("b", **KV, kv_bytes_per_s=kv_bytes_per_s.get("b", 0.0))
    for name in ("r2", "r3"):
        if driver.place(name).runner.uuid == "a":
            driver.failed(name, FailReason.RUNNER_ERROR)
        driver.gateway_sends(Started(name, driver.request(name).epoch))
    driver.gateway_sends(Started("r1", driver.request("r1").epoch))
    computing(driver, "b", r2=20, r3=20)
    computing(driver, "a", r1=70)
    return driver


@pytest.fixture
def victim(driver: Driver) -> Driver:
    return loaded(driver)


def test_what_runs_on_a_runner_that_should_go_moves_with_its_kv(victim: Driver) -> None:
    before = victim.request("r1").epoch
    victim.registry(min_runners=1, max_runners=1)
    effects = victim.wait(1.0)
    assert victim.pool().scaling.autoscaler.victims == ["a"]
    (assign,) = of(effects, Assign)
    assert (assign.request_id, assign.runner.uuid, assign.kv_address) == ("r1", "b", "tcp:1")
    assert assign.epoch > before
    assert [(e.request_id, e.reason) for e in of(effects, KvMigration)] == [("r1", "scale_in")]
    assert (victim.record("a").accounts.owned, victim.record("b").accounts.owned) == (set(), {"r1", "r2", "r3"})
    assert victim.record("a").accounts.working_set == 1, "its pages count until its next report"
    assert not of(victim.wait(1.0), Assign), "it moves once"
    victim.gateway_sends(Started("r1", assign.epoch, handed_off=True))
    victim.runner("a")
    assert victim.record("a").accounts.working_set == 0


def test_a_runner_that_drains_unannounced_is_emptied_at_once_though_requests_wait(victim: Driver) -> None:
    victim.submit("waits", prompt_tokens=1400, max_tokens=16)
    assert victim.request("waits").phase.value == "waiting"
    (assign,) = of([*computing(victim, "a", draining=True, r1=70), *victim.wait(0.01)], Assign)
    assert (assign.request_id, assign.runner.uuid, assign.kv_address) == ("r1", "b", "tcp:1")
    assert victim.request("r1").history.migrations == 0, "it is the system's own doing"


def test_a_runner_that_serves_again_keeps_what_runs_there(victim: Driver) -> None:
    computing(victim, "a", draining=True, r1=10)
    computing(victim, "a", r1=70)
    assert not of(victim.wait(2.0), Assign)


def test_a_preempted_request_takes_its_kv_along_where_that_is_cheaper(victim: Driver) -> None:
    effects = victim.preempt("a", "r1", 32)
    (assign,) = of(effects, Assign)
    assert (assign.runner.uuid, assign.kv_address, assign.reservation_tokens) == ("b", "tcp:1", 26)
    assert [e.reason for e in of(effects, KvMigration)] == ["preemption"]
    assert not of(effects, Preempt)
    assert victim.request("r1").reservation.preemptions == 1


def test_a_prompt_that_is_not_computed_yet_stays(victim: Driver) -> None:
    computing(victim, "a", r1=63)
    victim.registry(min_runners=1, max_runners=1)
    assert not of(victim.wait(2.0), Assign)
    computing(victim, "a", r1=64)
    assert of(victim.wait(1.0), Assign)


@pytest.mark.parametrize(("before", "moves"), [(7, True), (8, False)])
def test_a_request_moves_with_its_kv_a_bounded_number_of_times(victim: Driver, before: int, moves: bool) -> None:
    for _ in range(before):
        victim.request("r1").history.migrate_with_kv()
    assert victim.request("r1").history.kv_migrations == before
    victim.registry(min_runners=1, max_runners=1)
    assert bool(of(victim.wait(1.0), Assign)) is moves


def test_where_no_runner_takes_it_it_runs_on(victim: Driver) -> None:
    victim.reports(victim.report_of("b", victim.view("r2"), victim.view("r3"), free=2))
    victim.registry(min_runners=1, max_runners=1)
    effects = victim.wait(2.0)
    assert not of(effects, Assign)
    assert not of(effects, Preempt)
    assert of(victim.preempt("a", "r1", 32), Preempt)


@pytest.mark.parametrize(("rates", "moves"), [({}, True), ({"a": 1e9}, True), ({"a": 1e5}, False), ({"b": 1e5}, False)])
def test_the_rate_of_the_slower_runner_decides(driver: Driver, rates: dict[str, float], moves: bool) -> None:
    """80 KiB take 0.8 s at 100 kB a second, computing 70 tokens 0.07 s."""
    loaded(driver, **rates).registry(min_runners=1, max_runners=1)
    assert bool(of(driver.wait(1.0), Assign)) is moves
    assert moves or of(driver.preempt("a", "r1", 32), Preempt)


def test_a_move_that_fails_is_computed_again(victim: Driver) -> None:
    victim.registry(min_runners=1, max_runners=1)
    victim.wait(1.0)
    (again,) = of(victim.failed("r1", FailReason.KV_LOST, emitted=8), Assign)
    assert (again.runner.uuid, again.kv_address) == ("b", "")


@pytest.mark.parametrize(("tokens", "rate", "cheaper"), [(1000, 1e9, True), (10, 1e9, False), (1000, 1e6, False)])
def test_moving_costs_its_bytes_and_computing_its_tokens(tokens: int, rate: float, cheaper: bool) -> None:
    """16 KiB a page of 16 tokens, 1,000 tokens a second; a freeze alone is worth 20 tokens."""
    target = replace(SPEC, page_bytes=1 << 14, prefill_tokens_per_s=1000.0)
    assert transfer_is_cheaper(target, tokens, rate) is cheaper
    assert FREEZE_S * 1000 == 20
    assert not transfer_is_cheaper(replace(target, page_bytes=0), 1000, 1e9), "its bytes are not known"
    assert not transfer_is_cheaper(replace(target, prefill_tokens_per_s=0.0), 1000, 1e9)
