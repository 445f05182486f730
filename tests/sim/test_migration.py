"""Runners that should go are emptied while their answers go on elsewhere from their KV, and every law holds."""

from dataclasses import replace

import pytest

from weft.domain.routes import RegistryChange
from weft_sim.clock import Rank
from weft_sim.shells import RunnerShell
from weft_sim.simulate import PoolDescription, deployment_of, simulate
from weft_sim.stack import World
from weft_sim.traces import TraceArrival


@pytest.mark.parametrize(("phases", "left"), [("unified", 2), ("split", 1)])
def test_a_scale_in_moves_answers_with_their_kv(phases: str, left: int) -> None:
    """Long prompts, short transfers: computing them again would cost more. Of three runners some go."""
    pool = PoolDescription(
        runners=3, adapters=2, adapter_mib=0.1, page_kib=16.0, phases=phases, cpu=False, best_batch=8,
        prefill_tokens_per_s=500.0, max_sequences=32, min_token=2,
    )  # fmt: skip
    deployment = deployment_of(pool)
    (declared,) = deployment.pools
    fewer = RegistryChange(False, (replace(declared, min_runners=left, max_runners=left),))
    worlds = list[World]()

    def attach(world: World) -> None:
        worlds.append(world)
        registry = world.processes["registry"]
        world.clock.after(12.0, Rank.ARRIVAL, registry.post, fewer)

    arrivals = [TraceArrival(0.3 * number, 120, 400) for number in range(20)]
    figures = simulate(pool, arrivals, check=True, deployment=deployment, attach=attach).figures
    assert len(figures.served) == len(arrivals)
    (world,) = worlds
    shells = [process.shell for process in world.runners.values()]
    machines = [shell.machine for shell in shells if isinstance(shell, RunnerShell)]
    expected = len(arrivals) if phases == "split" else 0  # by hand-overs
    assert sum(machine.pool.kv.received for machine in machines) >= expected + 2
    assert all(machine.pool.kv.lost == 0 for machine in machines)
