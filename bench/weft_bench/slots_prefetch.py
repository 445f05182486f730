"""Forecast prefetch: the clients of ServeGen as adapters, with it and without

Two hours of requests as the clients of a ServeGen pool send them (rates, bursts and gap laws by ten minutes; Alibaba,
Apache 2.0), each client an adapter, 0.5 requests a second in all. The disks of all runners are empty at the beginning.
An adapter has 80 MiB (rank 16 of all projections of an 8B model): it comes from the depot over the runner's link, which
fetches share, then to the device in 50 ms. So that placement spreads the load with few tokens to simulate, a runner
computes one request at a time, and a step stands for a second of its answer.

*Cold* are the requests that reach a runner whose disk lacks their adapter while `prefetch` is `never`; the same
requests are then measured with `forecast`. The target is for those after the first hour, which is the forecast's
history; before it most cold requests are the first of their adapter, which nothing foresees. *In vain* is what was
fetched and used by no request of that runner until the end, or until the runner was replaced by one with an empty disk.
"""

import csv
import gzip
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from weft.domain.machine import Received
from weft.domain.request import Start
from weft_bench.charts import groups
from weft_bench.cpu_context import Bar
from weft_bench.errors import BenchFailed
from weft_bench.lines import Line, Origin, newest
from weft_sim.clock import Rank
from weft_sim.executor_model import StepTimes
from weft_sim.process import Process
from weft_sim.report import quantile
from weft_sim.shells import RunnerShell
from weft_sim.simulate import PoolDescription, deployment_of, simulate
from weft_sim.stack import World
from weft_sim.traces import TraceArrival

CLIENTS = "servegen_clients.csv.gz"
WINDOW_S, SPAN_S, HISTORY_S, RATE_S = 600.0, 2 * 3600.0, 3600.0, 0.5
PROMPT, ANSWER, SECOND_MS = 128, 3, 1000.0
ADAPTER_MIB = 80.0
POOL = PoolDescription(
    total_pages=256, max_sequences=1, best_batch=1, max_prefills=1, slots=32, adapter_mib=ADAPTER_MIB, load_ms=50.0,
    cpu=False,
)  # fmt: skip
TIMES = StepTimes(20.0, SECOND_MS, 0.05)  # a prompt's step has no decode row
OFF, ON, RATIO = "TTFT p90, never", "TTFT p90, forecast", "TTFT p90, forecast / never"
COLD, LEFT = "cold requests, never", "of them cold with the forecast, too"
FETCHED, VAIN = "fetched by the forecast", "of it in vain"
AFTER, WHOLE, ALL = "cold after an hour", "cold, from the beginning", "all requests"


@dataclass(frozen=True, slots=True)
class Case:
    """`replaced_s`: every so often one runner in turn is replaced by one with an empty disk; 0: none is."""

    clients: str
    runners: int
    gbit_s: float
    replaced_s: float = 0.0

    @property
    def name(self) -> str:
        fleet = f"{self.clients}, {self.runners} runners, {self.gbit_s:g} Gbit/s"
        return fleet + (f", one replaced every {self.replaced_s / 60:g} min" if self.replaced_s else "")


CASES = (
    Case("m-large", 8, 1.0),
    Case("m-large", 8, 1.0, 1800.0),
    Case("deepseek-r1", 8, 1.0),
)


class Trace(NamedTuple):
    """`adapters`: every client of the pool, whether it sends a request that day or not."""

    arrivals: list[TraceArrival]
    adapters: int


@dataclass(slots=True)
class Watched:
    """What the runners of one run did."""

    cold: set[str] = field(default_factory=set[str])  # requests
    ttft_s: dict[str, float] = field(default_factory=dict[str, float])
    fetched: int = 0
    vain: int = 0


def figures(origin: Origin, path: Path, known: Iterable[Line], *, seed: int, quick: bool, bar: Bar) -> Iterator[Line]:
    """The lines of every case that is not known. Raises BenchFailed."""
    there = {line.key for line in known}
    label = f", seed {seed}" + (" (quick)" if quick else "")
    cases = CASES[:1] if quick else CASES
    with bar("prefetch", len(cases)) as advance:
        for case in cases:
            name = case.name + label
            if (name, VAIN, origin.machine) not in there:
                trace = trace_of(path, case.clients, seed, quick)
                yield from _lines(origin, case, name, trace, seed, quick)
            advance(1)


def _lines(origin: Origin, case: Case, name: str, trace: Trace, seed: int, quick: bool) -> Iterator[Line]:
    off, on = (measure(case, trace, mode, seed) for mode in ("never", "forecast"))
    late = {str(number) for number, arrival in enumerate(trace.arrivals) if arrival.at_s >= HISTORY_S}
    for which, chosen in ((AFTER, off.cold & late), (WHOLE, off.cold), (ALL, set(off.ttft_s))):
        if not chosen:
            raise BenchFailed(f"{name}: there are no requests that are {which}")
        before, after = (quantile([run.ttft_s[one] for one in chosen], 0.9) for run in (off, on))
        row, target = f"{name}, {which}", None if quick or which != AFTER else "<= 0.5"
        if which != ALL:
            yield origin.line(row, COLD, len(chosen), "")
            yield origin.line(row, LEFT, 100 * len(chosen & on.cold) / len(chosen), "%")
        yield origin.line(row, OFF, before * 1e3, "ms")
        yield origin.line(row, ON, after * 1e3, "ms")
        yield origin.line(row, RATIO, after / before, "x", target=target)
    yield origin.line(name, FETCHED, on.fetched * ADAPTER_MIB / 1024 / case.runners, "GiB a runner")
    yield origin.line(name, VAIN, 100 * on.vain / max(on.fetched, 1), "%")


def measure(case: Case, trace: Trace, prefetch: str, seed: int) -> Watched:
    """One run to its last answer."""
    arrivals, adapters = trace
    fetch_ms = ADAPTER_MIB * (1 << 20) * 8 / (case.gbit_s * 1e9) * 1e3
    pool = replace(POOL, runners=case.runners, adapters=adapters, fetch_ms=fetch_ms, prefetch=prefetch)
    deployment = deployment_of(pool)
    runners = tuple(replace(plan, times=TIMES) for plan in deployment.runners)
    watched, worlds = Watched(), list[World]()

    def started(process: Process, event: object, _: float) -> None:
        shell = process.shell
        if isinstance(event, Received) and isinstance(event.message, Start) and isinstance(shell, RunnerShell):
            if event.message.adapter not in shell.on_disk:
                watched.cold.add(event.message.request_id)
            shell.prefetched.discard(event.message.adapter)

    def count(shell: RunnerShell) -> None:
        watched.vain += len(shell.prefetched)
        watched.fetched += shell.prefetches

    def replaced(world: World, number: int) -> None:
        process = [*world.runners.values()][number % case.runners]
        shell = process.shell
        assert isinstance(shell, RunnerShell)
        process.crash()
        count(shell)
        shell.empty()
        process.start()
        world.clock.after(case.replaced_s, Rank.FAULT, replaced, world, number + 1)

    def attach(world: World) -> None:
        worlds.append(world)
        for process in world.runners.values():
            process.on_event = started
        if case.replaced_s:
            world.clock.after(case.replaced_s, Rank.FAULT, replaced, world, 0)

    result = simulate(pool, arrivals, seed, deployment=replace(deployment, runners=runners), attach=attach).figures
    if result.failures or len(result.served) != len(arrivals):
        raise BenchFailed(f"{len(result.served)} of {len(arrivals)} requests were answered: {result.failures}")
    (world,) = worlds
    for process in world.runners.values():
        assert isinstance(process.shell, RunnerShell)
        count(process.shell)
    watched.ttft_s = {r.id: (r.first_at or 0.0) - r.arrived for r in world.clients.values()}
    return watched


def trace_of(path: Path, clients: str, seed: int, quick: bool) -> Trace:
    """The first day of a pool's clients: each a renewal process in its own count of expected requests."""
    span_s = HISTORY_S + WINDOW_S if quick else SPAN_S
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["pool"] == clients]
    names = sorted({int(row["client"]) for row in rows})
    windows = [row for row in rows if float(row["window_start_s"]) < span_s]
    factor = RATE_S * span_s / sum(float(row["rate_req_s"]) for row in windows)
    found: list[TraceArrival] = []
    for adapter, client in enumerate(names):
        chance = random.Random(f"servegen {seed} {client}")
        due = None
        for row in sorted((r for r in windows if int(r["client"]) == client), key=lambda r: float(r["window_start_s"])):
            gap, shape = row["gap_law"], float(row["gap_shape"])
            expected, at = factor * float(row["rate_req_s"]), 0.0
            due = chance.random() * _gap(chance, gap, shape) if due is None else due
            while due < expected - at:
                at += due
                at_s = float(row["window_start_s"]) + WINDOW_S * at / expected
                found.append(TraceArrival(at_s, PROMPT, ANSWER, adapter))
                due = _gap(chance, gap, shape)
            due -= expected - at
    return Trace(sorted(found, key=lambda arrival: arrival.at_s), len(names))


def _gap(chance: random.Random, law: str, shape: float) -> float:
    """Between two requests, of mean 1."""
    if law == "G":
        return chance.gammavariate(shape, 1.0) / shape
    return chance.weibullvariate(1.0, shape) / math.gamma(1 + 1 / shape)


def about(lines: Iterable[Line], picture: Path, folder: Path) -> str:
    """What the page says of it, with its picture, which it draws anew; "" without a figure."""
    values: dict[str, dict[str, float]] = {}
    for line in newest(lines):
        case, _, which = line.case.rpartition(", cold")
        if line.metric in (OFF, ON) and f"cold{which}" == AFTER and line.value is not None and "quick" not in case:
            values.setdefault(case.rpartition(", seed")[0], {})[line.metric.rpartition(", ")[2]] = line.value
    if not values:
        return ""
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text(
        groups("TTFT p90 of requests that are cold without it, after an hour", "ms", values), encoding="utf-8"
    )
    title, _, text = (__doc__ or "").strip().partition("\n\n")
    return f"### {title}\n\n{text}\n\n![TTFT p90 of cold requests]({picture.relative_to(folder).as_posix()})"
