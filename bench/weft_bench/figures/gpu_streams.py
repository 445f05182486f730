"""Streams through the engine on a GPU, in process and over HTTP: output tokens a second, TTFT, gaps between tokens.

A closed loop: each stream posts its next request when its last request has ended. Adapters are drawn uniformly and are
in their slots before the clock starts. `steady` leaves out the first and the last quarter of the tokens. Answers of one
length begin and end together, so that most steps have no prompt; of mixed lengths nearly every step has prompts.
"""

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from weft_bench.cpu_shapes import DEVICE_SHAPES, RANK
from weft_bench.drive.engine import DeviceSubject, Model, Sizes, adapter_pages
from weft_bench.drive.gpu import Bench, of_adapters
from weft_bench.roofline import lora_bytes
from weft_stage.cpu_models import adapter, base_model
from weft_stage.errors import OutOfTime, StackFailed
from weft_stage.lines import Line, percentile
from weft_stage.playing import Ask

LOADERS = 16  # requests at a time while adapters are loaded
PREFILLS = 16  # prompts of a step
FOLDERS = 4  # adapters on disk that stand for many
TARGETS = {(256, 0): ">= 13000", (256, 64): ">= 10500", (256, 384): ">= 9500"}  # tokens/s, by streams and adapters
READY_S, LOG_CHARS = 600.0, 4000  # of a slow and busy machine
COMPONENTS = (
    "weft_cli.up",
    *(f"weft_{name}.main" for name in ("depot", "gateway", "predictor", "scheduler", "supervisor")),
)


def streams(bench: Bench) -> Iterator[Line]:
    """Measure every number of adapters with every number of streams, the base first."""
    amounts, rng = bench.amounts, random.Random(0)
    (prompt, answer), most, spread = amounts.stream_tokens, max(amounts.stream_counts), amounts.stream_spread
    started = time.perf_counter()
    subject = _subject(bench, amounts.model, max(amounts.stream_adapters), prompt + answer + spread)
    model = Model(amounts.model, amounts.shape, bench.folder, rng)
    yield bench.line(f"{amounts.model} streams", "engine made", time.perf_counter() - started, "s")

    def ask(names: Sequence[str], tokens: int) -> Ask:
        return Ask(rng.choice(names), [rng.randrange(amounts.shape.vocab) for _ in range(prompt)], tokens)

    with subject:
        for adapters in amounts.stream_adapters:
            names = [model.alias(subject, f"adapter {i}", i, FOLDERS) for i in range(adapters)] or [""]
            began, loads = time.perf_counter(), len(subject.witness.loads)
            subject.play([ask([name], 2) for name in names], streams=min(LOADERS, most), between=bench.check_time)
            if loads := len(subject.witness.loads) - loads:
                each_ms = (time.perf_counter() - began) / loads * 1e3
                yield bench.line(f"{amounts.model} streams, {of_adapters(adapters)}", "loading, each", each_ms, "ms")
            mixed = f", answers of {answer - spread} to {answer + spread} tokens"
            runs = [(n, spread, mixed) for n in amounts.mixed_counts] + [(n, 0, "") for n in amounts.stream_counts]
            for count, differ, suffix in runs:
                asks = [
                    ask(names, rng.randint(answer - differ, answer + differ))
                    for _ in range(amounts.stream_rounds * count)
                ]
                played = subject.play(asks, streams=count, between=bench.check_time)
                case = f"{amounts.model}, {count} streams, {of_adapters(adapters)}{suffix}"
                target = None if differ else TARGETS.get((count, adapters))
                at = sorted(second for life in played.lives for second in life.at)
                yield bench.line(case, "output tokens, steady", steady(at), "tokens/s", target=target)
                yield bench.line(case, "output tokens", played.tokens / played.wall_s, "tokens/s")
                gaps_s = [b - a for life in played.lives for a, b in zip(life.at, life.at[1:], strict=False)]
                yield from _latencies(bench, case, [life.ttft_s for life in played.lives], gaps_s)


def steady(at: Sequence[float]) -> float:
    """Return the tokens a second from the first quarter of all tokens to the last. `at`: sorted seconds."""
    first, last = len(at) // 4, 3 * len(at) // 4
    return (last - first) / (at[last] - at[first]) if at[last] > at[first] else 0.0


def _latencies(bench: Bench, case: str, ttft_s: Sequence[float], gaps_s: Sequence[float]) -> Iterator[Line]:
    for percent in (50, 99):
        target = "<= 200" if percent == 50 and case.startswith(f"{bench.amounts.model}, 128 streams") else None
        yield bench.line(case, f"TTFT p{percent}", percentile(ttft_s, percent) * 1e3, "ms", target=target)
        yield bench.line(case, f"gap between tokens p{percent}", percentile(gaps_s or [0.0], percent) * 1e3, "ms")


def _subject(bench: Bench, model: str, slots: int, tokens: int) -> DeviceSubject:
    """Make an engine for the most streams. `tokens`: of the longest sequence."""
    rows, prompt = max(bench.amounts.stream_counts), bench.amounts.stream_tokens[0]
    sizes = Sizes(
        rows=rows, slots=slots, context_tokens=tokens, batch_tokens=PREFILLS * prompt, prefills=PREFILLS, max_rank=RANK
    )
    return DeviceSubject(bench.gpu, DEVICE_SHAPES[model], sizes, waiting=min(LOADERS, rows))


# ---- over HTTP


def stack(bench: Bench) -> Iterator[Line]:
    """Measure `weft up` over HTTP beside the engine alone, base and adapters. Raises StackFailed, RequestFailed."""
    check_components()
    from weft_bench.path_shape import write_manifests
    from weft_stage.stack import Stack

    amounts, folder, (prompt, answer) = bench.amounts, bench.folder, bench.amounts.stream_tokens
    name, shape = amounts.stack_model, DEVICE_SHAPES[amounts.stack_model]
    paths = [adapter(folder, name, shape, number, RANK) for number in range(amounts.stack_adapters)]
    pages = adapter_pages(shape, len(paths) * lora_bytes(shape, RANK), len(paths))
    sizes = Sizes(
        rows=max(amounts.stream_counts), slots=len(paths), context_tokens=prompt + answer,
        batch_tokens=PREFILLS * prompt, prefills=PREFILLS, adapter_pages=pages,
    )  # fmt: skip
    manifests = write_manifests(
        folder / "manifests", base_model(folder, name, shape), paths, shape, sizes,
        {"lora": {"maxRank": RANK}, "slo": None},
    )  # fmt: skip
    alone = _alone(bench, paths)
    bench.gpu.free()  # for the runner's process
    started = time.perf_counter()
    with Stack(manifests, folder / "data", "--executor", "cuda") as running:
        try:
            running.wait_for_models(len(paths) + 1, timeout_s=READY_S)
            yield bench.line(f"{name} over HTTP", "ready after", time.perf_counter() - started, "s")
            for (count, adapters), rate in alone.items():
                bench.check_time()
                yield from _over_http(bench, running.port, count, [path.name for path in paths[:adapters]], rate)
        except OutOfTime:
            raise
        except Exception as error:
            raise StackFailed(f"{error}\n{_logs(folder / 'data')}") from error


def check_components() -> None:
    """Raise StackFailed where a component of `weft up` cannot begin, with what it lacks."""
    code = f"import {', '.join(COMPONENTS)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise StackFailed(f"`weft up` cannot begin: {done.stderr.strip().splitlines()[-1]}")


def _alone(bench: Bench, paths: Sequence[Path]) -> dict[tuple[int, int], float]:
    """Return output tokens a second of the engine in this process, by streams and adapters."""
    amounts, rng, (prompt, answer) = bench.amounts, random.Random(0), bench.amounts.stream_tokens
    rates, vocab = dict[tuple[int, int], float](), DEVICE_SHAPES[amounts.stack_model].vocab
    with _subject(bench, amounts.stack_model, len(paths), prompt + answer) as subject:
        subject.adapters.paths.update({path.name: path for path in paths})
        for names in ([""], [path.name for path in paths]):
            for count in amounts.stream_counts:
                asks = [
                    Ask(rng.choice(names), [rng.randrange(vocab) for _ in range(prompt)], answer)
                    for _ in range(amounts.stream_rounds * count)
                ]
                played = subject.play(asks, streams=count, between=bench.check_time)
                rates[count, len(paths) if any(names) else 0] = played.tokens / played.wall_s
    return rates


def _over_http(bench: Bench, port: int, count: int, names: Sequence[str], alone: float) -> Iterator[Line]:
    from weft_bench.path_shape import MODEL, NAMESPACE
    from weft_stage import sse

    amounts, rng, (prompt, answer) = bench.amounts, random.Random(0), bench.amounts.stream_tokens
    models, vocab = [f"{NAMESPACE}/{name}" for name in names] or [MODEL], DEVICE_SHAPES[amounts.stack_model].vocab
    bodies: list[dict[str, Any]] = [
        {
            "model": rng.choice(models), "temperature": 0, "max_tokens": answer, "ignore_eos": True,
            "prompt": [rng.randrange(3, vocab) for _ in range(prompt)],
        }
        for _ in range(amounts.stream_rounds * count)
    ]  # fmt: skip
    started = time.perf_counter()
    done = asyncio.run(sse.run("127.0.0.1", port, bodies, count))
    rate = sum(each.tokens for each in done) / (time.perf_counter() - started)
    case = f"{amounts.stack_model} over HTTP, {count} streams, {of_adapters(len(names))}"
    target = ">= 0.85" if count == max(amounts.stream_counts) else None
    yield bench.line(case, "output tokens", rate, "tokens/s", baseline=alone)
    yield bench.line(case, "of the engine alone", rate / alone, "share", target=target)
    gaps_s = [gap for each in done for gap in each.gaps()]
    yield from _latencies(bench, case, [each.first - each.start for each in done], gaps_s)


def _logs(data: Path) -> str:
    """Return the ends of the runners' logs."""
    logs = sorted((data / "logs").glob("runner*"))
    return "\n".join(f"{log.name}\n{log.read_text(errors='replace')[-LOG_CHARS:]}" for log in logs)
