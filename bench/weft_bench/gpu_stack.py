"""The whole product on one machine: `weft up` with the cuda executor, asked over HTTP, beside the engine alone.

A random model on disk, with adapters, under a pool made for as many streams; the client only counts (`sse.py`).
"""

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft_bench.cpu_context import adapter_pages
from weft_bench.cpu_engine import Sizes as PoolSizes
from weft_bench.cpu_shapes import RANK
from weft_bench.gpu_amounts import SHAPES
from weft_bench.gpu_context import Context
from weft_bench.gpu_engine import DeviceSubject, Sizes
from weft_bench.gpu_page import OF_ENGINE
from weft_bench.gpu_streams import PREFILLS
from weft_bench.path_shape import MODEL, NAMESPACE, write_manifests
from weft_bench.roofline import lora_bytes
from weft_stage import sse
from weft_stage.cpu_models import adapter, base_model
from weft_stage.errors import OutOfTime, StackFailed
from weft_stage.gpu_models import random_tokens
from weft_stage.lines import percentile
from weft_stage.playing import Ask
from weft_stage.shapes import Shape
from weft_stage.stack import Stack

READY_S = 600.0  # of a slow and busy machine
LOG_CHARS = 4000
COMPONENTS = (
    "weft_cli.up",
    *(f"weft_{name}.main" for name in ("depot", "gateway", "predictor", "scheduler", "supervisor")),
)


def measure(context: Context) -> None:
    """Base and adapters with every number of streams. Raises StackFailed, RequestFailed."""
    check_components()
    amounts, rng, folder = context.amounts, random.Random(0), context.folder
    shape = SHAPES[amounts.stack_model]
    paths = [adapter(folder, amounts.stack_model, shape, i, RANK) for i in range(amounts.stack_adapters)]
    base, spec = base_model(folder, amounts.stack_model, shape), {"lora": {"maxRank": RANK}, "slo": None}
    manifests = write_manifests(folder / "manifests", base, paths, shape, _sizes(context, shape), spec)
    alone = _alone(context, paths)
    context.gpu.free()  # for the runner's process
    started = time.perf_counter()
    with Stack(manifests, folder / "data", "--executor", "cuda") as stack:
        try:
            stack.wait_for_models(len(paths) + 1, timeout_s=READY_S)
            context.report(f"{amounts.stack_model} over HTTP", "ready after", time.perf_counter() - started, "s")
            for names in (("",), tuple(path.name for path in paths)):
                for streams in amounts.stream_counts:
                    context.check_time()
                    bodies = [_body(context, rng, rng.choice(names)) for _ in range(amounts.stream_rounds * streams)]
                    adapters = len(paths) if any(names) else 0
                    _report(context, stack, bodies, streams, adapters, alone[streams, adapters])
        except OutOfTime:
            raise
        except Exception as error:
            raise StackFailed(f"{error}\n{_logs(folder / 'data')}") from error


def check_components() -> None:
    """Raise StackFailed, with what is not there, where a component of `weft up` could not begin."""
    code = f"import {', '.join(COMPONENTS)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise StackFailed(f"`weft up` cannot begin: {done.stderr.strip().splitlines()[-1]}")


def _alone(context: Context, paths: Sequence[Path]) -> dict[tuple[int, int], float]:
    """Output tokens a second of the engine in this process, by streams and adapters."""
    amounts, rng = context.amounts, random.Random(0)
    shape, (prompt, answer) = SHAPES[amounts.stack_model], amounts.stream_tokens
    sizes = Sizes(max(amounts.stream_counts), len(paths), prompt + answer, PREFILLS * prompt, PREFILLS)
    subject, found = DeviceSubject(context.gpu, amounts.stack_model, shape, sizes, context.folder), {}
    with subject:
        subject.adapters.paths.update({path.name: path for path in paths})
        for names in (("",), tuple(path.name for path in paths)):
            for streams in amounts.stream_counts:
                asks = [
                    Ask(rng.choice(names), random_tokens(rng, prompt, shape.vocab), answer)
                    for _ in range(amounts.stream_rounds * streams)
                ]
                played = subject.play(asks, streams=streams, between=context.check_time)
                found[streams, len(paths) if any(names) else 0] = played.tokens / played.wall_s
    return found


def _report(
    context: Context, stack: Stack, bodies: Sequence[dict[str, Any]], streams: int, adapters: int, alone: float
) -> None:
    started = time.perf_counter()
    done = asyncio.run(sse.run("127.0.0.1", stack.port, bodies, streams))
    wall_s = time.perf_counter() - started
    name = context.amounts.stack_name(streams, adapters)
    rate = sum(answer.tokens for answer in done) / wall_s
    context.report(name, "output tokens", rate, "tokens/s", baseline=alone)
    context.report(name, OF_ENGINE, rate / alone, "share")
    gaps_s = [gap for answer in done for gap in answer.gaps()]
    for percent in (50, 99):
        ttft_s = percentile([answer.first - answer.start for answer in done], percent)
        context.report(name, f"TTFT p{percent}", ttft_s * 1e3, "ms")
        context.report(name, f"gap between tokens p{percent}", percentile(gaps_s or [0.0], percent) * 1e3, "ms")


def _body(context: Context, rng: random.Random, adapter_name: str) -> dict[str, Any]:
    prompt, answer = context.amounts.stream_tokens
    vocab = SHAPES[context.amounts.stack_model].vocab
    return {
        "model": f"{NAMESPACE}/{adapter_name}" if adapter_name else MODEL, "temperature": 0, "max_tokens": answer,
        "ignore_eos": True, "prompt": [rng.randrange(3, vocab) for _ in range(prompt)],
    }  # fmt: skip


def _sizes(context: Context, shape: Shape) -> PoolSizes:
    """Room for every stream at its longest and for every adapter."""
    amounts, (prompt, answer) = context.amounts, context.amounts.stream_tokens
    pages = adapter_pages(shape, amounts.stack_adapters * lora_bytes(shape, RANK), amounts.stack_adapters)
    return PoolSizes(
        rows=max(amounts.stream_counts), slots=amounts.stack_adapters, context_tokens=prompt + answer,
        batch_tokens=PREFILLS * prompt, prefills=PREFILLS, adapter_pages=pages,
    )  # fmt: skip


def _logs(data: Path) -> str:
    """The ends of what the runners said."""
    logs = sorted((data / "logs").glob("runner*"))
    return "\n".join(f"{log.name}\n{log.read_text(errors='replace')[-LOG_CHARS:]}" for log in logs)
