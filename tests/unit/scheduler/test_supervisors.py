"""Several supervisors at once: a runner belongs to the one that reported it last."""

import pytest

from harness.scheduler_driver import Driver, of, peers
from weft.domain.request import Assign
from weft.domain.runner import OrderedRunner, Resync
from weft_scheduler.core import RunnerLost, Stale


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


def test_a_supervisor_that_ends_takes_its_runners_out_until_another_reports_them(driver: Driver) -> None:
    driver.runner("a")
    driver.runner("b", supervisor="other")
    driver.close_supervisor()
    assert {assign.runner.uuid for assign in of(driver.submit("r"), Assign)} == {"b"}
    driver.runner("a", supervisor="other")
    assert driver.record("a").confirmed
    assert driver.record("a").supervisor == "other"


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
