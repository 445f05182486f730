"""Reservations: throughput and preemptions where memory is short, see docs/benchmarks/scheduling.md.

One simulated runner whose memory holds 16 average requests at their full length. All requests wait from the start.
Rates are those between the 10th and the 80th percentile of the answers' ends.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from weft.domain.machine import Send
from weft.domain.request import Preempt
from weft.wire.codec.scheduling import outcome_from_bytes
from weft_bench.s3_lengths import Answered
from weft_sim.clock import Rank
from weft_sim.report import quantile
from weft_sim.shells import RunnerShell, SupervisorShell
from weft_sim.simulate import WARM_S, PoolDescription, deployment_of, simulate
from weft_sim.stack import World
from weft_sim.traces import TraceArrival
from weft_stage.lines import Line, Origin

REQUESTS = {"LMSYS": 500, "ShareGPT": 100, "Alpaca": 400}
LIMITS = {"LMSYS": 512, "ShareGPT": 1_024, "Alpaca": 512}  # what clients ask for; longer answers are cut
MAXIMA = {"LMSYS": 2_048, "ShareGPT": 5_000, "Alpaca": 1_024}  # of the model, for an answer
QUICK = 10  # times fewer
FIT = 16  # average requests in memory
PAGE_TOKENS = 16
BUCKETS = 10
LEVELS = (0.8, 0.9, 0.95, 0.99)
POLICIES = ("max-model", "max", "s3", "calibrated", "paged", "pooled", "oracle", "pooled, oracle")
RUNNER = PoolDescription(
    page_tokens=PAGE_TOKENS, max_sequences=256, max_batch_tokens=512, best_batch=32, step_ms_1=9.9, step_ms_best=29.3,
    prefill_tokens_per_s=4_300.0, adapters=0, cpu=False,
)  # fmt: skip
SAMPLE_S = 0.5
BEGIN, END = 0.1, 0.8  # of the answers' ends
SERVED_BY = {"max-model": "max", "oracle": "calibrated", "pooled, oracle": "pooled"}  # policy -> of the scheduler


@dataclass(frozen=True, slots=True)
class Cell:
    """A simulated run. `constant`: what that policy reserves, output tokens."""

    policy: str
    constant: int
    pages: int
    arrivals: tuple[TraceArrival, ...]


class Outcome(NamedTuple):
    """Figures of a cell. Shares are of its requests; `recomputed`: of the tokens that the runner computed."""

    tokens_per_s: float
    sequences: float
    overran: float
    preempted: float
    recomputed: float


UNITS = {  # of the fields of an outcome, in their order
    "tokens": "1/s", "sequences in flight": "", "overruns": "share", "preempted requests": "share",
    "recomputed tokens": "share",
}  # fmt: skip


def figures(
    origin: Origin, name: str, served: Sequence[Answered], seed: int, quick: bool, pool: Executor
) -> Iterator[Line]:
    """Run every policy on a trace, then compare them."""
    requests = REQUESTS[name] // (QUICK if quick else 1)
    cells = dict(cells_of(name, random.Random(f"{seed}/{name}").choices(served, k=requests)))
    outcomes = dict(zip(cells, pool.map(outcome_of, cells.values()), strict=True))
    for policy, outcome in outcomes.items():
        for (metric, unit), value in zip(UNITS.items(), outcome, strict=True):
            yield origin.line(f"reservations, {name}, {policy}", metric, value, unit)
    yield from _compared(origin, f"reservations, {name}", outcomes)


def cells_of(name: str, drawn: Sequence[Answered]) -> Iterator[tuple[str, Cell]]:
    """Return a cell for each policy, and for constants at some quantiles of the lengths."""
    limit = LIMITS[name]
    drawn = [replace(one, output_tokens=min(one.output_tokens, limit - 1)) for one in drawn]
    pages = round(FIT * mean(one.prompt_tokens + one.output_tokens for one in drawn)) // PAGE_TOKENS
    predicted = tuple(_arrival(one, limit, limit) for one in drawn)
    arrivals = {
        "max-model": tuple(_arrival(one, MAXIMA[name], limit) for one in drawn),
        "oracle": (exact := tuple(_arrival(one.exactly(), limit, limit) for one in drawn)),
        "pooled, oracle": exact,
    }
    for policy in POLICIES:
        yield policy, Cell(policy, 0, pages, arrivals.get(policy, predicted))
    lengths = [one.output_tokens + 1 for one in drawn]
    for level in LEVELS:
        yield f"constant, p{100 * level:g}", Cell("constant", round(quantile(lengths, level)), pages, predicted)


def _arrival(one: Answered, max_tokens: int, limit: int) -> TraceArrival:
    """Return the request with S3's bucket of answers up to `limit` tokens: that of the predicted median."""
    width = limit / BUCKETS
    bucket = round(width * min(BUCKETS, one.predicted.p50_tokens // width + 1))
    predicted = replace(one.predicted, bucket_tokens=bucket)
    return TraceArrival(0.0, one.prompt_tokens, one.output_tokens, -1, True, max_tokens, predicted)


def outcome_of(cell: Cell) -> Outcome:
    """Simulate the cell."""
    described = replace(RUNNER, total_pages=cell.pages, reservation=SERVED_BY.get(cell.policy, cell.policy))
    deployment = deployment_of(described)
    if cell.constant:  # all requests come before the first answer that could change it
        scheduler = replace(deployment.scheduler, default_output_tokens=cell.constant)
        deployment = replace(deployment, scheduler=scheduler)
    watched = Watched()
    simulated = simulate(described, cell.arrivals, deployment=deployment, attach=watched.attach).figures
    assert not simulated.failures, simulated.failures
    ends = sorted((one.e2e_ms / 1e3, one.tokens) for one in simulated.served)
    low, high = int(BEGIN * len(ends)), int(END * len(ends))
    (begin, _), (end, _) = ends[low], ends[high]
    needed = sum(arrival.prompt_tokens + arrival.output_tokens for arrival in cell.arrivals)
    return Outcome(
        sum(tokens for _, tokens in ends[low:high]) / (end - begin),
        watched.sequences(begin, end),
        watched.overruns() / len(ends),
        len(watched.preempted) / len(ends),
        1 - needed / watched.computed(),
    )


class Watched:
    """Preemptions, sequences, overruns and computed tokens of a run."""

    def __init__(self) -> None:
        self.preempted: set[str] = set()
        self._samples: list[tuple[float, int]] = []  # time since the first arrival, sequences on the runner

    def attach(self, world: World) -> None:
        (process,) = world.runners.values()
        assert isinstance(process.shell, RunnerShell)
        assert isinstance(world.supervisor.shell, SupervisorShell)
        self._clock, self._runner, self._supervisor = world.clock, process.shell, world.supervisor.shell
        world.scheduler.on_effects = self._on_effects
        self._begin = world.clock.now + WARM_S
        world.clock.at(self._begin, Rank.LAW, self._sample)

    def _on_effects(self, _: object, __: object, effects: Sequence[Any]) -> None:
        sent = [effect.message for effect in effects if type(effect) is Send]
        self.preempted |= {message.request_id for message in sent if isinstance(message, Preempt)}

    def _sample(self) -> None:
        self._samples.append((self._clock.now - self._begin, len(self._runner.machine.pool.sequences)))
        self._clock.call_after(SAMPLE_S, Rank.LAW, self._sample)

    def sequences(self, begin: float, end: float) -> float:
        """Return the sequences on the runner, on average."""
        return mean(count for at_s, count in self._samples if begin <= at_s <= end)

    def overruns(self) -> int:
        """Count the answers whose reservation was doubled."""
        return sum(outcome_from_bytes(record).doublings > 0 for record in self._supervisor.outcomes.values())

    def computed(self) -> int:
        """Count the tokens that went through the model, of prompts and of answers."""
        return self._runner.machine.pool.figures(ready=True).tokens


def _compared(origin: Origin, case: str, outcomes: Mapping[str, Outcome]) -> Iterator[Line]:
    rate = {policy: outcome.tokens_per_s for policy, outcome in outcomes.items()}
    constants = sorted((one.overran, one.tokens_per_s) for policy, one in outcomes.items() if "constant" in policy)
    overran, rates = zip(*constants, strict=True)
    equal = float(np.interp(outcomes["calibrated"].overran, overran, rates))
    line = origin.line
    yield line(case, "calibrated, of constant at equal overruns", rate["calibrated"] / equal, "x", target=">= 1.1")
    yield line(case, "pooled, of oracle", rate["pooled"] / rate["oracle"], "x", target=">= 0.85")
    yield line(case, "pooled, of pooled with the exact lengths", rate["pooled"] / rate["pooled, oracle"], "x")
    for policy in ("calibrated", "paged", "max-model"):
        yield line(case, f"pooled, of {policy}", rate["pooled"] / rate[policy], "x")
