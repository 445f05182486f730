"""A new scheduler, a new supervisor, a new gateway stream: nothing is placed on a guess, nothing that runs is moved."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from weft_scheduler.core.effects import Assign, Ignored, RaiseTerm, Requeued, SendRoutes, TellGone, TellTerm
from weft_scheduler.core.events import (
    ClusterReport,
    FailReason,
    KeysTold,
    RegistryChange,
    ResubmitComplete,
    SupervisorDown,
)
from weft_scheduler.core.state import Phase
from weft_scheduler.core.values import Epoch, RunnerId, SequenceView

Picked = Callable[..., list[Any]]
R = RunnerId("a", "i1")


def view(request_id: str, epoch: Epoch, reservation: int = 16) -> SequenceView:
    return SequenceView(request_id, epoch, "", reservation)


def running(desk: Any, request_id: str, epoch: Epoch, **fields: Any) -> list[Any]:
    values: dict[str, Any] = {"emitted_tokens": 3, "epoch": epoch, "runner": R, "reservation_tokens": 16} | fields
    return desk.submit(request_id, **values)


@pytest.mark.parametrize(("stored", "supervisor", "expected"), [(1, 0, 1), (1, 1, 2), (1, 7, 8), (5, 3, 5)])
def test_the_term_is_above_everything_a_supervisor_has_stored(
    new_desk: Any, picked: Picked, stored: int, supervisor: int, expected: int
) -> None:
    desk = new_desk(term=stored)
    desk.registry()
    desk.gateway()
    effects = desk.supervisor(supervisor) + desk.runner("a")
    raised = [e.term for e in picked(effects, RaiseTerm)]
    assert (raised[-1] if raised else stored) == expected
    assert [e.term for e in picked(effects, TellTerm)][-1] == expected
    assert desk.place("r").epoch == Epoch(expected, 1)


def test_a_term_is_raised_before_the_first_order_under_it(new_desk: Any) -> None:
    desk = new_desk(term=1)
    desk.registry()
    desk.gateway()
    desk.submit("r")
    kinds = [type(e) for e in desk.supervisor(9) + desk.runner("a")]
    assert kinds.index(RaiseTerm) < kinds.index(TellTerm) < kinds.index(Assign)


def test_no_word_of_a_runner_raises_the_term(desk: Any, picked: Picked) -> None:
    desk.start()
    effects = desk.runner("a", view("nobody's", Epoch(2**31, 2**64 - 1)), desired_version=2**64 - 1, free=98)
    assert not picked(effects + desk.wait(5.0), RaiseTerm)
    assert desk.place("r").epoch == Epoch(1, 1)


def test_our_own_term_seen_again_is_no_reason_to_raise_it(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a")
    desk.place("r")
    desk.handle(SupervisorDown("s"))
    effects = desk.supervisor(1) + desk.runner("a", desk.view("r"), free=98)
    assert not picked(effects, RaiseTerm)


def test_nothing_is_placed_before_a_runners_first_full_report_on_this_stream(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a")
    desk.handle(SupervisorDown("s"))
    assert not picked(desk.submit("r"), Assign)
    assert not picked(desk.supervisor(), Assign)
    assert [a.request_id for a in picked(desk.runner("a"), Assign)] == ["r"]


def test_what_runs_is_adopted_in_place(desk: Any, picked: Picked) -> None:
    desk.registry()
    desk.gateway(complete=False)
    effects = running(desk, "r", Epoch(4, 9))
    assert [e.term for e in picked(effects, RaiseTerm)] == [5]
    desk.handle(ResubmitComplete("g"))
    desk.supervisor(4)
    effects = desk.runner("a", view("r", Epoch(4, 9)), free=98)
    assert not picked(effects, Assign)
    assert desk.request("r").phase is Phase.RUNNING
    assert desk.record("a").pending == {}
    assert not picked(desk.wait(60.0), Requeued)


def test_an_adopted_start_on_its_way_to_the_runner_keeps_its_room(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a", total_pages=4)
    running(desk, "r", Epoch(1, 1), emitted_tokens=0, prompt_tokens=40)
    assert desk.record("a").pending_pages == 4
    assert not picked(desk.submit("waits"), Assign)
    desk.runner("a", view("r", Epoch(1, 1)), free=0)
    assert desk.record("a").pending_pages == 0


def test_what_the_last_report_includes_is_adopted_without_counting_it_twice(desk: Any) -> None:
    desk.start()
    desk.runner("a", view("r", Epoch(1, 1)), free=98)
    running(desk, "r", Epoch(1, 1), emitted_tokens=0)
    assert desk.request("r").phase is Phase.RUNNING
    assert desk.record("a").pending == {}


def test_an_adopted_reservation_counts_from_where_its_epoch_began(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a")
    running(desk, "r", Epoch(1, 1), start_emitted_tokens=10, emitted_tokens=20)
    assert (desk.request("r").cover_tokens, desk.record("a").pending_pages) == (26, 3)  # 16 + 26 tokens
    (again,) = picked(desk.failed("r", FailReason.PREEMPTED, 20), Assign)
    assert again.reservation_tokens == 6


def test_a_moved_start_on_its_way_is_not_taken_for_one_that_runs(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a")
    running(desk, "r", Epoch(1, 1), start_emitted_tokens=10, emitted_tokens=10)
    assert desk.request("r").phase is Phase.ASSIGNED
    assert [e.reason for e in picked(desk.wait(5.1), Requeued)] == ["expired"]


def test_an_adopted_start_before_the_runner_is_known_keeps_its_room_too(desk: Any, picked: Picked) -> None:
    desk.registry()
    desk.gateway()
    running(desk, "r", Epoch(1, 1), emitted_tokens=0, prompt_tokens=40)
    desk.supervisor()
    desk.runner("a", total_pages=4)
    assert desk.record("a").pending_pages == 4
    assert not picked(desk.submit("waits"), Assign)


def test_the_waiting_keep_their_order_and_none_is_placed_before_its_gateway_has_told_all(
    desk: Any, picked: Picked
) -> None:
    desk.registry()
    desk.gateway(complete=False)
    desk.supervisor()
    desk.runner("a", max_sequences=1)
    assert not picked(desk.submit("young", waited_s=1.0), Assign)
    assert not picked(desk.submit("old", waited_s=60.0), Assign)
    assigns = picked(desk.handle(ResubmitComplete("g")), Assign)
    assert [a.request_id for a in assigns] == ["old"]


def test_a_gateway_that_never_says_complete_is_taken_as_complete_after_a_while(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.gateway("g2", complete=False)
    desk.runner("a")
    desk.submit("r", gateway="g2")
    assert not picked(desk.wait(4.9), Assign)
    assert picked(desk.wait(0.2), Assign)


@pytest.mark.parametrize("supervised", [True, False])
def test_a_runner_nobody_reports_is_gone_only_while_somebody_could(desk: Any, picked: Picked, supervised: bool) -> None:
    desk.registry()
    desk.gateway()
    running(desk, "r", Epoch(1, 1))
    if supervised:
        desk.supervisor()
    effects = desk.wait(11.0)
    assert bool(picked(effects, TellGone)) is supervised
    assert desk.request("r").phase is (Phase.LEAVING if supervised else Phase.RUNNING)


def test_a_runner_that_died_with_the_supervisor_away_is_found_missing(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a")
    desk.place("r")
    desk.handle(SupervisorDown("s"))
    desk.wait(60.0)
    desk.supervisor()
    assert picked(desk.wait(11.0), TellGone)


def test_a_request_said_to_run_on_a_replaced_incarnation_is_asked_for_its_failed(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a", incarnation="i2")
    assert [e.runner for e in picked(running(desk, "r", Epoch(1, 1)), TellGone)] == [R]
    (again,) = picked(desk.failed("r", FailReason.SESSION_LOST, 3), Assign)
    assert again.runner == RunnerId("a", "i2")


def test_no_route_table_before_a_complete_registry_snapshot(desk: Any, picked: Picked) -> None:
    assert not picked(desk.gateway() + desk.supervisor() + desk.runner("a") + desk.wait(5.0), SendRoutes)
    assert not picked(desk.handle(RegistryChange(False)), SendRoutes)
    desk.handle(KeysTold("s", ()))
    assert picked(desk.registry(), SendRoutes)


def test_reports_older_than_the_last_are_ignored(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a", free=7, sequence=5)
    assert picked(desk.runner("a", free=99, sequence=4), Ignored)
    assert desk.record("a").report.free_pages == 7
    assert not picked(desk.runner("a", free=8, sequence=5), Ignored)


def test_a_report_of_a_supervisor_that_is_not_there_is_ignored(desk: Any, picked: Picked) -> None:
    effects = desk.handle(ClusterReport("stranger", (desk.report_of("a"),)))
    assert picked(effects, Ignored)
    assert not desk.core.state.runners


def test_a_runner_that_never_described_itself_is_not_placed_on(desk: Any, picked: Picked) -> None:
    desk.start()
    effects = desk.handle(ClusterReport("s", (replace(desk.report_of("a"), spec=None),)))
    assert [e.reason for e in picked(effects, Ignored)] == ["never described itself"]
    assert not picked(desk.submit("r"), Assign)
