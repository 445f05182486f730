"""Epochs end once, requests move a bounded number of times, pages that somebody is owed stay where they are."""

from collections.abc import Callable
from typing import Any

import pytest

from weft_scheduler.core import effects as ef
from weft_scheduler.core.effects import Assign, Preempt, Reject, RejectReason, Requeued, TellGone
from weft_scheduler.core.events import (
    Cancel,
    ClusterReport,
    Failed,
    FailReason,
    GatewayDown,
    GatewayUp,
    Started,
    SupervisorDown,
)
from weft_scheduler.core.state import Phase
from weft_scheduler.core.values import Epoch, PreemptDecision, RunnerId

Picked = Callable[..., list[Any]]


def test_every_assignment_has_a_higher_epoch(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a")
    epochs = [desk.place(f"r{i}").epoch for i in range(3)]
    epochs += [a.epoch for a in picked(desk.failed("r0", FailReason.PREEMPTED, 3), Assign)]
    assert epochs == sorted(set(epochs))
    assert len(epochs) == 4


def test_a_second_trigger_for_an_epoch_is_ignored(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a")
    first = desk.place("r")
    desk.lost("a")
    assert picked(desk.failed("r", FailReason.SESSION_LOST, 5, epoch=first.epoch), Requeued)
    again = desk.failed("r", FailReason.RUNNER_ERROR, 5, epoch=first.epoch)
    assert [type(e) for e in again] == [ef.Ignored]
    assert desk.request("r").moves == 1


def test_a_failed_of_an_older_epoch_does_not_touch_the_present_one(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a")
    first = desk.place("r")
    assert picked(desk.failed("r", FailReason.PREEMPTED, 3), Assign)
    effects = desk.failed("r", FailReason.SESSION_LOST, 9, epoch=first.epoch)
    assert [type(e) for e in effects] == [ef.Ignored]
    assert desk.request("r").phase is Phase.ASSIGNED
    assert desk.request("r").emitted_tokens == 3


@pytest.mark.parametrize("emitted", [0, 7])
def test_the_gateway_tells_first_or_the_lease_runs_out_first_one_placement_follows(
    desk: Any, picked: Picked, emitted: int
) -> None:
    desk.start()
    desk.runner("b")
    assert desk.place("r").runner.uuid == "b"
    desk.runner("a")
    (moved,) = picked(desk.failed("r", FailReason.SESSION_LOST, emitted), Assign)
    assert moved.runner.uuid == "a"
    effects = desk.lost("b")
    assert [e.runner for e in picked(effects, TellGone)] == [RunnerId("b", "i1")]
    assert not picked(effects, Assign)
    desk.handle(Started("g", "r", moved.epoch))
    assert not picked(desk.wait(30.0), Requeued)


def test_a_gateway_silent_about_a_lost_runner_is_not_waited_for_longer_than_an_assign(
    desk: Any, picked: Picked
) -> None:
    desk.start()
    desk.runner("b")
    desk.place("r")
    desk.lost("b")
    desk.runner("a")
    assert desk.request("r").phase is Phase.LEAVING
    assert not picked(desk.wait(4.9), Assign)
    assert [a.runner.uuid for a in picked(desk.wait(0.2), Assign)] == ["a"]


def test_a_new_incarnation_ends_the_old_ones_sequences_at_once(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a")
    desk.place("r")
    effects = desk.runner("a", incarnation="i2")
    assert picked(effects, TellGone)
    assert desk.request("r").phase is Phase.LEAVING
    (moved,) = picked(desk.failed("r", FailReason.SESSION_LOST, 4), Assign)
    assert moved.runner == RunnerId("a", "i2")  # only the old incarnation is avoided
    late = desk.runner("a", incarnation="i1")
    assert [type(e) for e in late] == [ef.Ignored]


@pytest.mark.parametrize("reason", [FailReason.SESSION_LOST, FailReason.RUNNER_ERROR, FailReason.DRAINED])
def test_the_runner_is_avoided_for_a_bounded_time(desk: Any, picked: Picked, reason: FailReason) -> None:
    desk.start()
    desk.runner("a")
    desk.place("r")
    assert not picked(desk.failed("r", reason, 1), Assign)
    assert not picked(desk.wait(2.9), Assign)
    (again,) = picked(desk.wait(0.2), Assign)
    assert again.runner.uuid == "a"


def test_a_killed_runner_whose_lease_lives_on_does_not_use_up_a_requests_moves(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a")
    first = desk.place("r")
    desk.handle(Started("g", "r", first.epoch))
    for pause_s in (3.0, 6.0, 12.0, 24.0, 48.0, 60.0, 60.0):
        assert not picked(desk.failed("r", FailReason.SESSION_LOST, 1), Assign)
        assert not picked(desk.wait(pause_s - 0.1), Assign)
        (again,) = picked(desk.wait(0.2), Assign)
    desk.handle(Started("g", "r", again.epoch))  # it was the network
    desk.failed("r", FailReason.SESSION_LOST, 2)
    assert picked(desk.wait(3.1), Assign)


def test_the_requests_of_a_lost_session_count_as_one_loss(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a")
    for name in "rs":
        desk.place(name)
    for name in "rs":
        desk.failed(name, FailReason.SESSION_LOST, 1)
    assert len(picked(desk.wait(3.1), Assign)) == 2


def test_one_gateways_lost_session_does_not_take_the_runner_from_the_others(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.gateway("g2")
    desk.runner("a")
    desk.place("r")
    desk.failed("r", FailReason.SESSION_LOST)
    assert not picked(desk.submit("r2"), Assign)  # same gateway
    assert desk.place("r3", gateway="g2").runner.uuid == "a"


def test_moves_are_bounded_and_then_end_the_request_by_name(desk: Any, picked: Picked) -> None:
    desk.start(max_moves=2)
    desk.runner("a")
    desk.place("r")
    for _ in range(2):
        assert not picked(desk.failed("r", FailReason.RUNNER_ERROR, 1), Reject)
        desk.wait(3.1)
    (rejected,) = picked(desk.failed("r", FailReason.RUNNER_ERROR, 1), Reject)
    assert rejected.reason is RejectReason.TOO_MANY_MOVES
    assert not desk.knows("r")


@pytest.mark.parametrize("reason", [FailReason.NO_ROOM, FailReason.PREEMPTED])
def test_what_the_system_does_itself_is_no_move(desk: Any, picked: Picked, reason: FailReason) -> None:
    desk.start(max_moves=1)
    desk.runner("a")
    desk.place("r")
    for _ in range(5):
        assert not picked(desk.failed("r", reason, 1), Reject)
        while desk.request("r").phase is Phase.WAITING:
            desk.wait(0.05)
    assert desk.request("r").moves == 0


@pytest.mark.parametrize("reason", [FailReason.NO_ROOM, FailReason.PREEMPTED])
def test_a_request_at_its_last_move_survives_what_the_system_does_itself(
    desk: Any, picked: Picked, reason: FailReason
) -> None:
    desk.start(max_moves=2)
    desk.runner("a")
    desk.submit("r", emitted_tokens=3, epoch=Epoch(1, 5), runner=RunnerId("a", "i1"), moves=9, reservation_tokens=8)
    assert not picked(desk.failed("r", reason, 3), Reject)
    desk.wait(0.2)
    (rejected,) = picked(desk.failed("r", FailReason.RUNNER_ERROR, 3), Reject)
    assert rejected.reason is RejectReason.TOO_MANY_MOVES


def test_a_runner_that_keeps_saying_no_room_is_asked_ever_more_rarely(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a")
    desk.place("r")
    begin, asked = desk.now, 0
    while desk.now < begin + 30.0:
        desk.failed("r", FailReason.NO_ROOM)
        while desk.request("r").phase is Phase.WAITING:
            desk.wait(0.05)
        asked += 1
    assert asked < 15


def test_a_started_request_forgets_its_no_rooms(desk: Any) -> None:
    desk.start()
    desk.runner("a")
    desk.place("r")
    desk.failed("r", FailReason.NO_ROOM)
    desk.wait(0.2)
    desk.handle(Started("g", "r", desk.request("r").epoch))
    assert desk.request("r").no_rooms == 0


def test_an_unacknowledged_assign_expires_and_its_room_comes_back(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a", total_pages=4)
    desk.place("r", prompt_tokens=40)
    assert not picked(desk.submit("waits", prompt_tokens=40), Assign)
    effects = desk.wait(5.1)
    assert [e.reason for e in picked(effects, Requeued)] == ["expired"]
    assert [a.request_id for a in picked(effects, Assign)] == ["waits"]  # r keeps off that runner for a while
    assert desk.request("r").moves == 1


@pytest.mark.parametrize("how", ["started", "reported"])
def test_an_acknowledged_assign_does_not_expire(desk: Any, picked: Picked, how: str) -> None:
    desk.start()
    desk.runner("a")
    desk.place("r")
    if how == "started":
        desk.handle(Started("g", "r", desk.request("r").epoch))
    else:
        desk.runner("a", desk.view("r"), free=98)
    assert not picked(desk.wait(60.0), Requeued)


def test_an_assign_expires_with_its_gateways_stream(desk: Any) -> None:
    desk.start()
    desk.runner("a")
    desk.place("r")
    assert desk.record("a").pending_pages == 2
    desk.handle(GatewayDown("g"))
    assert desk.record("a").pending_pages == 0
    assert not desk.core.state.requests


def test_an_assign_does_not_expire_while_no_supervisor_can_report_it(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a")
    desk.place("r")
    desk.handle(SupervisorDown("s"))
    assert not picked(desk.wait(60.0), Requeued)


def test_a_victim_leaves_keeps_its_age_and_comes_back_with_its_new_reservation(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a", total_pages=6)
    desk.place("old", p90_tokens=32)
    desk.now += 1
    desk.place("victim", p90_tokens=32)
    desk.runner("a", desk.view("old", 32), desk.view("victim", 32), free=0, owed_pages=1)
    desk.now += 1
    desk.submit("younger")
    assert [p.request_id for p in picked(desk.preempt("a", "victim", 32, for_="old"), Preempt)] == ["victim"]
    assert not picked(desk.preempt("a", "victim", 32, for_="old"), Preempt)  # said once
    assert not picked(desk.failed("victim", FailReason.PREEMPTED, 10), Assign)
    assert [r.id for r in desk.core.state.pools["acme/p"].queue] == ["victim", "younger"]
    # its pages went to the overrunner: the next report shows one free page, not three
    assert not picked(desk.runner("a", desk.view("old", 64), free=1), Assign)
    (again,) = picked(desk.runner("a", free=6), Assign)[:1]
    assert (again.request_id, again.reservation_tokens) == ("victim", 22)  # 32 in all, 10 of them emitted


def test_an_overrunner_that_is_its_own_victim_comes_back_doubled(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a")
    desk.place("r", p90_tokens=20)
    desk.preempt("a", "r", 40)
    (again,) = picked(desk.failed("r", FailReason.PREEMPTED, 20), Assign)
    assert again.reservation_tokens == 20  # 40 in all
    desk.preempt("a", "r", 40)  # doubled again, counted from this epoch's start at 20
    (third,) = picked(desk.failed("r", FailReason.PREEMPTED, 40), Assign)
    assert third.reservation_tokens == 20


def test_what_a_runner_doubled_in_place_is_kept_when_the_request_moves(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a")
    desk.place("r", p90_tokens=16)
    desk.runner("a", desk.view("r", 64), free=90)
    desk.runner("b")
    (moved,) = picked(desk.failed("r", FailReason.SESSION_LOST, 20), Assign)
    assert moved.reservation_tokens == 44


def test_a_preempt_decision_about_an_older_epoch_changes_nothing(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a")
    desk.place("r")
    stale = desk.request("r").epoch
    desk.failed("r", FailReason.PREEMPTED, 1)
    effects = desk.handle(ClusterReport("s", (), (), (PreemptDecision(RunnerId("a", "i1"), "r", stale, "r", 9),)))
    assert not picked(effects, Preempt)


def test_an_adapter_that_loads_nowhere_ends_its_request_with_the_reasons(desk: Any, picked: Picked) -> None:
    desk.start("sha256:1")
    desk.runner("a")
    desk.runner("b")
    assert desk.place("r", "sha256:1").runner.uuid == "b"
    (elsewhere,) = picked(desk.failed("r", FailReason.LOAD_FAILED, detail="no file"), Assign)
    assert elsewhere.runner.uuid == "a"
    (rejected,) = picked(desk.failed("r", FailReason.LOAD_FAILED, detail="torn"), Reject)
    assert (rejected.reason, rejected.message) == (RejectReason.ADAPTER_FAILED, "no file; torn")


def test_a_cancelled_request_is_gone_wherever_it_was(desk: Any, picked: Picked) -> None:
    desk.start()
    desk.runner("a", total_pages=4)
    desk.place("running", prompt_tokens=40)
    desk.submit("waiting", prompt_tokens=40)
    desk.submit("next", prompt_tokens=40)
    desk.handle(Cancel("g", "waiting"))
    assert [a.request_id for a in picked(desk.handle(Cancel("g", "running")), Assign)] == ["next"]
    assert not desk.knows("running")
    assert desk.handle(Cancel("g", "running")) == []


def test_a_gateway_cannot_speak_of_anothers_request(desk: Any) -> None:
    desk.start()
    desk.gateway("g2")
    desk.runner("a")
    assign = desk.place("r")
    desk.handle(Cancel("g2", "r"))
    desk.handle(Failed("g2", "r", assign.epoch, FailReason.NO_ROOM))
    desk.handle(Started("g2", "r", assign.epoch))
    assert desk.request("r").phase is Phase.ASSIGNED


def test_a_new_stream_of_a_gateway_starts_from_nothing(desk: Any) -> None:
    desk.start()
    desk.submit("r")
    desk.handle(GatewayUp("g"))
    assert not desk.knows("r")


def test_a_request_submitted_twice_on_a_stream_is_one(desk: Any) -> None:
    desk.start()
    desk.submit("r")
    assert [type(e) for e in desk.submit("r")] == [ef.Ignored]
    assert len(desk.core.state.pools["acme/p"].queue) == 1


def test_what_no_runner_could_ever_take_is_refused_once_the_cluster_has_told_itself(desk: Any, picked: Picked) -> None:
    desk.start("sha256:1", settle=False, rank=32)
    desk.runner("a", max_rank=16)
    assert not picked(desk.submit("large", max_tokens=2000), Reject)
    assert not picked(desk.submit("rank", "sha256:1"), Reject)
    reasons = {r.request_id: r.reason for r in picked(desk.wait(10.1), Reject)}
    assert reasons == {"large": RejectReason.TOO_LARGE, "rank": RejectReason.ADAPTER_FAILED}
    assert [r.reason for r in picked(desk.submit("l2", max_tokens=2000), Reject)] == [RejectReason.TOO_LARGE]


def test_without_any_runner_nothing_is_impossible(desk: Any, picked: Picked) -> None:
    desk.start()
    assert not picked(desk.submit("large", max_tokens=10**6), Reject)


@pytest.mark.parametrize("known", [True, False])
def test_a_pool_is_unknown_only_where_the_registry_has_spoken(desk: Any, picked: Picked, known: bool) -> None:
    if known:
        desk.registry()
    desk.gateway()
    rejects = picked(desk.submit("r", pool="acme/other"), Reject)
    assert [r.reason for r in rejects] == ([RejectReason.UNKNOWN_POOL] if known else [])
    if not known:
        assert [r.reason for r in picked(desk.registry(), Reject)] == [RejectReason.UNKNOWN_POOL]
