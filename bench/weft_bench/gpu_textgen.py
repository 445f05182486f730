"""Punica's text generation (arXiv 2310.18547, section 7.2): first come first served, 32 at a time, greedy.

Lengths as in its benchmark: prompts lognormal (s 0.8, loc -1, scale 18), whole texts uniform up to 2,048 tokens, at
most one new request a step. All requests are there at the start, so that arrivals, loading and the thin batches at the
end are in the figure; with fewer of them the end weighs more. Its own harness takes a decode row's adapter from the
newest request, and so decodes as one segment whatever the popularity: here the adapter of each row of each step is
compared with the one that was asked for. A few files stand for all adapters; each is read, packed and copied.
"""

import math
import random
from collections.abc import Sequence

from weft_bench.cpu_shapes import BASE, DISTINCT, IDENTICAL, SKEWED, UNIFORM, adapter_of_row, distinct, prompts
from weft_bench.gpu_amounts import PUNICA_TOKENS_S
from weft_bench.gpu_context import Context
from weft_bench.gpu_engine import DeviceSubject, Sizes
from weft_bench.gpu_page import ALL_TOKENS, KEPT
from weft_stage.errors import WrongAdapter
from weft_stage.lines import percentile
from weft_stage.playing import Ask, Played

SIGMA, LOC, SCALE = 0.8, -1.0, 18.0
WARM_UP_TOKENS = 2
ORDER = (BASE, DISTINCT, IDENTICAL, UNIFORM, SKEWED)  # what comes first is there when time runs out

Lengths = Sequence[tuple[int, int]]


def measure(context: Context) -> None:
    """The base first, then popularities."""
    rng, amounts, rows = random.Random(0), context.amounts, context.amounts.text_rows
    texts = lengths(rng, amounts.texts, amounts.text_tokens)
    sizes = Sizes(rows, rows, amounts.text_tokens, amounts.text_tokens + rows)
    subject = DeviceSubject(context.gpu, amounts.text_model, amounts.text_shape, sizes, context.folder)
    with subject:
        for number in range(amounts.folders):
            subject.file(number)  # not while the clock runs
        _warm_up(context, subject, rng)
        base_rate = 0.0
        for popularity in ORDER:
            played = _play(context, subject, rng, texts, popularity)
            rate = played.tokens / played.wall_s
            _report(context, subject, popularity, texts, played)
            if popularity == BASE:
                base_rate = rate
            else:
                context.report(amounts.text_name(popularity), KEPT, rate / base_rate, "share")


def lengths(rng: random.Random, count: int, most: int) -> Lengths:
    """(prompt, answer) tokens of each request."""
    found = list[tuple[int, int]]()
    for _ in range(count):
        prompt = int(min(LOC + SCALE * math.exp(SIGMA * rng.gauss(0.0, 1.0)), most - 2))
        prompt = max(1, prompt)
        found.append((prompt, max(prompt + 2, rng.randrange(most)) - prompt))
    return found


def _warm_up(context: Context, subject: DeviceSubject, rng: random.Random) -> None:
    """Kernels of prompts are compiled, and every file is in the page cache."""
    digests = [subject.alias(f"warm {number}", number) for number in range(context.amounts.folders)]
    made = prompts(rng, 2 * len(digests), WARM_UP_TOKENS, context.amounts.text_shape.vocab)
    names = [*digests, *[""] * len(digests)]
    asks = [Ask(name, prompt, WARM_UP_TOKENS) for name, prompt in zip(names, made, strict=True)]
    subject.play(asks, streams=context.amounts.text_rows, between=context.check_time)


def _play(context: Context, subject: DeviceSubject, rng: random.Random, texts: Lengths, popularity: str) -> Played:
    """Raises WrongAdapter where another number of adapters was served than the popularity has."""
    numbers = adapter_of_row(popularity, len(texts))
    rng.shuffle(numbers)
    asks = [_ask(context, subject, rng, text, popularity, number) for text, number in zip(texts, numbers, strict=True)]
    played = subject.play(asks, streams=context.amounts.text_rows, between=context.check_time)
    served = {adapter for beat in played.beats for adapter in beat.adapters if adapter}
    if len(served) != distinct(numbers):
        raise WrongAdapter(f"{popularity}: {len(served)} adapters were served, not {distinct(numbers)}")
    return played


def _ask(
    context: Context, subject: DeviceSubject, rng: random.Random, text: tuple[int, int], popularity: str,
    number: int | None,
) -> Ask:  # fmt: skip
    prompt = prompts(rng, 1, text[0], context.amounts.text_shape.vocab)[0]
    digest = "" if number is None else f"{popularity}, {number}"
    if number is not None:
        subject.alias(digest, number % context.amounts.folders)
    return Ask(digest, prompt, text[1])


def _report(context: Context, subject: DeviceSubject, popularity: str, texts: Lengths, played: Played) -> None:
    name, beats = context.amounts.text_name(popularity), played.beats
    all_tokens = (sum(prompt for prompt, _ in texts) + played.tokens) / played.wall_s
    context.report(name, "output tokens", played.tokens / played.wall_s, "tokens/s")
    published = None if popularity == BASE else PUNICA_TOKENS_S
    context.report(name, ALL_TOKENS, all_tokens, "tokens/s", baseline=published)
    context.report(name, "rows of a step", sum(beat.rows for beat in beats) / len(beats), "")
    context.report(name, "adapters of a step", sum(beat.distinct for beat in beats) / len(beats), "")
    context.report(name, "adapters loaded", float(len(subject.witness.loads)), "")
    ttft_s = percentile([life.ttft_s for life in played.lives], 99)
    context.report(name, "TTFT p99, from a place in the batch", ttft_s * 1e3, "ms")
