"""A request that has tokens goes on in the numerics class that computed them, but does not wait for it forever."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from harness.costs import traced_lines
from harness.scheduler_driver import POOL, Driver, of
from weft.domain.ids import Epoch, RunnerId
from weft.domain.machine import Kind, Peer, Received
from weft.domain.request import Assign, Failed, FailReason, Started, Submit
from weft.domain.runner import ClusterReport
from weft_scheduler.core.effects import Requeued, Resumed
from weft_scheduler.metrics import SchedulerMetrics

A, B = "cpu/1/tile32/bf16/tp1", "cpu/1/portable/bf16/tp1"


def running(driver: Driver) -> Driver:
    """A request that runs on `home`, of class A; "z" is where it would go if all were alike."""
    driver.start(min_runners=9)  # none is given back
    driver.runner("home", numerics_class=A)
    assert driver.place("r").runner.uuid == "home"
    driver.runner("z", numerics_class=B)
    return driver


def lose(driver: Driver, emitted: int = 5) -> list[Any]:
    """`home` is lost, and the gateway says how many tokens there are."""
    return [*driver.lost("home"), *driver.failed("r", FailReason.SESSION_LOST, emitted)]


def assigned(effects: list[Any]) -> list[str]:
    return [a.runner.uuid for a in of(effects, Assign)]


def test_one_without_tokens_goes_anywhere(driver: Driver) -> None:
    running(driver).runner("a", numerics_class=A)
    effects = lose(driver, emitted=0)
    assert assigned(effects) == ["z"]
    assert not of(effects, Resumed)


@pytest.mark.parametrize(
    "unfit", [{"draining": True}, {"max_context_tokens": 64}, {"max_rank": 4}], ids=lambda unfit: next(iter(unfit))
)
def test_a_runner_of_its_class_that_can_never_take_it_is_not_waited_for(driver: Driver, unfit: dict[str, Any]) -> None:
    driver.start("sha256:1").runner("home", numerics_class=A)
    driver.place("r", "sha256:1")
    driver.runner("z", numerics_class=B)
    driver.runner("a", numerics_class=A, **unfit)
    assert assigned(lose(driver)) == ["z"]


def test_a_full_runner_of_its_class_is_waited_for_and_taken_as_soon_as_it_has_room(driver: Driver) -> None:
    running(driver).runner("a", numerics_class=A, free=0)
    assert not assigned(lose(driver))
    assert not assigned(driver.wait(4.9))
    assert assigned(driver.runner("a", numerics_class=A)) == ["a"]


def test_a_runner_whose_supervisor_reconnects_is_waited_for(driver: Driver) -> None:
    running(driver).runner("a", numerics_class=A)
    driver.close_supervisor()
    driver.wait(driver.core.config.lapsed_s)
    driver.supervisor(name="other")
    driver.runner("z", supervisor="other")
    assert not assigned(driver.failed("r", FailReason.RUNNER_ERROR, 5))
    assert assigned(driver.runner("a", supervisor="other")) == ["a"]


def test_a_broken_session_ends_where_it_was_if_its_runner_lives(driver: Driver) -> None:
    running(driver)
    assert not assigned(driver.failed("r", FailReason.SESSION_LOST, 5))
    assert assigned(driver.wait(3.1)) == ["home"]


def test_whoever_waits_for_its_class_holds_up_nobody_on_others(driver: Driver) -> None:
    running(driver).runner("a", numerics_class=A, free=0)
    lose(driver)
    assert [driver.place(f"young{i}").runner.uuid for i in range(4)] == ["z"] * 4
    assert driver.pool().waiting.overtaking.counts["r"] == 0


def test_no_room_does_not_start_the_wait_anew(driver: Any) -> None:
    running(driver).runner("a", numerics_class=A)
    lose(driver)
    begin = driver.now
    while driver.request("r").runner.uuid == "a":
        driver.failed("r", FailReason.NO_CAPACITY, 5)
        while driver.request("r").runner is None:
            driver.wait(0.05)
        assert driver.now < begin + 6.0
    assert driver.request("r").runner.uuid == "z"


@pytest.mark.parametrize(("emitted", "there"), [(5, "a"), (6, "y")])
def test_its_class_is_that_of_the_latest_tokens(driver: Driver, emitted: int, there: str) -> None:
    assert assigned(lose(running(driver))) == ["z"]
    driver.runner("a", numerics_class=A)
    driver.runner("y", numerics_class=B)
    assert assigned([*driver.lost("z"), *driver.failed("r", FailReason.SESSION_LOST, emitted)]) == [there]


def test_a_silent_gateway_may_have_tokens(driver: Driver) -> None:
    running(driver).runner("a", numerics_class=A)
    driver.gateway_sends(Started("r", driver.request("r").epoch))
    driver.lost("home")
    assert assigned(driver.wait(5.1)) == ["a"]


def test_runners_that_tell_no_class_are_all_alike(driver: Driver) -> None:
    driver.start().runner("home")
    driver.place("r")
    driver.runner("a", free=0)
    driver.runner("z")
    effects = lose(driver)
    assert assigned(effects) == ["z"]
    assert not of(effects, Resumed)


# ---------------------------------------------------------------------------------------- restarts


def test_a_new_scheduler_is_told_the_class_and_waits_until_the_cluster_has_reported_itself(driver: Driver) -> None:
    driver.start(settle=False)
    driver.submit("r", emitted_tokens=5, numerics_class=A, waited_s=3.0)
    assert not assigned(driver.runner("z", numerics_class=B))
    assert assigned(driver.runner("a", numerics_class=A)) == ["a"]


@pytest.mark.parametrize("reported_first", [True, False])
def test_a_request_that_runs_on_has_the_class_of_its_runner(driver: Driver, reported_first: bool) -> None:
    driver.start()
    if reported_first:
        driver.runner("home", numerics_class=A)
    driver.submit("r", emitted_tokens=5, epoch=Epoch(1, 3), runner=RunnerId("home", "i1"), reservation_tokens=50)
    if not reported_first:
        driver.runner("home", numerics_class=A)
    driver.runner("a", numerics_class=A)
    driver.runner("z", numerics_class=B)
    assert assigned(lose(driver, emitted=9)) == ["a"]


# ------------------------------------------------------------------------------------------ whatever


FLEET = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.tuples(st.sampled_from([A, B]), st.sampled_from([0, 100]), st.booleans()),  # class, free pages, draining
)


@given(fleet=FLEET)
def test_it_stays_in_its_class_while_that_takes_it_and_never_starves(fleet: dict[str, tuple[str, int, bool]]) -> None:
    driver = Driver().start(min_runners=9)
    driver.runner("home", numerics_class=A)
    driver.place("r")
    for uuid, (numerics_class, free, draining) in fleet.items():
        driver.runner(uuid, numerics_class=numerics_class, free=free, draining=draining)
    taking = {uuid: (kind, free) for uuid, (kind, free, draining) in fleet.items() if not draining}
    now = max((uuid for uuid, (_, free) in taking.items() if free), default=None)
    own = max((uuid for uuid, (kind, free) in taking.items() if kind == A and free), default=None)
    waits = own is None and any(kind == A for kind, _ in taking.values())
    expected = own or (None if waits else now)
    effects = lose(driver)
    assert assigned(effects) == ([expected] if expected else [])
    if expected is not None:
        assert of(effects, Resumed) == [Resumed("r", POOL, RunnerId(expected, "i1"), A, fleet[expected][0])]
    else:
        assert assigned(driver.wait(driver.core.config.same_class_s)) == ([now] if now else [])
        if now is None:
            assert assigned(driver.runner("new", numerics_class=B)) == ["new"]


def moved(runners: int) -> int:
    """Lines run to place a request with tokens again, among runners of two classes."""
    driver = Driver().start()
    reports = [driver.report_of(f"u{i}", numerics_class=(A, B)[i % 2]) for i in range(runners)]
    driver.core.handle(Received(Peer(Kind.SUPERVISOR, "s"), ClusterReport(tuple(reports))), driver.now)
    gateway, core = Peer(Kind.GATEWAY, "g"), driver.core
    submit = Received(gateway, Submit("r", POOL, "acme", "m", "", 16, 100))
    (first,) = of(core.handle(submit, driver.now + 1.0), Assign)
    failed = Received(gateway, Failed("r", first.epoch, FailReason.SESSION_LOST, 5))
    effects, lines = traced_lines(lambda: core.handle(failed, driver.now + 2.0))
    assert (len(of(effects, Requeued)), len(of(effects, Assign)), len(of(effects, Resumed))) == (1, 1, 1)
    return lines


def test_a_move_costs_little_more_at_thousands_of_runners_than_at_a_hundred() -> None:
    assert moved(3_000) < 2 * moved(100)


# --------------------------------------------------------------------------------- what others see


def test_moves_are_counted_by_whether_the_class_stays() -> None:
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry)
    for to in (A, A, B):
        metrics.count(Resumed("r", POOL, RunnerId("a", "i"), A, to))
    values = {c: registry.get_sample_value("weft_scheduler_resumed_total", {"classes": c}) for c in ("same", "across")}
    assert values == {"same": 2, "across": 1}
