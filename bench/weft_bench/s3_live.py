"""Live: `fcfs` and `shortest` through a whole stack on the CPU engine, beside the simulator

Requests of a trace go through `weft up` with one runner of the m135 model and 8 adapters in turn; its executor ends
each answer at the trace's length while `max_tokens` stays 2,048, and the predictor replays the predictions of `queue`.
One token here stands for eight of the trace (Alpaca: four): of prompts, answers and predictions. Arrivals are Poisson,
at multiples of what `fcfs` answered of this trace's requests when all were there; latency a token and its tail are
those of `queue`, from the time at which a request is due. Each overload is
shorter than what bounds `shortest` beside the backlog.

The simulator is given the same requests at the same times, with step times and costs of this machine as `weft bench
fidelity` measures them, before any of these runs. Client, control plane and engine share the cores. `control plane` is
the CPU seconds of predictor, scheduler and supervisor over the seconds in which the runner computed (the predictor only
looks its predictions up); the paper has 11 % for these and the penalty of swapping together. Memory is for all here,
so nothing is swapped.
"""

import json
import random
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from weft_bench import charts
from weft_bench.fidelity import STREAMS, Amounts, Case, calibrate, case_of, seen
from weft_bench.fidelity_costs import Model
from weft_bench.fidelity_engine import measure
from weft_bench.fidelity_live import Bodies, Live, LiveRun
from weft_bench.path_shape import BUSY, NAMESPACE
from weft_bench.path_shape import MODEL as BASE_MODEL
from weft_bench.s3 import Context
from weft_bench.s3_lengths import TRACES, Answered
from weft_bench.s3_queue import LOWER, MAX_TOKENS, Outcome, arrival, summary, sustained
from weft_sim.traces import TraceArrival
from weft_stage.cpu_models import cache_dir
from weft_stage.errors import RequestFailed
from weft_stage.lines import Line
from weft_stage.stack import Stack
from weft_stage.trace_executor import TracedAnswer, trace_up, write_table

MODEL = "m135"
SCALES = {"LMSYS": 8, "ShareGPT": 8, "Alpaca": 4}  # tokens of the trace for each one here
MAX_PROMPT_TOKENS = 256
REQUESTS, QUICK_REQUESTS = 1_000, 60
CAPACITY_REQUESTS = 120
CALIBRATION = Amounts(seconds=5.0, singles=12, answers=6)
FIRST_WORD = 100  # of the vocabulary of numbered words: a prompt's first one is its own
VOCABULARY = 49_152
PATIENT = {  # requests wait longer here than users would
    "WEFT_GATEWAY__HOLD_SECONDS": "3600",
    "WEFT_GATEWAY__MAX_IN_FLIGHT": "10000",
    "WEFT_GATEWAY__PREDICT_MS": "5000",
}
OVERHEAD = ("predictor", "scheduler", "supervisor")
MAX_OVERHEAD_PERCENT = 11.0  # %: the paper's, with the penalty of preemption
SIMULATED = ", simulated"
MEAN, TAIL = "mean latency a token", "p99 latency a token, longest decile"


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request of a trace as a client sends it. `seed`: its key in the runner's table; `adapter` -1: the base."""

    seed: int
    adapter: int
    prompt: str
    answered: Answered

    def body(self, case: Case) -> dict[str, object]:
        model = f"{NAMESPACE}/{case.adapters[self.adapter].name}" if self.adapter >= 0 else BASE_MODEL
        return {
            "model": model, "prompt": self.prompt, "temperature": 0, "max_tokens": MAX_TOKENS, "seed": self.seed
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a trace and the files in which runner and predictor find them."""

    name: str
    requests: tuple[LiveRequest, ...]
    table: Path
    predictions: Path

    def bodies(self, case: Case, count: int | None = None) -> Bodies:
        return [(request.adapter, request.body(case)) for request in self.requests[:count]]

    def arrivals(self, at_s: Sequence[float]) -> list[TraceArrival]:
        """The same requests at these times, for the simulator."""
        return [
            arrival(time_s, request.answered, request.adapter)
            for time_s, request in zip(at_s, self.requests, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell. `overhead`: of the control plane, over the runner's busy seconds; `others`: other people's share of the
    machine; `unpredicted`: the share of requests without a prediction; `swapped_mib`: KV to host memory and back.
    """

    live: Outcome
    simulated: Outcome
    overhead: float
    others: float
    unpredicted: float
    swapped_mib: float


def run(context: Context) -> Iterator[Line]:
    """Run every trace at every load."""
    with case_of(MODEL, cache_dir()) as case, TemporaryDirectory(prefix="weft-bench-") as scratch:
        served = {name: TRACES[name](context.file, context.seed) for name in context.traces}
        with context.bar(f"{MODEL}: steps of the engine alone", 1) as advanced:
            engine = measure(case.files, case.adapters, case.sizes, case.vocab, context.seed)
            advanced(1)
        model = Model(replace(case.pool, threads=engine.threads), engine)
        for name, answers in served.items():
            requests = QUICK_REQUESTS if context.quick else min(context.requests, REQUESTS)
            chance = random.Random(f"{context.seed}/{name}/live")
            ours = [scaled(one, SCALES[name]) for one in chance.choices(answers, k=requests)]
            drawn = with_prompts(ours, len(case.adapters), chance)
            yield from _trace(context, case, model, prepared(name, drawn, Path(scratch)), chance)


def _trace(context: Context, case: Case, model: Model, work: Workload, chance: random.Random) -> Iterator[Line]:
    """Run `fcfs` at all loads in one stack, then `shortest` at each."""
    line, case_name = context.origin.line, f"live, {work.name}, {len(work.requests):,} requests"
    gaps = [chance.expovariate(1.0) for _ in work.requests]
    fcfs = dict[float, Measured]()
    with stack_of(case, work, {"queue": "fcfs"}) as stack:
        live = Live(stack)
        model, _ = calibrate(case, live, model, CALIBRATION, random.Random(context.seed), context.bar)
        rate = capacity(case, live, work)
        yield line(case_name, "capacity of fcfs", rate, "requests/s")
        for load in context.loads:
            fcfs[load] = _cell(context, stack, live, case, model, work, times(gaps, rate * load))
            yield from _lines(context, f"{case_name}, load {load:g}, fcfs", fcfs[load], fcfs[load])
        live.cpu.close()
    for load in context.loads:
        at_s = times(gaps, rate * load)
        with stack_of(case, work, {"queue": "shortest"}) as stack:
            live = Live(stack)
            live.closed(case.bodies(random.Random(context.seed), 6 * STREAMS), STREAMS)  # every path warm
            live.rest(1.0)
            described = replace(model, pool=replace(model.pool, queue="shortest"))
            measured = _cell(context, stack, live, case, described, work, at_s)
            live.cpu.close()
        yield from _lines(context, f"{case_name}, load {load:g}, shortest", measured, fcfs[load])


def with_prompts(drawn: Sequence[Answered], adapters: int, chance: random.Random) -> list[LiveRequest]:
    """Return requests whose prompts differ in the first word; they take turns over the adapters (0: the base)."""
    found = list[LiveRequest]()
    for number, one in enumerate(drawn):
        words = [FIRST_WORD + number, *(chance.randrange(FIRST_WORD, VOCABULARY) for _ in range(one.prompt_tokens - 1))]
        adapter = number % adapters if adapters else -1
        found.append(LiveRequest(number + 1, adapter, " ".join(f"w{word}" for word in words), one))
    return found


def scaled(one: Answered, scale: int) -> Answered:
    """Return a request of which each token stands for `scale` tokens of the trace's."""

    def fewer(tokens: int) -> int:
        return max(1, ceil(tokens / scale))

    of = one.predicted
    predicted = replace(
        of,
        p10_tokens=fewer(of.p10_tokens),
        p50_tokens=fewer(of.p50_tokens),
        p90_tokens=fewer(of.p90_tokens),
        p99_tokens=fewer(of.p99_tokens),
        bucket_tokens=fewer(of.bucket_tokens) if of.bucket_tokens else 0,
    )
    return Answered(min(MAX_PROMPT_TOKENS, fewer(one.prompt_tokens)), fewer(one.output_tokens), predicted)


def prepared(name: str, requests: Sequence[LiveRequest], folder: Path) -> Workload:
    """Write what runner and predictor are given."""
    table, predictions = folder / f"{name}.answers", folder / f"{name}.predictions"
    write_table(table, (TracedAnswer(r.seed, r.answered.prompt_tokens, r.answered.output_tokens) for r in requests))
    predictions.write_text("".join(_prediction(one) for one in requests), encoding="utf-8")
    return Workload(name, tuple(requests), table, predictions)


def _prediction(request: LiveRequest) -> str:
    """Return a line of `weft_predictor --model replay:FILE`."""
    of = request.answered.predicted
    quantiles = {"p10": of.p10_tokens, "p50": of.p50_tokens, "p90": of.p90_tokens, "p99": of.p99_tokens}
    return json.dumps({"key": request.prompt, **quantiles, "bucket": of.bucket_tokens}) + "\n"


@contextmanager
def stack_of(
    case: Case, work: Workload, scheduler: Mapping[str, object], *, pages: int = 0, auth: bool = False
) -> Generator[Stack]:
    """Start the case's stack with these fields of `spec.advanced`; its runner and predictor know the workload.

    `pages`: of KV; 0: as the case has it. `auth`: clients need keys, any namespace's. Changes the case's manifests.
    """
    path = case.manifests / "bench.yaml"
    objects = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    for one in objects:
        if one["kind"] == "ServingPool":
            one["spec"]["advanced"] |= {"maxQueue": 100_000, **scheduler} | ({"kvPages": pages} if pages else {})
            one["spec"]["allowedNamespaces"] = ["*"] if auth else []
    path.write_text(yaml.safe_dump_all(objects), encoding="utf-8")
    environment = {**PATIENT, "WEFT_PREDICTOR__MODEL": f"replay:{work.predictions}"}
    up = trace_up(work.table)
    with (
        TemporaryDirectory(prefix="weft-bench-") as data,
        Stack(case.manifests, Path(data), *["--auth"] * auth, environment=environment, up=up) as stack,
    ):
        if auth:
            stack.key = stack.create_key(NAMESPACE)
        stack.wait_for_models()
        yield stack


def capacity(case: Case, live: Live, work: Workload) -> float:
    """Measure the requests a second that the pool answers while all of them wait."""
    bodies = work.bodies(case, CAPACITY_REQUESTS)
    return sustained([seen(answer).e2e_ms for answer in live.open(bodies, [0.0] * len(bodies)).answers])


def times(gaps: Sequence[float], rate: float) -> list[float]:
    """Return when requests arrive: gaps of mean 1 at this rate."""
    at_s, found = 0.0, list[float]()
    for gap in gaps:
        at_s += gap / rate
        found.append(at_s)
    return found


def _cell(
    context: Context, stack: Stack, live: Live, case: Case, model: Model, work: Workload, at_s: Sequence[float]
) -> Measured:
    """Run the same requests live and simulated. Raises RequestFailed where an answer is not the trace's."""
    before = _counters(stack)
    with context.bar(f"live, {work.name}, {at_s[-1]:.0f} s of arrivals", 1) as advanced:
        found = live.open(work.bodies(case), at_s)
        advanced(1)
    check_answers(work, found)
    busy_s, failed, swapped = (now - then for now, then in zip(_counters(stack), before, strict=True))
    replayed = model.replay(work.arrivals(at_s)).served
    if len(replayed) != len(at_s):
        raise RequestFailed(f"the simulator answered {len(replayed)} of {len(at_s)} requests")
    span_s = max(at + one.e2e_ms / 1e3 for at, one in zip(at_s, replayed, strict=True))
    return Measured(
        summary([seen(answer) for answer in found.answers], found.tokens / found.wall_s),
        summary(replayed, sum(one.tokens for one in replayed) / span_s),
        sum(found.cpu[name] for name in OVERHEAD) / busy_s,
        found.others,
        failed / len(at_s),
        swapped / 2**20,
    )


def _counters(stack: Stack) -> tuple[float, float, float]:
    """Read the seconds in which the runner computed, predictions that failed, bytes of KV swapped."""
    failed = stack.metric("gateway", "weft_gateway_predict_failures_total")
    return stack.metric("runner", BUSY), failed, stack.metric("runner", "weft_runner_swapped_bytes_total")


def check_answers(work: Workload, found: LiveRun) -> None:
    """Check that each answer was ended by the model, where the trace says. Raises RequestFailed."""
    for request, answer in zip(work.requests, found.answers, strict=True):
        wanted = request.answered.output_tokens
        if not answer.stopped or answer.tokens != wanted:
            ended = "ended" if answer.stopped else "cut"
            raise RequestFailed(
                f"request {request.seed} of {work.name}: {ended} after {answer.tokens} tokens, not {wanted}"
            )


def _lines(context: Context, case: str, found: Measured, fcfs: Measured) -> Iterator[Line]:
    """Yield the figures: live, against live fcfs; simulated, against live."""
    line, live, simulated = context.origin.line, found.live, found.simulated
    figures: Mapping[str, tuple[float, float, float, str]] = {
        MEAN: (live.mean, fcfs.live.mean, simulated.mean, "ms"),
        LOWER: (fcfs.live.mean / live.mean, 0.0, fcfs.simulated.mean / simulated.mean, "x"),
        TAIL: (live.tail, fcfs.live.tail, simulated.tail, "ms"),
        "p99 latency a token": (live.p99, fcfs.live.p99, simulated.p99, "ms"),
        "median TTFT": (live.ttft_ms, fcfs.live.ttft_ms, simulated.ttft_ms, "ms"),
        "tokens": (live.tokens_per_s, fcfs.live.tokens_per_s, simulated.tokens_per_s, "1/s"),
    }
    for metric, (value, baseline, replayed, unit) in figures.items():
        yield line(case, metric, value, unit, baseline=baseline or None)
        yield line(case, metric + SIMULATED, replayed, unit, baseline=value)
    yield line(
        case, "control plane, of generation time", 100 * found.overhead, "%", target=f"<= {MAX_OVERHEAD_PERCENT:g}"
    )
    yield line(case, "KV swapped", found.swapped_mib, "MiB")
    yield line(case, "requests without a prediction", 100 * found.unpredicted, "%")
    yield line(case, "of the machine, by others", 100 * found.others, "%")


def pictures(lines: Sequence[Line]) -> dict[str, str]:
    """Draw the mean and the tail of each cell, live and simulated."""
    found: dict[str, defaultdict[str, dict[str, float]]] = {MEAN: defaultdict(dict), TAIL: defaultdict(dict)}
    for line in lines:
        part, *words = line.case.split(", ")
        metric = line.metric.removesuffix(SIMULATED)
        if part == "live" and metric in found and line.value is not None:
            trace, _, load, policy = words
            where = "simulated" if line.metric.endswith(SIMULATED) else "live"
            found[metric][f"{trace}, {load}"][f"{policy}, {where}"] = line.value
    return {
        name: charts.groups(f"{metric}, live and simulated", "ms", found[metric])
        for name, metric in (("mean", MEAN), ("tail", TAIL))
        if found[metric]
    }
