"""Punica's text generation (arXiv 2310.18547, section 7.2): 1,000 requests, first come first served, 32 at a time.

All requests are there at the start; one that ends makes room for the next, so that arrivals, prefill, loading and the
thin batches at the end are in the figure. Lengths are those of ShareGPT conversations, cut to fit. With Distinct
every request has an adapter of its own: it is read from its file, which the page cache holds, and packed while the
batch runs on. Each popularity is run once, after a short run of the base that warms up. Beside it the same engine
serves one adapter at a time: all requests of an adapter together, adapters one after the other; of very many adapters
a sample.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from weft_bench.cpu_context import Context
from weft_bench.cpu_engine import Ask, Played, Sizes, Subject
from weft_bench.cpu_shapes import BASE, DISTINCT, POPULARITIES, adapter_of_row, distinct, prompts
from weft_bench.data import find, rows
from weft_stage.errors import WrongAdapter
from weft_stage.lines import Line, percentile

LENGTHS = "sharegpt_8k_lengths.csv.gz"
BATCH, MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 32, 768, 256
MAX_GROUPS = 64  # adapters that are served one at a time; with more of them (Distinct), as many drawn at random
MIN_SPEEDUP = 8.0  # Distinct in one batch, as fast as one adapter at a time
CUT = f"prompts up to {MAX_PROMPT_TOKENS}, answers up to {MAX_OUTPUT_TOKENS} tokens"


def textgen_case(context: Context) -> Iterator[Line]:
    """The base and the four popularities, one after the other on one engine."""
    path = find(LENGTHS, context.options.data)
    if path is None:
        context.said(f"skipped: textgen: there is no {LENGTHS} in {context.options.data or '(give --data DIR)'}")
        return
    rng = random.Random(context.options.seed)
    lengths = sampled(path, context.options.amounts.texts, rng)
    sizes = Sizes(
        rows=BATCH, slots=BATCH, context_tokens=MAX_PROMPT_TOKENS + MAX_OUTPUT_TOKENS, batch_tokens=512, prefills=1
    )
    with context.subject(sizes) as subject:
        subject.play(_asks(context, subject, rng, lengths[:BATCH], adapter_of_row(BASE, len(lengths[:BATCH])), BASE))
        base_rate: float | None = None
        for popularity in (BASE, *POPULARITIES):
            lines, rate = _popularity(context, subject, rng, lengths, popularity, base_rate)
            base_rate = base_rate or rate
            yield from lines


def sampled(path: Path, count: int, rng: random.Random) -> list[tuple[int, int]]:
    """(prompt, answer) lengths of `count` conversations, cut to fit."""
    found = [(int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])) for row in rows(path)]
    return [cut(prompt, answer) for prompt, answer in rng.sample(found, count)]


def cut(prompt: int, answer: int) -> tuple[int, int]:
    """The later part of a conversation that is too long, and the beginning of an answer that is."""
    return max(1, min(prompt, MAX_PROMPT_TOKENS)), max(1, min(answer, MAX_OUTPUT_TOKENS))


def _popularity(
    context: Context, subject: Subject, rng: random.Random, lengths: Sequence[tuple[int, int]], popularity: str,
    base_rate: float | None,
) -> tuple[list[Line], float]:  # fmt: skip
    numbers = adapter_of_row(popularity, len(lengths))
    rng.shuffle(numbers)
    asks = _asks(context, subject, rng, lengths, numbers, popularity)
    label = f"text generation, {len(asks)} requests, {popularity}"
    with context.bar(f"{context.model.name}: {label}", len(asks)) as advanced:
        played = subject.play(asks, streams=BATCH, advanced=advanced)
    served = {adapter for beat in played.beats for adapter in beat.adapters if adapter}
    if len(served) != distinct(numbers):
        raise WrongAdapter(f"{label}: {len(served)} adapters were served, not {distinct(numbers)}")
    rate, reporter = played.tokens / played.wall_s, context.on(subject)
    mean_rows = sum(beat.rows for beat in played.beats) / len(played.beats)
    mean_adapters = sum(beat.distinct for beat in played.beats) / len(played.beats)
    ttft_ms = percentile([life.ttft_s for life in played.lives], 99) * 1e3
    lines = [
        reporter.line(f"{label}, {CUT}", "output tokens", rate, "tokens/s", baseline=base_rate),
        reporter.line(f"{label}, {CUT}", "rows of a step", mean_rows, ""),
        reporter.line(f"{label}, {CUT}", "adapters of a step", mean_adapters, ""),
        reporter.line(f"{label}, {CUT}", "adapters loaded", float(len(subject.witness.loads)), ""),
        reporter.line(f"{label}, {CUT}", "TTFT p99, from a place in the batch", ttft_ms, "ms"),
    ]
    if len(served) > 1:
        alone = _one_at_a_time(context, subject, rng, asks)
        target = f">= {MIN_SPEEDUP:g}" if popularity == DISTINCT and context.options.usual else None
        lines.append(reporter.line(f"{label}, {CUT}", "one adapter at a time", alone, "tokens/s"))
        lines.append(reporter.line(f"{label}, {CUT}", "times one adapter at a time", rate / alone, "x", target=target))
    return lines, rate


def _one_at_a_time(context: Context, subject: Subject, rng: random.Random, asks: Sequence[Ask]) -> float:
    """Tokens a second where a batch has one adapter."""
    groups = defaultdict[str, list[Ask]](list)
    for ask in asks:
        groups[ask.adapter].append(ask)
    chosen = list(groups.values()) if len(groups) <= MAX_GROUPS else rng.sample(list(groups.values()), MAX_GROUPS)
    with context.bar(f"{context.model.name}: one adapter at a time", len(chosen)) as advanced:
        played = list[Played]()
        for group in chosen:
            played.append(subject.play(group, streams=BATCH))
            advanced(1)
    return sum(each.tokens for each in played) / sum(each.wall_s for each in played)


def _asks(
    context: Context, subject: Subject, rng: random.Random, lengths: Sequence[tuple[int, int]],
    numbers: Sequence[int | None], popularity: str,
) -> list[Ask]:  # fmt: skip
    asks: list[Ask] = []
    for (prompt_tokens, tokens), number in zip(lengths, numbers, strict=True):
        prompt = prompts(rng, 1, prompt_tokens, context.model.shape.vocab)[0]
        digest = "" if number is None else f"text-{popularity}-{number}"
        if number is not None:
            context.model.alias(subject, digest, number)
        asks.append(Ask(digest, prompt, tokens))
    return asks
