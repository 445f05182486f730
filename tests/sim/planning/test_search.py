"""The search finds what trying every design finds, with a fraction of the runs, and a plan is confirmed."""

from dataclasses import replace
from math import inf

import pytest

from weft_sim.performance import StepShape
from weft_sim.planning import (
    Combination,
    Design,
    Frontier,
    MachineKind,
    Objective,
    PlanningProblem,
    PricedKind,
    Rules,
    ServedModel,
    Workload,
    bounds,
    distribution,
    families,
    plan,
    search,
    simulate,
)

MODEL = ServedModel("small", 4, 1_000, 0)


class Speed:
    def __init__(self, prompt_token_s: float, row_s: float) -> None:
        self.prompt_token_s, self.row_s = prompt_token_s, row_s

    def seconds(self, step: StepShape) -> float:
        return 5e-3 + self.prompt_token_s * step.prompt_tokens + self.row_s * step.decode_rows


FAST = PricedKind(MachineKind("fast", Speed(2e-5, 1e-4), 40_000_000, 64, 512), 1, 3.0, 700)
CHEAP = PricedKind(MachineKind("cheap", Speed(8e-5, 1.5e-4), 40_000_000, 64, 512), 1, 1.0, 300)
WORKLOAD = Workload(rate_s=60, prompt=distribution("lognormal:400,0.5"), output=distribution("uniform:20,60"))
OBJECTIVES = (Objective.of_level("ttft", 0.9, 0.15), Objective.of_level("tbt", 0.99, 0.02))


def problem(measure: str = "cost", seed: int = 0, requests: int = 200) -> PlanningProblem:
    arrivals = WORKLOAD.arrivals(requests, seed)
    return PlanningProblem(MODEL, arrivals, OBJECTIVES, Rules("mixed_pool"), Rules("shortest_queue"), measure, 60)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [Combination(FAST), Combination(FAST, CHEAP), Combination(CHEAP, CHEAP)], ids=lambda one: one.name
)
def test_a_family_s_smallest_design(family: Combination) -> None:
    of = problem()
    found = Frontier(of, family, inf).run()
    least, least_tokens = bounds(of, family)
    grid = [
        Design(family, prompts, tokens)
        for prompts in range(least, least + 10)
        for tokens in (range(least_tokens, least_tokens + 6) if family.split else (0,))
    ]
    smallest = min((design for design in grid if simulate(of, design).met), key=of.size, default=None)
    if found.best is None:
        assert smallest is None, smallest
        return
    assert smallest is not None
    assert of.size(found.best.design) == of.size(smallest)
    assert len(found.trials) < len(grid)


def test_a_family_whose_bound_is_not_smaller_is_not_simulated() -> None:
    found = Frontier(problem(), Combination(FAST), 3.0).run()
    assert found.ruled_out is not None
    assert not found.trials


def test_a_family_that_no_lone_request_can_use_is_not_searched() -> None:
    strict = replace(problem(), objectives=(Objective.of_level("ttft", 0.5, 0.001),))
    found = Frontier(strict, Combination(CHEAP), inf).run()
    assert (found.best, found.trials) == (None, [])
    assert "alone" in found.reason


def test_processes_search_as_one_does() -> None:
    every = families([FAST, CHEAP], split=True, unified=True)
    one, two = (search(problem(), every, jobs, full=True) for jobs in (1, 2))
    assert [(found.family.name, found.best and found.best.values) for found in one] == [
        (found.family.name, found.best and found.best.values) for found in two
    ]


@pytest.mark.parametrize("measure", ["cost", "power", "count"])
def test_a_plan_is_the_smallest_of_all_families_and_holds_for_other_requests(measure: str) -> None:
    every = families([FAST, CHEAP], split=True, unified=True)
    found = plan(problem(measure), problem(measure, seed=1, requests=400), every)
    assert found.confirmed is not None
    assert found.confirmed.met
    smallest = min(found.problem.size(one.best.design) for one in found.results if one.best is not None)
    assert found.problem.size(found.confirmed.design) >= smallest
    if not found.enlarged:
        assert found.problem.size(found.confirmed.design) == smallest


def test_pairs_have_as_many_gpus_because_kv_travels_between_equal_layouts() -> None:
    wide = replace(CHEAP, gpus=2)
    names = {family.name for family in families([FAST, wide], split=True, unified=False)}
    assert names == {"fast + fast", "cheap + cheap"}
