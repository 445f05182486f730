"""A new scheduler, a new supervisor, a new gateway stream: nothing is placed on a guess, nothing that runs is moved."""

from typing import Any

import pytest

from harness.scheduler_driver import Driver, of, sequence
from weft.domain.ids import Epoch, RunnerId
from weft.domain.machine import PersistTerm, Send
from weft.domain.request import Assign, FailReason, ResubmitComplete, RunnerGone
from weft.domain.routes import Keys, RegistryChange, Routes
from weft.domain.runner import Resync, SchedulerHello, SequenceState
from weft_scheduler.core import Stale
from weft_scheduler.core.effects import Requeued, RunnerLost
from weft_scheduler.core.model.request import Phase

R = RunnerId("a", "i1")


def view(request_id: str, epoch: Epoch, reservation: int = 16) -> SequenceState:
    return sequence(request_id, epoch, "", reservation)


def running(driver: Driver, request_id: str, epoch: Epoch, **fields: Any) -> list[Any]:
    values: dict[str, Any] = {"emitted_tokens": 3, "epoch": epoch, "runner": R, "reservation_tokens": 16} | fields
    return driver.submit(request_id, **values)


@pytest.mark.parametrize(("stored", "supervisor", "expected"), [(1, 0, 1), (1, 1, 2), (1, 7, 8), (5, 3, 5)])
def test_the_term_is_above_everything_a_supervisor_has_stored(stored: int, supervisor: int, expected: int) -> None:
    driver = Driver(term=stored)
    driver.registry()
    driver.gateway()
    effects = driver.supervisor(supervisor) + driver.runner("a")
    raised = [e.term for e in of(effects, PersistTerm)]
    assert (raised[-1] if raised else stored) == expected
    assert [e.term for e in of(effects, SchedulerHello)][-1] == expected
    assert driver.place("r").epoch == Epoch(expected, 1)


def test_a_term_is_raised_before_the_first_order_under_it() -> None:
    driver = Driver(term=1)
    driver.registry()
    driver.gateway()
    driver.submit("r")
    kinds = [type(e.message) if isinstance(e, Send) else type(e) for e in driver.supervisor(9) + driver.runner("a")]
    assert kinds.index(PersistTerm) < kinds.index(SchedulerHello) < kinds.index(Assign)


def test_no_word_of_a_runner_raises_the_term(driver: Driver) -> None:
    driver.start()
    effects = driver.runner("a", view("nobody's", Epoch(2**31, 2**64 - 1)), desired_version=2**64 - 1, free=98)
    assert not of(effects + driver.wait(5.0), PersistTerm)
    assert driver.place("r").epoch == Epoch(1, 1)


def test_our_own_term_seen_again_is_no_reason_to_raise_it(served: Driver) -> None:
    served.place("r")
    served.close_supervisor()
    assert not of(served.supervisor(1) + served.runner("a", served.view("r"), free=98), PersistTerm)


def test_nothing_is_placed_by_what_a_supervisor_reported_that_is_gone_for_long(served: Driver) -> None:
    served.close_supervisor()
    served.wait(served.core.config.lapsed_s)
    assert not of(served.submit("r"), Assign)
    assert not of(served.supervisor(), Assign)
    assert [a.request_id for a in of(served.runner("a"), Assign)] == ["r"]


def test_what_runs_is_adopted_in_place(driver: Driver) -> None:
    driver.registry()
    driver.gateway(complete=False)
    effects = running(driver, "r", Epoch(4, 9))
    assert [e.term for e in of(effects, PersistTerm)] == [5]
    driver.gateway_sends(ResubmitComplete(), "g")
    driver.supervisor(4)
    effects = driver.runner("a", view("r", Epoch(4, 9)), free=98)
    assert not of(effects, Assign)
    assert driver.request("r").phase is Phase.RUNNING
    assert driver.record("a").accounts.unacked == {}
    assert not of(driver.wait(60.0), Requeued)


@pytest.mark.parametrize("reported", [True, False])
def test_an_adopted_start_on_its_way_to_the_runner_keeps_its_room(driver: Driver, reported: bool) -> None:
    driver.start()
    if reported:
        driver.runner("a", total_pages=4)
    running(driver, "r", Epoch(1, 1), emitted_tokens=0, prompt_tokens=40)
    if not reported:
        driver.runner("a", total_pages=4)
    assert driver.record("a").accounts.unacked_pages == 4
    assert not of(driver.submit("waits"), Assign)
    driver.runner("a", view("r", Epoch(1, 1)), free=0)
    assert driver.record("a").accounts.unacked_pages == 0


def test_what_the_last_report_includes_is_adopted_without_counting_it_twice(driver: Driver) -> None:
    driver.start().runner("a", view("r", Epoch(1, 1)), free=98)
    running(driver, "r", Epoch(1, 1), emitted_tokens=0)
    assert driver.request("r").phase is Phase.RUNNING
    assert driver.record("a").accounts.unacked == {}


def test_an_adopted_reservation_counts_from_where_its_epoch_began(served: Driver) -> None:
    running(served, "r", Epoch(1, 1), start_emitted_tokens=10, emitted_tokens=20)
    assert (served.request("r").reservation.reserved_until, served.record("a").accounts.unacked_pages) == (
        26,
        3,
    )  # 16 + 26 tokens
    (again,) = of(served.failed("r", FailReason.PREEMPTED, 20), Assign)
    assert again.reservation_tokens == 6


def test_a_moved_start_on_its_way_is_not_taken_for_one_that_runs(served: Driver) -> None:
    running(served, "r", Epoch(1, 1), start_emitted_tokens=10, emitted_tokens=10)
    assert served.request("r").phase is Phase.ASSIGNED
    assert [e.reason for e in of(served.wait(5.1), Requeued)] == ["expired"]


def test_the_waiting_keep_their_order_and_none_is_placed_before_its_gateway_has_told_all(driver: Driver) -> None:
    driver.registry()
    driver.gateway(complete=False)
    driver.supervisor()
    driver.runner("a", max_sequences=1)
    assert not of(driver.submit("young", waited_s=1.0), Assign)
    assert not of(driver.submit("old", waited_s=60.0), Assign)
    assert [a.request_id for a in of(driver.gateway_sends(ResubmitComplete(), "g"), Assign)] == ["old"]


def test_a_gateway_that_never_says_complete_is_taken_as_complete_after_a_while(driver: Driver) -> None:
    driver.start()
    driver.gateway("g2", complete=False)
    driver.runner("a")
    driver.submit("r", gateway="g2")
    assert not of(driver.wait(4.9), Assign)
    assert of(driver.wait(0.2), Assign)


@pytest.mark.parametrize("supervised", [True, False])
def test_a_runner_nobody_reports_is_gone_only_while_somebody_could(driver: Driver, supervised: bool) -> None:
    driver.registry()
    driver.gateway()
    running(driver, "r", Epoch(1, 1))
    if supervised:
        driver.supervisor()
    assert bool(of(driver.wait(13.0), RunnerLost)) is supervised
    assert driver.request("r").phase is (Phase.STOPPING if supervised else Phase.RUNNING)


def test_a_runner_that_died_with_the_supervisor_away_is_found_missing(served: Driver) -> None:
    served.place("r")
    served.close_supervisor()
    served.wait(60.0)
    served.supervisor()
    assert of(served.wait(11.0), RunnerGone)


def test_a_request_said_to_run_on_a_replaced_incarnation_is_asked_for_its_failed(driver: Driver) -> None:
    driver.start().runner("a", incarnation="i2")
    assert [e.runner for e in of(running(driver, "r", Epoch(1, 1)), RunnerGone)] == [R]
    (again,) = of(driver.failed("r", FailReason.SESSION_LOST, 3), Assign)
    assert again.runner == RunnerId("a", "i2")


def test_no_route_table_before_a_complete_registry_snapshot(driver: Driver) -> None:
    assert not of(driver.gateway() + driver.supervisor() + driver.runner("a") + driver.wait(5.0), Routes)
    assert not of(driver.change(RegistryChange(False)), Routes)
    driver.supervisor_sends(Keys(()))
    assert of(driver.registry(), Routes)


def test_reports_older_than_the_last_are_ignored(driver: Driver) -> None:
    driver.start().runner("a", free=7, version=5)
    assert of(driver.runner("a", free=99, version=4), Stale)
    assert driver.record("a").report.figures.free_pages == 7
    assert not of(driver.runner("a", free=8, version=5), Stale)


def test_a_report_of_a_supervisor_that_is_not_there_is_ignored(driver: Driver) -> None:
    assert of(driver.runner("a", supervisor="stranger"), Stale)
    assert not driver.state.runners


def test_a_runner_that_never_described_itself_is_not_placed_on(driver: Driver) -> None:
    driver.start()
    effects = driver.reports(driver.report_of("a")._replace(spec=None))
    assert of(effects, Resync) == [Resync(R)], "the supervisor is asked for a full report, with the spec"
    assert not of(driver.submit("r"), Assign)
