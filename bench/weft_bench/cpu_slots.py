"""Many adapters over few slots: what a request waits for before its first token.

Each request is one of a closed loop of `STREAMS`. Its time to first token is parted at what the engine did for it:
queueing, until its adapter had a slot and the one loader had done what came before; the load; and the rest, which is
prefill and its place in the batch. A request whose adapter sat in a slot when it came is a hit, and has only
the rest. The first request of each stream is left out: they come at once. The crowds are held against as many requests
for adapters that sit in their slots (warm). Each figure is of a single run.
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
from weft_bench.roofline import lora_bytes

SLOTS, STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 16, 64, 32
OVER = "TTFT without queueing p99 / (warm TTFT p99 + one load p99)"
MIB = 1 << 20


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


def slots_case(context: Context) -> Iterator[Line]:
    """Crowds of adapters by popularity 1 / i and alike, beside slots that hold every adapter (warm)."""
    amounts = context.options.amounts
    sizes = Sizes(rows=STREAMS, slots=SLOTS, context_tokens=PROMPT_TOKENS + OUTPUT_TOKENS, prefills=1)
    crowded = 2 * STREAMS * lora_bytes(context.model.shape, RANK)  # what waits for a slot is promised its pages
    with context.subject(sizes, adapter_bytes=crowded) as subject:
        reporter, rng = context.on(subject), random.Random(context.options.seed)
        for crowd in amounts.crowds:
            requests = max(amounts.crowd_requests, 2 * crowd)
            warm_s = [part.ttft_s for part in _warm(context, subject, rng, requests)]
            yield from _percentiles(reporter, f"{SLOTS} adapters over {SLOTS} slots, beside {crowd}", "TTFT", warm_s)
            for zipf in (True, False):
                yield from _crowd(context, reporter, subject, rng, drawn(rng, crowd, requests, zipf=zipf), warm_s, zipf)


def parts(life: Life, loads: Sequence[SlotLoad]) -> Parts:
    """A request's time to first token, by the load that it waited for; `loads` of its own adapter, oldest first."""
    for load in loads:
        if life.posted < load.seated <= life.first:
            begun = max(load.seated - load.seconds, life.posted)  # on its way already: somebody else had asked
            return Parts(begun - life.posted, load.seated - begun, life.first - load.seated, hit=False)
    return Parts(0.0, 0.0, life.ttft_s, hit=True)


def settled(played: Played, loads: Sequence[SlotLoad], streams: int = STREAMS) -> list[Parts]:
    """The parts of every request but the first of each stream, which come all at once."""
    mine: dict[str, list[SlotLoad]] = {}
    for load in loads:
        mine.setdefault(load.digest, []).append(load)
    return [parts(life, mine.get(life.ask.adapter, ())) for life in played.lives[streams:]]


def over_allowed(found: Sequence[Parts], warm_s: Sequence[float], loads: Sequence[SlotLoad]) -> float:
    """The p99 of what is waited for beside queueing, as a multiple of a warm p99 and one load's p99."""
    one_load_s = percentile([load.seconds for load in loads] or [0.0], 99)
    return percentile([part.ttft_s - part.queue_s for part in found], 99) / (percentile(warm_s, 99) + one_load_s)


def _warm(context: Context, subject: Subject, rng: random.Random, requests: int) -> list[Parts]:
    """As many requests as the crowd's, for adapters that all sit in slots."""
    subject.play(_asks(context, subject, rng, range(SLOTS), "warm"))
    played = subject.play(
        _asks(context, subject, rng, drawn(rng, SLOTS, requests, zipf=False), "warm"), streams=STREAMS
    )
    return settled(played, subject.witness.loads)


def _crowd(
    context: Context, reporter: Reporter, subject: Subject, rng: random.Random, adapters: Sequence[int],
    warm_s: Sequence[float], zipf: bool,
) -> Iterator[Line]:  # fmt: skip
    case = f"{max(adapters) + 1} adapters over {SLOTS} slots, {'popularity 1/i' if zipf else 'alike'}"
    asks = _asks(context, subject, rng, adapters, case)  # digests of its own: none of them is here yet
    with context.bar(f"{context.model.name}: {case}", len(asks)) as advanced:
        played = subject.play(asks, streams=STREAMS, advanced=advanced)
    loads = list(subject.witness.loads)
    yield from _lines(reporter, case, settled(played, loads), loads, warm_s)


def _asks(
    context: Context, subject: Subject, rng: random.Random, adapters: Sequence[int], crowd: str
) -> list[Ask]:  # fmt: skip
    made = prompts(rng, len(adapters), PROMPT_TOKENS, context.model.shape.vocab)
    digests = [context.model.alias(subject, f"{crowd}, {number}", number) for number in adapters]
    return [Ask(digest, prompt, OUTPUT_TOKENS) for digest, prompt in zip(digests, made, strict=True)]


def _lines(
    reporter: Reporter, case: str, found: list[Parts], loads: Sequence[SlotLoad], warm_s: Sequence[float]
) -> Iterator[Line]:
    yield reporter.line(case, "hit rate", sum(part.hit for part in found) / len(found), "share")
    yield reporter.line(case, "adapters loaded", sum(load.n_bytes for load in loads) / MIB, "MiB")
    yield from _percentiles(reporter, case, "TTFT", [part.ttft_s for part in found])
    yield from _percentiles(reporter, case, "TTFT: queueing for slot and loader", [part.queue_s for part in found])
    yield from _percentiles(reporter, case, "TTFT: load", [part.load_s for part in found])
    yield from _percentiles(reporter, case, "TTFT: prefill and batch", [part.rest_s for part in found])
    yield reporter.line(case, OVER, over_allowed(found, warm_s, loads), "x", target="<= 1")


def _percentiles(reporter: Reporter, case: str, metric: str, seconds: Sequence[float]) -> Iterator[Line]:
    for percent in (50, 99):
        yield reporter.line(case, f"{metric} p{percent}", percentile(seconds, percent) * 1e3, "ms")
