"""A pool that grows and shrinks: bounds, victims, cordons, and what the registry hears of it."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft_scheduler.core import events as ev
from weft_scheduler.core.effects import Assign, PoolStatus
from weft_scheduler.core.values import PoolSpec

POOL = "acme/p"
ABSENT_S = 10.0


class Pool:
    """What the registry last heard of the pool."""

    def __init__(self, desk: Any) -> None:
        self.desk = desk

    @property
    def last(self) -> PoolStatus:
        return self.desk.core.context.told.pools[POOL]

    def hear(self, seconds: float = 0.3) -> PoolStatus:
        self.desk.wait(seconds)
        return self.last

    def bounds(self, least: int, most: int, idle_s: float = 60.0) -> None:
        spec = PoolSpec(POOL, "sha256:base", "base", min_runners=least, max_runners=most, idle_s=idle_s)
        self.desk.handle(ev.RegistryChange(False, (spec,)))


@pytest.fixture
def pool(desk: Any) -> Pool:
    desk.start(settle=False, min_runners=0, max_runners=3)
    return Pool(desk)


def settle(desk: Any) -> None:
    desk.wait(ABSENT_S + 1)


def test_from_nothing_the_first_request_asks_for_a_runner_and_gets_it(desk: Any, pool: Pool, picked: Any) -> None:
    settle(desk)
    assert pool.hear().wanted_runners == 0
    desk.submit("r")
    status = pool.hear()
    assert (status.wanted_runners, status.queued, status.demand_runners) == (1, 1, 1)
    (assign,) = picked(desk.runner("a", name="pod-a"), Assign)
    assert assign.runner.uuid == "a"


def test_it_goes_straight_to_as_many_as_are_needed_and_never_beyond_the_most(desk: Any, pool: Pool) -> None:
    settle(desk)
    desk.runner("a")
    for n in range(10):  # 4 sequences a runner
        desk.submit(f"r{n}")
    assert pool.hear().wanted_runners == 3
    pool.bounds(0, 9)
    assert pool.hear().wanted_runners == 3
    for n in range(10, 30):
        desk.submit(f"r{n}")
    status = pool.hear()
    assert status.wanted_runners == status.demand_runners == 8
    assert status.max_runners == 9
    pool.bounds(0, 2)
    assert (pool.hear().wanted_runners, pool.hear().demand_runners) == (2, 8)


def test_idle_runners_go_after_their_time_and_the_last_one_is_needed_again(desk: Any, pool: Pool, picked: Any) -> None:
    desk.runner("a", name="pod-a")
    desk.runner("b", name="pod-b")
    settle(desk)
    assert pool.hear(50.0).wanted_runners == 2, "who is there when this process starts is wanted for a while"
    assert pool.hear(11.0).victims == ("pod-b", "pod-a"), "the newest first"
    assert pool.hear().wanted_runners == 0
    (assign,) = picked(desk.submit("r"), Assign)
    assert assign.runner.uuid == "a", "at once: the last one named is the first to stay"
    status = pool.hear()
    assert (status.wanted_runners, status.victims) == (1, ("pod-b",))


def test_a_victim_takes_nothing_new_and_its_streams_run_on(desk: Any, pool: Pool, picked: Any) -> None:
    for uuid in "abc":
        desk.runner(uuid, name=uuid)
    settle(desk)
    first = [desk.place(f"r{n}").runner.uuid for n in range(6)]
    assert first == ["c"] * 4 + ["b"] * 2
    pool.bounds(1, 1)
    status = pool.hear()
    assert status.wanted_runners == 1
    assert status.victims == ("a", "b"), "the idle one, then the less loaded one"
    assert desk.core.state.pools[POOL].running == 6
    assert not picked(desk.submit("waits"), Assign), "c is full, the others are on their way out"
    desk.outcome("r0")
    desk.runner("c", *[desk.view(f"r{n}") for n in range(1, 4)], free=94)
    assert desk.request("waits").runner.uuid == "c"


def test_victims_stay_victims_while_others_become_less_loaded(desk: Any, pool: Pool) -> None:
    for uuid in "abc":
        desk.runner(uuid, name=uuid)
    settle(desk)
    for n in range(9):
        desk.place(f"r{n}")
    pool.bounds(2, 2)
    assert pool.hear().victims == ("a",)
    for n in range(8):
        desk.outcome(f"r{n}")
    desk.runner("b")
    desk.runner("c")
    desk.runner("a", desk.view("r8"), free=97)
    assert pool.hear().victims == ("a",), "though it is the only one with work now"


def test_one_that_drains_or_is_gone_is_no_victim_and_not_counted(desk: Any, pool: Pool) -> None:
    for uuid in "abc":
        desk.runner(uuid, name=uuid)
    settle(desk)
    pool.bounds(1, 1)
    assert pool.hear().victims == ("c", "b")
    desk.runner("c", draining=True)
    assert pool.hear().victims == ("b",)
    desk.lost("b")
    status = pool.hear()
    assert (status.victims, status.ready_runners) == ((), 1)
    assert desk.place("r").runner.uuid == "a"


def test_it_answers_to_no_bounds_before_the_runners_there_are_have_had_the_time_to_report(
    desk: Any, pool: Pool
) -> None:
    desk.submit("r")
    status = pool.hear()
    assert (status.wanted_runners, status.max_runners) == (1, 0)
    settle(desk)
    assert pool.hear().max_runners == 3


def test_one_that_comes_after_a_scale_down_is_a_victim(desk: Any, pool: Pool, picked: Any) -> None:
    desk.runner("a", name="a")
    settle(desk)
    pool.bounds(1, 1)
    desk.place("r0")
    desk.runner("late", name="late")
    assert pool.hear().victims == ("late",)
    for n in range(1, 4):
        assert desk.place(f"r{n}").runner.uuid == "a"
    assert not picked(desk.submit("r4"), Assign)


def test_a_victim_that_was_restarted_is_chosen_anew(desk: Any, pool: Pool) -> None:
    for uuid in "ab":
        desk.runner(uuid, name=uuid)
    settle(desk)
    pool.bounds(1, 1)
    assert pool.hear().victims == ("b",)
    desk.runner("b", name="b", incarnation="i2", sequence=1)
    assert pool.hear().victims == ("b",)


def test_a_supervisor_that_restarts_changes_no_victim(desk: Any, pool: Pool, picked: Any) -> None:
    for uuid in "abc":
        desk.runner(uuid, name=uuid)
    settle(desk)
    pool.bounds(2, 2)
    assert pool.hear().victims == ("c",)
    desk.handle(ev.SupervisorDown("s"))
    assert pool.hear().victims == ("c",)
    desk.supervisor()
    for uuid in "cba":
        desk.runner(uuid, name=uuid)
    assert pool.hear().victims == ("c",)
    assert desk.place("r").runner.uuid == "b"


def test_whoever_waits_longer_than_a_moment_gets_every_runner_that_is_there(desk: Any, pool: Pool) -> None:
    for uuid in "ab":
        desk.runner(uuid, name=uuid)
    settle(desk)
    pool.hear(61.0)
    assert desk.place("r").runner.uuid == "a"
    assert pool.hear().victims == ("b",), "one request needs one runner"
    desk.failed("r", ev.FailReason.RUNNER_ERROR)
    assert desk.request("r").runner is None, "it keeps off a for a while"
    status = pool.hear()
    assert (status.wanted_runners, status.victims) == (2, ())
    assert desk.request("r").runner.uuid == "b"


def test_streams_of_before_a_restart_of_the_scheduler_keep_their_runners(desk: Any, pool: Pool) -> None:
    """Before the cluster has told itself nobody is given back, whatever the load looks like."""
    pool.bounds(0, 5, idle_s=5.0)
    for uuid in "abcd":
        desk.runner(uuid, name=uuid)
    assert pool.hear().wanted_runners == 4
    assert pool.hear(ABSENT_S).victims == ()
    assert pool.hear(6.0).wanted_runners == 0


def test_pages_and_running_requests_are_told(desk: Any, pool: Pool) -> None:
    desk.runner("a")
    desk.runner("b", ready=False)
    settle(desk)
    desk.place("r", prompt_tokens=16 * 9 + 1, p90_tokens=15)
    status = pool.hear()
    assert (status.total_pages, status.reserved_pages, status.running, status.ready_runners) == (100, 10, 1, 1)


def test_a_slot_that_nobody_finds_asks_for_a_runner(desk: Any, picked: Any) -> None:
    digests = [f"sha256:{n}" for n in range(5)]
    desk.start(*digests, max_runners=4)
    pool = Pool(desk)
    desk.runner("a", max_sequences=32)
    for n in range(5):
        desk.submit(f"r{n}", digests[n])
    status = pool.hear()
    assert (status.running, status.queued) == (2, 3)
    assert status.wanted_runners == 3, "five adapters, two slots a runner"


def test_work_that_would_take_too_long_asks_for_runners(desk: Any, picked: Any) -> None:
    desk.start(max_runners=20, max_queue=100)
    pool = Pool(desk)
    desk.runner("a", max_sequences=2)
    for n in range(2):
        desk.place(f"r{n}")
    for turn in range(1, 21):  # 10 tokens a second, seen over 10 s
        desk.wait(0.5)
        desk.runner("a", desk.view("r0"), desk.view("r1"), free=96, tokens=5 * turn)
    desk.submit("q", prompt_tokens=1000, p90_tokens=200, max_tokens=400)
    assert pool.hear().demand_runners == 5, "1 full, 1200 tokens at 10 a second and 30 s: 4 more"


def test_a_quiet_pool_says_nothing_more(desk: Any, pool: Pool, picked: Any) -> None:
    desk.runner("a")
    settle(desk)
    pool.hear(200.0)
    desk.wait(1.0)
    assert not picked(desk.wait(10_000.0), PoolStatus)


class Scaling(RuleBasedStateMachine):
    """Requests come and end, runners come and go as an operator would let them, bounds change, time passes.

    `Desk` checks every law after each event; here are those of capacity.
    """

    make_desk: Any = None

    @initialize(least=st.integers(0, 2), more=st.integers(0, 3))
    def start(self, least: int, more: int) -> None:
        self.desk = type(self).make_desk()
        self.desk.start(settle=False, min_runners=least, max_runners=least + more, max_queue=1000)
        self.pool = Pool(self.desk)
        self.least, self.most, self.numbers, self.queued_before = least, least + more, 0, 0
        self.alive: list[str] = []
        self.desk.wait(ABSENT_S + 1)
        self.pool.hear()

    @rule(count=st.integers(1, 6), prompt=st.integers(1, 900))
    def submit(self, count: int, prompt: int) -> None:
        for _ in range(count):
            self.numbers += 1
            self.desk.submit(f"r{self.numbers}", prompt_tokens=prompt)

    @precondition(lambda self: self.desk.core.state.requests)
    @rule(pick=st.randoms(use_true_random=False), count=st.integers(1, 6))
    def end(self, pick: Any, count: int) -> None:
        for _ in range(min(count, len(self.desk.core.state.requests))):
            self.desk.outcome(pick.choice(sorted(self.desk.core.state.requests)))
        self.report()

    @rule(seconds=st.sampled_from([0.3, 5.0, 61.0]))
    def wait(self, seconds: float) -> None:
        before, queued = self.pool.last, len(self.desk.core.state.pools[POOL].queue)
        self.pool.hear(seconds)
        if queued and len(self.desk.core.state.pools[POOL].queue):
            assert self.pool.last.wanted_runners >= min(before.wanted_runners, self.most), "it shrank on the waiting"

    @rule(least=st.integers(0, 2), more=st.integers(0, 3))
    def rebound(self, least: int, more: int) -> None:
        self.least, self.most = least, least + more
        self.pool.bounds(least, least + more)
        self.pool.hear()

    @rule()
    def operate(self) -> None:
        """What an operator does: as many as are wanted, victims first."""
        status = self.pool.hear()
        victims = list(status.victims)
        while len(self.alive) > status.wanted_runners:
            gone = victims.pop(0)
            self.alive.remove(gone)
            self.desk.lost(gone)
            for request_id in [r.id for r in self.desk.core.state.requests.values() if r.phase.value == "leaving"]:
                self.desk.failed(request_id, ev.FailReason.DRAINED)
        while len(self.alive) < status.wanted_runners:
            self.numbers += 1
            self.alive.append(f"n{self.numbers}")
        self.report()

    def report(self) -> None:
        for uuid in self.alive:
            running = [r for r in self.desk.core.state.requests.values() if r.runner and r.runner.uuid == uuid]
            pages = sum(-(-(r.prompt_tokens + 16) // 16) for r in running)
            self.desk.runner(uuid, *[self.desk.view(r.id) for r in running], free=100 - pages, name=uuid)

    @invariant()
    def wanted_is_within_its_bounds(self) -> None:
        if hasattr(self, "pool"):
            wanted = self.pool.last.wanted_runners
            assert self.least <= wanted
            assert wanted <= self.most or self.most == 0, "0: no bound was told"

    @invariant()
    def victims_are_exactly_those_beyond(self) -> None:
        if hasattr(self, "pool"):
            status = self.pool.hear()
            assert len(status.victims) == max(0, len(self.alive) - status.wanted_runners)
            assert set(status.victims) <= set(self.alive)

    def teardown(self) -> None:
        """Whatever happened: under a load that stays, the number of runners settles and stays."""
        if not hasattr(self, "pool"):
            return
        for _ in range(30):
            self.operate()
            self.desk.wait(61.0)
        settled = self.pool.hear().wanted_runners
        for _ in range(10):
            self.operate()
            self.desk.wait(30.0)
            assert self.pool.hear().wanted_runners == settled == len(self.alive), "it oscillates"


def test_bounds_victims_and_rest_under_any_history(new_desk: Any) -> None:
    Scaling.make_desk = staticmethod(new_desk)
    Scaling.TestCase.settings = settings(stateful_step_count=25)
    Scaling.TestCase("runTest").runTest()
