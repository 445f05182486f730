"""Several supervisors at once: a runner belongs to the one that reported it last."""

import pytest

from harness.scheduler_driver import Driver, of, peers
from weft.domain.ids import Epoch, RunnerId
from weft.domain.request import Assign, RunnerGone
from weft.domain.routes import Routes
from weft.domain.runner import OrderedRunner, Resync
from weft_scheduler.core import Stale
from weft_scheduler.core.effects import RunnerLost
from weft_scheduler.core.model.request import Phase
from weft_scheduler.core.model.runner import Contact


@pytest.fixture
def driver(driver: Driver) -> Driver:
    """With two supervisors, `s` and `other`."""
    driver.start()
    driver.supervisor(name="other")
    return driver


def test_a_lease_that_runs_out_where_the_runner_was_before_ends_nothing(driver: Driver) -> None:
    driver.runner("a")
    driver.runner("a", supervisor="other")
    placed = driver.place("r")
    effects = driver.lost("a")  # told by the first one
    assert [e.reason for e in of(effects, Stale)] == ["another supervisor has reported it since"]
    assert not of(effects, RunnerLost)
    assert driver.request("r").runner == placed.runner
    assert [e.runner.uuid for e in of(driver.lost("a", supervisor="other"), RunnerLost)] == ["a"]


def test_orders_follow_the_runner_to_its_supervisor(driver: Driver) -> None:
    driver.runner("a")
    assert {*peers(driver.runner("a", supervisor="other"), OrderedRunner)} == {"other"}


def test_an_older_state_of_the_supervisor_before_does_not_take_the_runner_back(driver: Driver) -> None:
    stale = driver.report_of("a")
    driver.reports(stale)
    driver.runner("a", supervisor="other")
    driver.reports(stale)
    assert driver.record("a").supervisor == "other"


def test_a_runner_is_placed_on_by_what_its_supervisor_reported_until_another_reports_it(driver: Driver) -> None:
    driver.runner("a", total_pages=4)
    driver.close_supervisor()
    (placed,) = of(driver.submit("r", prompt_tokens=40), Assign)
    assert placed.runner.uuid == "a"
    assert not of(driver.submit("waits", prompt_tokens=40), Assign)  # the last report less what is assigned since
    driver.runner("a", driver.view("r", 24), free=0, supervisor="other")
    assert (driver.record("a").contact, driver.record("a").supervisor) == (Contact.PRESENT, "other")
    assert not of(driver.wait(60.0), RunnerLost)


def test_a_runner_whose_supervisor_is_gone_and_that_no_other_reports_is_gone_too(driver: Driver) -> None:
    driver.runner("a")
    driver.close_supervisor()
    assert not of(driver.wait(driver.core.config.absent_s - 0.1), RunnerLost)
    assert [gone.unless_alive for gone in of(driver.wait(0.2), RunnerGone)] == [True]
    assert [e.runner.uuid for e in of(driver.checks("a", alive=False), RunnerLost)] == ["a"]


def test_supervisors_that_come_and_go_without_a_report_do_not_keep_old_ones_true(driver: Driver) -> None:
    driver.close_supervisor("other")
    driver.runner("a")
    driver.close_supervisor()
    for _ in range(9):
        driver.wait(driver.core.config.lapsed_s / 10)
        driver.supervisor(name="other")
        driver.close_supervisor("other")
    assert of(driver.submit("r"), Assign)
    driver.wait(driver.core.config.lapsed_s / 10)
    assert driver.record("a").contact is Contact.NONE
    assert not of(driver.submit("waits"), Assign)
    driver.supervisor(name="other")  # from now on somebody could have reported it
    assert not of(driver.wait(driver.core.config.absent_s - 0.1), RunnerLost)
    assert [a.request_id for a in of(driver.runner("a", supervisor="other"), Assign)] == ["waits"]


def test_what_a_runner_has_to_hold_is_sent_once_it_is_reported_again(driver: Driver) -> None:
    driver.close_supervisor("other")
    driver.runner("a")
    driver.close_supervisor()
    assert not peers(driver.registry("sha256:1", "sha256:2"), OrderedRunner)
    assert not peers(driver.supervisor(), OrderedRunner)
    assert peers(driver.runner("a"), OrderedRunner) == ["s"]


def test_a_stream_that_breaks_and_comes_back_takes_no_runner_from_the_gateways(driver: Driver) -> None:
    driver.runner("a")
    ready = driver.pool().fleet.ready.count
    routes = [*of(driver.close_supervisor(), Routes), *of(driver.supervisor(), Routes)]
    assert not routes
    assert not of(driver.runner("a"), Routes)
    assert driver.pool().fleet.ready.count == ready == 1


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("name", ["s", "other"])
def test_changes_count_only_on_a_stream_that_brought_the_whole_state(driver: Driver, name: str, follows: bool) -> None:
    """Also from the supervisor of before, when it comes back: what it sent meanwhile may be lost."""
    driver.runner("a", free=90)
    change = driver.report_of("a", free=30)
    if follows and name == "s":
        assert not of(driver.reports(change), Resync)
        assert driver.record("a").accounts.free_pages == 30
        return
    if name == "s":
        driver.close_supervisor()
        driver.supervisor()
    assert peers(driver.reports(change, supervisor=name), Resync) == [name]
    assert driver.record("a").accounts.free_pages == 90


def test_a_runner_without_a_lease_that_a_gateway_finds_alive_is_placed_on_for_a_while(driver: Driver) -> None:
    driver.runner("a")
    driver.place("r")
    driver.runner("a", driver.view("r"))
    config = driver.core.config
    effects = driver.lease_ends("a")
    for number in range(8):
        assert [gone.unless_alive for gone in of(effects, RunnerGone)] == [True]
        driver.checks("a", alive=True)
        driver.checks("a", alive=True)  # nobody has asked again
        if number * config.absent_s < config.lapsed_s:
            driver.place(f"new {number}")
            driver.outcome(f"new {number}")
        effects = driver.wait(config.absent_s)
        assert not of(effects, RunnerLost)
    driver.checks("a", alive=True)
    assert not of(driver.submit("waits"), Assign), "what was reported is too old"
    assert driver.request("r").phase is Phase.RUNNING
    (assign,) = of(driver.runner("a", driver.view("r"), version=9), Assign)
    assert assign.request_id == "waits"
    assert not of(driver.wait(config.absent_s), RunnerGone)


@pytest.mark.parametrize("silent", [False, True])
def test_a_runner_that_neither_a_supervisor_nor_a_gateway_knows_alive_is_gone(driver: Driver, silent: bool) -> None:
    driver.gateway("g2")
    driver.runner("a")
    driver.place("r")
    assert peers(driver.lease_ends("a"), RunnerGone) == ["g", "g2"]
    assert not of(driver.checks("a", alive=False), RunnerLost)
    effects = driver.wait(driver.core.config.check_s) if silent else driver.checks("a", "g2", alive=False)
    assert [gone.unless_alive for gone in of(effects, RunnerGone)] == [False, False]
    assert of(effects, RunnerLost)
    assert driver.request("r").phase is Phase.STOPPING
    assert not driver.checks("a", "g2", alive=True), "too late"


def test_one_gateway_that_finds_a_runner_alive_is_enough(driver: Driver) -> None:
    driver.gateway("g2")
    driver.runner("a")
    driver.lease_ends("a")
    driver.checks("a", "g2", alive=True)
    driver.checks("a", alive=False)
    assert not of(driver.wait(driver.core.config.check_s), RunnerLost)


def test_a_runner_that_a_gateway_finds_alive_is_not_missed_after_a_restart(driver: Driver) -> None:
    driver.submit("r", emitted_tokens=3, epoch=Epoch(1, 1), runner=RunnerId("a", "i1"), reservation_tokens=16)
    config = driver.core.config
    driver.close_supervisor()
    driver.supervisor()
    assert [gone.unless_alive for gone in of(driver.wait(config.absent_s), RunnerGone)] == [True]
    driver.checks("a", alive=True)
    assert not of(driver.wait(config.check_s), RunnerLost)
    assert driver.request("r").phase is Phase.RUNNING
