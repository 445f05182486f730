"""`weft bench phases`: prompts and tokens apart, and the batching mechanisms, live through stacks of m135.

`tbt`: two runners of one thread each under long prompts with short answers beside chats; `Split` (one for prompts, one
for tokens) beside `Unified` (both for both, prompts in chunks). `batching`: one runner whose iterations are formed in
the three ways that Splitwise compares. docs/benchmarks/phases.md has the method.
"""

import asyncio
import random
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from weft_bench import cases
from weft_bench.cpu_shapes import RANK, SHAPES, prompts
from weft_bench.drive.engine import Sizes, adapter_pages
from weft_bench.path_shape import MODEL, NAMESPACE, write_manifests
from weft_bench.roofline import lora_bytes
from weft_bench.run import Run
from weft_sim.report import quantile
from weft_stage import sse
from weft_stage.cpu_models import adapter, base_model, cache_dir
from weft_stage.errors import RequestFailed
from weft_stage.lines import Line, Origin
from weft_stage.sse import Streamed
from weft_stage.stack import UP, Stack

SHAPE, ADAPTERS, STREAMS = "m135", 8, 16
CHAT_PROMPT, CHAT_ANSWER, LONG_ANSWER = 64, 96, 16
LONG_SHARE = 0.2  # of the requests
REQUESTS, QUICK_REQUESTS = {"tbt": 160, "batching": 96}, 24
LONG_PROMPT = {"tbt": 1024, "batching": 512}
BATCHING_LOADS = (0.3, 0.6)  # of the rate with all requests waiting
PATIENT = {  # requests wait longer here than users would
    "WEFT_GATEWAY__HOLD_SECONDS": "3600", "WEFT_GATEWAY__MAX_IN_FLIGHT": "10000", "WEFT_GATEWAY__PREDICT_MS": "5000",
}  # fmt: skip
THREAD_RUNNER, BATCHING_RUNNER = "weft_stage.thread_runner", "weft_bench.batching_runner"
SPLIT_TARGETS = {"p99 TBT": "<= 0.6", "throughput": ">= 0.95"}  # of Unified's
HANDED_OVER = (("sequences handed over", "handed_over"), ("sequences whose KV was lost", "kv_lost"))
Figure = tuple[str, float, str]  # metric, value, unit


@dataclass(frozen=True, slots=True)
class Variant:
    """A pool under measurement: the changes of its spec, its runners' module with arguments, its token time."""

    name: str
    spec: Mapping[str, Any]
    runner: Sequence[str]
    batch_tokens: int = 512
    token_time_ms: int = 100


def variants(part: str) -> list[Variant]:
    if part == "tbt":
        modes = ("Unified", "Split")
        return [Variant(mode, {"replicas": 2, "phases": {"mode": mode}}, (THREAD_RUNNER,)) for mode in modes]
    mechanisms, tokens = ("mixed", "continuous", "request"), LONG_PROMPT[part] + STREAMS  # prompts are never cut
    return [Variant(name, {"replicas": 1}, (BATCHING_RUNNER, name), tokens, 60_000) for name in mechanisms]


def figures(options: cases.Phases, run: Run) -> Iterator[Line]:
    """Measure every variant at every load, on the same requests. Raises StackFailed, RequestFailed."""
    for part in options.part:
        yield from _part(part, options, run)


def _part(part: str, options: cases.Phases, run: Run) -> Iterator[Line]:
    count, origin = QUICK_REQUESTS if options.quick else REQUESTS[part], run.origin()
    loads = options.loads if part == "tbt" else BATCHING_LOADS
    bodies = mixed(random.Random(options.seed), count, LONG_PROMPT[part])
    gaps = [random.Random(f"{options.seed}/{number}").expovariate(1.0) for number in range(count)]
    prefix = f"batching, {count} requests" if part == "batching" else f"{SHAPE}, {count} requests"
    saturated, first = 0.0, dict[float, Sequence[Figure]]()
    for variant in variants(part):
        sizes = Sizes(
            rows=STREAMS, slots=ADAPTERS, context_tokens=LONG_PROMPT[part] + CHAT_ANSWER,
            batch_tokens=variant.batch_tokens, prefills=1, token_time_ms=variant.token_time_ms, profile=True,
            adapter_pages=adapter_pages(SHAPES[SHAPE], ADAPTERS * lora_bytes(SHAPES[SHAPE], RANK), ADAPTERS),
        )  # fmt: skip
        up = ("weft_stage.runner_up", *variant.runner, "--")
        with started(sizes, variant.spec, up) as stack, run.progress(variant.name, 1 + len(loads)) as advance:
            send = partial(sse.run, "127.0.0.1", stack.port)
            asyncio.run(send(bodies[:STREAMS], STREAMS))  # every adapter in its slot, every path warm
            began = time.perf_counter()
            asyncio.run(send(bodies, STREAMS))
            rate = count / (time.perf_counter() - began)
            saturated = saturated or rate
            advance(1)
            yield origin.line(f"{prefix}, {variant.name}, {STREAMS} streams", "requests", rate, "1/s")
            for load in loads:
                at_s = [at / (load * saturated) for at in accumulate(gaps)]
                measured = list(_figures(bodies, asyncio.run(sse.run_at("127.0.0.1", stack.port, bodies, at_s))))
                advance(1)
                yield from _lines(origin, f"{prefix}, load {load:g}, {variant.name}", measured, first.get(load))
                first.setdefault(load, measured)
                if variant.name == "Split":
                    for metric, name in HANDED_OVER:
                        count = stack.metric("runner", f"weft_runner_{name}_total")
                        yield origin.line(f"{prefix}, load {load:g}, Split", metric, count, "")


def mixed(chance: random.Random, count: int, long_prompt: int) -> list[dict[str, Any]]:
    """Make requests, of which some have a long prompt. They take turns over the base and every adapter."""
    models = [MODEL, *(f"{NAMESPACE}/r{RANK}-{number}" for number in range(ADAPTERS))]
    bodies = list[dict[str, Any]]()
    for number in range(count):
        is_long = int((number + 1) * LONG_SHARE) > int(number * LONG_SHARE)
        length, tokens = (long_prompt, LONG_ANSWER) if is_long else (CHAT_PROMPT, CHAT_ANSWER)
        (prompt,) = prompts(chance, 1, length, SHAPES[SHAPE].vocab)
        bodies.append({"model": models[number % len(models)], "prompt": prompt, "temperature": 0, "max_tokens": tokens})
    return bodies


@contextmanager
def started(sizes: Sizes, spec: Mapping[str, Any] | None = None, up: Sequence[str] = UP) -> Generator[Stack]:
    """Start a stack with adapters. `spec`: fields of its pool. `up`: as `Stack`'s. Raises StackFailed."""
    shape, folder = SHAPES[SHAPE], cache_dir()
    adapters = [adapter(folder, SHAPE, shape, number, RANK) for number in range(ADAPTERS)]
    with TemporaryDirectory(prefix="weft-bench-") as scratch:
        base = base_model(folder, SHAPE, shape)
        manifests = write_manifests(Path(scratch) / "manifests", base, adapters, shape, sizes, spec)
        with Stack(manifests, Path(scratch) / "data", environment=PATIENT, up=up) as stack:
            stack.wait_for_models()
            yield stack


def _figures(bodies: Sequence[Mapping[str, Any]], answers: Sequence[Streamed]) -> Iterator[Figure]:
    """Yield metric, value and unit of what clients saw. Raises RequestFailed for an answer of another length."""
    for body, answer in zip(bodies, answers, strict=True):
        if answer.tokens != body["max_tokens"] and not answer.stopped:
            raise RequestFailed(f"expected an answer of {body['max_tokens']} tokens, got {answer.tokens}")
    gaps = sorted(gap for answer in answers for gap in answer.gaps())
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
        yield f"{name} TBT", 1e3 * quantile(gaps, q), "ms"
    is_long = [body["max_tokens"] == LONG_ANSWER for body in bodies]
    for kind, of_kind in (("", (True, False)), (", long prompts", (True,)), (", chats", (False,))):
        ttft_s = [one.first - one.start for one, long in zip(answers, is_long, strict=True) if long in of_kind]
        for percent in (50, 90):
            yield f"p{percent} TTFT{kind}", 1e3 * quantile(ttft_s, percent / 100), "ms"
    for percent in (50, 90):
        yield f"p{percent} end to end", 1e3 * quantile([one.end - one.start for one in answers], percent / 100), "ms"
    wall_s = max(answer.end for answer in answers) - min(answer.start for answer in answers)
    yield "throughput", sum(answer.tokens for answer in answers) / wall_s, "tokens/s"


def _lines(origin: Origin, case: str, measured: Sequence[Figure], first: Sequence[Figure] | None) -> Iterator[Line]:
    """Yield the figures beside those of the first variant at the same load."""
    for (metric, value, unit), (_, baseline, _) in zip(measured, first or measured, strict=True):
        yield origin.line(case, metric, value, unit, baseline=baseline if first else None)
        if first and case.endswith("Split") and (target := SPLIT_TARGETS.get(metric)):
            yield origin.line(case, f"{metric}, of Unified's", value / baseline, "x", target=target)
