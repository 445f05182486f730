"""Epochs end once, requests move a bounded number of times, pages that somebody is owed stay where they are."""

import pytest

from harness.scheduler_driver import Driver, of
from weft.domain.ids import Epoch, RunnerId
from weft.domain.request import Assign, Cancel, Failed, FailReason, Preempt, Reject, RejectReason, RunnerGone, Started
from weft.domain.runner import ClusterReport, PreemptDecision
from weft_scheduler.core import Stale
from weft_scheduler.core.effects import Requeued
from weft_scheduler.core.model.request import Phase


def test_every_assignment_has_a_higher_epoch(served: Driver) -> None:
    epochs = [served.place(f"r{i}").epoch for i in range(3)]
    epochs += [a.epoch for a in of(served.failed("r0", FailReason.PREEMPTED, 3), Assign)]
    assert (epochs, len(epochs)) == (sorted(set(epochs)), 4)


def test_a_second_trigger_for_an_epoch_is_ignored(served: Driver) -> None:
    first = served.place("r")
    served.lost("a")
    assert of(served.failed("r", FailReason.SESSION_LOST, 5, epoch=first.epoch), Requeued)
    assert [type(e) for e in served.failed("r", FailReason.RUNNER_ERROR, 5, epoch=first.epoch)] == [Stale]
    assert served.request("r").history.migrations == 1


def test_a_failed_of_an_older_epoch_does_not_touch_the_present_one(served: Driver) -> None:
    first = served.place("r")
    assert of(served.failed("r", FailReason.PREEMPTED, 3), Assign)
    assert [type(e) for e in served.failed("r", FailReason.SESSION_LOST, 9, epoch=first.epoch)] == [Stale]
    assert served.request("r").phase is Phase.ASSIGNED
    assert served.request("r").tokens.emitted == 3


@pytest.mark.parametrize("emitted", [0, 7])
def test_the_gateway_tells_or_the_lease_runs_out_first_one_placement_follows(driver: Driver, emitted: int) -> None:
    driver.start().runner("b")
    assert driver.place("r").runner.uuid == "b"
    driver.runner("a")
    (moved,) = of(driver.failed("r", FailReason.SESSION_LOST, emitted), Assign)
    assert moved.runner.uuid == "a"
    effects = driver.lost("b")
    assert {e.runner for e in of(effects, RunnerGone)} == {RunnerId("b", "i1")}
    assert not of(effects, Assign)
    driver.gateway_sends(Started("r", moved.epoch))
    assert not of(driver.wait(30.0), Requeued)


def test_a_gateway_silent_about_a_lost_runner_is_not_waited_for_longer_than_an_assign(driver: Driver) -> None:
    driver.start().runner("b")
    driver.place("r")
    driver.lost("b")
    driver.runner("a")
    assert driver.request("r").phase is Phase.STOPPING
    assert not of(driver.wait(4.9), Assign)
    assert [a.runner.uuid for a in of(driver.wait(0.2), Assign)] == ["a"]


def test_a_runner_that_is_back_after_its_lease_ran_out_does_not_own_what_the_loss_stopped(served: Driver) -> None:
    served.place("r")
    served.lost("a")
    served.runner("a", served.view("r"), version=9)  # the same incarnation, before the gateway has answered
    assert served.request("r").phase is Phase.STOPPING
    assert "r" not in served.record("a").accounts.owned
    served.failed("r", FailReason.SESSION_LOST, 4)
    assert served.request("r").phase is not Phase.STOPPING


def test_a_new_incarnation_ends_the_old_ones_sequences_at_once(served: Driver) -> None:
    served.place("r")
    assert of(served.runner("a", incarnation="i2"), RunnerGone)
    assert served.request("r").phase is Phase.STOPPING
    (moved,) = of(served.failed("r", FailReason.SESSION_LOST, 4), Assign)
    assert moved.runner == RunnerId("a", "i2")  # only the old incarnation is avoided
    assert [type(e) for e in served.runner("a", incarnation="i1")] == [Stale]


@pytest.mark.parametrize("reason", [FailReason.SESSION_LOST, FailReason.RUNNER_ERROR, FailReason.DRAINED])
def test_the_runner_is_avoided_for_a_bounded_time(served: Driver, reason: FailReason) -> None:
    served.place("r")
    assert not of(served.failed("r", reason, 1), Assign)
    assert not of(served.wait(2.9), Assign)
    (again,) = of(served.wait(0.2), Assign)
    assert again.runner.uuid == "a"


def test_a_killed_runner_whose_lease_lives_on_does_not_use_up_a_requests_moves(served: Driver) -> None:
    first = served.place("r")
    served.gateway_sends(Started("r", first.epoch))
    for pause_s in (3.0, 6.0, 12.0, 24.0, 48.0, 60.0, 60.0):
        assert not of(served.failed("r", FailReason.SESSION_LOST, 1), Assign)
        assert not of(served.wait(pause_s - 0.1), Assign)
        (again,) = of(served.wait(0.2), Assign)
    served.gateway_sends(Started("r", again.epoch))  # it was the network
    served.failed("r", FailReason.SESSION_LOST, 2)
    assert of(served.wait(3.1), Assign)


def test_the_requests_of_a_lost_session_count_as_one_loss(served: Driver) -> None:
    for name in "rs":
        served.place(name)
    for name in "rs":
        served.failed(name, FailReason.SESSION_LOST, 1)
    assert len(of(served.wait(3.1), Assign)) == 2


def test_one_gateways_lost_session_does_not_take_the_runner_from_the_others(driver: Driver) -> None:
    driver.start()
    driver.gateway("g2")
    driver.runner("a")
    driver.place("r")
    driver.failed("r", FailReason.SESSION_LOST)
    assert not of(driver.submit("r2"), Assign)  # same gateway
    assert driver.place("r3", gateway="g2").runner.uuid == "a"


def test_moves_are_bounded_and_then_end_the_request_by_name() -> None:
    driver = Driver(max_migrations=2).start()
    driver.runner("a")
    driver.place("r")
    for _ in range(2):
        assert not of(driver.failed("r", FailReason.RUNNER_ERROR, 1), Reject)
        driver.wait(3.1)
    (rejected,) = of(driver.failed("r", FailReason.RUNNER_ERROR, 1), Reject)
    assert rejected.reason is RejectReason.TOO_MANY_MIGRATIONS
    assert not driver.knows("r")


@pytest.mark.parametrize("reason", [FailReason.NO_CAPACITY, FailReason.PREEMPTED])
def test_what_the_system_does_itself_is_no_move(driver: Driver, reason: FailReason) -> None:
    driver.start().runner("a")
    driver.place("r")
    for _ in range(5):
        assert not of(driver.failed("r", reason, 1), Reject)
        while driver.request("r").phase is Phase.WAITING:
            driver.wait(0.05)
    assert driver.request("r").history.migrations == 0


@pytest.mark.parametrize("reason", [FailReason.NO_CAPACITY, FailReason.PREEMPTED])
def test_a_request_at_its_last_move_survives_what_the_system_does_itself(driver: Driver, reason: FailReason) -> None:
    driver.start().runner("a")
    driver.submit(
        "r", emitted_tokens=3, epoch=Epoch(1, 5), runner=RunnerId("a", "i1"), migrations=9, reservation_tokens=8
    )
    assert not of(driver.failed("r", reason, 3), Reject)
    driver.wait(0.2)
    (rejected,) = of(driver.failed("r", FailReason.RUNNER_ERROR, 3), Reject)
    assert rejected.reason is RejectReason.TOO_MANY_MIGRATIONS


def test_a_runner_that_keeps_saying_no_room_is_asked_ever_more_rarely(served: Driver) -> None:
    served.place("r")
    for pause_s in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0):
        assert not of(served.failed("r", FailReason.NO_CAPACITY), Assign)
        assert not of(served.wait(pause_s - 0.01), Assign)
        assert of(served.wait(0.02), Assign)


def test_a_started_request_forgets_its_no_rooms(served: Driver) -> None:
    served.place("r")
    served.failed("r", FailReason.NO_CAPACITY)
    served.wait(0.2)
    served.gateway_sends(Started("r", served.request("r").epoch))
    assert served.request("r").history.capacity_refusals == 0


def test_an_unacknowledged_assign_expires_and_its_room_comes_back(driver: Driver) -> None:
    driver.start().runner("a", total_pages=4)
    driver.place("r", prompt_tokens=40)
    assert not of(driver.submit("waits", prompt_tokens=40), Assign)
    effects = driver.wait(5.1)
    assert [e.reason for e in of(effects, Requeued)] == ["expired"]
    assert [a.request_id for a in of(effects, Assign)] == ["waits"]  # r keeps off that runner for a while
    assert driver.request("r").history.migrations == 1


@pytest.mark.parametrize("how", ["started", "reported"])
def test_an_acknowledged_assign_does_not_expire(served: Driver, how: str) -> None:
    served.place("r")
    if how == "started":
        served.gateway_sends(Started("r", served.request("r").epoch))
    else:
        served.runner("a", served.view("r"), free=98)
    assert not of(served.wait(60.0), Requeued)


def test_an_assign_expires_with_its_gateways_stream(served: Driver) -> None:
    served.place("r")
    assert served.record("a").accounts.unacked_pages == 2
    served.close_gateway()
    assert served.record("a").accounts.unacked_pages == 0
    assert not served.state.requests


def test_an_assign_does_not_expire_while_no_supervisor_can_report_it(served: Driver) -> None:
    served.place("r")
    served.close_supervisor()
    assert not of(served.wait(60.0), Requeued)


def test_a_victim_leaves_keeps_its_age_and_comes_back_with_its_new_reservation(driver: Driver) -> None:
    driver.start().runner("a", total_pages=6)
    driver.place("old", p90_tokens=32)
    driver.now += 1
    driver.place("victim", p90_tokens=32)
    driver.runner("a", driver.view("old", 32), driver.view("victim", 32), free=0, owed_pages=1)
    driver.now += 1
    driver.submit("younger")
    assert [p.request_id for p in of(driver.preempt("a", "victim", 32, for_="old"), Preempt)] == ["victim"]
    assert not of(driver.preempt("a", "victim", 32, for_="old"), Preempt)  # said once
    assert not of(driver.failed("victim", FailReason.PREEMPTED, 10), Assign)
    assert [r.id for r in driver.pool().waiting.queue] == ["victim", "younger"]
    # its pages went to the overrunner: the next report shows one free page, not three
    assert not of(driver.runner("a", driver.view("old", 64), free=1), Assign)
    (again,) = of(driver.runner("a", free=6), Assign)[:1]
    assert (again.request_id, again.reservation_tokens) == ("victim", 22)  # 32 in all, 10 of them emitted


def test_an_overrunner_that_is_its_own_victim_comes_back_doubled(served: Driver) -> None:
    served.place("r", p90_tokens=20)
    served.preempt("a", "r", 40)
    (again,) = of(served.failed("r", FailReason.PREEMPTED, 20), Assign)
    assert again.reservation_tokens == 20  # 40 in all
    served.preempt("a", "r", 40)  # doubled again, counted from this epoch's start at 20
    (third,) = of(served.failed("r", FailReason.PREEMPTED, 40), Assign)
    assert third.reservation_tokens == 20


@pytest.mark.parametrize("reservation", ["calibrated", "s3", "paged", "pooled"])
def test_after_a_last_preemption_a_request_reserves_a_whole_answer_and_stays(driver: Driver, reservation: str) -> None:
    """On whatever runners, and whoever wanted its memory."""
    driver.start(reservation=reservation).runner("a")
    driver.runner("b")
    assign = driver.place("r", p90_tokens=20, p50_tokens=10)
    for emitted in range(8):
        assert not assign.allotment.stays
        assert of(driver.preempt(assign.runner.uuid, "r", 16, for_="other"), Preempt)
        (assign,) = of(driver.failed("r", FailReason.PREEMPTED, emitted), Assign)
        driver.runner("a", *[driver.view("r")] * (assign.runner.uuid == "a"))
    assert assign.allotment[3:6] == (False, False, True)
    assert assign.reservation_tokens == 100 - 7
    driver.runner(assign.runner.uuid, driver.view("r", 93), free=90)
    driver.outcome("r")
    assert not driver.knows("r")


def test_a_sequence_that_is_given_back_with_tokens_was_preempted_and_a_refused_one_was_not(served: Driver) -> None:
    served.place("r")
    served.failed("r", FailReason.NO_CAPACITY)
    served.wait(0.3)
    assert served.request("r").reservation.preemptions == 0
    served.failed("r", FailReason.NO_CAPACITY, 1)
    assert served.request("r").reservation.preemptions == 1


@pytest.mark.parametrize(("preemptions", "stays"), [(7, False), (8, True)])
def test_the_bound_on_preemptions_outlives_the_scheduler(served: Driver, preemptions: int, stays: bool) -> None:
    assert served.place("r", preemptions=preemptions, emitted_tokens=3).allotment.stays == stays
    assert served.request("r").reservation.output_tokens == (97 if stays else 13)


def test_what_a_runner_doubled_in_place_is_kept_when_the_request_moves(served: Driver) -> None:
    served.place("r", p90_tokens=16)
    served.runner("a", served.view("r", 64), free=90)
    served.runner("b")
    (moved,) = of(served.failed("r", FailReason.SESSION_LOST, 20), Assign)
    assert moved.reservation_tokens == 44


def test_a_preempt_decision_about_an_older_epoch_changes_nothing(served: Driver) -> None:
    served.place("r")
    stale = served.request("r").epoch
    served.failed("r", FailReason.PREEMPTED, 1)
    effects = served.supervisor_sends(
        ClusterReport((), (), (PreemptDecision(RunnerId("a", "i1"), "r", stale, "r", 9),))
    )
    assert not of(effects, Preempt)


@pytest.mark.parametrize(
    ("reason", "rejected_for"),
    [(FailReason.LOAD_FAILED, RejectReason.ADAPTER_FAILED), (FailReason.RUNNER_FULL, RejectReason.RUNNER_FULL)],
)
def test_an_adapter_that_loads_nowhere_ends_its_request_with_the_reasons(
    driver: Driver, reason: FailReason, rejected_for: RejectReason
) -> None:
    driver.start("sha256:1").runner("a")
    driver.runner("b")
    assert driver.place("r", "sha256:1").runner.uuid == "b"
    (elsewhere,) = of(driver.failed("r", reason, detail="no file"), Assign)
    assert elsewhere.runner.uuid == "a"
    (rejected,) = of(driver.failed("r", reason, detail="torn"), Reject)
    assert (rejected.reason, rejected.message) == (rejected_for, "no file; torn")


def test_a_cancelled_request_is_gone_wherever_it_was(driver: Driver) -> None:
    driver.start().runner("a", total_pages=4)
    driver.place("running", prompt_tokens=40)
    driver.submit("waiting", prompt_tokens=40)
    driver.submit("next", prompt_tokens=40)
    driver.gateway_sends(Cancel("waiting"))
    assert [a.request_id for a in of(driver.gateway_sends(Cancel("running")), Assign)] == ["next"]
    assert not driver.knows("running")
    assert driver.gateway_sends(Cancel("running")) == []


def test_a_gateway_cannot_speak_of_anothers_request(driver: Driver) -> None:
    driver.start()
    driver.gateway("g2")
    driver.runner("a")
    assign = driver.place("r")
    driver.gateway_sends(Cancel("r"), "g2")
    driver.gateway_sends(Failed("r", assign.epoch, FailReason.NO_CAPACITY), "g2")
    driver.gateway_sends(Started("r", assign.epoch), "g2")
    assert driver.request("r").phase is Phase.ASSIGNED


def test_a_new_stream_of_a_gateway_starts_from_nothing(driver: Driver) -> None:
    driver.start()
    driver.submit("r")
    driver.gateway(complete=False)
    assert not driver.knows("r")


def test_a_request_submitted_twice_on_a_stream_is_one(driver: Driver) -> None:
    driver.start()
    driver.submit("r")
    assert [type(e) for e in driver.submit("r")] == [Stale]
    assert len(driver.pool().waiting.queue) == 1


def test_what_no_runner_could_ever_take_is_refused_once_the_cluster_has_told_itself(driver: Driver) -> None:
    driver.start("sha256:1", settle=False, rank=32).runner("a", max_rank=16)
    driver.runner("b", max_rank=16, max_context_tokens=100)
    assert not of(driver.submit("large", max_tokens=2000), Reject)
    assert not of(driver.submit("rank", "sha256:1"), Reject)
    reasons = {r.request_id: r.reason for r in of(driver.wait(10.1), Reject)}
    assert reasons == {"large": RejectReason.TOO_LARGE, "rank": RejectReason.ADAPTER_FAILED}
    assert [r.reason for r in of(driver.submit("l2", max_tokens=2000), Reject)] == [RejectReason.TOO_LARGE]


def test_an_answer_that_nobody_bounded_is_as_long_as_the_largest_runner_holds(driver: Driver) -> None:
    driver.start(settle=False)
    driver.submit("early", max_tokens=10**5, open_ended=True)
    driver.runner("a", max_context_tokens=100)
    effects = driver.wait(10.1)
    effects += driver.submit("late", max_tokens=10**5, open_ended=True)
    assert [assign.request_id for assign in of(effects, Assign)] == ["early", "late"]
    assert [driver.request(name).tokens.context for name in ("early", "late")] == [100, 100]
    refused = driver.submit("long", prompt_tokens=100, max_tokens=10**5, open_ended=True)
    assert [reject.reason for reject in of(refused, Reject)] == [RejectReason.TOO_LARGE]


def test_without_any_runner_nothing_is_impossible(driver: Driver) -> None:
    driver.start()
    assert not of(driver.submit("large", max_tokens=10**6), Reject)


@pytest.mark.parametrize("known", [True, False])
def test_a_pool_is_unknown_only_where_the_registry_has_spoken(driver: Driver, known: bool) -> None:
    if known:
        driver.registry()
    driver.gateway()
    rejects = of(driver.submit("r", pool="acme/other"), Reject)
    assert [r.reason for r in rejects] == ([RejectReason.UNKNOWN_POOL] if known else [])
    if not known:
        assert [r.reason for r in of(driver.registry(), Reject)] == [RejectReason.UNKNOWN_POOL]


@pytest.mark.parametrize("reservation", ["calibrated", "pooled", "paged", "maximum", "s3"])
def test_a_request_for_its_prompt_alone_is_placed_like_one_of_a_token(driver: Driver, reservation: str) -> None:
    driver.start(reservation=reservation).runner("a")
    assert driver.place("r", max_tokens=0, p90_tokens=0).reservation_tokens == 1


@pytest.mark.parametrize("reservation", ["calibrated", "pooled", "paged", "maximum", "s3"])
@pytest.mark.parametrize("phases", ["together", "split"])
def test_a_prompt_as_long_as_the_context_is_placed_where_nothing_is_generated(
    driver: Driver, reservation: str, phases: str
) -> None:
    """The runner has just the pages of the prompt."""
    driver.start(reservation=reservation, phases=phases).runner("a")
    driver.place("r", prompt_tokens=1600, max_tokens=0, p90_tokens=0)
