"""Who is worked on next: bounds hold, nothing is lost, and what stands still holds up only itself."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft_depot.core.fresh import Fresh
from weft_depot.core.lanes import Lane, Lanes, Room


def started(lanes: Lanes[str]) -> list[str]:
    jobs: list[str] = []
    while found := lanes.start():
        jobs.append(found[1])
    return jobs


def test_hosts_and_owners_take_turns_and_an_owner_keeps_its_order() -> None:
    lanes: Lanes[str] = Lanes(Room(100, 100, 100))
    for number in range(3):
        lanes.add(Lane("hub", "a"), f"a{number}")
    lanes.add(Lane("hub", "b"), "b0")
    lanes.add(Lane("share", "a"), "s0")
    assert started(lanes) == ["a0", "s0", "b0", "a1", "a2"]


def test_a_host_that_stands_still_leaves_room_for_the_others() -> None:
    lanes: Lanes[str] = Lanes(Room(total=4, per_host=2, per_owner=2))
    for number in range(100):
        lanes.add(Lane("hangs", "a"), f"h{number}")
    assert started(lanes) == ["h0", "h1"]
    for number in range(3):
        lanes.add(Lane("fine", "b"), f"f{number}")
    assert started(lanes) == ["f0", "f1"]
    lanes.end(Lane("fine", "b"))
    assert started(lanes) == ["f2"]


def test_an_owner_with_many_jobs_leaves_room_on_its_host() -> None:
    lanes: Lanes[str] = Lanes(Room(total=4, per_host=4, per_owner=2))
    for number in range(9):
        lanes.add(Lane("hub", "a"), f"a{number}")
    lanes.add(Lane("hub", "b"), "b0")
    assert sorted(started(lanes)) == ["a0", "a1", "b0"]


class Work(RuleBasedStateMachine):
    """Random jobs against a list of what should be there."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Room(total=5, per_host=3, per_owner=2)
        self.lanes: Lanes[tuple[Lane, int]] = Lanes(self.room)
        self.waiting: list[tuple[Lane, int]] = []
        self.running: list[tuple[Lane, int]] = []
        self.count = 0

    @rule(host=st.sampled_from("xyz"), owner=st.sampled_from("ab"))
    def add(self, host: str, owner: str) -> None:
        self.count += 1
        job = (Lane(host, owner), self.count)
        self.lanes.add(job[0], job)
        self.waiting.append(job)

    @rule()
    def start(self) -> None:
        found = self.lanes.start()
        fits = [job for job in self.waiting if self.has_room(job[0])]
        assert (found is None) == (not fits), "nobody waits while there is room"
        if found:
            lane, job = found
            assert job == next(other for other in self.waiting if other[0] == lane), "the oldest of its owner"
            self.waiting.remove(job)
            self.running.append(job)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.running))
        self.running.remove(job)
        self.lanes.end(job[0])

    def has_room(self, lane: Lane) -> bool:
        lanes = Counter(running for running, _ in self.running)
        hosts = Counter(running.host for running, _ in self.running)
        fits = lanes[lane] < self.room.per_owner and hosts[lane.host] < self.room.per_host
        return fits and len(self.running) < self.room.total

    @invariant()
    def holds(self) -> None:
        self.lanes.check_lanes()
        assert self.lanes.running == len(self.running)


TestWork = Work.TestCase
TestWork.settings = settings(stateful_step_count=40)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 20)), max_size=40))
def test_what_was_seen_stays_fresh_for_its_time_and_the_longest_unseen_is_forgotten_first(
    seen: list[tuple[str, int]],
) -> None:
    fresh, now, last = Fresh(10.0, limit=3), 0.0, dict[str, float]()
    for key, wait in seen:
        now += wait
        fresh.see(key, now)
        last.pop(key, None)
        last[key] = now
        kept = list(last)[-3:]
        for other in "abcdef":
            assert fresh.is_fresh(other, now) == (other in kept and now - last[other] < 10)
