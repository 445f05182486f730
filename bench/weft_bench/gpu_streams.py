"""Streams through the engine, in process: output tokens a second, times to first token, gaps between tokens.

A closed loop: each stream posts its next request when its last one has ended. Adapters are drawn uniformly and sit in
their slots before the clock starts. `steady` leaves out the first and the last quarter of the tokens.

Answers of one length begin and end together, so that most steps have no prompt. Of mixed lengths, as in traffic, they
do not: nearly every step has some.
"""

import random
import time

from weft_bench.gpu_context import Context
from weft_bench.gpu_engine import DeviceSubject, Sizes
from weft_stage.lines import percentile
from weft_stage.playing import Ask, Played

LOADERS = 16  # requests at a time while adapters are loaded
PREFILLS = 16  # prompts of a step


def measure(context: Context) -> None:
    """Every number of adapters with every number of streams, the base first."""
    amounts, rng = context.amounts, random.Random(0)
    (prompt, answer), most = amounts.stream_tokens, max(amounts.stream_counts)
    started = time.perf_counter()
    slots = max(amounts.stream_adapters)
    spread = amounts.stream_spread
    sizes = Sizes(most, slots, prompt + answer + spread, PREFILLS * prompt, PREFILLS, waiting=min(LOADERS, most))
    subject = DeviceSubject(context.gpu, amounts.model, amounts.shape, sizes, context.folder)
    context.report(f"{amounts.model} streams", "engine made", time.perf_counter() - started, "s")

    def prompt_of() -> list[int]:
        return [rng.randrange(amounts.shape.vocab) for _ in range(prompt)]

    with subject:
        for adapters in amounts.stream_adapters:
            names = [subject.alias(f"adapter {i}", i % amounts.folders) for i in range(adapters)] or [""]
            began, loads = time.perf_counter(), len(subject.witness.loads)
            subject.play(
                [Ask(name, prompt_of(), 2) for name in names], streams=min(LOADERS, most), between=context.check_time
            )
            loads = len(subject.witness.loads) - loads
            if loads:
                seconds = (time.perf_counter() - began) / loads
                context.report(f"{amounts.model} streams, {adapters} adapters", "loading, each", seconds * 1e3, "ms")

            def measured(name: str, streams: int, spread: int, names: list[str] = names) -> None:
                lengths = [
                    rng.randint(answer - spread, answer + spread) for _ in range(amounts.stream_rounds * streams)
                ]
                asks = [Ask(rng.choice(names), prompt_of(), length) for length in lengths]
                _report(context, name, subject.play(asks, streams=streams, between=context.check_time))

            for streams in amounts.mixed_counts:
                measured(amounts.mixed_name(streams, adapters), streams, spread)
            for streams in amounts.stream_counts:
                measured(amounts.streams_name(streams, adapters), streams, 0)


def _report(context: Context, name: str, played: Played) -> None:
    context.report(name, "output tokens, steady", steady(played), "tokens/s")
    context.report(name, "output tokens", played.tokens / played.wall_s, "tokens/s")
    ttft_s = [life.ttft_s for life in played.lives]
    gaps_s = [b - a for life in played.lives for a, b in zip(life.at, life.at[1:], strict=False)]
    for percent in (50, 99):
        context.report(name, f"TTFT p{percent}", percentile(ttft_s, percent) * 1e3, "ms")
        context.report(name, f"gap between tokens p{percent}", percentile(gaps_s, percent) * 1e3, "ms")


def steady(played: Played) -> float:
    """Tokens a second from the first quarter of all tokens to the last."""
    at = sorted(second for life in played.lives for second in life.at)
    first, last = len(at) // 4, 3 * len(at) // 4
    return (last - first) / (at[last] - at[first]) if at[last] > at[first] else 0.0
