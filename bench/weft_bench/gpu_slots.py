"""Many adapters over few slots, through the engine: what a request waits for before its first token.

As `cpu_slots`: a closed loop of streams, popularity 1/i, times to first token parted at what the engine did. Adapters
come from a few files under many digests; each is read (from the page cache), packed and copied for itself.
"""

import random
from collections.abc import Sequence

from weft_bench.cpu_shapes import drawn, prompts
from weft_bench.gpu_context import Context
from weft_bench.gpu_engine import DeviceSubject, Sizes
from weft_bench.gpu_page import NO_CLIFF, NO_CLIFF_99
from weft_bench.slot_parts import Parts, over_allowed, settled
from weft_stage.lines import percentile
from weft_stage.playing import Ask


def measure(context: Context) -> None:
    """Crowds of adapters, each beside as many requests for adapters that sit in their slots (warm)."""
    amounts = context.amounts
    prompt, answer = amounts.crowd_tokens
    sizes = Sizes(amounts.streams, amounts.slots, prompt + answer, amounts.streams * prompt)
    subject = DeviceSubject(context.gpu, amounts.model, amounts.shape, sizes, context.folder)
    rng = random.Random(0)
    with subject:
        for crowd in amounts.crowds:
            requests = max(amounts.crowd_requests, 2 * crowd)
            warm_s = _warm(context, subject, rng, requests)
            name = f"{amounts.model}, {amounts.slots} adapters over {amounts.slots} slots, beside {crowd}"
            _report_percentiles(context, name, "TTFT", warm_s)
            _crowd(context, subject, rng, drawn(rng, crowd, requests, zipf=True), warm_s)


def _warm(context: Context, subject: DeviceSubject, rng: random.Random, requests: int) -> list[float]:
    """Times to first token of adapters that sit in slots."""
    amounts = context.amounts
    subject.play(
        _asks(context, subject, rng, range(amounts.slots), "warm"), streams=amounts.streams, between=context.check_time
    )
    adapters = drawn(rng, amounts.slots, requests, zipf=False)
    played = subject.play(
        _asks(context, subject, rng, adapters, "warm"), streams=amounts.streams, between=context.check_time
    )
    return [part.ttft_s for part in settled(played, subject.witness.loads, amounts.streams)]


def _crowd(
    context: Context, subject: DeviceSubject, rng: random.Random, adapters: Sequence[int], warm_s: Sequence[float]
) -> None:
    name = context.amounts.crowd_name(max(adapters) + 1)
    played = subject.play(
        _asks(context, subject, rng, adapters, name), streams=context.amounts.streams, between=context.check_time
    )
    loads = list(subject.witness.loads)
    found = settled(played, loads, context.amounts.streams)
    one_load_s = percentile([load.seconds for load in loads] or [0.0], 50)
    context.report(name, "hit rate", sum(part.hit for part in found) / len(found), "share")
    context.report(name, "adapters loaded", float(len(loads)), "")
    context.report(name, "one load p50", one_load_s * 1e3, "ms")
    _report_parts(context, name, found)
    allowed_s = percentile(warm_s, 50) + one_load_s
    context.report(name, NO_CLIFF, percentile([part.ttft_s for part in found], 50) / allowed_s, "x")
    context.report(name, NO_CLIFF_99, over_allowed(found, warm_s, loads), "x")


def _report_parts(context: Context, name: str, found: Sequence[Parts]) -> None:
    _report_percentiles(context, name, "TTFT", [part.ttft_s for part in found])
    _report_percentiles(context, name, "TTFT: queueing for slot and loader", [part.queue_s for part in found])
    _report_percentiles(context, name, "TTFT: load", [part.load_s for part in found])
    _report_percentiles(context, name, "TTFT: prefill and batch", [part.rest_s for part in found])


def _report_percentiles(context: Context, name: str, metric: str, seconds: Sequence[float]) -> None:
    for percent in (50, 99):
        context.report(name, f"{metric} p{percent}", percentile(seconds, percent) * 1e3, "ms")


def _asks(
    context: Context, subject: DeviceSubject, rng: random.Random, adapters: Sequence[int], crowd: str
) -> list[Ask]:
    prompt_tokens, answer = context.amounts.crowd_tokens
    made = prompts(rng, len(adapters), prompt_tokens, context.amounts.shape.vocab)
    digests = [subject.alias(f"{crowd}, {number}", number % context.amounts.folders) for number in adapters]
    return [Ask(digest, prompt, answer) for digest, prompt in zip(digests, made, strict=True)]
