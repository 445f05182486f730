"""The operator's planner in the loop: a pool's runners come and go by the scheduler's demand, from zero and back."""

import pytest

from weft.domain.ids import RunnerId
from weft.domain.runner import RunnerSpec
from weft_scheduler.core import SchedulerConfig
from weft_sim.clock import Rank
from weft_sim.deployment import Deployment, RunnerPlan
from weft_sim.laws import ClientRequest
from weft_sim.objects import adapter_object, pool_object
from weft_sim.stack import World

IDLE_S, GIVE_BACK_S = 5, 3.0


def deployment(least: int, most: int) -> Deployment:
    spec = RunnerSpec(
        RunnerId("", ""), "", "", 4, 64, 4, 4, 64, 256, best_batch=4, step_ms_1=20.0, step_ms_best=26.0,
        prefill_tokens_per_s=2000.0,
    )  # fmt: skip
    scaling = {"minReplicas": least, "maxReplicas": most, "idleSeconds": IDLE_S}
    return Deployment(
        objects=(
            pool_object("acme", "p", spec, autoscaling=scaling),
            *(adapter_object("acme", f"a{i}", "p") for i in range(2)),
        ),
        template=RunnerPlan(spec, ""),
        scheduler=SchedulerConfig(give_back_s=GIVE_BACK_S, work_s=2.0),
    )


def sizes(world: World, seconds: float, count: int) -> list[int]:
    """Count the runners that are up, over `seconds` seconds; `count` requests arrive in the first one."""
    clock, found = world.clock, list[int]()
    begin, first = clock.now, len(world.clients)
    for number in range(first, first + count):
        request = ClientRequest(
            f"r{number}", f"r{number}", "gateway-0", "acme", f"acme/a{number % 2}", (number + 1, 2, 3), 40, number << 40
        )
        at_s = begin + (number - first) / count
        clock.at(at_s, Rank.ARRIVAL, world.submit, request.id, [request])
    for second in range(int(seconds)):
        clock.run(end_s=begin + second + 1.0)
        found.append(sum(runner.up for runner in world.runners.values()))
    return found


def test_a_pool_scales_from_zero_with_its_demand_and_back_to_zero() -> None:
    world = World(deployment(0, 3), seed=1)
    world.start()
    assert sizes(world, 5, 0) == [0] * 5
    first = sizes(world, 40, 40)
    assert max(first) == 3
    assert first[-1] == 0
    assert {request.finish for request in world.clients.values()} == {"length"}
    second = sizes(world, 40, 2)
    assert max(second) == 1, "two requests wake one runner"
    assert second[-1] == 0
    assert {request.finish for request in world.clients.values()} == {"length"}
    assert not world.laws.unfinished()


def test_runners_that_are_needed_no_more_drain_and_what_they_run_is_served() -> None:
    world = World(deployment(1, 3), seed=2)
    world.start()
    assert sizes(world, 5, 0)[-1] == 1
    busy = sizes(world, 12, 40)
    assert max(busy) == 3
    calm = [runners for _ in range(20) for runners in sizes(world, 1, 1)]
    assert calm[-1] == 1
    assert sizes(world, 10, 0)[-1] == 1
    assert {request.finish for request in world.clients.values()} == {"length"}
    assert not world.laws.unfinished()


@pytest.mark.parametrize("victim", ["registry", "scheduler", "supervisor"])
def test_a_restart_of_the_control_plane_neither_starts_nor_ends_a_runner(victim: str) -> None:
    world = World(deployment(2, 2), seed=3)
    world.start()
    sizes(world, 5, 0)
    sizes(world, 5, 8)
    before = {name: runner.generation for name, runner in world.runners.items() if runner.up}
    assert len(before) == 2
    world.processes[victim].crash()
    world.clock.run(end_s=world.clock.now + 1.0)
    world.processes[victim].start()
    assert set(sizes(world, 20, 8)) == {2}
    assert {name: runner.generation for name, runner in world.runners.items() if runner.up} == before
    assert {request.finish for request in world.clients.values()} == {"length"}
