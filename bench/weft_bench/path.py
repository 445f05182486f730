"""`weft bench path`: what a request costs on its way through the whole stack, with the quickstart model.

Cases: 1 stream (latency) and 32 streams (throughput), base and adapters mixed. The model is tiny on purpose: what is
measured is the path (gateway, scheduler, streams), not the arithmetic. `outside the runner` is the share of the wall
time in which the runner computed nothing: 1 - busy seconds / wall seconds, from the runner's own counter.

`--model-shape m135` measures a model whose arithmetic counts: streams through the stack beside the engine alone
(baseline), in turn, with the same requests on the same cores, which the client shares.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft_bench.lines import Line, Origin

if TYPE_CHECKING:
    from weft_bench.load import Timing  # brings an HTTP client along, which `gpu-bench` has not: percentiles need none

WORDS = "the red fox jumps over seven lazy dogs while rain falls on green hills near an old stone bridge".split()


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    streams: int
    requests: int


CASES = (Case("1 stream", 1, 24), Case("32 streams", 32, 256))


def bodies(models: Sequence[str], count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Requests in turn over the models, each a sentence of 8 to 16 words, greedy."""
    rng = random.Random(seed)
    for i in range(count):
        prompt = " ".join(rng.choices(WORDS, k=rng.randint(8, 16)))
        yield {"model": models[i % len(models)], "prompt": prompt, "temperature": 0, "max_tokens": 200}


def lines(origin: Origin, case: str, timings: "Sequence[Timing]", wall_s: float, busy_s: float) -> Iterator[Line]:
    """The figures of one case."""
    tokens = sum(t.completion_tokens for t in timings)
    yield origin.line(case, "requests", len(timings) / wall_s, "1/s")
    yield origin.line(case, "output tokens", tokens / wall_s, "1/s")
    for metric, values in (
        ("time to first token", [t.ttft_s for t in timings]),
        ("time per output token", [gap for t in timings for gap in t.gaps_s]),
        ("end to end", [t.end - t.start for t in timings]),
    ):
        for percent in (50, 90, 99):
            yield origin.line(case, f"{metric} p{percent}", percentile(values, percent) * 1000, "ms")
    yield origin.line(case, "time outside the runner", 1 - busy_s / wall_s, "share")


def percentile(values: Sequence[float], percent: int) -> float:
    """Nearest-rank percentile of a non-empty sequence."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * percent // 100) - 1))]
