"""# Prompt and token phases apart, live

`weft bench phases --part tbt`: two runners of one thread each (m135, 8 adapters in turn and the base) under one mix of
requests: long prompts with short answers beside chats. `Unified`: both runners compute both phases, prompts in chunks
that keep the pool's token time (chunked prefill). `Split`: one runner computes prompts, the other one generates tokens
from their KV (Splitwise, section 4.2). Arrivals are Poisson, the same for both modes, at fractions of the throughput
that Unified has with all requests waiting. Client, control plane and both runners share this machine's cores.

Time between tokens (TBT) is what a client sees between two events of a stream, over all streams.
"""

import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from weft_bench.cpu_context import Bar, adapter_pages
from weft_bench.cpu_engine import Sizes
from weft_bench.cpu_models import adapter, base_model, cache_dir
from weft_bench.cpu_shapes import RANK, SHAPES, prompts
from weft_bench.errors import RequestFailed
from weft_bench.fidelity_live import PATIENT, Bodies, Live, LiveRun
from weft_bench.lines import Line, Origin
from weft_bench.path_shape import MODEL, NAMESPACE, write_manifests
from weft_bench.roofline import lora_bytes
from weft_bench.stack import Stack
from weft_sim.report import quantile

SHAPE, ADAPTERS = "m135", 8
MODES = ("Unified", "Split")
LOADS = (0.5, 0.8)
CHAT_PROMPT, CHAT_ANSWER = 64, 96
LONG_PROMPT, LONG_ANSWER = 1024, 16
LONG_SHARE = 0.2  # of the requests
REQUESTS, QUICK_REQUESTS = 160, 24
STREAMS = 16
TARGETS = {"p99 TBT, of Unified's": "<= 0.6", "throughput, of Unified's": ">= 0.95"}


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests in their order. `long`: which have the long prompt."""

    bodies: Bodies
    long: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class LiveModel:
    """The model that both modes serve. `sizes`: of each runner."""

    base: Path
    adapters: Sequence[Path]
    sizes: Sizes

    @property
    def names(self) -> list[str]:
        """Names of the base and of every adapter, as requests have them."""
        return [MODEL, *(f"{NAMESPACE}/{path.name}" for path in self.adapters)]

    @contextmanager
    def stack(self, pool: Mapping[str, Any], *runner: str) -> Generator[Stack]:
        """Start a stack; `pool`: changes of the pool's spec, `runner`: the runners' module with its arguments."""
        with TemporaryDirectory(prefix="weft-bench-") as scratch:
            manifests = write_manifests(
                Path(scratch) / "manifests", self.base, self.adapters, SHAPES[SHAPE], self.sizes, pool
            )
            up = ("weft_bench.runner_up", *runner, "--")
            with Stack(manifests, Path(scratch) / "data", environment=PATIENT, up=up) as stack:
                stack.wait_for_models()
                yield stack


def live_model(context_tokens: int, **sizes: Any) -> LiveModel:
    """Prepare the model, with room for `context_tokens` of context. `sizes`: changes of `Sizes`."""
    shape, folder = SHAPES[SHAPE], cache_dir()
    adapters = [adapter(folder, SHAPE, shape, number, RANK) for number in range(ADAPTERS)]
    wanted = Sizes(
        rows=STREAMS, slots=ADAPTERS, context_tokens=context_tokens, batch_tokens=512, prefills=1,
        adapter_pages=adapter_pages(shape, ADAPTERS * lora_bytes(shape, RANK), ADAPTERS), token_time_ms=100,
        profile=True,
    )  # fmt: skip
    return LiveModel(base_model(folder, SHAPE, shape), adapters, replace(wanted, **sizes))


def two_runners(mode: str) -> dict[str, Any]:
    """Return the part of a pool's spec that has two runners in this mode."""
    return {"replicas": 2, "phases": {"mode": mode}}


def figures(origin: Origin, *, quick: bool, seed: int, loads: Sequence[float], bar: Bar) -> Iterator[Line]:
    """Measure both modes at every load, on the same requests. Raises BenchFailed."""
    count = QUICK_REQUESTS if quick else REQUESTS
    model = live_model(LONG_PROMPT + CHAT_ANSWER)
    mix = mixed(random.Random(seed), model.names, count, LONG_PROMPT)
    case = f"{SHAPE}, {count} requests"
    rate, unified = 0.0, dict[float, LiveRun]()
    for mode in MODES:
        with model.stack(two_runners(mode), "weft_bench.thread_runner") as stack:
            live = Live(stack)
            live.closed(mix.bodies[:STREAMS], STREAMS)  # every adapter in its slot, every path warm
            with bar(f"{mode}: all at once", 1) as advanced:
                saturated = live.closed(mix.bodies, STREAMS)
                advanced(1)
            rate = rate or saturated.rate
            yield origin.line(f"{case}, {mode}, {STREAMS} streams", "requests", saturated.rate, "1/s")
            for load in loads:
                found = poisson(live, mix, load, rate, seed, bar, mode)
                unified.setdefault(load, found)
                yield from _lines(origin, f"{case}, load {load:g}, {mode}", mix, found, unified[load])
                if mode == "Split":
                    yield from _handed_over(origin, f"{case}, load {load:g}, {mode}", stack)
            live.cpu.close()


def mixed(chance: random.Random, models: Sequence[str], count: int, long_prompt: int) -> Mix:
    """Mix requests: long prompts are spread evenly, and requests take turns over the base and every adapter."""
    bodies, long = list[tuple[int, dict[str, Any]]](), list[bool]()
    for number in range(count):
        is_long = int((number + 1) * LONG_SHARE) > int(number * LONG_SHARE)
        (prompt,) = prompts(chance, 1, long_prompt if is_long else CHAT_PROMPT, SHAPES[SHAPE].vocab)
        of = number % len(models)
        tokens = LONG_ANSWER if is_long else CHAT_ANSWER
        bodies.append((of - 1, {"model": models[of], "prompt": prompt, "temperature": 0, "max_tokens": tokens}))
        long.append(is_long)
    return Mix(bodies, tuple(long))


def poisson(live: Live, mix: Mix, load: float, saturated: float, seed: int, bar: Bar, case: str) -> LiveRun:
    """Send the mix by Poisson at `load` times `saturated` a second, alike in all cases. Raises RequestFailed."""
    gaps = [random.Random(f"{seed}/{n}").expovariate(load * saturated) for n in range(len(mix.bodies))]
    at_s = list(accumulate(gaps))
    with bar(f"{case}: load {load:g}, {at_s[-1]:.0f} s", 1) as advanced:
        found = live.open(mix.bodies, at_s)
        advanced(1)
    check(mix, found)
    return found


def check(mix: Mix, found: LiveRun) -> None:
    """Check that every answer has its length. Raises RequestFailed."""
    for (_, body), answer in zip(mix.bodies, found.answers, strict=True):
        if answer.tokens != body["max_tokens"] and not answer.stopped:
            raise RequestFailed(f"an answer of {answer.tokens} tokens, not {body['max_tokens']}")


def _lines(origin: Origin, case: str, mix: Mix, found: LiveRun, unified: LiveRun) -> Iterator[Line]:
    """Yield the figures of a run. `unified`: the same requests in that mode."""
    other = found is not unified
    gaps, theirs = (sorted(gap for one in run.answers for gap in one.gaps()) for run in (found, unified))
    for percent in (50, 90, 99, 100):
        name, q = "max" if percent == 100 else f"p{percent}", percent / 100
        value, baseline = quantile(gaps, q), quantile(theirs, q)
        yield origin.line(case, f"{name} TBT", value * 1e3, "ms", baseline=baseline * 1e3 if other else None)
        if other and percent == 99:
            metric = "p99 TBT, of Unified's"
            yield origin.line(case, metric, value / baseline, "x", target=TARGETS[metric])
    for kind, of_long in (("long prompts", True), ("chats", False)):
        for percent in (50, 90):
            value, baseline = (_ttft(mix, run, of_long, percent) for run in (found, unified))
            yield origin.line(case, f"p{percent} TTFT, {kind}", value, "ms", baseline=baseline if other else None)
    value, baseline = (quantile([a.end - a.start for a in run.answers], 0.9) for run in (found, unified))
    yield origin.line(case, "p90 end to end", value * 1e3, "ms", baseline=baseline * 1e3 if other else None)
    rate, their_rate = (run.tokens / run.wall_s for run in (found, unified))
    yield origin.line(case, "throughput", rate, "tokens/s", baseline=their_rate if other else None)
    if other:
        metric = "throughput, of Unified's"
        yield origin.line(case, metric, rate / their_rate, "x", target=TARGETS[metric])
    yield origin.line(case, "of the machine, by others", 100 * found.others, "%")


def _ttft(mix: Mix, run: LiveRun, of_long: bool, percent: int) -> float:
    """Return a percentile of TTFT in ms."""
    found = [a.first - a.start for a, long in zip(run.answers, mix.long, strict=True) if long is of_long]
    return quantile(found, percent / 100) * 1e3


def _handed_over(origin: Origin, case: str, stack: Stack) -> Iterator[Line]:
    """Yield what was handed over since the start of the stack."""
    for metric, name in (("sequences handed over", "handed_over"), ("sequences whose KV was lost", "kv_lost")):
        yield origin.line(case, metric, stack.metric("runner", f"weft_runner_{name}_total"), "")
