"""Who may pass whom."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weft_scheduler.core.effects import Assign, Reject, RejectReason
from weft_scheduler.core.events import FailReason, ResubmitComplete
from weft_scheduler.core.queueing import Fcfs, Queue
from weft_scheduler.core.shelves import Place, Shape

SMALL, LARGE = Shape(8, 10), Shape(8, 100)


@dataclass(eq=False)
class Waiting:
    name: int
    size: int
    passes: int = 0

    @property
    def order(self) -> tuple[float, int]:
        return 0.0, self.name


class Room:
    """Two runners, each of one shape, with so much room left."""

    def __init__(self, queue: Queue[Waiting], small: int, large: int) -> None:
        self.queue, self.free, self.admitted = queue, {SMALL: small, LARGE: large}, list[int]()

    def admit(self, request: Waiting, closed: AbstractSet[Shape]) -> Place | None:
        for shape in self.shapes_for(request):
            if shape not in closed and self.free[shape] >= request.size:
                self.free[shape] -= request.size
                self.queue.remove(request)
                self.admitted.append(request.name)
                return Place(shape, "")
        return None

    def waits_for(self, request: Waiting, place: Place) -> bool:
        return place.shape in self.shapes_for(request)

    def shapes_for(self, request: Waiting) -> AbstractSet[Shape]:
        return {shape for shape in (SMALL, LARGE) if shape.max_context_tokens >= request.size}

    def has_room(self, closed: AbstractSet[Shape]) -> bool:
        return any(free for shape, free in self.free.items() if shape not in closed)


def queue_of(*sizes: int) -> Queue[Waiting]:
    queue: Queue[Waiting] = Queue()
    for name, size in enumerate(sizes):
        queue.add(Waiting(name, size))
    return queue


def look(queue: Queue[Waiting], small: int, large: int, bound: int = 2, window: int = 64) -> list[int]:
    room = Room(queue, small, large)
    Fcfs().look(queue, room, bound, window)
    return room.admitted


def test_what_fits_is_admitted_in_order() -> None:
    assert look(queue_of(1, 2, 3), 0, 10) == [0, 1, 2]


def test_a_blocked_request_is_passed_up_to_the_bound_and_then_closes_its_runners() -> None:
    queue = queue_of(50, 1, 1, 1, 1)
    assert look(queue, 0, 40, bound=2) == [1, 2]
    assert [r.passes for r in queue] == [2, 0, 0]
    assert look(queue, 0, 40, bound=2) == []  # nothing behind it, although it fits
    assert look(queue, 0, 50, bound=2) == [0]
    assert look(queue, 0, 50, bound=2) == [3, 4]


def test_runners_that_could_never_take_it_stay_open_and_are_no_passes() -> None:
    queue = queue_of(50, 1, 1, 1, 1)
    assert look(queue, 10, 0, bound=2) == [1, 2, 3, 4]
    assert [r.passes for r in queue] == [0]


def test_a_bound_of_zero_is_strict_order() -> None:
    assert look(queue_of(50, 1), 0, 40, bound=0) == []


def test_no_more_than_the_window_is_passed_at_all() -> None:
    assert look(queue_of(50, 50, 1), 0, 40, window=2) == []
    assert look(queue_of(50, 50, 1), 0, 40, window=3) == [2]


@given(
    sizes=st.lists(st.integers(1, 60), max_size=12),
    looks=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 60)), max_size=8),
    bound=st.integers(0, 3),
)
def test_nobody_is_passed_more_often_than_the_bound(sizes: list[int], looks: list[tuple[int, int]], bound: int) -> None:
    queue = queue_of(*sizes)
    waiting = {r.name: r for r in queue}
    shapes = Room(queue, 0, 0).shapes_for
    passed = dict.fromkeys(waiting, 0)
    for small, large in looks:
        room = Room(queue, small, large)
        before = room.free.copy()
        Fcfs().look(queue, room, bound, 64)
        for name in room.admitted:
            ran_on = {s for s in shapes(waiting[name]) if before[s] != room.free[s]}
            for earlier in [r for r in queue if r.name < name and ran_on <= shapes(r)]:
                passed[earlier.name] += len(ran_on) == 1
    assert all(r.passes <= bound for r in waiting.values())
    assert all(passed[name] <= bound for name in passed)


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=15), bound=st.integers(0, 4))
def test_when_room_keeps_coming_everybody_is_admitted(sizes: list[int], bound: int) -> None:
    queue = queue_of(*sizes)
    for _ in range(len(sizes)):
        look(queue, 10, 100, bound)
    assert not len(queue)


def test_in_the_core_the_oldest_waits_for_pages_while_the_bound_lasts(new_desk: Any, picked: Any) -> None:
    desk = new_desk(starvation_bound=2).start()
    desk.runner("a", free=10)
    desk.submit("large", prompt_tokens=400, p90_tokens=50)
    assert not picked(desk.submit("large2", prompt_tokens=400), Assign)
    assert [desk.place(f"r{i}").request_id for i in range(2)] == ["r0", "r1"]
    assert desk.request("large").passes == 2
    assert not picked(desk.submit("r2"), Assign)
    effects = desk.runner("a", desk.view("r0"), desk.view("r1"), free=96)
    assert [a.request_id for a in picked(effects, Assign)] == ["large", "large2"]


def test_one_that_keeps_off_the_only_runner_stalls_nobody(desk: Any) -> None:
    """100 requests a second beside one that its runner failed: everybody is admitted at once, without a pause."""
    desk.start()
    desk.runner("a", max_sequences=32)
    desk.place("bad")
    desk.failed("bad", FailReason.RUNNER_ERROR)
    for i in range(200):
        desk.wait(0.01)
        assert desk.place(f"r{i}").runner.uuid == "a"
        desk.outcome(f"r{i}")
    assert desk.request("bad").passes == 0


def test_one_that_keeps_off_a_runner_waits_for_the_others_no_longer_than_the_bound(new_desk: Any, picked: Any) -> None:
    desk = new_desk(starvation_bound=2, avoid_s=60.0).start()
    desk.runner("a", max_sequences=9)
    desk.place("bad", prompt_tokens=400)
    desk.failed("bad", FailReason.RUNNER_ERROR)
    desk.runner("b", max_sequences=9, free=10)
    placed = [desk.place(f"r{i}") for i in range(2)]
    assert ([a.runner.uuid for a in placed], desk.request("bad").passes) == (["b", "b"], 2)
    assert not picked(desk.submit("behind"), Assign), "b has room for it and drains for the oldest"
    effects = desk.runner("b", desk.view("r0"), desk.view("r1"), free=96)
    assert [a.request_id for a in picked(effects, Assign)] == ["bad", "behind"]


def test_age_counts_waiting_before_a_restart(desk: Any) -> None:
    desk.start()
    for name, waited_s in (("young", 1.0), ("old", 9.0), ("middle", 5.0)):
        desk.submit(name, waited_s=waited_s)
    assert [r.id for r in desk.core.state.pools["acme/p"].queue] == ["old", "middle", "young"]


def test_beyond_its_bound_the_queue_refuses_with_a_time_from_the_measured_rate(desk: Any, picked: Any) -> None:
    desk.start(max_queue=2)
    desk.runner("a", max_sequences=2)
    desk.place("r0")
    desk.place("r1")
    desk.runner("a", desk.view("r0"), desk.view("r1"), free=90)
    desk.submit("q0")
    desk.submit("q1")
    (unknown,) = picked(desk.submit("q2"), Reject)
    assert (unknown.reason, unknown.retry_after_ms) == (RejectReason.QUEUE_FULL, 5000)
    desk.wait(1.0)
    desk.outcome("r0")  # one departure in about 30 s
    (measured,) = picked(desk.submit("q3"), Reject)
    assert measured.retry_after_ms == 45_000  # 3 asked, half of it at 1/30 a second
    assert desk.knows("q1")


def test_one_that_fits_is_admitted_past_a_full_queue(desk: Any) -> None:
    desk.start(max_queue=1)
    desk.runner("a", free=10)
    desk.submit("large", prompt_tokens=400)
    assert desk.place("small").request_id == "small"


def test_requests_that_were_accepted_once_are_never_refused_for_a_full_queue(desk: Any, picked: Any) -> None:
    desk.start(max_queue=1)
    desk.submit("q0")
    desk.gateway("g2", complete=False)
    for i in range(3):
        assert not picked(desk.submit(f"h{i}", gateway="g2"), Reject)
    assert not picked(desk.handle(ResubmitComplete("g2")), Reject)
    assert not picked(desk.submit("moved", emitted_tokens=4), Reject)
    assert [r.reason for r in picked(desk.submit("new"), Reject)] == [RejectReason.QUEUE_FULL]
