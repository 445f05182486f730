"""`weft bench path --model-shape`: streams through the whole stack beside the engine alone, on the same cores.

The same model, adapters, prompts (token ids), answer lengths and runner settings; the two alternate. The base and its
adapters take turns over the requests. The client is a raw reader of server-sent events that shares the cores; what it
takes of them is shown.
"""

import asyncio
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
import yaml

from weft_bench.cpu_context import adapter_pages
from weft_bench.cpu_engine import Ask, Sizes, Subject, pages_of
from weft_bench.cpu_shapes import RANK, SHAPES, prompts
from weft_bench.roofline import lora_bytes
from weft_stage import sse
from weft_stage.cpu_models import adapter, base_model, files
from weft_stage.lines import Line, Origin, percentile
from weft_stage.shapes import Shape
from weft_stage.stack import Stack

ADAPTERS, PROMPT_TOKENS, OUTPUT_TOKENS, REQUESTS_PER_STREAM = 8, 64, 64, 4
MODEL, NAMESPACE = "base", "default"  # the adapters say that they were trained on "base"
SPECIAL = ("<unk>", "<s>", "</s>")
READY_S = 180.0
TARGETS = {"m135, 32 streams": ">= 0.85"}
BUSY = "weft_runner_busy_seconds_total"


@dataclass(frozen=True, slots=True)
class Work:
    """What both sides are given: for each request the number of its adapter (None: the base) and its prompt."""

    numbers: tuple[int | None, ...]
    prompts: tuple[tuple[int, ...], ...]


def measure(name: str, folder: Path, streams: int, repetitions: int, seed: int, origin: Origin) -> list[Line]:
    """Alternate the engine alone and the whole stack. Raises StackFailed, EngineRefused, RequestFailed."""
    shape, rng = SHAPES[name], random.Random(seed)
    base = base_model(folder, name, shape)
    adapters = [adapter(folder, name, shape, number, RANK) for number in range(ADAPTERS)]
    sizes = _sizes(shape, streams)
    with TemporaryDirectory(prefix="weft-bench-") as scratch:
        manifests = write_manifests(Path(scratch) / "manifests", base, adapters, shape, sizes)
        with Subject(files(base), sizes) as subject, Stack(manifests, Path(scratch) / "data") as stack:
            subject.adapters.paths.update({path.name: path for path in adapters})
            stack.wait_for_models(ADAPTERS + 1, timeout_s=READY_S)
            rounds = [
                _round(subject, stack, adapters, work(rng, shape, streams), streams) for _ in range(repetitions + 1)
            ]
    return list(_lines(origin, f"{name}, {streams} streams", rounds[1:]))


def work(rng: random.Random, shape: Shape, streams: int) -> Work:
    """Requests that take turns over the base and every adapter."""
    count = streams * REQUESTS_PER_STREAM
    numbers = [None if i % (ADAPTERS + 1) == 0 else i % (ADAPTERS + 1) - 1 for i in range(count)]
    made = prompts(rng, count, PROMPT_TOKENS, shape.vocab)
    return Work(tuple(numbers), tuple(map(tuple, made)))


def write_manifests(
    folder: Path,
    base: Path,
    adapters: Sequence[Path],
    shape: Shape,
    sizes: Sizes,
    spec: Mapping[str, Any] | None = None,
) -> Path:
    """A pool with this base, and its adapters. `spec`: what its specification has besides.

    Files of the same file system are not copied.
    """
    for source, target in ((base, folder / "model"), *((path, folder / path.name) for path in adapters)):
        shutil.copytree(source, target, copy_function=_linked)
    (folder / "model" / "tokenizer.json").write_text(tokenizer(shape.vocab), encoding="utf-8")
    objects = [_pool(sizes, spec or {}), *(_adapter(path.name) for path in adapters)]
    (folder / "bench.yaml").write_text(yaml.safe_dump_all(objects), encoding="utf-8")
    return folder


def tokenizer(vocab: int) -> str:
    """`tokenizer.json` of a vocabulary of numbered words: token 17 is `w17`."""
    words = {word: i for i, word in enumerate(SPECIAL)} | {f"w{i}": i for i in range(len(SPECIAL), vocab)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=SPECIAL[0]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(SPECIAL))
    return made.to_str()


def _linked(source: str, target: str) -> None:
    """A second name for the file, or a copy where that cannot be. (The depot refuses links that leave its root.)"""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


@dataclass(frozen=True, slots=True)
class _Round:
    engine: float  # tokens a second
    stack: float
    client: float  # cores that the client took
    busy: float  # share of the time in which the runner computed
    ttft_s: tuple[float, ...]


def _round(subject: Subject, stack: Stack, adapters: Sequence[Path], given: Work, streams: int) -> _Round:
    asks = [
        Ask("" if number is None else adapters[number].name, prompt, OUTPUT_TOKENS)
        for number, prompt in zip(given.numbers, given.prompts, strict=True)
    ]
    alone = subject.play(asks, streams=streams)
    bodies = [_body(ask) for ask in asks]
    busy_s, cpu_s, start = stack.metric("runner", BUSY), time.process_time(), time.perf_counter()
    done = asyncio.run(sse.run("127.0.0.1", stack.port, bodies, streams))
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_s
    busy_s = stack.metric("runner", BUSY) - busy_s
    tokens = sum(answer.tokens for answer in done)
    ttft_s = tuple(answer.first - answer.start for answer in done)
    return _Round(alone.tokens / alone.wall_s, tokens / wall_s, cpu_s / wall_s, busy_s / wall_s, ttft_s)


def _body(ask: Ask) -> dict[str, Any]:
    model = f"{NAMESPACE}/{ask.adapter}" if ask.adapter else MODEL
    return {"model": model, "prompt": list(ask.prompt), "temperature": 0, "max_tokens": ask.tokens}


def _lines(origin: Origin, case: str, rounds: Sequence[_Round]) -> Iterator[Line]:
    engine = median(each.engine for each in rounds)
    yield origin.line(case, "output tokens", median(each.stack for each in rounds), "tokens/s", baseline=engine)
    share = median(each.stack / each.engine for each in rounds)
    yield origin.line(case, "of the engine alone", share, "share", target=TARGETS.get(case))
    yield origin.line(case, "the client's CPU", median(each.client for each in rounds), "cores")
    yield origin.line(case, "time outside the runner", 1 - median(each.busy for each in rounds), "share")
    ttft_s = [seconds for each in rounds for seconds in each.ttft_s]
    for percent in (50, 99):
        yield origin.line(case, f"time to first token p{percent}", percentile(ttft_s, percent) * 1e3, "ms")


def _sizes(shape: Shape, streams: int) -> Sizes:
    pages = adapter_pages(shape, ADAPTERS * lora_bytes(shape, RANK), ADAPTERS)
    return Sizes(
        rows=streams, slots=ADAPTERS, context_tokens=PROMPT_TOKENS + OUTPUT_TOKENS, batch_tokens=512, prefills=1,
        adapter_pages=pages, token_time_ms=100, profile=True,
    )  # fmt: skip


def _pool(sizes: Sizes, spec: Mapping[str, Any]) -> dict[str, Any]:
    """`spec`: fields that are others; None leaves one out."""
    made = {
        "model": {"name": MODEL, "uri": "file:model"},
        "replicas": 1,
        "lora": {"maxRank": sizes.max_rank},
        "advanced": {
            "maxSequences": sizes.rows, "maxBatchTokens": sizes.batch_tokens, "maxQueue": 100_000,
            "maxAdapters": sizes.slots, "kvPages": pages_of(sizes), "speculation": sizes.speculation.capitalize(),
        },
        "slo": {"tokenTimeMs": sizes.token_time_ms},
        **spec,
    }  # fmt: skip
    return {
        "apiVersion": "serving.weft.dev/v1alpha1",
        "kind": "ServingPool",
        "metadata": {"name": MODEL, "namespace": NAMESPACE},
        "spec": {name: value for name, value in made.items() if value is not None},
    }


def _adapter(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "serving.weft.dev/v1alpha1",
        "kind": "LoRAAdapter",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"poolRef": {"name": MODEL}, "source": {"uri": f"file:{name}"}},
    }
