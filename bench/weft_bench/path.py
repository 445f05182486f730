"""`weft bench path`: what a request costs on its way through the whole stack, with the quickstart model.

Cases: 1 stream (latency) and 32 streams (throughput), base and adapters mixed; then answers of one token, whose cost is
that of a request, and of 256, whose cost is that of tokens. The model is tiny on purpose: what is measured is the path
(gateway, scheduler, streams), not the arithmetic. `outside the runner` is the share of the wall time in which the
runner computed nothing: 1 - busy seconds / wall seconds, from the runner's own counter. CPU is that of the processes,
from their own counters; `all but the runner` is gateway, scheduler, predictor, supervisor, depot and batch service. The
client is a raw reader of server-sent events that shares the cores; what it takes of them is shown.

`--model-shape m135` measures a model whose arithmetic counts: streams through the stack beside the engine alone
(baseline), in turn, with the same requests on the same cores, which the client shares.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft_stage.lines import Line, Origin, percentile
from weft_stage.sse import Streamed
from weft_stage.stack import WORDS

RUNNER, GATEWAY, CLIENT = "runner", "gateway", "client"


@dataclass(frozen=True, slots=True)
class Case:
    """Requests by `streams` clients. `tokens`: in each answer; 0: as many as the model gives, at most 200."""

    name: str
    streams: int
    requests: int
    tokens: int = 0


ONE, MANY = Case("1 stream", 1, 24), Case("32 streams", 32, 256)
SHORT, LONG = Case("32 streams, one token", 32, 256, 1), Case("32 streams, 256 tokens", 32, 64, 256)
CASES = (ONE, MANY, SHORT, LONG)
TARGETS = {
    (ONE.name, "time to first token p50"): "<= 10",
    (MANY.name, "time per output token p99"): "<= 25",
    (MANY.name, "output tokens"): ">= 8000",
    (SHORT.name, "CPU a request, all but the runner"): "<= 5",
    (LONG.name, "tokens a second of the gateway's CPU"): ">= 20000",
}


def bodies(models: Sequence[str], case: Case, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Make requests in turn over the models, each a sentence of 8 to 16 words, greedy."""
    rng = random.Random(seed)
    length = {"max_tokens": case.tokens, "ignore_eos": True} if case.tokens else {"max_tokens": 200}
    for i in range(count):
        prompt = " ".join(rng.choices(WORDS, k=rng.randint(8, 16)))
        yield {"model": models[i % len(models)], "prompt": prompt, "temperature": 0, **length}


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds that a case took: on the clock, of the runner's steps, of the processes' CPU by name."""

    wall_s: float
    busy_s: float
    cpu_s: Mapping[str, float]

    @property
    def beside_runner_s(self) -> float:
        """The CPU seconds of all processes without runners and the client."""
        return sum(seconds for name, seconds in self.cpu_s.items() if name not in (RUNNER, CLIENT))


def lines(origin: Origin, case: Case, answers: Sequence[Streamed], taken: Taken) -> Iterator[Line]:
    """Yield the figures of one case."""

    def line(metric: str, value: float, unit: str) -> Line:
        return origin.line(case.name, metric, value, unit, target=TARGETS.get((case.name, metric)))

    count, tokens = len(answers), sum(answer.tokens for answer in answers)
    yield line("requests", count / taken.wall_s, "1/s")
    yield line("output tokens", tokens / taken.wall_s, "1/s")
    times = {"time to first token": [answer.first - answer.start for answer in answers]}
    if case.tokens != 1:
        times["time per output token"] = [gap for answer in answers for gap in answer.gaps()]
    times["end to end"] = [answer.end - answer.start for answer in answers]
    for metric, values in times.items():
        for percent in (50, 90, 99):
            yield line(f"{metric} p{percent}", percentile(values, percent) * 1000, "ms")
    yield line("time outside the runner", 1 - taken.busy_s / taken.wall_s, "share")
    yield line("CPU a request, gateway", taken.cpu_s[GATEWAY] / count * 1000, "ms")
    yield line("CPU a request, all but the runner", taken.beside_runner_s / count * 1000, "ms")
    yield line("CPU a request, runner", taken.cpu_s[RUNNER] / count * 1000, "ms")
    yield line("tokens a second of the gateway's CPU", tokens / taken.cpu_s[GATEWAY], "1/s")
    yield line("the client's CPU", taken.cpu_s[CLIENT] / taken.wall_s, "cores")
