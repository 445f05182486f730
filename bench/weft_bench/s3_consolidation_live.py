"""Consolidation live: three runners of the quickstart while load rises and falls

The load of Punica's picture within twenty minutes: requests arrive at random at a rate that rises to 90 % of what three
runners sustain, and falls again, once with `consolidation: always` and once with `never`. A step lasts 200 ms whatever
it computes, as it would on a device of its own, and beyond 8 sequences in proportion to them: the best batch is 8, as
each runner finds itself, and it takes 10. Requests are for the base and three adapters, for 30 to 500 tokens (log-
normal, 150 on average). At most one runner is emptied in ten seconds. Rows of 120 s are of pools that had a period, of
a second: all times were a tenth of these.

A slice of fifty seconds is what a minute is in the simulated picture: full, idle and partial runners are counted in the
same way, from what the supervisor lists every two seconds. Every token and its log probability are compared with the
same request's in an undisturbed run. No runner comes or goes.
"""

import asyncio
import math
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc.aio
import yaml

from weft.wire.v1.supervisor_pb2_grpc import AdminStub
from weft_bench.s3 import Context
from weft_bench.s3_consolidation import PEAK, Hour
from weft_sim.report import quantile
from weft_stage.errors import StackFailed
from weft_stage.lines import Line
from weft_stage.reports import books, listed
from weft_stage.stack import WORDS, Stack, quickstart
from weft_stage.trace_executor import trace_up
from weft_trouble.fault_stage import MODELS
from weft_trouble.fault_streams import Ask, Difference, Stream, Streams, difference, recorded

RUNNERS, BEST_BATCH, SEQUENCES = 3, 8, 10
STEP_MS = 200
SPAN_S, QUICK_SPAN_S = 1200.0, 300.0
SLICE_S, POLL_S = 50.0, 2.0
TOKENS, SIGMA, MIN_TOKENS, MAX_TOKENS = 150, 0.6, 30, 500
ASKS = 96  # different ones
SETTINGS = ("always", "never")
SHAPE = "slices with at most one partial runner that receives"


@dataclass
class Watched:
    """One run. `slices`: as the simulator's minutes."""

    hour: Hour
    streams: list[Stream] = field(default_factory=list[Stream])
    wrong: Difference = field(default_factory=Difference)


def run(context: Context) -> Iterator[Line]:
    """Every setting that is not there, on the same requests."""
    span_s = QUICK_SPAN_S if context.quick else SPAN_S
    for setting in SETTINGS:
        case = f"consolidation-live, {RUNNERS} runners, {span_s:g} s, {setting}"
        if context.missing(case, SHAPE):
            with context.bar(case, 1) as advanced:
                yield from _lines(context, case, setting, *_run(context, setting, span_s))
                advanced(1)


def asks_of(chance: random.Random) -> list[Ask]:
    """Different requests; an answer has exactly its `max_tokens`."""
    mean = math.log(TOKENS) - SIGMA * SIGMA / 2
    return [
        Ask(
            chance.choice(MODELS), " ".join(chance.choices(WORDS, k=6)),
            max(MIN_TOKENS, min(MAX_TOKENS, round(chance.lognormvariate(mean, SIGMA)))), 0.0, number,
        )
        for number in range(ASKS)
    ]  # fmt: skip


def arrivals(chance: random.Random, asks: Sequence[Ask], span_s: float) -> list[tuple[float, Ask]]:
    """Poisson; the rate is a triangle, whose peak is `PEAK` of what all runners sustain at their best batch."""
    tokens = sum(ask.max_tokens for ask in asks) / len(asks)
    most_s = PEAK * RUNNERS * BEST_BATCH / (tokens * STEP_MS / 1e3)
    at_s, found = 0.0, list[tuple[float, Ask]]()
    while (at_s := at_s + chance.expovariate(most_s)) < span_s:
        if chance.random() < 1 - abs(2 * at_s / span_s - 1):
            found.append((at_s, chance.choice(asks)))
    return found


def _run(context: Context, setting: str, span_s: float) -> tuple[Watched, float]:
    """What it showed, and how many requests migrated. Raises StackFailed."""
    chance = random.Random(f"{context.seed}/consolidation-live")
    asks = asks_of(chance)
    requests = arrivals(chance, asks, span_s)
    with TemporaryDirectory(prefix="weft-bench-") as scratch:
        manifests = _manifests(Path(scratch) / "manifests", setting)
        (table := Path(scratch) / "answers").touch()
        up = trace_up(table, STEP_MS, BEST_BATCH)
        with Stack(manifests, Path(scratch) / "data", up=up) as stack:
            stack.wait_for_models()
            watched = asyncio.run(_watch(stack, asks, requests, span_s))
            return watched, stack.metric("scheduler", "weft_scheduler_consolidations_total")


def _manifests(folder: Path, setting: str) -> Path:
    """The quickstart's, with a pool for this run."""
    shutil.copytree(quickstart(), folder)
    (path,) = folder.glob("*-pool.yaml")
    pool = yaml.safe_load(path.read_text(encoding="utf-8"))
    advanced = {"maxSequences": SEQUENCES, "consolidation": setting}
    pool["spec"] |= {"replicas": RUNNERS, "advanced": advanced, "slo": {"tokenTimeMs": 10 * STEP_MS}}
    path.write_text(yaml.safe_dump(pool), encoding="utf-8")
    return folder


async def _watch(stack: Stack, asks: Sequence[Ask], requests: Sequence[tuple[float, Ask]], span_s: float) -> Watched:
    """Undisturbed answers first, then the requests at their times while runners are watched."""
    async with grpc.aio.insecure_channel(stack.address("supervisor")) as channel:
        admin = AdminStub(channel)
        expected = await recorded(stack.url, asks)
        best = {book.spec.good_sequences for book in books(await listed(admin))}
        if best != {BEST_BATCH}:
            raise StackFailed(f"the runners find a best batch of {sorted(best)}, not {BEST_BATCH}: the machine is busy")
        watched = Watched(Hour(BEST_BATCH, math.ceil(span_s / SLICE_S)))
        began = time.perf_counter()
        async with Streams(stack.url, "live") as streams, asyncio.TaskGroup() as group:
            group.create_task(_sample(admin, watched.hour, began, span_s))
            for at_s, ask in requests:
                await asyncio.sleep(began + at_s - time.perf_counter())
                watched.streams += streams.start([ask])
    for stream in watched.streams:
        if stream.error:
            raise StackFailed(f"{stream.request_id}: {stream.error}")
        watched.wrong += difference(expected[stream.ask], stream.tokens)
    return watched


async def _sample(admin: AdminStub, hour: Hour, began: float, span_s: float) -> None:
    """Every runner's batch, and what is new there."""
    before: dict[str, set[str]] = {}
    while (elapsed_s := time.perf_counter() - began) < span_s:
        here = {book.spec.name: set(book.sequences) for book in books(await listed(admin))}
        part = int(elapsed_s / SLICE_S)
        hour.sample(part, {name: len(sequences) for name, sequences in here.items()})
        for name, sequences in here.items():
            hour.of(name, part).received += len(sequences - before.get(name, set()))
        before = here
        await asyncio.sleep(POLL_S)


def _lines(context: Context, case: str, setting: str, watched: Watched, migrated: float) -> Iterator[Line]:
    line, hour, streams = context.origin.line, watched.hour, watched.streams
    wrong = watched.wrong
    yield line(case, "requests", len(streams), "")
    yield line(case, "tokens lost, repeated or wrong", wrong.lost + wrong.repeated + wrong.wrong, "", target="<= 0")
    aimed = setting == "always" and not context.quick
    yield line(case, SHAPE, hour.in_shape(), "share", target=">= 0.95" if aimed else None)
    yield line(case, "runner-seconds, of an ideal packing", hour.busy / hour.ideal, "x")
    yield line(case, "requests that migrated for it", migrated / len(streams), "share")
    ttft = [1e3 * (stream.read_at[0] - stream.started) for stream in streams]
    tpot = [1e3 * (one.read_at[-1] - one.read_at[0]) / (len(one.tokens) - 1) for one in streams]
    yield line(case, "p99 TTFT", quantile(ttft, 0.99), "ms")
    yield line(case, "p99 time per token", quantile(tpot, 0.99), "ms")
