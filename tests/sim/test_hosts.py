"""Threads share the cores of their host."""

from collections.abc import Sequence

import pytest

from weft_sim.clock import Clock, Rank
from weft_sim.hosts import Host, Lane
from weft_sim.simulate import PoolDescription, simulate
from weft_sim.traces import TraceArrival

Work = tuple[float, float, int]  # when it begins, how long it takes alone, on how many threads


def ends(cores: int, work: Sequence[Work]) -> list[float]:
    """When each is done."""
    clock = Clock(start=0.0)
    host, done = Host("host", cores, clock), dict[int, float]()

    def begin(number: int, seconds: float, threads: int) -> None:
        host.run(seconds, threads, lambda: done.__setitem__(number, clock.now))

    for number, (at_s, seconds, threads) in enumerate(work):
        clock.at(at_s, Rank.WORK, begin, number, seconds, threads)
    clock.run()
    return [done[number] for number in range(len(work))]


@pytest.mark.parametrize(
    ("cores", "work", "expected"),
    [
        pytest.param(2, [(0, 3, 1), (1, 1, 1)], [3, 2], id="a core for each: nothing waits"),
        pytest.param(1, [(0, 3, 1), (1, 1, 1)], [4, 3], id="one core: both run at half its speed"),
        pytest.param(2, [(0, 3, 2), (0, 1, 1)], [3.5, 1.5], id="three threads on two cores: each at two thirds"),
        pytest.param(1, [(0, 1, 1)] * 3, [3, 3, 3], id="equals end together"),
        pytest.param(2, [(0, 1, 8)], [1], id="a step takes no more threads than there are cores"),
    ],
)
def test_busy_threads_share_the_cores_alike(cores: int, work: list[Work], expected: list[float]) -> None:
    assert ends(cores, work) == pytest.approx(expected)


def test_no_work_is_lost_or_made() -> None:
    work = [(0.37 * i % 2, 0.1 + 0.07 * (i % 5), 1 + i % 2) for i in range(40)]
    core_seconds = sum(seconds * threads for _, seconds, threads in work)
    assert max(ends(2, work)) == pytest.approx(core_seconds / 2, rel=0.02)
    assert ends(2, work) == ends(2, work)


def test_a_lane_does_one_thing_after_the_other() -> None:
    clock = Clock(start=0.0)
    lane, log = Lane(Host("host", 4, clock)), list[tuple[float, str]]()

    def done(name: str) -> None:
        log.append((clock.now, name))

    for name in ("a", "b", "c"):
        lane.run(1.0, done, name)
    clock.run(end_s=1.5)
    lane.clear()
    clock.run()
    assert log == [(1.0, "a"), (2.0, "b")]


def test_steps_on_the_control_planes_cores_take_longer_and_so_do_its_events() -> None:
    arrivals = [TraceArrival(0.05 * i, 20, 20) for i in range(20)]
    laptop = PoolDescription(cores=2, one_host=True, threads=2, adapters=0)
    apart = PoolDescription(cores=2, runner_cores=2, threads=2, adapters=0)
    slow, fast = (simulate(pool, arrivals).figures.served for pool in (laptop, apart))
    for quantity in ("ttft_ms", "tpot_ms"):
        assert sum(getattr(one, quantity) for one in slow) > 1.05 * sum(getattr(one, quantity) for one in fast)
