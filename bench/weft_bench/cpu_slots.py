"""Many adapters over few slots: a closed loop of `STREAMS` requests, each time to first token parted (`slot_parts`).

The crowds are held against as many requests for adapters that sit in their slots (warm). Each figure is of a single
run.
"""

import random
from collections.abc import Iterator, Sequence

from weft_bench.cpu_context import Context, Reporter
from weft_bench.cpu_engine import Ask, Sizes, Subject
from weft_bench.cpu_shapes import RANK, drawn, prompts
from weft_bench.roofline import lora_bytes
from weft_bench.slot_parts import Parts, over_allowed, settled
from weft_stage.cpu_witness import SlotLoad
from weft_stage.lines import Line, percentile

SLOTS, STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 16, 64, 32
OVER = "TTFT without queueing p99 / (warm TTFT p99 + one load p99)"
MIB = 1 << 20


def slots_case(context: Context) -> Iterator[Line]:
    """Measure crowds of adapters by popularity 1 / i and alike, beside slots that hold every adapter (warm)."""
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


def _warm(context: Context, subject: Subject, rng: random.Random, requests: int) -> list[Parts]:
    """Measure as many requests as the crowd has, for adapters that all sit in slots."""
    subject.play(_asks(context, subject, rng, range(SLOTS), "warm"))
    played = subject.play(
        _asks(context, subject, rng, drawn(rng, SLOTS, requests, zipf=False), "warm"), streams=STREAMS
    )
    return settled(played, subject.witness.loads, STREAMS)


def _crowd(
    context: Context, reporter: Reporter, subject: Subject, rng: random.Random, adapters: Sequence[int],
    warm_s: Sequence[float], zipf: bool,
) -> Iterator[Line]:  # fmt: skip
    case = f"{max(adapters) + 1} adapters over {SLOTS} slots, {'popularity 1/i' if zipf else 'alike'}"
    asks = _asks(context, subject, rng, adapters, case)  # digests of its own: none of them is here yet
    with context.bar(f"{context.model.name}: {case}", len(asks)) as advanced:
        played = subject.play(asks, streams=STREAMS, advanced=advanced)
    loads = list(subject.witness.loads)
    yield from _lines(reporter, case, settled(played, loads, STREAMS), loads, warm_s)


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
