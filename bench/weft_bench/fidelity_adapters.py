"""`weft bench fidelity --part adapters`: the engine simulation beside hours of real vLLM 0.8.5 with 8 to 384 adapters.

Published runs (BSC) of Llama-3.1-8B and Qwen2.5-7B on one GPU of 64 GB: each is simulated for its hour with its own
adapters, rates, slots and recorded KV memory, and finished requests are compared. Constants are those of the *other*
model, fitted on its engine probes and on the mean iterations of its runs (rows over tokens a second; times between
tokens, as clients saw them, are longer). "with probes of its own": fitted again from there on the model's own engine
probes; the time of a load is of these, too. Lengths are not published with the runs: their means are the model's, their
spread and correlation were chosen on Llama's, and terms and priors were chosen with results of both models in view;
nothing else of a model's runs is used to predict it. What penalties of repetition take of the host, Qwen's alone, is an
estimate (`PENALTY_US`); fitted on Qwen's own runs it is twice that. `baseline`: the share of the authors' digital twin
on the same runs. Of `planner_1h` one run in 16 is simulated; `--every 3`: a third of all.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from weft_bench.cpu_context import Bar
from weft_bench.data import find, known, table
from weft_bench.engine_request import EngineRequest
from weft_bench.engine_simulation import EngineLimits, EngineSimulation, serve
from weft_bench.fidelity_points import Array
from weft_sim.performance.accelerator import accelerator
from weft_sim.performance.architecture import Architecture, architecture
from weft_sim.performance.models import efficiency
from weft_sim.performance.roofline import AdapterCosts, Efficiency, Roofline
from weft_stage.lines import Line, Origin

RUNS, PROBES = "bsc_multilora_runs.csv.gz", "bsc_engine_points.csv.gz"
MODELS = {"llama-3.1-8b-instruct": "meta-llama/Llama-3.1-8B", "qwen-2.5-7b-instruct": "Qwen/Qwen2.5-7B"}
RUN_COLUMNS: Sequence[str] = (
    "model", "family", "status", "suspect", "adapters", "slots", "max_rank", "ranks", "rate_counts", "rates_req_s",
    "offered_req_s", "req_s", "completed", "in_tokens", "out_tokens", "running_mean", "waiting_mean", "kv_use_mean",
    "kv_tokens", "preempted", "itl_mean_ms", "tpot_mean_ms", "twin_finished",
)  # fmt: skip
PROBE_COLUMNS: Sequence[str] = (
    "kind", "model", "status", "slots", "max_rank", "adapters", "completed", "duration_s", "in_tokens", "out_tokens",
    "itl_p50_ms", "running_busy", "load_ms",
)  # fmt: skip
PENALISED = {"qwen-2.5-7b-instruct"}  # its generation_config.json penalises repetition, which vLLM applies by default
FAMILIES = {"varied_1h": 1, "planner_1h": 16}  # 16: one run in 16 is simulated
DEVICE = "H100-64G"
BATCH_TOKENS, MAX_SEQUENCES, PAGE_TOKENS = 2_048, 2_048, 16
MANY, FULL_MEMORY, FULL_BATCH = 1_000, 0.9, 0.5  # waiting requests, shares
MAX_WAITING = 25_000  # there the client ran out of sockets
HORIZON_S = 3_600.0
# ShareGPT's first turns, whose lengths are not published with the runs: gamma laws with the runs' means. Shape of
# answers and correlation are those of the runs of Llama-3.1-8B: the number of rows that 8 slots have (a slot is held by
# the longest answer in it), and the KV in use, by which a row holds 350 tokens on average.
PROMPT_TOKENS, PROMPT_SHAPE, LONGEST_PROMPT = 225.0, 1.2, 1_024
ANSWER_SHAPE, LONGEST_ANSWER = 1.3, 1_500
ANSWER_TOKENS = {"llama-3.1-8b-instruct": 195.2, "qwen-2.5-7b-instruct": 192.2}  # as their tokenizers count
CORRELATION = -0.28  # of the normal variables behind both lengths
WITHIN, TARGET = 0.05, 0.85

# Launches are captured, so that no layer waits for one; host and device take turns at each step.
START = {"layer_us": 0.0, "step_us": 3_500.0, "prompt_us": 1_000.0, "prompt_token_us": 2.0}
BASE = {
    "weights_bandwidth": 0.03, "kv_bandwidth": 0.2, "step_us": 0.5, "row_us": 0.7, "prompt_us": 0.2,
    "prompt_token_us": 0.3,
}  # fmt: skip
ADAPTERS = {
    "present_us": 50.0, "block_ns": 0.8, "prompt_us": 0.55, "adapter_us": 5.0, "adapter_bandwidth": 0.2,
    "passed_us": 0.5, "listed_us": 0.25,
}  # fmt: skip
ADAPTER_SPREADS = {"prompt_us": 0.1, "passed_us": 0.1, "listed_us": 0.2}  # of others 1
PENALTY_US, PENALTY_SPREAD = 7.0, 1.0  # 6 us with numpy, of 225 and 180 tokens a row, and their way to the device
SCALE = 0.05
PROBE_WEIGHT = 2.0
FEWEST_SETTINGS = 3
PROBE_KINDS = ("base_decode", "adapter_decode", "base_prefill")
FEWEST_REQUESTS = 1_000  # of a probe; smaller ones are a burst of the client


@dataclass(frozen=True, slots=True)
class Sample:
    """A mean iteration and the seconds that it took."""

    model: str
    slots: int
    max_rank: int
    registered: int
    prompts: float
    prompt_tokens: float
    pairs: float
    decode_rows: float
    context: float
    adapters: float
    passed_over: float
    seconds: float
    weight: float

    @property
    def base(self) -> bool:
        """Is it one without adapters?"""
        return not self.slots


@dataclass(frozen=True)
class AdapterRun:
    """A run of one hour."""

    row: Mapping[str, str]

    @property
    def model(self) -> str:
        """The model's name as the files have it."""
        return self.row["model"]

    @cached_property
    def rates(self) -> list[float]:
        """Requests a second of each adapter."""
        parts = (part.split("x") for part in self.row["rate_counts"].split())
        return [float(rate) for rate, count in parts for _ in range(int(count))]

    @property
    def saturated(self) -> bool:
        """True where less than 95 % of the load was served."""
        return self.number("req_s") < 0.95 * self.number("offered_req_s")

    def number(self, name: str) -> float:
        """Return a column as a number."""
        return float(self.row[name])

    def sample(self) -> Sample:
        """Return the mean iteration of the run: rows that run, adapters in use among them, prompts that come meanwhile.

        Its seconds are rows over tokens a second: times between what clients receive are longer, some being several
        tokens at once.
        """
        running, per_s = self.number("running_mean"), self.number("req_s")
        prompt, answer = (self.number(name) / self.number("completed") for name in ("in_tokens", "out_tokens"))
        begun = running * answer * (1 + 1 / ANSWER_SHAPE) / 2  # tokens of answers that the hour cut off
        seconds = running * HORIZON_S / (self.number("out_tokens") + begun)
        slots, latency = int(self.row["slots"]), running / per_s
        used = sum(1 - np.exp(-rate * latency) for rate in self.rates)
        if self.number("waiting_mean") > 5:  # for a slot, so that all are in use, or for memory
            drawn = (1 - np.exp(-running * rate / sum(self.rates)) for rate in self.rates)
            used = sum(drawn) if self.number("kv_use_mean") > 0.9 else len(self.rates)
        prompts, again = per_s * seconds, self.number("preempted") / HORIZON_S * seconds
        tokens = prompts * prompt + again * (prompt + answer / 2)
        prompts += again
        return Sample(
            self.model, slots, int(self.row["max_rank"]), len(self.rates), prompts, tokens, tokens * prompt / 2,
            running, self.number("kv_use_mean") * self.number("kv_tokens") - running * PAGE_TOKENS / 2,
            min(slots, used, running), self.waiting_for_slots, seconds, 1.0,
        )  # fmt: skip

    @property
    def waiting_for_slots(self) -> float:
        """Requests; all are passed over in every iteration, also in one whose batch is full."""
        return self.number("waiting_mean") if self.number("slots") < self.number("adapters") else 0.0

    @property
    def steady(self) -> bool:
        """Do its mean iterations say what an iteration costs? Not where rows come and go in waves: there adapters come
        to slots with most requests, or a few slots with all that wait for them."""
        if self.number("running_mean") <= 0 or self.number("slots") >= self.number("adapters"):
            return self.number("running_mean") > 0
        sample, full = self.sample(), self.number("kv_use_mean") > FULL_MEMORY
        return self.waiting_for_slots > MANY and (
            full or sample.prompt_tokens > FULL_BATCH * (BATCH_TOKENS - sample.decode_rows)
        )

    def arrivals(self, seed: int) -> Iterator[EngineRequest]:
        """Draw requests, as many as the rates give on average, at random times, for adapters by their rates."""
        from scipy.stats import gamma, norm  # here: half a second, which a simulated hour alone needs

        rng = np.random.default_rng(seed)
        total = sum(self.rates)
        count = round(total * HORIZON_S)
        times = np.sort(rng.random(count)) * HORIZON_S
        owners = rng.choice(len(self.rates), count, p=np.array(self.rates) / total)
        first, second = rng.standard_normal((2, count))
        second = CORRELATION * first + (1 - CORRELATION**2) ** 0.5 * second
        prompts = gamma.ppf(norm.cdf(first), PROMPT_SHAPE, scale=PROMPT_TOKENS / PROMPT_SHAPE).clip(4, LONGEST_PROMPT)
        answers = gamma.ppf(norm.cdf(second), ANSWER_SHAPE, scale=ANSWER_TOKENS[self.model] / ANSWER_SHAPE).clip(
            2, LONGEST_ANSWER
        )
        for at_s, prompt, answer, owner in zip(times.tolist(), prompts, answers, owners.tolist(), strict=True):
            yield EngineRequest(at_s, int(prompt), int(answer), owner)


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of an engine with adapters; `costs` lacks slots and rank, which are a run's."""

    base: Efficiency
    costs: Mapping[str, float]
    penalty_us: float

    def model(self, name: str, slots: Any, max_rank: Any, registered: Any) -> Roofline:
        """Return the roofline with these slots for these adapters: numbers, or arrays of them."""
        costs = AdapterCosts(slots, max_rank, registered, **self.costs)
        penalty_us = self.penalty_us if name in PENALISED else None
        return Roofline(accelerator(DEVICE), shape(name), self.base, adapters=costs, penalty_us=penalty_us)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run simulated."""

    finished: int
    ttft_s: float
    tpot_s: float
    preemptions: int


def shape(name: str) -> Architecture:
    """Return the model's sizes."""
    return architecture(MODELS[name])


def finished(run: AdapterRun, constants: Constants, seed: int = 0) -> Outcome:
    """Simulate the run for its hour; what waits or runs then is dropped."""
    slots = int(run.row["slots"])
    model = constants.model(run.model, slots, int(run.row["max_rank"]), len(run.rates))
    limits = EngineLimits(run.number("kv_tokens"), MAX_SEQUENCES, BATCH_TOKENS, slots=slots)
    engine = EngineSimulation(model, limits)
    ended = serve(engine, run.arrivals(seed), HORIZON_S, max_waiting=MAX_WAITING)
    ttft, tpot = (float(np.mean([getattr(one, name) for one in ended])) for name in ("ttft_s", "tpot_s"))
    return Outcome(len(ended), ttft, tpot, engine.preemptions)


def runs(data: Path) -> list[AdapterRun]:
    """Read the hour-long runs that finished and whose log is its own."""
    path = find(RUNS, data)
    every = table(path, RUN_COLUMNS) if path else ()
    usable = (row for row in every if row["family"] in FAMILIES and row["status"] == "ok" and row["suspect"] != "1")
    return [AdapterRun(row) for row in usable if known(MODELS, row["model"], "model")]


def probes(data: Path) -> list[Sample]:
    """Read engine probes: decode steps with and without adapters, prompts without."""
    path = find(PROBES, data)
    every = table(path, PROBE_COLUMNS) if path else ()
    usable = (row for row in every if row["status"] == "ok" and float(row["completed"] or 0) >= FEWEST_REQUESTS)
    return [_probe(row) for row in usable if row["kind"] in PROBE_KINDS]


def _probe(row: Mapping[str, str]) -> Sample:
    requests = float(row["completed"])
    prompt, answer = (float(row[name]) / requests for name in ("in_tokens", "out_tokens"))  # not the words asked for
    if row["kind"] == "base_prefill":
        prompts = BATCH_TOKENS / prompt
        seconds = float(row["duration_s"]) * prompts / requests
        tokens = prompts * prompt
        return Sample(row["model"], 0, 0, 0, prompts, tokens, tokens * prompt / 2, 0, 0, 0, 0, seconds, PROBE_WEIGHT)
    running, slots = float(row["running_busy"]), int(row["slots"] or 0)
    adapters = float(row["adapters"] or 0)
    used = adapters * (1 - (1 - 1 / adapters) ** running) if adapters > 1 else adapters
    seconds, context = float(row["itl_p50_ms"]) / 1e3, running * (prompt + answer / 2)
    return Sample(
        row["model"], slots, int(row["max_rank"] or 0), int(adapters), 0, 0, 0, running, context, used, 0, seconds,
        PROBE_WEIGHT,
    )  # fmt: skip


def load_us(data: Path) -> dict[str, float]:
    """Read by model how long an adapter takes from host memory to a slot: the median over all ranks."""
    path, found = find(PROBES, data), defaultdict[str, list[float]](list)
    for row in table(path, PROBE_COLUMNS) if path else ():
        if row["kind"] == "load_ms":
            found[row["model"]].append(1e3 * float(row["load_ms"]))
    return {model: float(np.median(times)) for model, times in found.items()}


def beginning(load_us: float) -> Constants:
    """Return the constants that a fit begins with."""
    return Constants(replace(efficiency("vllm"), **START), {**ADAPTERS, "load_us": load_us}, PENALTY_US)


def fit(samples: Sequence[Sample], start: Constants) -> Constants:
    """Fit the likeliest constants near those of the start; what a load takes stays."""
    from scipy.optimize import least_squares  # here: half a second, which a fit alone needs

    spreads = np.array([*BASE.values(), *(ADAPTER_SPREADS.get(name, 1.0) for name in ADAPTERS), PENALTY_SPREAD])
    groups = defaultdict[str, list[Sample]](list)
    for sample in samples:
        groups[sample.model].append(sample)
    order = [sample for group in groups.values() for sample in group]
    weights, seconds = (np.array([getattr(one, name) for one in order]) for name in ("weight", "seconds"))

    def constants(shifts: Array) -> Constants:
        factors = np.exp(shifts * spreads).tolist()
        base = {name: getattr(start.base, name) * factor for name, factor in zip(BASE, factors, strict=False)}
        costs = {n: start.costs[n] * factor for n, factor in zip(ADAPTERS, factors[len(BASE) :], strict=False)}
        return Constants(replace(start.base, **base), {**start.costs, **costs}, start.penalty_us * factors[-1])

    def residuals(shifts: Array) -> Array:
        predicted = np.concatenate([_seconds(constants(shifts), name, group) for name, group in groups.items()])
        return np.concatenate([weights * np.log(predicted / seconds) / SCALE, shifts])

    return constants(least_squares(residuals, np.zeros(len(spreads)), loss="soft_l1", max_nfev=60).x)


def toml(constants: Constants, command: str, fitted_on: int) -> str:
    """Return the costs of adapters as the text of a file."""
    about = f"# Fitted on {fitted_on} runs of {RUNS} and the probes of {PROBES}, both models."
    values = (f"{name} = {value:.4g}" for name, value in constants.costs.items())
    return "\n".join([f"# Written by `{command}`.", about, "", "[vllm]", *values]) + "\n"


def _seconds(constants: Constants, model: str, group: Sequence[Sample]) -> Array:
    names = ("prompts", "prompt_tokens", "pairs", "decode_rows", "context", "adapters")
    slots, ranks, registered, passed_over, *amounts = (
        np.array([getattr(one, name) for one in group], float)
        for name in ("slots", "max_rank", "registered", "passed_over", *names)
    )
    return constants.model(model, slots, ranks, registered).seconds_of(*amounts, passed_over=passed_over)


@dataclass(frozen=True)
class Predicted:
    """Runs with what the simulation made of them."""

    runs: Sequence[AdapterRun]
    outcomes: Sequence[Outcome]

    @cached_property
    def ratios(self) -> Array:
        """Simulated over measured finished requests."""
        pairs = zip(self.outcomes, self.runs, strict=True)
        return np.array([outcome.finished / run.number("completed") for outcome, run in pairs])

    def of(self, name: str, value: str | bool) -> "Predicted":
        """Return the runs of a model, of a family, or the saturated ones."""
        kept = [
            i for i, run in enumerate(self.runs) if (run.saturated if name == "saturated" else run.row[name]) == value
        ]
        return Predicted([self.runs[i] for i in kept], [self.outcomes[i] for i in kept])

    def lines(self, origin: Origin, case: str, target: str | None = None) -> Iterator[Line]:
        """Yield how far off the runs are, over all; the twin's share where it has all; nothing without runs."""
        if not self.runs:
            return
        off = np.abs(self.ratios - 1)
        twin = [run.row["twin_finished"] for run in self.runs]
        theirs = [float(one) / run.number("completed") for one, run in zip(twin, self.runs, strict=True) if one]
        baseline = float(np.mean(np.abs(np.array(theirs) - 1) <= WITHIN)) if len(theirs) == len(twin) else None
        yield origin.line(case, "runs", len(self.runs), "")
        within = float(np.mean(off <= WITHIN))
        yield origin.line(case, "finished within 5 %", within, "share", baseline=baseline, target=target)
        for percent in (50, 90):
            yield origin.line(case, f"finished off by, p{percent}", float(np.quantile(off, percent / 100)), "share")
        yield origin.line(case, "finished, simulated / measured, p50", float(np.median(self.ratios)), "")
        between = [
            one.tpot_s * 1e3 / run.number("tpot_mean_ms") for one, run in zip(self.outcomes, self.runs, strict=True)
        ]
        yield origin.line(case, "mean TPOT off by, p50", float(np.median(np.abs(np.array(between) - 1))), "share")

    def cliffs(self, origin: Origin, case: str) -> Iterator[Line]:
        """Loads that were measured with three numbers of slots or more: is the simulated best setting a good one?"""
        settings = defaultdict[tuple[str, ...], list[int]](list)
        for number, run in enumerate(self.runs):
            settings[tuple(run.row[name] for name in ("model", "adapters", "rates_req_s", "ranks"))].append(number)
        kept = list[float]()
        for group in (group for group in settings.values() if len(group) >= FEWEST_SETTINGS):
            done = [self.runs[i].number("completed") for i in group]
            best = int(np.argmax([self.outcomes[i].finished for i in group]))
            kept.append(done[best] / max(done))
        yield origin.line(case, "loads with several numbers of slots", len(kept), "")
        if not kept:
            return
        yield origin.line(
            case, "finished at the slots simulated best, of the best, mean", float(np.mean(kept)), "share"
        )
        yield origin.line(case, "the same, least", float(min(kept)), "share")


def iterations(
    origin: Origin,
    known: Sequence[AdapterRun],
    probed: Sequence[Sample],
    other: Mapping[str, Constants],
    own: Mapping[str, Constants],
) -> Iterator[Line]:
    """Mean iterations of all runs, not simulated: what the terms miss, and what fits of a model on itself reach."""
    for model in MODELS:
        running = [run.sample() for run in known if run.model == model and run.steady]
        probes_of = [one for one in probed if one.model == model]
        for how, constants in (
            ("fitted on the other model", other[model]),
            ("with probes of its own", own[model]),
            ("fitted on its own runs", fit([*running, *probes_of], own[model])),
        ):
            for what, samples in (("runs", running), ("probes of the base", [one for one in probes_of if one.base])):
                case = f"adapters, iterations of {what}, {how}, {model}"
                ratios = _seconds(constants, model, samples) / np.array([one.seconds for one in samples])
                yield origin.line(case, "predicted / measured, p50", float(np.median(ratios)), "")
                for percent in (50, 90):
                    off = float(np.quantile(np.abs(ratios - 1), percent / 100))
                    yield origin.line(case, f"off by, p{percent}", off, "share")


def figures(origin: Origin, data: Path, constants_file: Path | None, every: int, jobs: int, bar: Bar) -> Iterator[Line]:
    """Measure both families, every `every`-th run of those that FAMILIES chooses.

    The shipped costs of adapters, of both models, are written to `constants_file` if there is one.
    """
    known, probed, loads = runs(data), probes(data), load_us(data)
    if constants_file:
        steady = [run.sample() for run in known if run.steady]
        fitted = fit([*steady, *probed], beginning(float(np.mean([*loads.values()]))))
        constants_file.write_text(toml(fitted, origin.command, len(steady)), encoding="utf-8")
    chosen = [
        run
        for family, step in FAMILIES.items()
        for run in [one for one in known if one.row["family"] == family][:: step * every]
    ]
    other, own = dict[str, Constants](), dict[str, Constants]()
    for model in MODELS:
        (another,) = (one for one in MODELS if one != model)
        steady = [run.sample() for run in known if run.model == another and run.steady]
        other[model] = fit([*steady, *(one for one in probed if one.model == another)], beginning(loads[another]))
        start = replace(other[model], costs={**other[model].costs, "load_us": loads[model]})
        own[model] = fit([one for one in probed if one.model == model], start)
    yield from iterations(origin, known, probed, other, own)
    for how, constants in (("fitted on the other model", other), ("with probes of its own", own)):
        with bar(f"adapters, {how}", len(chosen)) as advanced, ProcessPoolExecutor(jobs) as pool:
            outcomes = list[Outcome]()
            for outcome in pool.map(finished, chosen, [constants[run.model] for run in chosen]):
                outcomes.append(outcome)
                advanced(1)
        found = Predicted(chosen, outcomes)
        for family in FAMILIES:
            case, part = f"adapters {family}, {how}", found.of("family", family)
            yield from part.lines(origin, case, target=f">= {TARGET:g}")
            for model in MODELS:
                yield from part.of("model", model).lines(origin, f"{case}, {model}")
            yield from part.of("saturated", value=True).lines(origin, f"{case}, saturated")
        yield from found.of("family", "varied_1h").cliffs(origin, f"adapters varied_1h, {how}")
