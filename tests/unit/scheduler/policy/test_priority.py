"""Interactive requests go first, batch ones take what they leave, and leave it again."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.scheduler_driver import Driver, of
from weft.domain.machine import Closed, Connected, Kind, Peer, Received
from weft.domain.request import (
    Assign,
    Failed,
    FailReason,
    GatewayHello,
    Preempt,
    Priority,
    Reject,
    ResubmitComplete,
    Started,
    Submit,
)
from weft.domain.routes import PoolStatus
from weft_scheduler.core.effects import KvMigration
from weft_scheduler.core.model.request import Phase
from weft_scheduler.core.policy.priority.headroom import InteractiveArrivals
from weft_scheduler.core.policy.priority.victims import BatchSequence, Capacity, Need, select_preempted

BATCH: dict[str, Any] = {"priority": Priority.BATCH}
KV: dict[str, Any] = {"kv_address": "tcp:1", "kv_layout": "m", "page_bytes": 1 << 14, "prefill_tokens_per_s": 9.0}


def seen(driver: Driver, *request_ids: str) -> list[Any]:
    """These requests as their runner reports them: two pages each, of 16 tokens."""
    return [driver.view(request_id)._replace(reserved_pages=2) for request_id in request_ids]


def report(driver: Driver, *request_ids: str, pages: int, **state: Any) -> list[Any]:
    """A report of runner a, whose other pages are free."""
    return driver.runner("a", *seen(driver, *request_ids), free=pages - 2 * len(request_ids), **state)


# ---------------------------------------------------------------- order


def test_a_batch_request_is_placed_once_no_interactive_one_waits_however_long_it_has_waited() -> None:
    driver = Driver(starvation_bound=0).start()
    driver.submit("line", waited_s=10_000.0, **BATCH)
    driver.submit("r")
    assert [assign.request_id for assign in of(driver.runner("a", max_sequences=1), Assign)] == ["r"]
    assert [assign.request_id for assign in of(driver.outcome("r"), Assign)] == ["line"]


def test_tenants_share_what_is_left_by_what_their_batch_requests_received(driver: Driver) -> None:
    driver.start().runner("a", max_sequences=1)
    driver.place("running", **BATCH)
    for number in range(3):
        driver.submit(f"flood{number}", namespace="acme", **BATCH)
    driver.submit("other", namespace="other", **BATCH)
    assert of(driver.outcome("running"), Assign)[0].request_id == "other"


@given(
    arrivals=st.lists(st.tuples(st.booleans(), st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=12),
    queue=st.sampled_from(["fcfs", "s3", "shortest"]),
)
def test_no_batch_request_is_placed_before_interactive_ones(arrivals: list[tuple[bool, int, int]], queue: str) -> None:
    driver = Driver().start(queue=queue)
    driver.runner("a", max_sequences=2, total_pages=8)
    for number, (batch, prompt, waited) in enumerate(arrivals):
        fields: dict[str, Any] = BATCH if batch else {}
        waiting = len(driver.pool().waiting.queue)
        effects = driver.submit(f"r{number}", prompt_tokens=prompt, waited_s=float(waited), **fields)
        placed = [driver.request(assign.request_id).batch for assign in of(effects, Assign)]
        assert not (waiting and any(placed))
    assert all(request.batch for request in driver.pool().waiting.batch.queue)


# ---------------------------------------------------------------- room


def test_room_for_the_arrivals_of_a_second_stays_free_and_comes_back_as_they_cease() -> None:
    arrivals = InteractiveArrivals()
    assert arrivals.headroom(0.0, 1) == (0, 0)
    for number in range(300):
        arrivals.count(number / 10, 40, 100)
    assert arrivals.headroom(30.0, 1) == (7, 700)  # (1 - 1/e) of ten a second
    assert arrivals.prompt_tokens_per_s(30.0) == pytest.approx(0.632 * 400, rel=0.01)
    assert arrivals.headroom(30.0, 7).sequences == 1
    assert arrivals.headroom(1000.0, 1) == (0, 0)


def test_batch_requests_leave_places_and_pages_to_interactive_arrivals(driver: Driver) -> None:
    driver.start().runner("a", max_sequences=4)
    for number in range(40):
        driver.place(f"r{number}")
        driver.outcome(f"r{number}")
    placed = [bool(of(driver.submit(f"line{number}", **BATCH), Assign)) for number in range(4)]
    assert placed == [True, True, False, False], "half of the places at most are left"
    driver.runner("a", *seen(driver, "line0", "line1"), free=96)
    effects = driver.wait(60.0)
    assert [assign.request_id for assign in of(effects, Assign)][:1] == ["line2"], "nothing arrives any more"


def test_one_too_large_to_fit_beside_that_room_takes_an_empty_runner(served: Driver) -> None:
    served.runner("b")
    for number in range(80):
        served.place(f"r{number}")
        served.outcome(f"r{number}")
    assert served.place("line", prompt_tokens=1500, **BATCH).runner.uuid == "b"
    assert served.pool().waiting.batch.headroom.tokens


# ---------------------------------------------------------------- victims


def test_an_interactive_request_without_room_has_the_batch_request_with_least_progress_leave(driver: Driver) -> None:
    driver.start()
    report(driver, pages=9, total_pages=9, max_sequences=4)
    for name, waited_s in (("old", 9.0), ("young", 1.0)):
        driver.place(name, waited_s=waited_s, **BATCH)
    driver.place("chat")
    report(driver, "old", "young", "chat", pages=9, total_pages=9)
    driver.place("more", **BATCH)
    effects = driver.submit("r")
    assert [preempt.request_id for preempt in of(effects, Preempt)] == ["more"]
    assert of(driver.submit("s"), Preempt)[0].request_id == "young", "each has room of its own"
    driver.failed("more", FailReason.PREEMPTED)
    assert driver.request("r").phase is not Phase.WAITING, "what was not reported is free at once"
    assert not of(driver.failed("young", FailReason.PREEMPTED, 3), Preempt), "it leaves; the report has it yet"
    effects = report(driver, "old", "chat", pages=9)
    assert [assign.request_id for assign in of(effects, Assign)] == ["s"]
    assert {r.id for r in driver.pool().waiting.batch.queue} == {"more", "young"}
    assert driver.request("young").tokens.emitted == 3


def test_room_that_was_made_for_a_request_is_its_own_until_it_is_placed(driver: Driver) -> None:
    """`large` takes the pages of both lines: what the first one leaves is enough for `small` and r1."""
    driver.start().runner("b", total_pages=4, **KV)
    driver.place("r1")
    driver.gateway_sends(Started("r1", driver.request("r1").epoch))
    of_b = driver.report_of("b", *seen(driver, "r1"), free=0, total_pages=4, **KV)
    driver.reports(of_b._replace(report=of_b.report._replace(progress=[20])))
    size: dict[str, Any] = {"pages": 9, "total_pages": 9, **KV}
    report(driver, **size)
    names = ("line1", "line2", "chat")
    for name in names:
        driver.place(name, **BATCH if name != "chat" else {})
    report(driver, *names, **size)
    preempted = [preempt.request_id for preempt in of(driver.submit("large", prompt_tokens=96), Preempt)]
    assert sorted(preempted) == ["line1", "line2"]
    driver.submit("small")
    for name in preempted:
        driver.failed(name, FailReason.PREEMPTED)
    effects = report(driver, "line2", "chat", **size)
    assert not of(effects, Assign), "small fits, and waits"
    assert not of(driver.preempt("b", "r1", 16), KvMigration), "so does what leaves another runner"
    effects = report(driver, "chat", **size)
    assert [assign.request_id for assign in of(effects, Assign)] == ["large"]


def test_interactive_requests_are_never_preempted_for_others(driver: Driver) -> None:
    driver.start().runner("a", max_sequences=2)
    driver.place("chat")
    driver.place("line", **BATCH)
    driver.runner("a", *seen(driver, "chat", "line"), free=90, max_sequences=2)
    assert [preempt.request_id for preempt in of(driver.submit("r"), Preempt)] == ["line"]
    assert not of(driver.submit("s"), Preempt)
    assert not of(driver.submit("another", **BATCH), Preempt)


@pytest.mark.parametrize(("slots", "sequences", "victim"), [(2, 8, "line1"), (3, 3, "line2")])
def test_a_slot_for_an_adapter_is_room_too(driver: Driver, slots: int, sequences: int, victim: str) -> None:
    driver.start("x", "y", "z").runner("a", max_adapters=slots, max_sequences=sequences)
    driver.place("line1", "x", **BATCH)
    driver.now += 1
    driver.place("line2", "y", **BATCH)
    driver.place("chat", "y")
    driver.runner("a", *seen(driver, "line1", "line2", "chat"), free=90)
    assert [preempt.request_id for preempt in of(driver.submit("r", "z"), Preempt)] == [victim]


def test_the_places_that_the_token_time_leaves_are_taken_by_one_request_each() -> None:
    lines = [BatchSequence(name, "", 10, 0, 0.0) for name in ("first", "second")]
    needs = [Need("", {"a": (10, 10)}) for _ in lines]
    for places in (0, 1, 2):
        assert len(select_preempted(needs, [Capacity("a", 0, 2, places, 9, {""}, [*lines])])[0]) == places


X1, X2, Y3 = (BatchSequence(name, name[0], 10, int(name[1]), 0.0) for name in ("x1", "x2", "y3"))
LARGE = BatchSequence("z4", "z", 30, 4, 0.0)


@pytest.mark.parametrize(
    ("case", "free", "lines", "needs", "expected"),
    [
        ("each takes the pages of another one", (0, 5, 9), (X1, X2), [("", 10)] * 2, ["x1", "x2"]),
        ("each takes the place of another one", (100, 0, 9), (X1, X2), [("", 10)] * 2, ["x1", "x2"]),
        ("the first takes the place that is free", (100, 1, 9), (X1, X2), [("", 10)] * 2, ["x1"]),
        ("a small one stays where a large one has to leave", (0, 5, 9), (X1, X2, LARGE), [("", 35)], ["x1", "z4"]),
        ("the slot of which least is lost", (100, 5, 0), (Y3, X1, X2, LARGE), [("w", 10)], ["y3"]),
        ("the base needs no slot", (0, 5, 0), (X1, X2), [("", 10)], ["x1"]),
        ("nor does an adapter that stays in use", (0, 5, 0), (X1, X2), [("x", 10)], ["x1"]),
    ],
)
def test_those_leave_whose_pages_places_or_slots_are_needed(
    case: str,
    free: tuple[int, int, int],
    lines: tuple[BatchSequence, ...],
    needs: list[tuple[str, int]],
    expected: list[str],
) -> None:
    """`free`: tokens, places, slots; an adapter that is not in use takes five tokens."""
    tokens, places, slots = free
    capacity = Capacity("a", tokens, places, 9, slots, set(), [*lines])
    wanted = [Need(adapter, {"a": (n, n + 5)}) for adapter, n in needs]
    assert [request_id for _, request_id in select_preempted(wanted, [capacity])[0]] == expected, case


SEQUENCES = st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 40), st.integers(0, 40)), max_size=8)


@given(
    runners=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 2), st.integers(0, 1), SEQUENCES), min_size=1, max_size=4
    ),
    needs=st.lists(st.tuples(st.sampled_from(["", "w", "x"]), st.integers(1, 80)), max_size=5),
)
@example(runners=[(16, 7, 2, [("", 80, 8)]), (64, 6, 2, [("", 24, 0), ("", 8, 0)])], needs=[("", 63), ("", 79)])
@example(runners=[(0, 1, 0, [("x", 10, 0)])], needs=[("x", 10)])
def test_victims_make_the_room_that_is_needed_and_each_leaves_for_a_reason(
    runners: list[tuple[int, int, int, list[tuple[str, int, int]]]], needs: list[tuple[str, int]]
) -> None:
    def capacities() -> list[Capacity]:
        return [
            Capacity(
                f"runner{i}", tokens, places, 9, slots, {""},
                [BatchSequence(f"{i}/{j}", adapter, size, done, float(j)) for j, (adapter, size, done) in enumerate(b)],
            )
            for i, (tokens, places, slots, b) in enumerate(runners)
        ]  # fmt: skip

    names = [f"runner{i}" for i in range(len(runners))]
    wanted = [Need(adapter, dict.fromkeys(names, (tokens, tokens + 5))) for adapter, tokens in needs]
    used = capacities()
    victims, claims = select_preempted(wanted, used)
    assert len(set(victims)) == len(victims)

    def slots(capacity: Capacity) -> int:
        """Adapters in use, and room for others."""
        return len({one.adapter for one in capacity.lines} | capacity.shared) + capacity.free_adapters

    assert [slots(one) for one in used] == [slots(one) for one in capacities()], "a slot is free or in use"
    known = {(capacity.uuid, one.request_id) for capacity in capacities() for one in capacity.lines}
    assert set(victims) <= known

    def without(leaving: set[tuple[str, str]]) -> list[Capacity]:
        """After these have left."""
        left = capacities()
        for capacity in left:
            gone = [one for one in capacity.lines if (capacity.uuid, one.request_id) in leaving]
            capacity.lines = [one for one in capacity.lines if one not in gone]
            capacity.free_adapters += len(
                {o.adapter for o in gone} - {o.adapter for o in capacity.lines} - capacity.shared
            )
            capacity.free_tokens += sum(one.tokens for one in gone)
            capacity.free_sequences += len(gone)
            capacity.leaving_adapters = {one.adapter for one in gone}
        return left

    places = [claim.uuid if claim is not None else "" for claim in claims]
    assigned = [need._replace(assigned=uuid) for need, uuid in zip(wanted, places, strict=True)]
    more, again = select_preempted(assigned, without(set(victims)))
    assert (more, [claim.uuid if claim is not None else "" for claim in again]) == ([], places), "asked again: the same"

    if len(wanted) == 1 and victims:
        assert not select_preempted(wanted, without(set(victims)))[0], "one request has one set of victims"
        if not needs[0][0] or all(slots for _, _, slots, _ in runners):  # else those of one adapter leave together
            assert all(select_preempted(wanted, without({*victims} - {one}))[0] for one in victims), "each is needed"


# ---------------------------------------------------------------- what does not count them


def test_the_queues_bound_and_its_estimates_are_of_interactive_requests(driver: Driver) -> None:
    driver.start(max_queue=1).runner("a", max_sequences=1)
    driver.place("running")
    for number in range(3):
        assert not of(driver.submit(f"line{number}", **BATCH), Reject)
    assert not of(driver.submit("r"), Reject)
    assert of(driver.submit("s"), Reject)[0].message == "1 requests wait for acme/p"


def test_batch_requests_wake_a_pool_and_never_grow_it(driver: Driver) -> None:
    driver.start(min_runners=0, max_runners=9)
    for number in range(50):
        driver.submit(f"line{number}", **BATCH)
    assert [status.wanted_runners for status in of(driver.wait(1.0), PoolStatus)][-1:] == [1]
    driver.runner("a", max_sequences=4)
    status = of(driver.wait(1.0), PoolStatus)[-1]
    waiting = len(driver.pool().waiting.batch.queue)
    assert (status.wanted_runners, sum(driver.demanded()), driver.pool().waiting.running, waiting) == (1, 1, 4, 46)
    for number in range(9):
        driver.submit(f"r{number}")
    assert of(driver.wait(1.0), PoolStatus)[-1].wanted_runners == 3


@pytest.mark.parametrize("running", [False, True])
def test_a_priority_survives_a_new_stream_of_its_gateway(driver: Driver, running: bool) -> None:
    driver.start()
    if running:
        driver.runner("a")
    driver.submit("line", **BATCH)
    request = driver.request("line")
    peer, epoch, placement = Peer(Kind.GATEWAY, "g"), request.epoch, request.placement
    driver.handle(Closed(peer))
    driver.handle(Connected(peer, GatewayHello("g")))
    again = Submit("line", "acme/p", "acme", "m", "", 16, 100, priority=Priority.BATCH)
    if placement is not None:
        again = Submit(
            "line", "acme/p", "acme", "m", "", 16, 100, epoch=epoch, runner=placement.prompt, reservation_tokens=16,
            priority=Priority.BATCH,
        )  # fmt: skip
    driver.handle(Received(peer, again))
    driver.handle(Received(peer, ResubmitComplete()))
    assert driver.request("line").batch
    assert (driver.pool().waiting.batch.running, len(driver.pool().waiting.batch.queue)) == (running, not running)


def test_a_failure_sends_it_back_to_the_queue_of_its_priority(driver: Driver) -> None:
    driver.start().runner("a", max_sequences=1)
    assign = driver.place("line", **BATCH)
    driver.gateway_sends(Failed("line", assign.epoch, FailReason.RUNNER_ERROR, 2))
    assert [request.id for request in driver.pool().waiting.batch.queue] == ["line"]


# ---------------------------------------------------------------- laws


@pytest.mark.parametrize("fields", [{}, BATCH], ids=["interactive", "batch"])
def test_leaving_one_out_breaks_a_law(driver: Driver, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    driver.start().runner("a")
    monkeypatch.setattr("weft_scheduler.core.admission.schedule", lambda *_: None)
    monkeypatch.setattr("weft_scheduler.core.cycle.schedule", lambda *_: None)
    with pytest.raises(AssertionError, match=r"\('r', 'a'\)"):
        driver.submit("r", **fields)
