"""Several supervisors at once: a runner belongs to the one that reported it last."""

from typing import Any

from weft_scheduler.core import events as ev
from weft_scheduler.core.effects import Assign, ForwardOutcome, Ignored, Order, RunnerEnded
from weft_scheduler.core.values import RunnerId


def _two(desk: Any) -> None:
    desk.start()
    desk.handle(ev.SupervisorUp("other", 0))


def test_a_lease_that_runs_out_where_the_runner_was_before_ends_nothing(desk: Any, picked: Any) -> None:
    _two(desk)
    desk.runner("a")
    desk.handle(ev.ClusterReport("other", (desk.report_of("a"),)))
    placed = desk.place("r")
    effects = desk.lost("a")  # told by the first one
    assert [e.reason for e in picked(effects, Ignored)] == ["another supervisor has reported it since"]
    assert not picked(effects, RunnerEnded)
    assert desk.request("r").runner == placed.runner
    ended = desk.handle(ev.ClusterReport("other", (), (RunnerId("a", "i1"),)))
    assert [e.runner.uuid for e in picked(ended, RunnerEnded)] == ["a"]


def test_orders_follow_the_runner_to_its_supervisor(desk: Any, picked: Any) -> None:
    _two(desk)
    desk.runner("a")
    moved = desk.handle(ev.ClusterReport("other", (desk.report_of("a"),)))
    assert {order.supervisor for order in picked(moved, Order)} == {"other"}


def test_an_older_state_of_the_supervisor_before_does_not_take_the_runner_back(desk: Any) -> None:
    _two(desk)
    stale = desk.report_of("a")
    desk.handle(ev.ClusterReport("s", (stale,)))
    desk.handle(ev.ClusterReport("other", (desk.report_of("a"),)))
    desk.handle(ev.ClusterReport("s", (stale,)))
    assert desk.record("a").supervisor == "other"


def test_a_supervisor_that_ends_takes_its_runners_out_until_another_reports_them(desk: Any, picked: Any) -> None:
    _two(desk)
    desk.runner("a")
    desk.handle(ev.ClusterReport("other", (desk.report_of("b"),)))
    desk.handle(ev.SupervisorDown("s"))
    assert {assign.runner.uuid for assign in picked(desk.submit("r"), Assign)} == {"b"}
    desk.handle(ev.ClusterReport("other", (desk.report_of("a"),)))
    assert desk.record("a").confirmed
    assert desk.record("a").supervisor == "other"


def test_outcomes_go_to_one_supervisor_and_to_the_next_when_it_ends(desk: Any, picked: Any) -> None:
    _two(desk)
    desk.runner("a")
    desk.place("r")
    assert [forward.supervisor for forward in picked(desk.outcome("r"), ForwardOutcome)] == ["s"]
    again = desk.handle(ev.SupervisorDown("s"))
    assert [(f.supervisor, f.request_id) for f in picked(again, ForwardOutcome)] == [("other", "r")]
