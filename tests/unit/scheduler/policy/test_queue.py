"""Who may pass whom."""

from collections.abc import Set as AbstractSet
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.scheduler_driver import Driver, of
from harness.waiting_request import Runners, WaitingRequest
from weft.domain.request import Assign, FailReason, Reject, RejectReason, ResubmitComplete
from weft_scheduler.core.model.request import Phase
from weft_scheduler.core.policy.placement.runner_index import RunnerShape
from weft_scheduler.core.policy.queue.orders import AGING_S, QUEUE_POLICIES, Shortest
from weft_scheduler.core.policy.queue.overtaking import Overtaking, QueuePass
from weft_scheduler.core.policy.queue.sorted_queue import SortedQueue
from weft_scheduler.core.policy.queue.token_counters import TokenCounters
from weft_scheduler.core.policy.queue.waiting_queue import WaitingQueue

SMALL, LARGE = RunnerShape(8, 10), RunnerShape(8, 100)


class Room(Runners):
    """Two runners, each of one shape, with room for `small` and for `large`."""

    def __init__(self, queue: WaitingQueue[WaitingRequest], small: int, large: int) -> None:
        self.queue, self.free, self.admitted = queue, {SMALL: small, LARGE: large}, list[int]()

    def place(self, request: WaitingRequest, closed: AbstractSet[RunnerShape]) -> RunnerShape | None:
        for shape in self.shapes_for(request):
            if shape not in closed and self.free[shape] >= request.size:
                self.free[shape] -= request.size
                self.queue.remove(request)
                self.admitted.append(request.name)
                return shape
        return None

    def shapes_for(self, request: WaitingRequest) -> AbstractSet[RunnerShape]:
        return {shape for shape in (SMALL, LARGE) if shape.max_context_tokens >= request.size}

    def free_tokens(self) -> int:
        return max(self.free.values())

    def has_capacity(self, closed: AbstractSet[RunnerShape]) -> bool:
        return any(free for shape, free in self.free.items() if shape not in closed)


def queue_of(
    *sizes: int, policy: str = "fcfs", every_s: float = AGING_S / 3, work_per_s: float = 0.0
) -> WaitingQueue[WaitingRequest]:
    """Queue requests of these sizes, one after the other."""
    queue = WaitingQueue[WaitingRequest](QUEUE_POLICIES[policy](), TokenCounters({}))
    for name, size in enumerate(sizes):
        queue.push(WaitingRequest(name, size, every_s=every_s), work_per_s)
    return queue


def pass_of(overtaking: Any, queue: Any, room: Any, bound: int, window: int = 64) -> QueuePass[WaitingRequest]:
    return QueuePass(overtaking, queue, room, bound=bound, window=window)


def schedule(
    queue: WaitingQueue[WaitingRequest],
    overtaking: Overtaking[WaitingRequest],
    small: int,
    large: int,
    bound: int = 2,
    window: int = 64,
) -> list[int]:
    room = Room(queue, small, large)
    room.answer(pass_of(overtaking, queue, room, bound, window))
    return room.admitted


def overtaken(queue: WaitingQueue[WaitingRequest], overtaking: Overtaking[WaitingRequest]) -> list[int]:
    return [overtaking.counts[r.id] for r in queue.oldest("", 99)]


@pytest.mark.parametrize(
    ("sizes", "free", "bound", "window", "admitted"),
    [
        ((1, 2, 3), 10, 2, 64, [0, 1, 2]),
        ((50, 1), 40, 0, 64, []),  # a bound of zero is strict order
        ((50, 50, 1), 40, 2, 2, []),  # no more than the window is passed at all
        ((50, 50, 1), 40, 2, 3, [2]),
    ],
)
def test_one_pass_over_a_queue(sizes: tuple[int, ...], free: int, bound: int, window: int, admitted: list[int]) -> None:
    assert schedule(queue_of(*sizes), Overtaking[WaitingRequest](), 0, free, bound, window) == admitted


def test_a_blocked_request_is_passed_up_to_the_bound_and_then_closes_its_runners() -> None:
    queue, overtaking = queue_of(50, 1, 1, 1, 1), Overtaking[WaitingRequest]()
    assert schedule(queue, overtaking, 0, 40, bound=2) == [1, 2]
    assert overtaken(queue, overtaking) == [2, 0, 0]
    assert schedule(queue, overtaking, 0, 40, bound=2) == []  # nothing behind it, although it fits
    assert schedule(queue, overtaking, 0, 50, bound=2) == [0]
    assert schedule(queue, overtaking, 0, 50, bound=2) == [3, 4]


def test_runners_that_could_never_take_it_stay_open_and_are_no_passes() -> None:
    queue, overtaking = queue_of(50, 1, 1, 1, 1), Overtaking[WaitingRequest]()
    assert schedule(queue, overtaking, 10, 0, bound=2) == [1, 2, 3, 4]
    assert overtaken(queue, overtaking) == [0]


@given(
    policy=st.sampled_from(sorted(QUEUE_POLICIES)),
    sizes=st.lists(st.integers(1, 60), max_size=12),
    passes=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 60)), max_size=8),
    bound=st.integers(0, 3),
)
def test_nobody_is_passed_too_often(policy: str, sizes: list[int], passes: list[tuple[int, int]], bound: int) -> None:
    queue, overtaking = queue_of(*sizes, policy=policy), Overtaking[WaitingRequest]()
    waiting = {r.name: r for r in queue}
    shapes = Room(queue, 0, 0).shapes_for
    passed = dict.fromkeys(waiting, 0)
    for small, large in passes:
        room = Room(queue, small, large)
        before, keys = room.free.copy(), {r.name: queue.key_of(r) for r in queue}
        room.answer(pass_of(overtaking, queue, room, bound))
        for name in room.admitted:  # overtaken are those that a pass leaves behind
            ran_on = {s for s in shapes(waiting[name]) if before[s] != room.free[s]}
            for earlier in [r for r in queue if r.name < name and ran_on <= shapes(r)]:
                if queue.policy.ages and keys[earlier.name] > keys[name]:
                    continue  # ageing bounds those
                passed[earlier.name] += len(ran_on) == 1
    assert all(count <= bound for count in overtaking.counts.values())
    assert all(passed[name] <= bound for name in passed)


@given(
    policy=st.sampled_from(sorted(QUEUE_POLICIES)),
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=15),
    bound=st.integers(0, 4),
)
def test_when_room_keeps_coming_everybody_is_admitted(policy: str, sizes: list[int], bound: int) -> None:
    queue, overtaking = queue_of(*sizes, policy=policy), Overtaking[WaitingRequest]()
    for _ in range(len(sizes)):
        schedule(queue, overtaking, 10, 100, bound)
    assert not len(queue)


@pytest.mark.parametrize(
    ("policy", "sizes", "free", "admitted"),
    [
        ("fcfs", (30, 10, 60, 20), 120, [0, 1, 2, 3]),
        ("fcfs", (30, 10, 60, 20), 35, [0]),
        ("s3", (30, 10, 60, 20), 120, [2, 0, 3, 1]),  # the largest first
        ("s3", (30, 10, 60, 20), 35, [0]),  # the largest that fits
        ("s3", (30, 10, 60, 20), 55, [0, 3]),  # what is left is filled by the next that fits
        ("s3", (20, 20, 10), 40, [0, 1]),  # equals by age
        ("shortest", (30, 10, 60, 20), 120, [0, 1, 3, 2]),  # nothing waits before the first; 3 arrivals * size / 60
        ("shortest", (30, 10, 60, 20), 29, [1]),
        ("shortest", (60, 60, 60, 60, 1), 121, [0, 1, 4]),  # it passes those of the last 3 arrivals only
    ],
)
def test_the_order_of_a_policy(policy: str, sizes: tuple[int, ...], free: int, admitted: list[int]) -> None:
    assert schedule(queue_of(*sizes, policy=policy), Overtaking[WaitingRequest](), 0, free, bound=99) == admitted


def test_s3_offers_what_fits_however_many_do_not() -> None:
    assert schedule(queue_of(*[50] * 9, 5, policy="s3"), Overtaking[WaitingRequest](), 0, 40, bound=99, window=2) == [9]


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12), arrivals=st.floats(0.5, 20))
def test_shortest_passes_nobody_that_arrived_much_earlier(sizes: list[int], arrivals: float) -> None:
    queue = queue_of(*sizes, policy="shortest", every_s=AGING_S / arrivals)
    admitted = schedule(queue, Overtaking[WaitingRequest](), 0, 10_000, bound=10_000)
    for place, name in enumerate(admitted):
        assert all(later >= name - arrivals for later in admitted[place:]), (name, admitted)


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12), work_per_s=st.floats(1, 100))
def test_shortest_lets_requests_be_passed_for_three_times_their_backlog(sizes: list[int], work_per_s: float) -> None:
    queue = queue_of(*sizes, policy="shortest", every_s=1.0, work_per_s=work_per_s)
    admitted = schedule(queue, Overtaking[WaitingRequest](), 0, 10_000, bound=10_000)
    for place, name in enumerate(admitted):
        aging_s = min(AGING_S, 3.0 * sum(sizes[:name]) / work_per_s)
        assert all(earlier <= name + aging_s + 1e-6 for earlier in admitted[:place]), (name, admitted)


def test_shortest_measures_work_by_the_longest_of_the_latest_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def delays(*sizes: int) -> list[float]:
        policy, requests = Shortest(), [WaitingRequest(name, size) for name, size in enumerate(sizes)]
        return [policy.delay_s(request, policy.key(request, backlog_s=AGING_S)) for request in requests]

    assert delays(*[1] * 200, 1000)[-1] == AGING_S, "one of a hundred may be longer still"
    monkeypatch.setattr("weft_scheduler.core.policy.queue.orders.SAMPLE", 3)
    assert delays(100, 1, 1, 1) == pytest.approx([AGING_S, AGING_S / 100, AGING_S / 100, AGING_S])


def test_a_backlog_is_the_work_of_what_waits_and_the_lanes_of_classes_are_one_order() -> None:
    queue = queue_of(30, 10, policy="shortest")
    assert queue.backlog_s("", 2.0) == 20.0
    queue.remove(next(iter(queue)))
    assert queue.backlog_s("", 2.0) == 5.0
    lanes = queue_of()
    for name, awaited in enumerate(("", "A", "", "B", "A")):
        lanes.push(WaitingRequest(name, 1, awaited_class=awaited))
    assert [request.name for request in lanes.candidates("", 9, Room(lanes, 0, 9))] == [*range(5)]


def test_under_shortest_what_never_fits_is_passed_out_of_order_no_more_than_the_bound() -> None:
    """The large one's turn by ageing has long come: small ones behind it would fill the runner for ever."""
    queue, overtaking = queue_of(1, 50, *[1] * 20, policy="shortest"), Overtaking[WaitingRequest]()
    admitted = schedule(queue, overtaking, 0, 40, bound=2)
    assert admitted == [0, 2, 3, 4, 5]  # 2 and 3 are before it by ageing, then two pass it
    assert schedule(queue, overtaking, 0, 40, bound=2) == []
    assert schedule(queue, overtaking, 0, 50, bound=2) == [1]


def test_a_starved_request_that_fits_runs_at_once() -> None:
    """Under an order of its own a policy may come to it late: the bound does not wait for that."""
    queue, overtaking = queue_of(5, 10, 10, 10, policy="s3"), Overtaking[WaitingRequest]()
    assert schedule(queue, overtaking, 0, 50, bound=2) == [1, 2, 0, 3]


def test_in_the_core_the_oldest_waits_for_pages_while_the_bound_lasts() -> None:
    driver = Driver(starvation_bound=2).start()
    driver.runner("a", free=10)
    driver.submit("large", prompt_tokens=400, p90_tokens=50)
    assert not of(driver.submit("large2", prompt_tokens=400), Assign)
    assert [driver.place(f"r{i}").request_id for i in range(2)] == ["r0", "r1"]
    assert driver.pool().waiting.overtaking.counts["large"] == 2
    assert not of(driver.submit("r2"), Assign)
    effects = driver.runner("a", driver.view("r0"), driver.view("r1"), free=96)
    assert [a.request_id for a in of(effects, Assign)] == ["large", "large2"]


def test_one_that_keeps_off_the_only_runner_stalls_nobody(driver: Driver) -> None:
    """100 requests a second beside one that its runner failed: everybody is admitted at once, without a pause."""
    driver.start().runner("a", max_sequences=32)
    driver.place("bad")
    driver.failed("bad", FailReason.RUNNER_ERROR)
    for i in range(200):
        driver.wait(0.01)
        assert driver.place(f"r{i}").runner.uuid == "a"
        driver.outcome(f"r{i}")
    assert driver.pool().waiting.overtaking.counts["bad"] == 0


def test_one_that_keeps_off_a_runner_waits_for_the_others_no_longer_than_the_bound() -> None:
    driver = Driver(starvation_bound=2, avoid_s=60.0).start()
    driver.runner("a", max_sequences=9)
    driver.place("bad", prompt_tokens=400)
    driver.failed("bad", FailReason.RUNNER_ERROR)
    driver.runner("b", max_sequences=9, free=10)
    placed = [driver.place(f"r{i}") for i in range(2)]
    assert ([a.runner.uuid for a in placed], driver.pool().waiting.overtaking.counts["bad"]) == (["b", "b"], 2)
    assert not of(driver.submit("behind"), Assign), "b has room for it and drains for the oldest"
    effects = driver.runner("b", driver.view("r0"), driver.view("r1"), free=96)
    assert [a.request_id for a in of(effects, Assign)] == ["bad", "behind"]


def test_age_counts_waiting_before_a_restart(driver: Driver) -> None:
    driver.start()
    for name, waited_s in (("young", 1.0), ("old", 9.0), ("middle", 5.0)):
        driver.submit(name, waited_s=waited_s)
    assert [r.id for r in driver.pool().waiting.queue] == ["old", "middle", "young"]


def test_beyond_its_bound_the_queue_refuses_with_a_time_from_the_measured_rate(driver: Driver) -> None:
    driver.start(max_queue=2).runner("a", max_sequences=2)
    driver.place("r0")
    driver.place("r1")
    driver.runner("a", driver.view("r0"), driver.view("r1"), free=90)
    driver.submit("q0")
    driver.submit("q1")
    (unknown,) = of(driver.submit("q2"), Reject)
    assert (unknown.reason, unknown.retry_after_ms) == (RejectReason.QUEUE_FULL, 5000)
    driver.wait(1.0)
    driver.outcome("r0")  # one departure in about 30 s
    (measured,) = of(driver.submit("q3"), Reject)
    assert measured.retry_after_ms == 45_000  # 3 asked, half of it at 1/30 a second
    assert driver.knows("q1")


def test_one_that_fits_is_admitted_past_a_full_queue(driver: Driver) -> None:
    driver.start(max_queue=1).runner("a", free=10)
    driver.submit("large", prompt_tokens=400)
    assert driver.place("small").request_id == "small"


def test_requests_that_were_accepted_once_are_never_refused_for_a_full_queue(driver: Driver) -> None:
    driver.start(max_queue=1)
    driver.submit("q0")
    driver.gateway("g2", complete=False)
    for i in range(3):
        assert not of(driver.submit(f"h{i}", gateway="g2"), Reject)
    assert not of(driver.gateway_sends(ResubmitComplete(), "g2"), Reject)
    assert not of(driver.submit("moved", emitted_tokens=4), Reject)
    assert [r.reason for r in of(driver.submit("new"), Reject)] == [RejectReason.QUEUE_FULL]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60), st.integers(1, 4))
def test_a_sorted_queue_is_a_sorted_list(steps: list[tuple[bool, int]], bucket: int) -> None:
    queue, model = SortedQueue[str](), dict[int, str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft_scheduler.core.policy.queue.sorted_queue.BUCKET", bucket)
        for add, key in steps:
            if add and key not in model:
                model[key] = str(key)
                queue.add((key,), str(key))
            elif not add and key in model:
                queue.remove((key,))
                del model[key]
            assert [*queue] == [model[key] for key in sorted(model)]
            assert len(queue) == len(model)
            assert queue.last() == (((max(model),), model[max(model)]) if model else None)
            for key in range(-1, 31):
                above = min((k for k in model if k > key), default=None)
                assert queue.successor((key,)) == (None if above is None else ((above,), model[above]))
    with pytest.raises(KeyError):
        queue.remove((99,))


def test_requests_that_wait_for_their_class_do_not_hold_up_those_behind_them() -> None:
    """More wait for a full class than a pass looks at; one that any class can run is placed all the same."""
    driver: Any = Driver(window=4).start(min_runners=9)
    driver.runner("home", numerics_class="A", max_sequences=8)
    waiting = [f"w{i}" for i in range(5)]
    for name in waiting:
        assert driver.place(name).runner.uuid == "home"
    driver.runner("full", numerics_class="A", free=0)
    driver.runner("other", numerics_class="B", max_sequences=8)
    driver.lost("home")
    for name in waiting:
        driver.failed(name, FailReason.SESSION_LOST, 3)
    assert {driver.request(name).phase for name in waiting} == {Phase.WAITING}
    assert driver.place("young").runner.uuid == "other"
    driver.wait(5.1)
    assert {driver.request(name).runner.uuid for name in waiting} == {"other"}, "then any class will do"
