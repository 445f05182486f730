"""A pool that grows and shrinks: bounds, victims, cordons, and what the registry hears of it."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prometheus_client import CollectorRegistry

from harness.scheduler_driver import Driver, of
from weft.domain.ids import RunnerId
from weft.domain.request import Assign, FailReason
from weft.domain.routes import PoolSpec, PoolStatus, RegistryChange
from weft_scheduler.core import Consolidated
from weft_scheduler.core.effects import BatchPreempted, Judged, RoleChanged, SequencesParked
from weft_scheduler.metrics import SchedulerMetrics

POOL = "acme/p"
ABSENT_S = 10.0
RUNNER = RunnerId("a", "i")


class Pool:
    """What the registry last heard of the pool."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    @property
    def last(self) -> PoolStatus:
        return self.driver.state.published.pools[POOL]

    def hear(self, seconds: float = 0.3) -> PoolStatus:
        self.driver.wait(seconds)
        return self.last

    def bounds(self, least: int, most: int, idle_s: float = 60.0, generation: int = 1) -> None:
        spec = PoolSpec(
            POOL, "sha256:base", "base", min_runners=least, max_runners=most, idle_s=idle_s, generation=generation
        )
        self.driver.change(RegistryChange(False, (spec,)))


@pytest.fixture
def pool(driver: Driver) -> Pool:
    driver.start(settle=False, min_runners=0, max_runners=3, generation=5)
    return Pool(driver)


def settle(driver: Driver) -> None:
    driver.wait(ABSENT_S + 1)


def with_runners(driver: Driver, uuids: str) -> None:
    for uuid in uuids:
        driver.runner(uuid, name=uuid)
    settle(driver)


def test_from_nothing_the_first_request_asks_for_a_runner_and_gets_it(driver: Driver, pool: Pool) -> None:
    settle(driver)
    assert pool.hear().wanted_runners == 0
    driver.submit("r")
    assert (pool.hear().wanted_runners, len(driver.pool().waiting.queue), sum(driver.demanded())) == (1, 1, 1)
    (assign,) = of(driver.runner("a", name="pod-a"), Assign)
    assert assign.runner.uuid == "a"


def test_it_goes_straight_to_as_many_as_are_needed_and_never_beyond_the_most(driver: Driver, pool: Pool) -> None:
    settle(driver)
    driver.runner("a")
    for n in range(10):  # 4 sequences a runner
        driver.submit(f"r{n}")
    assert pool.hear().wanted_runners == 3
    pool.bounds(0, 9, generation=6)
    assert pool.hear().wanted_runners == 3
    for n in range(10, 30):
        driver.submit(f"r{n}")
    status = pool.hear()
    assert status.wanted_runners == sum(driver.demanded()) == 8
    assert status.observed_generation == 6
    pool.bounds(0, 2)
    assert (pool.hear().wanted_runners, sum(driver.demanded())) == (2, 8)


def test_idle_runners_go_after_their_time_and_the_last_one_is_needed_again(driver: Driver, pool: Pool) -> None:
    driver.runner("a", name="pod-a")
    driver.runner("b", name="pod-b")
    settle(driver)
    assert pool.hear(50.0).wanted_runners == 2, "who is there when this process starts is wanted for a while"
    assert pool.hear(11.0).victims == ("pod-b", "pod-a"), "the newest first"
    assert pool.hear().wanted_runners == 0
    (assign,) = of(driver.submit("r"), Assign)
    assert assign.runner.uuid == "a", "at once: the last one named is the first to stay"
    status = pool.hear()
    assert (status.wanted_runners, status.victims) == (1, ("pod-b",))


def test_a_victim_takes_nothing_new_and_its_streams_run_on(driver: Any, pool: Pool) -> None:
    with_runners(driver, "abc")
    assert [driver.place(f"r{n}").runner.uuid for n in range(6)] == ["c"] * 4 + ["b"] * 2
    pool.bounds(1, 1)
    status = pool.hear()
    assert status.wanted_runners == 1
    assert status.victims == ("a", "b"), "the idle one, then the less loaded one"
    assert driver.pool().waiting.running == 6
    assert not of(driver.submit("waits"), Assign), "c is full, the others are on their way out"
    driver.outcome("r0")
    driver.runner("c", *[driver.view(f"r{n}") for n in range(1, 4)], free=94)
    assert driver.request("waits").runner.uuid == "c"


def test_victims_stay_victims_while_others_become_less_loaded(driver: Driver, pool: Pool) -> None:
    with_runners(driver, "abc")
    for n in range(9):
        driver.place(f"r{n}")
    pool.bounds(2, 2)
    assert pool.hear().victims == ("a",)
    for n in range(8):
        driver.outcome(f"r{n}")
    driver.runner("b")
    driver.runner("c")
    driver.runner("a", driver.view("r8"), free=97)
    assert pool.hear().victims == ("a",), "though it is the only one with work now"


def test_one_that_drains_or_is_gone_is_no_victim_and_not_counted(driver: Driver, pool: Pool) -> None:
    with_runners(driver, "abc")
    pool.bounds(1, 1)
    assert pool.hear().victims == ("c", "b")
    driver.runner("c", draining=True)
    assert pool.hear().victims == ("b",)
    driver.lost("b")
    status = pool.hear()
    assert (status.victims, status.ready_runners) == ((), 1)
    assert driver.place("r").runner.uuid == "a"


def test_it_observes_no_generation_before_the_runners_had_the_time_to_report(driver: Driver, pool: Pool) -> None:
    driver.submit("r")
    status = pool.hear()
    assert (status.wanted_runners, status.observed_generation) == (1, 0)
    settle(driver)
    assert pool.hear().observed_generation == 5


def test_one_that_comes_after_a_scale_down_is_a_victim(driver: Driver, pool: Pool) -> None:
    driver.runner("a", name="a")
    settle(driver)
    pool.bounds(1, 1)
    driver.place("r0")
    driver.runner("late", name="late")
    assert pool.hear().victims == ("late",)
    for n in range(1, 4):
        assert driver.place(f"r{n}").runner.uuid == "a"
    assert not of(driver.submit("r4"), Assign)


def test_a_victim_that_was_restarted_is_chosen_anew(driver: Driver, pool: Pool) -> None:
    with_runners(driver, "ab")
    pool.bounds(1, 1)
    assert pool.hear().victims == ("b",)
    driver.runner("b", name="b", incarnation="i2", version=1)
    assert pool.hear().victims == ("b",)


def test_a_supervisor_that_restarts_changes_no_victim(driver: Driver, pool: Pool) -> None:
    with_runners(driver, "abc")
    pool.bounds(2, 2)
    assert pool.hear().victims == ("c",)
    driver.close_supervisor()
    assert pool.hear().victims == ("c",)
    driver.supervisor()
    for uuid in "cba":
        driver.runner(uuid, name=uuid)
    assert pool.hear().victims == ("c",)
    assert driver.place("r").runner.uuid == "b"


def test_whoever_waits_longer_than_a_moment_gets_every_runner_that_is_there(driver: Any, pool: Pool) -> None:
    with_runners(driver, "ab")
    pool.hear(61.0)
    assert driver.place("r").runner.uuid == "a"
    assert pool.hear().victims == ("b",), "one request needs one runner"
    driver.failed("r", FailReason.RUNNER_ERROR)
    assert driver.request("r").runner is None, "it keeps off a for a while"
    status = pool.hear()
    assert (status.wanted_runners, status.victims) == (2, ())
    assert driver.request("r").runner.uuid == "b"


def test_streams_of_before_a_restart_of_the_scheduler_keep_their_runners(driver: Driver, pool: Pool) -> None:
    """Before the cluster has told itself nobody is given back, whatever the load looks like."""
    pool.bounds(0, 5, idle_s=5.0)
    for uuid in "abcd":
        driver.runner(uuid, name=uuid)
    assert pool.hear().wanted_runners == 4
    assert pool.hear(ABSENT_S).victims == ()
    assert pool.hear(6.0).wanted_runners == 0


def test_a_slot_that_nobody_finds_asks_for_a_runner(driver: Driver) -> None:
    digests = [f"sha256:{n}" for n in range(5)]
    driver.start(*digests, max_runners=4)
    pool = Pool(driver)
    driver.runner("a", max_sequences=32)
    for n in range(5):
        driver.submit(f"r{n}", digests[n])
    status = pool.hear()
    assert (driver.pool().waiting.running, len(driver.pool().waiting.queue)) == (2, 3)
    assert status.wanted_runners == 3, "five adapters, two slots a runner"


def test_work_that_would_take_too_long_asks_for_runners(driver: Driver) -> None:
    driver.start(max_runners=20, max_queue=100)
    pool = Pool(driver)
    driver.runner("a", max_sequences=2)
    for n in range(2):
        driver.place(f"r{n}")
    for turn in range(1, 21):  # 10 tokens a second, seen over 10 s
        driver.wait(0.5)
        driver.runner("a", driver.view("r0"), driver.view("r1"), free=96, tokens=5 * turn)
    driver.submit("q", prompt_tokens=1000, p90_tokens=200, max_tokens=400)
    pool.hear()
    assert sum(driver.demanded()) == 5, "1 full, 1200 tokens at 10 a second and 30 s: 4 more"


def test_a_quiet_pool_says_nothing_more(driver: Driver, pool: Pool) -> None:
    driver.runner("a")
    settle(driver)
    pool.hear(200.0)
    driver.wait(1.0)
    assert not of(driver.wait(10_000.0), PoolStatus)


class Scaling(RuleBasedStateMachine):
    """Requests come and end, runners come and go as an operator would let them, bounds change, time passes.

    `Driver` checks every law after each event; here are those of capacity.
    """

    @initialize(least=st.integers(0, 2), more=st.integers(0, 3))
    def start(self, least: int, more: int) -> None:
        self.driver = Driver()
        self.driver.start(settle=False, min_runners=least, max_runners=least + more, max_queue=1000)
        self.pool = Pool(self.driver)
        self.least, self.most, self.numbers, self.queued_before = least, least + more, 0, 0
        self.alive: list[str] = []
        self.driver.wait(ABSENT_S + 1)
        self.pool.hear()

    @rule(count=st.integers(1, 6), prompt=st.integers(1, 900))
    def submit(self, count: int, prompt: int) -> None:
        for _ in range(count):
            self.numbers += 1
            self.driver.submit(f"r{self.numbers}", prompt_tokens=prompt)

    @precondition(lambda self: self.driver.state.requests)
    @rule(pick=st.randoms(use_true_random=False), count=st.integers(1, 6))
    def end(self, pick: Any, count: int) -> None:
        for _ in range(min(count, len(self.driver.state.requests))):
            self.driver.outcome(pick.choice(sorted(self.driver.state.requests)))
        self.report()

    @rule(seconds=st.sampled_from([0.3, 5.0, 61.0]))
    def wait(self, seconds: float) -> None:
        before, queued = self.pool.last, len(self.driver.pool().waiting.queue)
        self.pool.hear(seconds)
        if queued and len(self.driver.pool().waiting.queue):
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
            self.driver.lost(gone)
        while len(self.alive) < status.wanted_runners:
            self.numbers += 1
            self.alive.append(f"n{self.numbers}")
        self.report()

    def report(self) -> None:
        for uuid in self.alive:
            running = [r for r in self.driver.state.requests.values() if r.runner and r.runner.uuid == uuid]
            pages = sum(-(-(r.tokens.prompt + 16) // 16) for r in running)
            self.driver.runner(uuid, *[self.driver.view(r.id) for r in running], free=100 - pages, name=uuid)

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
            self.driver.wait(61.0)
        settled = self.pool.hear().wanted_runners
        for _ in range(10):
            self.operate()
            self.driver.wait(30.0)
            assert self.pool.hear().wanted_runners == settled == len(self.alive), "it oscillates"


def test_bounds_victims_and_rest_under_any_history() -> None:
    Scaling.TestCase.settings = settings(stateful_step_count=25)
    Scaling.TestCase("runTest").runTest()


def test_an_autoscaler_of_others_reads_the_demand_whatever_the_bounds(driver: Driver, pool: Pool) -> None:
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry)
    settle(driver)
    pool.bounds(1, 1)
    driver.runner("a")
    for n in range(9):  # 4 sequences a runner
        driver.submit(f"r{n}")
    pool.hear()
    metrics.observe(driver.state)
    read = {
        name: registry.get_sample_value(f"weft_scheduler_{name}_runners", {"pool": POOL})
        for name in ("wanted", "demanded")
    }
    assert read == {"wanted": 1, "demanded": 3}


def test_series_of_a_pool_end_with_it_though_its_last_requests_are_counted_later(driver: Driver, pool: Pool) -> None:
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry)

    def shown() -> set[str]:
        return {sample.name for family in registry.collect() for sample in family.samples if "pool" in sample.labels}

    late: tuple[Any, ...] = (
        Judged(POOL, ttft_met=True, token_time_met=True), Consolidated(POOL, RUNNER, ("r",)),
        RoleChanged(POOL, RUNNER, "prompt", "load"), BatchPreempted(POOL, RUNNER, ("r",)),
        SequencesParked(POOL, RUNNER, "r", ("s",)),
    )  # fmt: skip
    settle(driver)
    metrics.observe(driver.state)
    assert len(shown()) > 10
    driver.change(RegistryChange(False, removed_pools=(POOL,)))
    metrics.observe(driver.state)
    assert not shown()
    for effect in late:
        metrics.count(effect)
    assert len(shown()) == len(late)
    metrics.observe(driver.state)
    assert not shown()
