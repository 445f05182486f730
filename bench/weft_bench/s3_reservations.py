"""Reservations: throughput and preemptions where memory is short

One runner whose memory holds 16 average requests at their full length; all requests wait from the start, so that
memory decides how many run together. Simulated with the step times that `weft bench fidelity` and `cpu` measured of the
m135 model on two cores. Rates are those between the 10th and the 80th percentile of the answers' ends.

`max-model` reserves the model's maximum (S3's ORCA: clients that ask for no maximum), `max` what the client asks for,
`constant` a quantile of these very answers, `s3` the edge of the likeliest of ten buckets, `calibrated` each request's
predicted p90, `paged` nothing, `pooled` nothing on the runner: the scheduler admits what is expected to fit together.
`oracle` is `calibrated` with the exact length for a prediction: S3's own upper bound. `pooled, oracle` is `pooled` with
the exact length: what admission over time gains by itself. An overrun is an answer that outgrew its reservation (none
where nothing is reserved); a preemption takes a sequence off the runner, and its tokens are computed again.

What to see: `pooled` is faster than the oracle of reservations, because a sequence holds its full length only at its
end. `paged` runs the most sequences, preempts most of them and computes much again; where prefill is cheap beside
decoding (a GPU) or preempted pages are swapped to the host it comes nearer. `calibrated` hardly gains on a constant at
equal overruns, since memory counts by time: long answers hold theirs for longest, and their p90 is near the constant.
A reservation that is exact would hold only 1.28 times less than the constant p90 on LMSYS.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean
from typing import Any

from weft.domain.machine import Send
from weft.domain.prediction import Prediction
from weft.domain.request import Preempt
from weft.wire.codec.scheduling import outcome_from_bytes
from weft_bench import charts
from weft_bench.s3 import Context
from weft_bench.s3_lengths import TRACES, Answered
from weft_sim.clock import Rank
from weft_sim.report import quantile
from weft_sim.shells import RunnerShell, SupervisorShell
from weft_sim.simulate import WARM_S, PoolDescription, deployment_of, simulate
from weft_sim.stack import World
from weft_sim.traces import TraceArrival
from weft_stage.lines import Line

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


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulated run. `constant`: what that policy reserves, output tokens."""

    policy: str
    constant: int
    pages: int
    arrivals: tuple[TraceArrival, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one cell gave. Shares are of its requests; `recomputed`: of the tokens that the runner computed."""

    tokens_per_s: float
    sequences: float
    overran: float
    preempted: float
    recomputed: float


def run(context: Context) -> Iterator[Line]:
    """Run every policy on every trace."""
    with ProcessPoolExecutor(context.jobs) as pool:
        for name in context.traces:
            requests = REQUESTS[name] // (QUICK if context.quick else 1)
            served = TRACES[name](context.file, context.seed)
            cells = dict(cells_of(name, random.Random(f"{context.seed}/{name}").choices(served, k=requests)))
            known: dict[str, Outcome] = {}
            with context.bar(f"reservations, {name}", len(cells)) as advanced:
                for policy, outcome in zip(cells, pool.map(outcome_of, cells.values()), strict=True):
                    known[policy] = outcome
                    yield from _lines(context, f"reservations, {name}, {policy}", outcome)
                    advanced(1)
            yield from _compared(context, f"reservations, {name}", known)


def cells_of(name: str, drawn: list[Answered]) -> Iterator[tuple[str, Cell]]:
    limit = LIMITS[name]
    drawn = [replace(one, output_tokens=min(one.output_tokens, limit - 1)) for one in drawn]
    pages = round(FIT * mean(one.prompt_tokens + one.output_tokens for one in drawn)) // PAGE_TOKENS
    predicted = tuple(_arrival(one, limit, limit) for one in drawn)
    for policy in POLICIES:
        if policy == "max-model":
            arrivals = tuple(_arrival(one, MAXIMA[name], limit) for one in drawn)
        else:
            arrivals = (
                tuple(_arrival(one.exactly(), limit, limit) for one in drawn) if "oracle" in policy else predicted
            )
        yield policy, Cell(policy, 0, pages, arrivals)
    lengths = [one.output_tokens + 1 for one in drawn]
    for level in LEVELS:
        yield f"constant, p{100 * level:g}", Cell("constant", round(quantile(lengths, level)), pages, predicted)


def _arrival(one: Answered, max_tokens: int, limit: int) -> TraceArrival:
    predicted = bucketed(one.predicted, limit)
    return TraceArrival(0.0, one.prompt_tokens, one.output_tokens, -1, True, max_tokens, predicted)


def bucketed(predicted: Prediction, limit: int) -> Prediction:
    """Return the prediction with S3's bucket of answers up to `limit` tokens: the one of the median."""
    width = limit / BUCKETS
    return replace(predicted, bucket_tokens=round(width * min(BUCKETS, predicted.p50_tokens // width + 1)))


SERVED_BY = {"max-model": "max", "oracle": "calibrated", "pooled, oracle": "pooled"}


def outcome_of(cell: Cell) -> Outcome:
    """Simulate the cell."""
    described = replace(RUNNER, total_pages=cell.pages, reservation=SERVED_BY.get(cell.policy, cell.policy))
    deployment = deployment_of(described)
    if cell.constant:  # all requests come before the first answer that could change it
        scheduler = replace(deployment.scheduler, default_output_tokens=cell.constant)
        deployment = replace(deployment, scheduler=scheduler)
    watched = Watched()
    figures = simulate(described, cell.arrivals, deployment=deployment, attach=watched.attach).figures
    assert not figures.failures, figures.failures
    ends = sorted((one.e2e_ms / 1e3, one.tokens) for one in figures.served)
    low, high = int(BEGIN * len(ends)), int(END * len(ends))
    begin, end = ends[low][0], ends[high][0]
    needed = sum(arrival.prompt_tokens + arrival.output_tokens for arrival in cell.arrivals)
    return Outcome(
        sum(tokens for _, tokens in ends[low:high]) / (end - begin),
        watched.sequences(begin, end),
        watched.overruns() / len(ends),
        len(watched.preempted) / len(ends),
        1 - needed / watched.computed(),
    )


class Watched:
    """What a run shows beside its answers."""

    def __init__(self) -> None:
        self.preempted: set[str] = set()
        self._samples: list[tuple[float, int]] = []  # time since the first arrival, sequences on the runner

    def attach(self, world: World) -> None:
        self._world = world
        (self._runner,) = world.runners.values()
        world.scheduler.on_effects = self._on_effects
        self._begin = world.clock.now + WARM_S
        world.clock.at(self._begin, Rank.LAW, self._sample)

    def _on_effects(self, _: object, __: object, effects: Sequence[Any]) -> None:
        for effect in effects:
            if type(effect) is Send and isinstance(effect.message, Preempt):
                self.preempted.add(effect.message.request_id)

    def _sample(self) -> None:
        shell, clock = self._runner.shell, self._world.clock
        assert isinstance(shell, RunnerShell)
        self._samples.append((clock.now - self._begin, len(shell.machine.pool.sequences)))
        clock.after(SAMPLE_S, Rank.LAW, self._sample)

    def sequences(self, begin: float, end: float) -> float:
        """Return the sequences on the runner, on average."""
        return mean(count for at_s, count in self._samples if begin <= at_s <= end)

    def overruns(self) -> int:
        """Count the answers whose reservation was doubled."""
        shell = self._world.supervisor.shell
        assert isinstance(shell, SupervisorShell)
        return sum(outcome_from_bytes(record).doublings > 0 for record in shell.outcomes.values())

    def computed(self) -> int:
        """Count the tokens that went through the model, of prompts and of answers."""
        shell = self._runner.shell
        assert isinstance(shell, RunnerShell)
        return shell.machine.pool.figures(ready=True).tokens


def at_equal_overruns(constants: Mapping[float, float], overran: float) -> float:
    """Return the throughput of `constant` where it overruns as often, between the quantiles that were simulated."""
    points = sorted(constants.items())
    for (low, low_rate), (high, high_rate) in pairwise(points):
        if low <= overran <= high:
            return low_rate + (high_rate - low_rate) * (overran - low) / (high - low)
    return points[0][1] if overran < points[0][0] else points[-1][1]


def _lines(context: Context, case: str, outcome: Outcome) -> Iterator[Line]:
    line = context.origin.line
    yield line(case, "tokens", outcome.tokens_per_s, "1/s")
    yield line(case, "sequences in flight", outcome.sequences, "")
    yield line(case, "overruns", outcome.overran, "share")
    yield line(case, "preempted requests", outcome.preempted, "share")
    yield line(case, "recomputed tokens", outcome.recomputed, "share")


def _compared(context: Context, case: str, known: Mapping[str, Outcome]) -> Iterator[Line]:
    """Yield the targets, and the best that preempts."""
    rate = {policy: outcome.tokens_per_s for policy, outcome in known.items()}
    constants = {o.overran: o.tokens_per_s for policy, o in known.items() if policy.startswith("constant")}
    equal = at_equal_overruns(constants, known["calibrated"].overran)
    line = context.origin.line
    yield line(case, "calibrated, of constant at equal overruns", rate["calibrated"] / equal, "x", target=">= 1.1")
    yield line(case, "pooled, of oracle", rate["pooled"] / rate["oracle"], "x", target=">= 0.85")
    yield line(case, "pooled, of pooled with the exact lengths", rate["pooled"] / rate["pooled, oracle"], "x")
    yield line(case, "pooled, of calibrated", rate["pooled"] / rate["calibrated"], "x")
    yield line(case, "pooled, of paged", rate["pooled"] / rate["paged"], "x")
    yield line(case, "pooled, of max-model", rate["pooled"] / rate["max-model"], "x")


def pictures(lines: Sequence[Line]) -> Mapping[str, str]:
    """Draw a bar for each policy, by trace."""
    found: dict[str, dict[str, dict[str, float]]] = {"tokens": {}, "preempted requests": {}}
    for line in lines:
        part, name, policy = (*line.case.split(", ", 2), "", "")[:3]
        if part == "reservations" and policy and line.metric in found and line.value is not None:
            found[line.metric].setdefault(name, {})[policy] = line.value
    titles = {"tokens": "Tokens a second", "preempted requests": "Share of requests that were preempted"}
    return {metric.split()[0]: charts.groups(titles[metric], "", values) for metric, values in found.items() if values}
