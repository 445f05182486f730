"""Runners that should go, or end, are emptied while their answers continue elsewhere from their KV; all laws hold."""

from dataclasses import replace

import pytest

from weft.domain.routes import RegistryChange
from weft.domain.runner import RunnerRole
from weft_runner.core import Drain
from weft_runner.core.drain import DRAIN_IDLE_S
from weft_runner.core.transfer.hand_over import MIGRATE_S
from weft_scheduler.core import Scheduler
from weft_sim.clock import Rank
from weft_sim.shells import RunnerShell
from weft_sim.simulate import PoolDescription, deployment_of, simulate
from weft_sim.stack import World
from weft_sim.traces import TraceArrival

POOL = PoolDescription(
    runners=3, adapters=2, adapter_mib=0.1, page_kib=16.0, cpu=False, best_batch=8, prefill_tokens_per_s=500.0,
    max_sequences=32,
)  # fmt: skip


def received(worlds: list[World]) -> int:
    """Sequences that came with their KV; none was lost."""
    (world,) = worlds
    shells = [process.shell for process in world.runners.values()]
    machines = [shell.machine for shell in shells if isinstance(shell, RunnerShell)]
    assert all(machine.pool.hand_over.lost == 0 for machine in machines)
    return sum(machine.pool.hand_over.received for machine in machines)


@pytest.mark.slow
@pytest.mark.parametrize(("phases", "left"), [("unified", 2), ("split", 1)])
def test_a_scale_in_moves_answers_with_their_kv(phases: str, left: int) -> None:
    """Long prompts, short transfers: computing them again would cost more. Of three runners some go."""
    pool = replace(POOL, phases=phases)
    deployment = deployment_of(pool)
    roles = (RunnerRole.PROMPT, RunnerRole.TOKEN, RunnerRole.TOKEN)
    plans = [
        replace(plan, spec=replace(plan.spec, role=role)) for plan, role in zip(deployment.runners, roles, strict=True)
    ]
    deployment = replace(deployment, runners=tuple(plans))
    (declared,) = deployment.pools
    fewer = RegistryChange(False, (replace(declared, min_runners=left, max_runners=left),))
    worlds = list[World]()

    def attach(world: World) -> None:
        worlds.append(world)
        registry = world.processes["registry"]
        world.clock.call_after(12.0, Rank.ARRIVAL, registry.post, fewer)

    arrivals = [TraceArrival(0.3 * number, 120, 400) for number in range(20)]
    figures = simulate(pool, arrivals, check=True, deployment=deployment, attach=attach).figures
    assert len(figures.served) == len(arrivals)
    hand_overs = len(arrivals) if phases == "split" else 0
    assert received(worlds) >= hand_overs + 2


@pytest.mark.slow
def test_a_runner_that_gets_sigterm_is_emptied_with_kv_before_it_ends() -> None:
    worlds, struck_at, left_at = list[World](), list[float](), list[float]()

    def attach(world: World) -> None:
        worlds.append(world)
        runner = next(iter(world.runners.values()))
        struck_at.append(world.clock.now + 12.0)
        world.clock.call_after(12.0, Rank.ARRIVAL, runner.post, Drain(True, MIGRATE_S))

        def look() -> None:
            assert isinstance(runner.shell, RunnerShell)
            if runner.shell.machine.pool.sequences:
                world.clock.call_after(0.05, Rank.ARRIVAL, look)
            else:
                left_at.append(world.clock.now)

        world.clock.call_after(12.01, Rank.ARRIVAL, look)

    arrivals = [TraceArrival(0.3 * number, 120, 400) for number in range(20)]
    figures = simulate(POOL, arrivals, check=True, attach=attach).figures
    assert len(figures.served) == len(arrivals)
    assert received(worlds) >= 2
    assert left_at[0] - struck_at[0] < DRAIN_IDLE_S


@pytest.mark.slow
@pytest.mark.parametrize(("gib_per_s", "least_s", "most_s"), [(1.0, 0.0, 2.0), (1e-4, 10.0, 20.0)])
def test_a_runner_of_a_split_pool_is_emptied_as_fast_as_its_kv_moves(
    gib_per_s: float, least_s: float, most_s: float
) -> None:
    """Eight runners, of which three are needed: those that run answers are idle within a second, or at their ends."""
    pool = PoolDescription(
        runners=8, adapters=4, adapter_mib=0.1, page_kib=16.0, phases="split", cpu=False, best_batch=16,
        prefill_tokens_per_s=2000.0, max_sequences=64, total_pages=3072,
    )  # fmt: skip
    deployment = deployment_of(pool)
    plans = [
        replace(plan, spec=replace(plan.spec, kv_bytes_per_s=gib_per_s * (1 << 30))) for plan in deployment.runners
    ]
    deployment = replace(deployment, runners=tuple(plans))
    (declared,) = deployment.pools
    fewer = RegistryChange(False, (replace(declared, min_runners=3, max_runners=3),))
    named, idle, answers = list[float](), dict[str, float](), list[int]()

    def attach(world: World) -> None:
        registry = world.processes["registry"]
        world.clock.call_after(40.0, Rank.ARRIVAL, registry.post, fewer)

        def look() -> None:
            machine = world.scheduler.machine
            assert isinstance(machine, Scheduler)
            found = machine.state.pools[declared.name]
            pool_runners, victims = found.fleet.runners, found.scaling.autoscaler.victims
            working = {uuid: pool_runners[uuid].accounts.working_set for uuid in victims}
            if working and not named:
                named.append(world.clock.now)
                answers.append(sum(working.values()))
            for uuid in working:
                if not working[uuid]:
                    idle.setdefault(uuid, world.clock.now)
            if len(idle) < 5:
                world.clock.call_after(0.1, Rank.WORK, look)

        world.clock.call_after(39.0, Rank.WORK, look)

    arrivals = [TraceArrival(0.5 * number, 800, 600) for number in range(16, 76)]
    figures = simulate(pool, arrivals, check=True, deployment=deployment, attach=attach).figures
    assert len(figures.served) == len(arrivals)
    last_s = max(idle.values()) - named[0]
    print(f"{answers[0]} answers, the last runner is idle after {last_s:.1f} s")
    assert least_s <= last_s <= most_s
