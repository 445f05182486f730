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

from weft_bench.cpu_shapes import BASE, adapter_of_row, distinct, prompts
from weft_bench.errors import WrongAdapter
from weft_bench.gpu_amounts import PUNICA_TOKENS_S
from weft_bench.gpu_context import Context
from weft_bench.gpu_engine import DeviceSubject, Sizes
from weft_bench.gpu_plan import ALL_TOKENS, KEPT, OUTPUT, TEXT_ORDER, text_name
from weft_bench.path import percentile
from weft_bench.playing import Ask, Played

SIGMA, LOC, SCALE = 0.8, -1.0, 18.0
WARM_UP_TOKENS = 2
SPARE = 1.3  # of the time that the base took: what adapters may add to it

Lengths = Sequence[tuple[int, int]]


def measure(context: Context) -> None:
    """The base first, then popularities as far as time goes."""
    rng, amounts, rows = random.Random(0), context.amounts, context.amounts.text_rows
    texts = lengths(rng, amounts.texts, amounts.text_tokens)
    sizes = Sizes(rows, rows, amounts.text_tokens, amounts.text_tokens + rows)
    subject = DeviceSubject(context.gpu, context.plan.text_shape, context.text_shape, sizes, context.folder)
    with subject:
        for number in range(amounts.folders):
            subject.file(number)  # not while the clock runs
        _warm_up(context, subject, rng)
        base_rate = base_s = 0.0
        for popularity in TEXT_ORDER:
            context.needs(SPARE * base_s, text_name(context.plan, popularity))
            played = _play(context, subject, rng, texts, popularity)
            rate = played.tokens / played.wall_s
            _tell(context, subject, popularity, texts, played)
            if popularity == BASE:
                base_rate, base_s = rate, played.wall_s
            else:
                context.tell(text_name(context.plan, popularity), KEPT, rate / base_rate)


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
    made = prompts(rng, 2 * len(digests), WARM_UP_TOKENS, context.text_shape.vocab)
    names = [*digests, *[""] * len(digests)]
    asks = [Ask(name, prompt, WARM_UP_TOKENS) for name, prompt in zip(names, made, strict=True)]
    subject.play(asks, streams=context.amounts.text_rows)


def _play(context: Context, subject: DeviceSubject, rng: random.Random, texts: Lengths, popularity: str) -> Played:
    """Raises WrongAdapter where another number of adapters was served than the popularity has."""
    numbers = adapter_of_row(popularity, len(texts))
    rng.shuffle(numbers)
    asks = [_ask(context, subject, rng, text, popularity, number) for text, number in zip(texts, numbers, strict=True)]
    played = subject.play(asks, streams=context.amounts.text_rows)
    served = {adapter for beat in played.beats for adapter in beat.adapters if adapter}
    if len(served) != distinct(numbers):
        raise WrongAdapter(f"{popularity}: {len(served)} adapters were served, not {distinct(numbers)}")
    return played


def _ask(
    context: Context, subject: DeviceSubject, rng: random.Random, text: tuple[int, int], popularity: str,
    number: int | None,
) -> Ask:  # fmt: skip
    prompt = prompts(rng, 1, text[0], context.text_shape.vocab)[0]
    digest = "" if number is None else f"{popularity}, {number}"
    if number is not None:
        subject.alias(digest, number % context.amounts.folders)
    return Ask(digest, prompt, text[1])


def _tell(context: Context, subject: DeviceSubject, popularity: str, texts: Lengths, played: Played) -> None:
    name, beats = text_name(context.plan, popularity), played.beats
    all_tokens = (sum(prompt for prompt, _ in texts) + played.tokens) / played.wall_s
    context.tell(name, OUTPUT, played.tokens / played.wall_s)
    context.tell(name, ALL_TOKENS, all_tokens, baseline=None if popularity == BASE else PUNICA_TOKENS_S)
    context.tell(name, "rows of a step", sum(beat.rows for beat in beats) / len(beats))
    context.tell(name, "adapters of a step", sum(beat.distinct for beat in beats) / len(beats))
    context.tell(name, "adapters loaded", float(len(subject.witness.loads)))
    ttft_s = percentile([life.ttft_s for life in played.lives], 99)
    context.tell(name, "TTFT p99, from a place in the batch", ttft_s * 1e3)
