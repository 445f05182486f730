"""`weft bench path`: what a request costs on its way through the whole stack.

With the quickstart model, whose arithmetic is next to nothing: gateway, scheduler, streams. `--model-shape m135`: a
model whose arithmetic counts, beside the engine alone, in turn, with the same requests on the same cores. The client is
a raw reader of server-sent events that shares the cores. docs/benchmarks/stack.md has the method.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from weft_bench import cases
from weft_bench.cpu_shapes import RANK, SHAPES, prompts
from weft_bench.drive.engine import Sizes, Subject, adapter_pages
from weft_bench.path_shape import MODEL, NAMESPACE, write_manifests
from weft_bench.roofline import lora_bytes
from weft_bench.run import Run
from weft_stage import sse
from weft_stage.cpu_models import adapter, base_model, cache_dir, files
from weft_stage.lines import Line, percentile
from weft_stage.playing import Ask
from weft_stage.sse import WORDS
from weft_stage.stack import Stack, quickstart

RUNNER, GATEWAY, CLIENT = "runner", "gateway", "client"
COMPONENTS = (GATEWAY, RUNNER, "scheduler", "predictor", "supervisor", "depot", "batch")
BUSY, CPU = "weft_runner_busy_seconds_total", "process_cpu_seconds_total"
ADAPTERS, PROMPT_TOKENS, OUTPUT_TOKENS, REQUESTS_PER_STREAM = 8, 64, 64, 4
READY_S = 180.0


@dataclass(frozen=True, slots=True)
class Case:
    """Requests by `streams` clients. `tokens`: in each answer; 0: as many as the model gives, at most 200."""

    name: str
    streams: int
    requests: int
    tokens: int = 0


ONE, MANY = Case("1 stream", 1, 24), Case("32 streams", 32, 256)
SHORT, LONG = Case("32 streams, one token", 32, 256, 1), Case("32 streams, 256 tokens", 32, 64, 256)
TARGETS = {
    (ONE.name, "time to first token p50"): "<= 10",
    (MANY.name, "time per output token p99"): "<= 25",
    (MANY.name, "output tokens"): ">= 8000",
    (SHORT.name, "CPU a request, all but the runner"): "<= 5",
    (LONG.name, "tokens a second of the gateway's CPU"): ">= 20000",
}
OF_ENGINE_TARGETS = {"m135, 32 streams": ">= 0.85"}


def figures(options: cases.RequestPath, run: Run) -> Iterator[Line]:
    """Measure the path of requests. Raises StackFailed, EngineRefused, RequestFailed."""
    yield from _quickstart(options, run) if options.model_shape is None else _random_model(options, run)


def _quickstart(options: cases.RequestPath, run: Run) -> Iterator[Line]:
    """Measure all cases on one stack; a few requests of a case's own kind warm it up."""
    origin = run.origin()
    with TemporaryDirectory(prefix="weft-bench-") as scratch, Stack(quickstart(), Path(scratch)) as stack:
        models = stack.wait_for_models(timeout_s=60)
        for case in (ONE, MANY, SHORT, LONG):
            warm = list(bodies(models, case, case.streams + len(models), options.seed + 1))
            asyncio.run(sse.run("127.0.0.1", stack.port, warm, case.streams))
            answers, used = _sent(stack, list(bodies(models, case, case.requests, options.seed)), case.streams)
            for metric, value, unit in _path_figures(case, answers, used):
                yield origin.line(case.name, metric, value, unit, target=TARGETS.get((case.name, metric)))


def bodies(models: Sequence[str], case: Case, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Make requests in turn over the models, each a sentence of 8 to 16 words, greedy."""
    rng = random.Random(seed)
    length = {"max_tokens": case.tokens, "ignore_eos": True} if case.tokens else {"max_tokens": 200}
    for number in range(count):
        prompt = " ".join(rng.choices(WORDS, k=rng.randint(8, 16)))
        yield {"model": models[number % len(models)], "prompt": prompt, "temperature": 0, **length}


def _sent(stack: Stack, sent: Sequence[dict[str, Any]], streams: int) -> tuple[list[sse.Streamed], dict[str, float]]:
    """Send requests. Returns the answers and the seconds that they took: wall, of steps, of CPU by process."""
    before, start, own_s = _used(stack), time.perf_counter(), time.process_time()
    answers = asyncio.run(sse.run("127.0.0.1", stack.port, sent, streams))
    clocks = {"wall": time.perf_counter() - start, CLIENT: time.process_time() - own_s}
    return answers, clocks | {name: seconds - before[name] for name, seconds in _used(stack).items()}


def _used(stack: Stack) -> dict[str, float]:
    """Return the seconds until now of the runner's steps, and of the processes' CPU by name."""
    return {"busy": stack.metric(RUNNER, BUSY), **{name: stack.metric(name, CPU) for name in COMPONENTS}}


def _path_figures(
    case: Case, answers: Sequence[sse.Streamed], used: Mapping[str, float]
) -> Iterator[tuple[str, float, str]]:
    """Yield metric, value and unit. `used`: as `_sent` returns it."""
    count, tokens, wall_s = len(answers), sum(answer.tokens for answer in answers), used["wall"]
    yield "requests", count / wall_s, "1/s"
    yield "output tokens", tokens / wall_s, "1/s"
    times_s = {"time to first token": [answer.first - answer.start for answer in answers]}
    if case.tokens != 1:
        times_s["time per output token"] = [gap for answer in answers for gap in answer.gaps()]
    times_s["end to end"] = [answer.end - answer.start for answer in answers]
    for metric, values in times_s.items():
        for percent in (50, 90, 99):
            yield f"{metric} p{percent}", 1e3 * percentile(values, percent), "ms"
    yield "time outside the runner", 1 - used["busy"] / wall_s, "share"
    beside_s = sum(used[name] for name in COMPONENTS if name != RUNNER)
    for name, seconds in ((GATEWAY, used[GATEWAY]), ("all but the runner", beside_s), (RUNNER, used[RUNNER])):
        yield f"CPU a request, {name}", 1e3 * seconds / count, "ms"
    yield "tokens a second of the gateway's CPU", tokens / used[GATEWAY], "1/s"
    yield "the client's CPU", used[CLIENT] / wall_s, "cores"


def _random_model(options: cases.RequestPath, run: Run) -> Iterator[Line]:
    """Alternate the engine alone and the whole stack. The base and its adapters take turns over the requests."""
    assert options.model_shape is not None
    name, streams, folder = options.model_shape, options.streams, options.models or cache_dir()
    shape, rng, origin = SHAPES[name], random.Random(options.seed), run.origin("tokenizers")
    base = base_model(folder, name, shape)
    adapters = [adapter(folder, name, shape, number, RANK) for number in range(ADAPTERS)]
    digests = ["", *(path.name for path in adapters)]
    sizes = Sizes(
        rows=streams, slots=ADAPTERS, context_tokens=PROMPT_TOKENS + OUTPUT_TOKENS, batch_tokens=512, prefills=1,
        adapter_pages=adapter_pages(shape, ADAPTERS * lora_bytes(shape, RANK), ADAPTERS), token_time_ms=100,
        profile=True,
    )  # fmt: skip
    engine_rates, rates, clients, busy, ttft_s = (list[float]() for _ in range(5))
    with TemporaryDirectory(prefix="weft-bench-") as scratch:
        manifests = write_manifests(Path(scratch) / "manifests", base, adapters, shape, sizes)
        with Subject(files(base), sizes) as subject, Stack(manifests, Path(scratch) / "data") as stack:
            subject.adapters.paths.update({path.name: path for path in adapters})
            stack.wait_for_models(ADAPTERS + 1, timeout_s=READY_S)
            for number in range(options.repetitions + 1):
                made = prompts(rng, streams * REQUESTS_PER_STREAM, PROMPT_TOKENS, shape.vocab)
                asks = [Ask(digest, prompt, OUTPUT_TOKENS) for digest, prompt in zip(cycle(digests), made)]
                alone = subject.play(asks, streams=streams)
                answers, used = _sent(stack, [_body(ask) for ask in asks], streams)
                if number:
                    engine_rates.append(alone.tokens / alone.wall_s)
                    rates.append(sum(answer.tokens for answer in answers) / used["wall"])
                    clients.append(used[CLIENT] / used["wall"])
                    busy.append(used["busy"] / used["wall"])
                    ttft_s += [answer.first - answer.start for answer in answers]
    case, engine = f"{name}, {streams} streams", median(engine_rates)
    share = median(rate / alone for rate, alone in zip(rates, engine_rates, strict=True))
    yield origin.line(case, "output tokens", median(rates), "tokens/s", baseline=engine)
    yield origin.line(case, "of the engine alone", share, "share", target=OF_ENGINE_TARGETS.get(case))
    yield origin.line(case, "the client's CPU", median(clients), "cores")
    yield origin.line(case, "time outside the runner", 1 - median(busy), "share")
    for percent in (50, 99):
        yield origin.line(case, f"time to first token p{percent}", 1e3 * percentile(ttft_s, percent), "ms")


def _body(ask: Ask) -> dict[str, Any]:
    model = f"{NAMESPACE}/{ask.adapter}" if ask.adapter else MODEL
    return {"model": model, "prompt": list(ask.prompt), "temperature": 0, "max_tokens": ask.tokens}
