"""The smallest design that meets objectives: bounds from the step models, then simulations along the frontier.

A family's designs are a grid of prompt and token runners. More runners of a kind are taken to never harm, so the
designs that meet the objectives lie above a staircase. A search begins at a design that meets them, takes away prompt
runners and then token runners by bisection, and follows the staircase in both directions as far as a design there can
still be smaller than the best. What a bound, a smaller design or monotony rules out is not simulated, and is counted.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf

from weft_sim.performance.step import StepShape
from weft_sim.planning.cluster import Cluster, Rules, ServedModel
from weft_sim.planning.designs import MEASURES, Combination, Design
from weft_sim.planning.machine import MachineKind
from weft_sim.planning.objectives import Objective, Watch
from weft_sim.traces import TraceArrival

GROWTH = (1.1, 1.35, 1.7, 2.2, 3.0, 4.0)  # of the bounds, where a design that meets the objectives is sought
PATIENCE = 3  # steps along the staircase without a smaller design
ALONE = 400  # requests, one after the other, that show what no queue can better


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """The workload, its objectives and the rules. `split` and `unified`: for designs with and without roles."""

    model: ServedModel
    arrivals: tuple[TraceArrival, ...]
    objectives: tuple[Objective, ...]
    split: Rules
    unified: Rules
    measure: str = "cost"
    max_runners: int = 512

    def size(self, design: Design) -> float:
        return design.total(MEASURES[self.measure])

    @property
    def seconds(self) -> float:
        return self.arrivals[-1].at_s


@dataclass(frozen=True, slots=True)
class Trial:
    """A simulated design. `missed`: the objective that ended it, or the first that its quantiles miss; `values`: of the
    objectives, if the run came to its end; `most_mixed` runners at a time."""

    design: Design
    missed: str | None
    values: tuple[float, ...] = ()
    utilization: tuple[float, float] = (0.0, 0.0)  # of the prompt (or all) runners and of the token runners
    most_mixed: int = 0

    @property
    def met(self) -> bool:
        return self.missed is None


@dataclass(slots=True)
class Found:
    """The result of the search for a family. Without `best`, `reason` excludes the family or `ruled_out` is too large.

    `ruled_out`: the smallest design by the bounds. `lower_bound`: the runners by the bounds. `grid`: the number of
    designs smaller than the best of the other families. `trials`: the simulated designs.
    """

    family: Combination
    best: Trial | None = None
    reason: str = ""
    ruled_out: Design | None = None
    lower_bound: tuple[int, int] = (0, 0)
    grid: int = 0
    trials: list[Trial] = field(default_factory=list[Trial])


def simulate(problem: PlanningProblem, design: Design) -> Trial:
    """A run that ends with the last answer, or when an objective is certain to be missed."""
    watch = Watch(problem.objectives, len(problem.arrivals))
    rules = problem.split if design.family.split else problem.unified
    cluster = Cluster(design.machines(), problem.model, rules, watch)
    cluster.serve(problem.arrivals)
    if watch.missed is not None:
        return Trial(design, watch.missed.label)
    values = tuple(objective.measured(cluster) for objective in problem.objectives)
    missed = [of.label for of, value in zip(problem.objectives, values, strict=True) if value > of.bound]
    busy = [machine.busy_s / cluster.clock.now for machine in cluster.machines]
    prompts, tokens = busy[: design.prompts], busy[design.prompts :]
    utilization = sum(prompts) / len(prompts), sum(tokens) / len(tokens) if tokens else 0.0
    mixed = max(roles.mixed for roles in cluster.roles) if design.family.split else 0
    return Trial(design, missed[0] if missed else None, values, utilization, mixed)


def bounds(problem: PlanningProblem, family: Combination) -> tuple[int, int]:
    """Runners for prompts and for tokens (or for both, and 0) below which they are busy for longer than the trace."""
    prompt_s = sum(arrival.prompt_tokens for arrival in problem.arrivals) * prompt_token_s(family.prompt.kind)
    rows = sum(arrival.output_tokens - 1 for arrival in problem.arrivals)
    context = sum(arrival.prompt_tokens + arrival.output_tokens / 2 for arrival in problem.arrivals) / len(
        problem.arrivals
    )
    token_s = rows * decode_row_s((family.token or family.prompt).kind, problem.model, context)
    if family.token is None:
        return max(1, ceil((prompt_s + token_s) / problem.seconds)), 0
    return max(1, ceil(prompt_s / problem.seconds)), max(1, ceil(token_s / problem.seconds))


def prompt_token_s(kind: MachineKind) -> float:
    """Seconds of a prompt token in the batch that computes most of them a second, without attention."""
    sizes = {min(kind.max_batch_tokens, 1 << power) for power in range(5, 16)}
    return min(kind.model.seconds(StepShape(prompts=1, prompt_tokens=size)) / size for size in sizes)


def decode_row_s(kind: MachineKind, model: ServedModel, context: float) -> float:
    """Return the seconds of a decode row in the largest possible batch, or in a smaller, better batch."""
    max_rows = min(kind.max_sequences, max(1, int(kind.kv_bytes / (context * model.kv_token_bytes))))
    sizes = {min(max_rows, 1 << power) for power in range(12)}
    shapes = [StepShape(decode_rows=rows, context_tokens=int(rows * context)) for rows in sizes]
    return min(kind.model.seconds(shape) / shape.decode_rows for shape in shapes)


def alone(problem: PlanningProblem, family: Combination) -> Trial:
    """Simulate requests without queueing, on a runner of each role."""
    first = problem.arrivals[:ALONE]
    spread = tuple(replace(arrival, at_s=1e4 * number) for number, arrival in enumerate(first, 1))
    return simulate(replace(problem, arrivals=spread), Design(family, 1, 1 if family.split else 0))


class Frontier:
    """The search within a family; a design is simulated once. `below`: the size that a design has to undercut."""

    def __init__(self, problem: PlanningProblem, family: Combination, below: float) -> None:
        self._problem, self._family, self._below = problem, family, below
        self._trials: dict[Design, Trial] = {}
        self.outcome = Found(family, lower_bound=bounds(problem, family))

    def run(self) -> Found:
        outcome, (lower_bound, least_tokens) = self.outcome, self.outcome.lower_bound
        smallest = Design(self._family, lower_bound, least_tokens)
        if self._problem.size(smallest) >= self._below or smallest.runners > self._problem.max_runners:
            outcome.ruled_out = smallest
            return outcome
        if not (single := alone(self._problem, self._family)).met:
            outcome.reason = f"{single.missed} is missed by a request that is alone"
            return outcome
        outcome.grid = self._grid()
        if (start := self._start(smallest)) is None:
            outcome.reason = self._last_missed()
        else:
            self._descend(start)
        outcome.trials = list(self._trials.values())
        return outcome

    def _meets(self, prompts: int, tokens: int) -> bool:
        design = Design(self._family, prompts, tokens)
        trial = self._trials.get(design)
        if trial is None:
            trial = self._trials[design] = simulate(self._problem, design)
        if trial.met and self._problem.size(design) < self._below:
            self._below, self.outcome.best = self._problem.size(design), trial
        return trial.met

    def _start(self, smallest: Design) -> Design | None:
        for growth in GROWTH:
            design = replace(smallest, prompts=ceil(smallest.prompts * growth), tokens=ceil(smallest.tokens * growth))
            if design.runners > self._problem.max_runners or self._problem.size(design) >= self._below:
                design = self._largest(smallest)
            if self._meets(design.prompts, design.tokens):
                return design
            if design == self._largest(smallest):
                break
        return None

    def _largest(self, smallest: Design) -> Design:
        """In the proportion of the bounds, the largest that is smaller than the best."""
        low, high = 1.0, GROWTH[-1]
        for _ in range(20):
            middle = (low + high) / 2
            design = replace(smallest, prompts=floor(smallest.prompts * middle), tokens=floor(smallest.tokens * middle))
            fits = self._problem.size(design) < self._below and design.runners <= self._problem.max_runners
            low, high = (middle, high) if fits else (low, middle)
        return replace(smallest, prompts=floor(smallest.prompts * low), tokens=floor(smallest.tokens * low))

    def _descend(self, start: Design) -> None:
        lower_bound, least_tokens = self.outcome.lower_bound
        prompts = self._bisect(lower_bound, start.prompts, lambda count: self._meets(count, start.tokens))
        if not self._family.split:
            return
        self._bisect(least_tokens, start.tokens, lambda count: self._meets(prompts, count))
        for direction in (1, -1):
            idle, count = 0, prompts + direction
            while idle < PATIENCE and count >= lower_bound and (tokens := self._affordable(count)) >= least_tokens:
                if self._meets(count, tokens):
                    self._bisect(least_tokens, tokens, lambda tokens, count=count: self._meets(count, tokens))
                    idle = 0
                else:
                    idle += 1
                count += direction

    def _affordable(self, prompts: int) -> int:
        """The most token runners with which a design is still smaller than the best."""
        assert self._family.token is not None
        measure = MEASURES[self._problem.measure]
        left = self._below - prompts * measure(self._family.prompt)
        return min(ceil(left / measure(self._family.token)) - 1, self._problem.max_runners - prompts)

    def _bisect(self, low: int, high: int, meets: Callable[[int], bool]) -> int:
        """Return the smallest count that meets the objectives; `high` meets them."""
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if meets(middle) else (middle + 1, high)
        return high

    def _grid(self) -> int:
        """Designs at or above the bounds that are smaller than the best elsewhere."""
        lower_bound, least_tokens = self.outcome.lower_bound
        if self._below == inf:
            return 0
        if not self._family.split:
            return max(0, ceil(self._below / MEASURES[self._problem.measure](self._family.prompt)) - lower_bound)
        counts = range(lower_bound, self._problem.max_runners)
        return sum(max(0, self._affordable(count) - least_tokens + 1) for count in counts)

    def _last_missed(self) -> str:
        trials = list(self._trials.values())
        return f"{trials[-1].design.name}: {trials[-1].missed} missed" if trials else "no design in its bounds"


def _searched(problem: PlanningProblem, family: Combination, below: float) -> Found:
    return Frontier(problem, family, below).run()


def search(
    problem: PlanningProblem,
    families: Iterable[Combination],
    jobs: int = 1,
    advance: Callable[[int], None] = lambda _: None,
    *,
    full: bool = False,
) -> list[Found]:
    """Search every family, the smallest bound first. `advance` counts searched families.

    A family goes on only while it can be smaller than the best before it, unless `full`.
    """
    ordered = sorted(families, key=lambda family: problem.size(Design(family, *bounds(problem, family))))
    below, results = inf, list[Found]()
    if jobs == 1:
        for family in ordered:
            results.append(_searched(problem, family, below))
            below = inf if full else _smallest(problem, results)
            advance(1)
        return results
    with ProcessPoolExecutor(jobs) as pool:
        for first in range(0, len(ordered), jobs):
            wave = [pool.submit(_searched, problem, family, below) for family in ordered[first : first + jobs]]
            for result in wave:
                results.append(result.result())
                advance(1)
            below = inf if full else _smallest(problem, results)
    return results


def _smallest(problem: PlanningProblem, results: Sequence[Found]) -> float:
    return min(
        (problem.size(family_result.best.design) for family_result in results if family_result.best is not None),
        default=inf,
    )
