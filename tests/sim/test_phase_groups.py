"""Groups for prompts and for tokens: each follows the demand of its phase, and all is served."""

from collections import Counter
from itertools import pairwise

import pytest

from tests.sim.test_autoscaling import GIVE_BACK_S
from weft.domain.ids import RunnerId
from weft.domain.runner import RunnerRole, RunnerSpec
from weft_scheduler.core import SchedulerConfig
from weft_sim.clock import Rank
from weft_sim.deployment import Deployment, RunnerPlan
from weft_sim.laws import ClientRequest
from weft_sim.objects import adapter_object, pool_object
from weft_sim.shells import RunnerShell
from weft_sim.stack import World

MAX_REPLICAS = 5
SCALED = {"minReplicas": 2, "maxReplicas": MAX_REPLICAS, "idleSeconds": 5}


def deployment(**size: object) -> Deployment:
    """Each of at most five runners, or of a number that `size` says, computes 400 tokens of prompts a second, or runs
    eight streams well.
    """
    spec = RunnerSpec(
        RunnerId("", ""), "", "", 16, 256, 16, 8, 64, 4096, best_batch=8, step_ms_1=20.0, step_ms_best=26.0,
        prefill_tokens_per_s=400.0, page_bytes=1 << 14, kv_address="kv", kv_layout="pages", numerics_class="simulated",
    )  # fmt: skip
    phases = {"mode": "Split"}
    groups = [{"name": phase.lower(), "minRunners": 0, "phase": phase} for phase in ("Prompt", "Token")]
    return Deployment(
        objects=(
            pool_object("acme", "p", spec, phases=phases, runnerGroups=groups, **size or {"autoscaling": SCALED}),
            adapter_object("acme", "a", "p"),
        ),
        template=RunnerPlan(spec, ""),
        scheduler=SchedulerConfig(give_back_s=GIVE_BACK_S, work_s=2.0),
    )


def groups(world: World) -> tuple[int, int]:
    """Count the runners that are up, of the group for prompts and of that for tokens."""
    shells = [runner.shell for runner in world.runners.values() if runner.up]
    roles = Counter(shell.spec.role for shell in shells if isinstance(shell, RunnerShell))
    return roles[RunnerRole.PROMPT], roles[RunnerRole.TOKEN]


def serve(world: World, seconds: int, per_s: float, prompt_tokens: int, answer_tokens: int) -> list[tuple[int, int]]:
    """Return the groups after each second, while `per_s` requests arrive in each."""
    clock, found = world.clock, list[tuple[int, int]]()
    begin, first = clock.now, len(world.clients)
    for number in range(first, first + round(seconds * per_s)):
        prompt = tuple(token % 60 + 2 for token in range(number, number + prompt_tokens))
        request = ClientRequest(
            f"r{number}", f"r{number}", "gateway-0", "acme", "acme/a", prompt, answer_tokens, number << 40
        )
        clock.at(begin + (number - first) / per_s, Rank.ARRIVAL, world.submit, request.id, [request])
    for second in range(seconds):
        clock.run(end_s=begin + second + 1.0)
        found.append(groups(world))
    return found


@pytest.mark.slow
def test_each_group_follows_the_demand_of_its_phase() -> None:
    world = World(deployment(), seed=1)
    world.start()
    assert serve(world, 5, 0.0, 1, 1)[-1] == (1, 1)
    long_prompts = serve(world, 45, 1.4, 800, 4)
    assert long_prompts[-1][0] >= 3, "1,120 tokens a second, of 400 that one computes"
    assert long_prompts[-1][1] == 1
    long_answers = serve(world, 30, 2.0, 16, 400)
    assert long_answers[-1][1] >= 3, "twenty streams, of eight that one runs well"
    assert long_answers[-1][0] <= 2
    assert max(map(sum, long_prompts + long_answers)) <= MAX_REPLICAS
    assert all(prompt and token for prompt, token in long_prompts + long_answers), "never the last one of a phase"
    calm = serve(world, 30, 0.25, 16, 4)
    assert calm[-1] == (1, 1)
    assert {request.finish for request in world.clients.values()} == {"length"}
    assert not world.laws.unfinished()


@pytest.mark.slow
def test_groups_that_cannot_grow_together_give_runners_to_each_other_one_by_one() -> None:
    """At the most that the pool may have a runner for prompts goes before one for tokens comes, and nothing is lost."""
    world = World(deployment(), seed=2)
    world.start()
    serve(world, 5, 0.0, 1, 1)
    before = serve(world, 20, 3.6, 400, 40)
    assert sum(before[-1]) == MAX_REPLICAS
    after = serve(world, 33, 3.0, 16, 400)
    assert after[-1][1] > before[-1][1]
    for (prompt, token), (later_prompt, later_token) in pairwise([*before, *after]):
        assert later_prompt + later_token >= min(prompt + token, MAX_REPLICAS) - 1, "one goes at a time"
    assert all(prompt and token for prompt, token in after)
    serve(world, 25, 0.25, 16, 4)
    assert {request.finish for request in world.clients.values()} == {"length"}
    assert not world.laws.unfinished()


@pytest.mark.slow
def test_a_number_that_people_wrote_follows_the_demand_of_both_phases() -> None:
    world = World(deployment(replicas=4), seed=3)
    world.start()
    assert serve(world, 5, 0.0, 1, 1)[-1] == (2, 2)
    found = serve(world, 40, 1.4, 800, 4)
    assert found[-1] == (3, 1), "1,120 tokens a second, of 400 that one computes"
    assert all(3 <= prompt + token <= 4 and token for prompt, token in found), "one goes at a time"
    serve(world, 20, 0.25, 16, 4)
    assert {request.finish for request in world.clients.values()} == {"length"}
    assert not world.laws.unfinished()
