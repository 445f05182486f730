"""A plan: every family searched, the smallest design confirmed with requests of another seed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from weft_sim.planning.designs import Combination, Design, PricedKind
from weft_sim.planning.search import Found, PlanningProblem, Trial, search, simulate

MAX_ENLARGED = 12  # runners that are added, one at a time, where another seed misses an objective
SMALLER = 4
NOT_TRIED = (
    "more than two kinds of runners in one pool, prompt and token runners with different numbers of GPUs (KV travels "
    "between equal layouts), runners that are always mixed beside them (a queue makes them so for its time), designs "
    "that a bound, a smaller design or monotony rules out"
)


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """`confirmed`: of the answer, with requests of another seed; None: no design meets the objectives.

    `enlarged`: runners that the confirmation added to the search's answer.
    """

    problem: PlanningProblem
    results: tuple[Found, ...]
    confirmed: Trial | None
    enlarged: int = 0


def families(kinds: Sequence[PricedKind], *, split: bool, unified: bool) -> list[Combination]:
    """Every kind alone, and every pair for prompts and tokens on as many GPUs: KV travels between equal layouts.

    Where prompts and decode rows share iterations, a quarter of the kind's batch tokens is tried too: each prompt then
    lengthens more steps by less.
    """
    pairs = [(prompt, token) for prompt, token in product(kinds, kinds) if prompt.gpus == token.gpus]
    alone = [
        kind_alone for kind in kinds for kind_alone in (kind, _with_batch(kind, kind.kind.max_batch_tokens // SMALLER))
    ]
    return [Combination(kind) for kind in alone if unified] + [Combination(*pair) for pair in pairs if split]


def _with_batch(kind: PricedKind, tokens: int) -> PricedKind:
    return replace(kind, kind=replace(kind.kind, name=f"{kind.name}, {tokens} tokens", max_batch_tokens=tokens))


def plan(
    problem: PlanningProblem,
    second: PlanningProblem,
    families: Sequence[Combination],
    jobs: int = 1,
    advance: Callable[[int], None] = lambda _: None,
    *,
    full: bool = False,
) -> CapacityPlan:
    """The smallest design for `problem` that also meets its objectives for the requests of `second`.

    `full`: the smallest design of every family, also where the bounds say that it cannot be the smallest of all.
    """
    results = tuple(search(problem, families, jobs, advance, full=full))
    best = min(
        (family_result.best for family_result in results if family_result.best is not None),
        key=lambda trial: problem.size(trial.design),
        default=None,
    )
    if best is None:
        return CapacityPlan(problem, results, None)
    confirmed, enlarged = simulate(second, best.design), 0
    while not confirmed.met and enlarged < MAX_ENLARGED:
        enlarged += 1
        confirmed = _enlarged(second, confirmed.design)
    return CapacityPlan(problem, results, confirmed, enlarged)


def _enlarged(problem: PlanningProblem, design: Design) -> Trial:
    """Add one runner: the cheaper kind that meets the objectives, or else the more demanded kind."""
    larger = [replace(design, prompts=design.prompts + 1)]
    if design.family.split:
        larger.append(replace(design, tokens=design.tokens + 1))
    larger.sort(key=problem.size)
    trials = [simulate(problem, trial_design) for trial_design in larger]
    if met := [trial for trial in trials if trial.met]:
        return met[0]
    late_prompts = (trials[0].missed or "").startswith("ttft")
    return next((trial for trial in trials if (trial.design.prompts > design.prompts) == late_prompts), trials[0])
