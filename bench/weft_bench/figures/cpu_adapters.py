"""Adapters that come and go: loads beside a decoding batch, and many adapters over few slots.

A time to first token has three parts: queueing, until the adapter has a slot and the loader has done earlier loads; the
load; and the rest, which is prefill and the request's place in the batch. A hit has only the rest.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from weft.domain.adapter import DesiredAdapter, DesiredChange
from weft.domain.machine import Kind, Peer, Received
from weft.domain.runner import RunnerOrder
from weft_bench.cpu_shapes import RANK, drawn, prompts
from weft_bench.drive.cpu import Bench, Reporter
from weft_bench.drive.engine import FOLDERS, PROMPT_TOKENS, Decoded, Model, Sizes, Subject, base, decode
from weft_bench.roofline import lora_bytes
from weft_stage.cpu_witness import SlotLoad
from weft_stage.lines import Line, percentile
from weft_stage.playing import Ask, Life, Played

MIB = 1 << 20
SUPERVISOR = Peer(Kind.SUPERVISOR, "bench")
ROWS, LOAD_SLOTS = 8, 4  # pinned adapters may have all slots but one: an engine has one more
QUIET, LOADING = "nothing loads", "adapters load"
SLOTS, STREAMS, OUTPUT_TOKENS = 8, 16, 32
OVER = "TTFT without queueing p99 / (warm TTFT p99 + one load p99)"


@dataclass(slots=True)
class Flow:
    """Order adapters without end, the next once all are in slots. `ordered`: the number ordered so far."""

    model: Model
    subject: Subject
    ordered: int = 0
    version: int = 0
    present: tuple[str, ...] = ()
    seated: int = 0
    n_bytes: int = 0

    def flow(self) -> None:
        """Order the next adapters once all that were ordered are in their slots."""
        self._count()
        if self.seated == self.ordered:
            numbers = range(self.ordered, self.ordered + LOAD_SLOTS)
            self._order(tuple(DesiredAdapter(self._digest(number), 0, 0, pinned=True) for number in numbers))
            self.ordered += LOAD_SLOTS

    def stop(self) -> None:
        """Wait for the adapters on their way, then let all of them go."""
        self._count()
        while self.seated < self.ordered:
            self.subject.engine.run_once()
            self._count()
        self._order(())

    def beside(self, run: Callable[[], Decoded]) -> tuple[Decoded, int, float]:
        """Return what `run` returns, the bytes of the adapters that were seated meanwhile, and its seconds."""
        self._count()
        before, started = self.n_bytes, time.perf_counter()
        done = run()
        wall_s = time.perf_counter() - started
        self._count()
        return done, self.n_bytes - before, wall_s

    def _order(self, adapters: tuple[DesiredAdapter, ...]) -> None:
        self.version += 1
        removed, self.present = self.present, tuple(adapter.digest for adapter in adapters)
        change = DesiredChange(self.version, full=True, adapters=adapters, removed=removed)
        self.subject.engine.post(Received(SUPERVISOR, RunnerOrder(change)))

    def _count(self) -> None:
        self.seated += len(self.subject.witness.loads)
        self.n_bytes += sum(load.n_bytes for load in self.subject.witness.loads)
        self.subject.witness.loads.clear()

    def _digest(self, number: int) -> str:
        return self.model.alias(self.subject, f"stream-{self.model.name}-{number}", number)


def loading(bench: Bench) -> Iterator[Line]:
    """Measure decode steps of the base with and without loads beside them, in turn."""
    tokens, repetitions, model = bench.amounts.tokens, bench.amounts.repetitions, bench.model
    sizes = Sizes(rows=ROWS, slots=LOAD_SLOTS + 1, context_tokens=PROMPT_TOKENS + tokens, prefills=ROWS)
    steps: dict[str, list[float]] = {QUIET: [], LOADING: []}
    with bench.subject(sizes) as subject, bench.progress("loading", repetitions + 1) as advance:
        flow, n_bytes, wall_s = Flow(model, subject), 0, 0.0
        for number in range(FOLDERS):
            model.digest(subject, number)  # written now, not between two steps
        for number in range(repetitions + 1):
            for kind, between in ((QUIET, None), (LOADING, flow.flow)):
                done, seated, took_s = flow.beside(
                    lambda between=between: decode(model, subject, base(ROWS), tokens, between=between)
                )
                flow.stop()
                if number:
                    steps[kind] += done.steps_s
                if number and kind == LOADING:
                    n_bytes, wall_s = n_bytes + seated, wall_s + took_s
            advance(1)
        reporter, case = bench.on(subject), f"batch {ROWS}, base"
        for kind, seconds in steps.items():
            for percent in (50, 99):
                yield reporter.line(case, f"decode step p{percent}, {kind}", percentile(seconds, percent) * 1e3, "ms")
        for metric, of, target in (("p50", median, "<= 1.1"), ("mean", fmean, None)):
            ratio = of(steps[LOADING]) / of(steps[QUIET])
            yield reporter.line(case, f"decode step {metric}, {LOADING} / {QUIET}", ratio, "x", target=target)
        yield reporter.line(case, "adapters loaded beside the steps", n_bytes / MIB / wall_s, "MiB/s", target=">= 60")


def slots(bench: Bench) -> Iterator[Line]:
    """Measure a closed loop of streams over adapters that do not fit, beside as many requests for seated adapters."""
    sizes = Sizes(rows=STREAMS, slots=SLOTS, context_tokens=PROMPT_TOKENS + OUTPUT_TOKENS, prefills=1)
    room = 2 * STREAMS * lora_bytes(bench.model.shape, RANK)  # a load that waits for a slot has its pages already
    with bench.subject(sizes, adapter_bytes=room) as subject:
        reporter, rng = bench.on(subject), random.Random(bench.options.seed)

        def play(adapters: Sequence[int], crowd: str) -> Played:
            made = prompts(rng, len(adapters), PROMPT_TOKENS, bench.model.shape.vocab)
            digests = [bench.model.alias(subject, f"{crowd}, {number}", number) for number in adapters]
            asks = [Ask(digest, prompt, OUTPUT_TOKENS) for digest, prompt in zip(digests, made, strict=True)]
            return subject.play(asks, streams=STREAMS)

        for crowd in bench.amounts.crowds:
            requests = max(bench.amounts.crowd_requests, 2 * crowd)
            play(range(SLOTS), "warm")
            warm_s = [life.ttft_s for life in play(drawn(rng, SLOTS, requests, zipf=False), "warm").lives[STREAMS:]]
            yield from _percentiles(reporter, f"{SLOTS} adapters over {SLOTS} slots, beside {crowd}", "TTFT", warm_s)
            for zipf in (True, False):
                case = f"{crowd} adapters over {SLOTS} slots, {'popularity 1/i' if zipf else 'alike'}"
                played = play(drawn(rng, crowd, requests, zipf=zipf), case)  # with digests that are new to the engine
                yield from _crowd(reporter, case, played, list(subject.witness.loads), warm_s)


def _crowd(
    reporter: Reporter, case: str, played: Played, loads: Sequence[SlotLoad], warm_s: Sequence[float]
) -> Iterator[Line]:
    by_adapter: dict[str, list[SlotLoad]] = {}
    for load in loads:
        by_adapter.setdefault(load.digest, []).append(load)
    # The first request of each stream comes with all others, and is left out.
    ttfts = [parts(life, by_adapter.get(life.ask.adapter, ())) for life in played.lives[STREAMS:]]
    yield reporter.line(case, "hit rate", sum(part.hit for part in ttfts) / len(ttfts), "share")
    yield reporter.line(case, "adapters loaded", sum(load.n_bytes for load in loads) / MIB, "MiB")
    yield from _percentiles(reporter, case, "TTFT", [part.ttft_s for part in ttfts])
    yield from _percentiles(reporter, case, "TTFT: queueing for slot and loader", [part.queue_s for part in ttfts])
    yield from _percentiles(reporter, case, "TTFT: load", [part.load_s for part in ttfts])
    yield from _percentiles(reporter, case, "TTFT: prefill and batch", [part.rest_s for part in ttfts])
    allowed_s = percentile(warm_s, 99) + percentile([load.seconds for load in loads] or [0.0], 99)
    over = percentile([part.ttft_s - part.queue_s for part in ttfts], 99) / allowed_s
    yield reporter.line(case, OVER, over, "x", target="<= 1")


def _percentiles(reporter: Reporter, case: str, metric: str, seconds: Sequence[float]) -> Iterator[Line]:
    for percent in (50, 99):
        yield reporter.line(case, f"{metric} p{percent}", percentile(seconds, percent) * 1e3, "ms")


@dataclass(frozen=True, slots=True)
class Parts:
    """A time to first token, in the order of what was waited for; seconds."""

    queue_s: float
    load_s: float
    rest_s: float
    hit: bool

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.load_s + self.rest_s


def parts(life: Life, loads: Sequence[SlotLoad]) -> Parts:
    """Divide a request's time to first token at the load that it waited for; `loads` of its adapter, oldest first."""
    for load in loads:
        if life.posted < load.seated <= life.first:
            begun = max(load.seated - load.seconds, life.posted)  # another request may have begun the load
            return Parts(begun - life.posted, load.seated - begun, life.first - load.seated, hit=False)
    return Parts(0.0, 0.0, life.ttft_s, hit=True)
