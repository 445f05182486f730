"""A request that has tokens goes on in the numerics class that computed them, but does not wait for it forever."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tests.unit.scheduler.conftest import POOL, Desk, of
from tests.unit.scheduler.test_scale import counted
from weft.wire.v1 import common_pb2 as cpb
from weft.wire.v1 import scheduler_pb2 as pb
from weft.wire.v1 import supervisor_pb2 as spb
from weft_scheduler import wire
from weft_scheduler.core import events as ev
from weft_scheduler.core.effects import Assign, Requeued, Resumed
from weft_scheduler.core.events import FailReason
from weft_scheduler.core.scheduler import Scheduler
from weft_scheduler.core.values import Config, Epoch, PoolSpec, RunnerId, RunnerReport, RunnerSpec
from weft_scheduler.metrics import Metrics

A, B = "cpu/1/tile32/bf16/tp1", "cpu/1/portable/bf16/tp1"
Picked = Callable[..., list[Any]]


def running(desk: Desk) -> Desk:
    """A request that runs on `home`, of class A; "z" is where it would go if all were alike."""
    desk.start(min_runners=9)  # none is given back
    desk.runner("home", numerics_class=A)
    assert desk.place("r").runner.uuid == "home"
    desk.runner("z", numerics_class=B)
    return desk


def lose(desk: Desk, emitted: int = 5) -> list[Any]:
    """`home` is lost, and the gateway says how many tokens there are."""
    return [*desk.lost("home"), *desk.failed("r", FailReason.SESSION_LOST, emitted)]


def assigned(effects: list[Any]) -> list[str]:
    return [a.runner.uuid for a in of(effects, Assign)]


def test_a_request_with_tokens_goes_to_a_runner_of_its_class(desk: Any) -> None:
    running(desk).runner("a", numerics_class=A)
    effects = lose(desk)
    assert assigned(effects) == ["a"]
    assert of(effects, Resumed) == [Resumed("r", POOL, RunnerId("a", "i1"), A, A)]


def test_one_without_tokens_goes_anywhere(desk: Any) -> None:
    running(desk).runner("a", numerics_class=A)
    effects = lose(desk, emitted=0)
    assert assigned(effects) == ["z"]
    assert not of(effects, Resumed)


def test_where_nobody_of_its_class_is_left_it_goes_to_another_at_once(desk: Any) -> None:
    effects = lose(running(desk))
    assert assigned(effects) == ["z"]
    assert of(effects, Resumed) == [Resumed("r", POOL, RunnerId("z", "i1"), A, B)]


@pytest.mark.parametrize(
    "unfit", [{"draining": True}, {"max_context_tokens": 64}, {"max_rank": 4}], ids=lambda unfit: next(iter(unfit))
)
def test_a_runner_of_its_class_that_can_never_take_it_is_not_waited_for(desk: Any, unfit: dict[str, Any]) -> None:
    desk.start("sha256:1")
    desk.runner("home", numerics_class=A)
    desk.place("r", "sha256:1")
    desk.runner("z", numerics_class=B)
    desk.runner("a", numerics_class=A, **unfit)
    assert assigned(lose(desk)) == ["z"]


def test_a_full_runner_of_its_class_is_waited_for_and_taken_as_soon_as_it_has_room(desk: Any) -> None:
    running(desk).runner("a", numerics_class=A, free=0)
    assert not assigned(lose(desk))
    assert not assigned(desk.wait(4.9))
    assert assigned(desk.runner("a", numerics_class=A)) == ["a"]


def test_it_waits_for_a_bounded_time(desk: Any) -> None:
    running(desk).runner("a", numerics_class=A, free=0)
    lose(desk)
    assert not assigned(desk.wait(4.9))
    effects = desk.wait(0.2)
    assert assigned(effects) == ["z"]
    assert of(effects, Resumed) == [Resumed("r", POOL, RunnerId("z", "i1"), A, B)]


def test_a_runner_whose_supervisor_reconnects_is_waited_for(desk: Any) -> None:
    running(desk).runner("a", numerics_class=A)
    desk.handle(ev.SupervisorUp("other"))
    desk.handle(ev.SupervisorDown("s"))
    other = desk.report_of("z")
    desk.handle(ev.ClusterReport("other", (other,)))
    assert not assigned(desk.failed("r", FailReason.RUNNER_ERROR, 5))
    assert assigned(desk.handle(ev.ClusterReport("other", (desk.report_of("a"),)))) == ["a"]


def test_a_broken_session_ends_where_it_was_if_its_runner_lives(desk: Any) -> None:
    running(desk)
    assert not assigned(desk.failed("r", FailReason.SESSION_LOST, 5))
    assert assigned(desk.wait(3.1)) == ["home"]


def test_whoever_waits_for_its_class_holds_up_nobody_on_others(desk: Any) -> None:
    running(desk).runner("a", numerics_class=A, free=0)
    lose(desk)
    assert [desk.place(f"young{i}").runner.uuid for i in range(4)] == ["z"] * 4
    assert desk.request("r").passes == 0


def test_no_room_does_not_start_the_wait_anew(desk: Any) -> None:
    running(desk).runner("a", numerics_class=A)
    lose(desk)
    begin = desk.now
    while desk.request("r").runner.uuid == "a":
        desk.failed("r", FailReason.NO_ROOM, 5)
        while desk.request("r").runner is None:
            desk.wait(0.05)
        assert desk.now < begin + 6.0
    assert desk.request("r").runner.uuid == "z"


@pytest.mark.parametrize(("emitted", "there"), [(5, "a"), (6, "y")])
def test_its_class_is_that_of_the_latest_tokens(desk: Any, emitted: int, there: str) -> None:
    assert assigned(lose(running(desk))) == ["z"]
    desk.runner("a", numerics_class=A)
    desk.runner("y", numerics_class=B)
    assert assigned([*desk.lost("z"), *desk.failed("r", FailReason.SESSION_LOST, emitted)]) == [there]


def test_a_silent_gateway_may_have_tokens(desk: Any) -> None:
    running(desk).runner("a", numerics_class=A)
    desk.handle(ev.Started("g", "r", desk.request("r").epoch))
    desk.lost("home")
    assert assigned(desk.wait(5.1)) == ["a"]


def test_runners_that_tell_no_class_are_all_alike(desk: Any) -> None:
    desk.start()
    desk.runner("home")
    desk.place("r")
    desk.runner("a", free=0)
    desk.runner("z")
    effects = lose(desk)
    assert assigned(effects) == ["z"]
    assert not of(effects, Resumed)


# ---------------------------------------------------------------------------------------- restarts


def test_a_new_scheduler_is_told_the_class_and_waits_until_the_cluster_has_reported_itself(desk: Any) -> None:
    desk.start(settle=False)
    desk.submit("r", emitted_tokens=5, numerics_class=A, waited_s=3.0)
    assert not assigned(desk.runner("z", numerics_class=B))
    assert assigned(desk.runner("a", numerics_class=A)) == ["a"]


@pytest.mark.parametrize("reported_first", [True, False])
def test_a_request_that_runs_on_has_the_class_of_its_runner(desk: Any, reported_first: bool) -> None:
    desk.start()
    if reported_first:
        desk.runner("home", numerics_class=A)
    desk.submit("r", emitted_tokens=5, epoch=Epoch(1, 3), runner=RunnerId("home", "i1"), reservation_tokens=50)
    if not reported_first:
        desk.runner("home", numerics_class=A)
    desk.runner("a", numerics_class=A)
    desk.runner("z", numerics_class=B)
    assert assigned(lose(desk, emitted=9)) == ["a"]


# ------------------------------------------------------------------------------------------ whatever


FLEET = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.tuples(st.sampled_from([A, B]), st.sampled_from([0, 100]), st.booleans()),  # class, free pages, draining
)


@given(fleet=FLEET)
def test_it_stays_in_its_class_while_that_can_take_it_and_never_starves(
    fleet: dict[str, tuple[str, int, bool]],
) -> None:
    desk = Desk().start(min_runners=9)
    desk.runner("home", numerics_class=A)
    desk.place("r")
    for uuid, (numerics_class, free, draining) in fleet.items():
        desk.runner(uuid, numerics_class=numerics_class, free=free, draining=draining)
    taking = {uuid: (kind, free) for uuid, (kind, free, draining) in fleet.items() if not draining}
    now = max((uuid for uuid, (_, free) in taking.items() if free), default=None)
    own = max((uuid for uuid, (kind, free) in taking.items() if kind == A and free), default=None)
    waits = own is None and any(kind == A for kind, _ in taking.values())
    expected = own or (None if waits else now)
    assert assigned(lose(desk)) == ([expected] if expected else [])
    if expected is None:
        later = assigned(desk.wait(desk.core.config.same_class_s))
        assert later == ([now] if now else [])
        if now is None:
            assert assigned(desk.runner("new", numerics_class=B)) == ["new"]


def moved(runners: int) -> int:
    """Lines run to place a request with tokens again, among runners of two classes."""
    core = Scheduler(Config(), 1)
    core.handle(ev.RegistryChange(True, (PoolSpec(POOL, "b", "base"),)), 0.0)
    core.handle(ev.GatewayUp("g"), 0.0)
    core.handle(ev.ResubmitComplete("g"), 0.0)
    core.handle(ev.SupervisorUp("s"), 0.0)
    specs = [RunnerSpec("h:1", POOL, 16, 100, 4, 2, 64, 1600, numerics_class=kind) for kind in (A, B)]
    reports = (RunnerReport(RunnerId(f"u{i}", "i"), specs[i % 2], 1, 100) for i in range(runners))
    core.handle(ev.ClusterReport("s", tuple(reports)), 0.1)
    core.tick(20.0)
    (first,) = of(core.handle(ev.Submit("g", "r", POOL, "acme", "m", "", 16, 100), 21.0), Assign)
    failed = ev.Failed("g", "r", first.epoch, FailReason.SESSION_LOST, 5)
    effects, lines = counted(lambda: core.handle(failed, 22.0))
    assert [type(e) for e in effects] == [Requeued, Assign, Resumed]
    return lines


def test_a_move_costs_little_more_at_thousands_of_runners_than_at_a_hundred() -> None:
    assert moved(3_000) < 2 * moved(100)


# --------------------------------------------------------------------------------- what others see


def test_moves_are_counted_by_whether_the_class_stays() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for to in (A, A, B):
        metrics.count(Resumed("r", POOL, RunnerId("a", "i"), A, to))
    values = {c: registry.get_sample_value("weft_scheduler_resumed_total", {"classes": c}) for c in ("same", "across")}
    assert values == {"same": 2, "across": 1}


def test_classes_travel_with_hellos_assignments_and_submits() -> None:
    hello = spb.RunnerHello(
        runner=cpb.RunnerId(uuid="u", incarnation="i"), pool="n/p", address="h:1", page_tokens=16, total_pages=9,
        max_sequences=8, max_adapters=4, max_rank=64, max_context_tokens=99, numerics_class=A,
    )  # fmt: skip
    state = spb.RunnerState(id=hello.runner, runner=hello)
    spec = wire.runner_report(state).spec
    assert spec is not None
    assert spec.numerics_class == A
    assign = Assign("g", "r", Epoch(1, 2), RunnerId("u", "i"), "h:1", 16, A)
    assert wire.to_gateway(assign).assign.numerics_class == A
    submit = pb.Submit(request_id="r", max_tokens=5, numerics_class=A)
    event = wire.gateway_event("g", pb.GatewayToScheduler(submit=submit))
    assert isinstance(event, ev.Submit)
    assert event.numerics_class == A
