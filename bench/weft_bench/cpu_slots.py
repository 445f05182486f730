"""Many adapters over few slots: what a request waits for before its first token.

Each request is one of a closed loop of `STREAMS`. Its time to first token is parted at what the engine did for it:
from its arrival until a slot was ordered for its adapter, from there until the adapter sat in the slot, and the rest,
which is prefill and its place in the batch. A request whose adapter sat in a slot when it came is a hit, and has only
the rest.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft_bench.cpu_context import Context, Reporter
from weft_bench.cpu_engine import Ask, Life, Played, Sizes, Subject
from weft_bench.cpu_shapes import RANK, drawn, prompts
from weft_bench.cpu_witness import SlotLoad
from weft_bench.lines import Line
from weft_bench.path import percentile

SLOTS, STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 16, 64, 32
FOLDERS = 32  # adapters on disk; each stands for several digests, and so is read and packed anew for each of them
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Parts:
    """A time to first token, in the order of what was waited for; seconds."""

    slot_s: float
    load_s: float
    rest_s: float
    hit: bool

    @property
    def ttft_s(self) -> float:
        return self.slot_s + self.load_s + self.rest_s


def slots_case(context: Context) -> Iterator[Line]:
    """Crowds of adapters by popularity 1 / i and alike, against slots that hold every adapter (warm)."""
    amounts = context.options.amounts
    sizes = Sizes(rows=STREAMS, slots=SLOTS, context_tokens=PROMPT_TOKENS + OUTPUT_TOKENS, prefills=1)
    with context.subject(sizes) as subject:
        reporter, rng = context.on(subject), random.Random(context.options.seed)
        asks = _asks(context, subject, rng, drawn(rng, SLOTS, max(amounts.crowd_requests // 4, SLOTS), zipf=False))
        subject.play(asks, streams=STREAMS)
        warm = _parts(subject.play(asks_again(context, rng, asks), streams=STREAMS), subject.witness.loads)
        yield from _percentiles(reporter, f"{SLOTS} adapters over {SLOTS} slots", "TTFT", [p.ttft_s for p in warm])
        for crowd in amounts.crowds:
            for zipf in (True, False):
                yield from _crowd(context, reporter, subject, rng, crowd, warm, zipf=zipf)


def parts(life: Life, loads: Sequence[SlotLoad]) -> Parts:
    """A request's time to first token, by the load that it waited for; `loads` of its own adapter, oldest first."""
    for load in loads:
        if life.posted < load.seated <= life.first:
            ordered = max(load.ordered, life.posted)  # on its way already: somebody else had asked
            return Parts(ordered - life.posted, load.seated - ordered, life.first - load.seated, hit=False)
    return Parts(0.0, 0.0, life.ttft_s, hit=True)


def asks_again(context: Context, rng: random.Random, asks: Sequence[Ask]) -> list[Ask]:
    """The same adapters with prompts that were never asked before."""
    made = prompts(rng, len(asks), PROMPT_TOKENS, context.model.shape.vocab)
    return [Ask(ask.adapter, prompt, ask.tokens) for ask, prompt in zip(asks, made, strict=True)]


def _crowd(
    context: Context, reporter: Reporter, subject: Subject, rng: random.Random, crowd: int, warm: list[Parts],
    *, zipf: bool,
) -> Iterator[Line]:  # fmt: skip
    requests = max(context.options.amounts.crowd_requests, 2 * crowd)
    asks = _asks(context, subject, rng, drawn(rng, crowd, requests, zipf=zipf))
    label = "popularity 1/i" if zipf else "alike"
    with context.bar(f"{context.model.name}: {crowd} adapters, {label}", requests) as advanced:
        played = subject.play(asks, streams=STREAMS, advanced=advanced)
    loads = list(subject.witness.loads)
    yield from _lines(reporter, f"{crowd} adapters over {SLOTS} slots, {label}", _parts(played, loads), loads, warm)


def _asks(context: Context, subject: Subject, rng: random.Random, adapters: Sequence[int]) -> list[Ask]:
    made = prompts(rng, len(adapters), PROMPT_TOKENS, context.model.shape.vocab)
    digests = [f"crowd-{context.model.name}-{number}" for number in adapters]
    for number, digest in zip(adapters, digests, strict=True):
        folder = context.model.digest(subject, number % FOLDERS, RANK)
        subject.adapters.paths[digest] = subject.adapters.paths[folder]
    return [Ask(digest, prompt, OUTPUT_TOKENS) for digest, prompt in zip(digests, made, strict=True)]


def _parts(played: Played, loads: Sequence[SlotLoad]) -> list[Parts]:
    mine: dict[str, list[SlotLoad]] = {}
    for load in loads:
        mine.setdefault(load.digest, []).append(load)
    return [parts(life, mine.get(life.ask.adapter, ())) for life in played.lives]


def _lines(
    reporter: Reporter, case: str, found: list[Parts], loads: Sequence[SlotLoad], warm: list[Parts]
) -> Iterator[Line]:
    ttft, warm_ttft = [part.ttft_s for part in found], [part.ttft_s for part in warm]
    yield reporter.line(case, "hit rate", sum(part.hit for part in found) / len(found), "share")
    yield reporter.line(case, "adapters loaded", sum(load.n_bytes for load in loads) / MIB, "MiB")
    yield from _percentiles(reporter, case, "TTFT", ttft)
    yield from _percentiles(reporter, case, "TTFT: queueing for a slot", [part.slot_s for part in found])
    yield from _percentiles(reporter, case, "TTFT: load", [part.load_s for part in found])
    yield from _percentiles(reporter, case, "TTFT: prefill and batch", [part.rest_s for part in found])
    one_load_s = percentile([load.seconds for load in loads] or [0.0], 99)
    allowed_s = percentile(warm_ttft, 99) + percentile([part.slot_s for part in found], 99) + one_load_s
    over = percentile(ttft, 99) / allowed_s
    yield reporter.line(case, "TTFT p99 / (warm TTFT + queueing for a slot + one load)", over, "x", target="<= 1")


def _percentiles(reporter: Reporter, case: str, metric: str, seconds: Sequence[float]) -> Iterator[Line]:
    for percent in (50, 99):
        yield reporter.line(case, f"{metric} p{percent}", percentile(seconds, percent) * 1e3, "ms")
