"""Evidence from a GPU in a few minutes; each figure is printed as soon as it is measured.

    python tools/gpu/evidence.py [device] [exact] [steps] [streams] [http]

It needs the folders of the Makefile's `GPU` on PYTHONPATH. TRITON_INTERPRET=1 runs every stage with tiny shapes on a
CPU: this shows that it works, and gives no figures. A stage that fails does not keep the next one from running. The
exit code is 1 when a stage failed.
"""

import asyncio
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from weft_bench.cpu_shapes import BASE, DEVICE_SHAPES, DISTINCT, IDENTICAL, RANK
from weft_bench.drive.device import Loaded, RowOf, Timer
from weft_bench.drive.device_machine import measured
from weft_bench.drive.engine import Batch, DeviceSubject, Model, Sizes
from weft_bench.figures import gpu_exact
from weft_bench.path_shape import write_manifests
from weft_stage import sse
from weft_stage.cpu_models import adapter, base_model
from weft_stage.gpu_device import find
from weft_stage.gpu_models import PROJECTIONS, Numbers, peft_tensors, random_tokens, random_weights, spec_of
from weft_stage.lines import percentile
from weft_stage.playing import Ask
from weft_stage.stack import Stack

STARTED = time.perf_counter()
GPU = find()
REAL = GPU.is_real
TIMER = Timer(GPU)
SHAPE = DEVICE_SHAPES["8B" if REAL else "tiny"]
EXACT_PROMPT, EXACT_MORE = (96, 24) if REAL else (10, 3)
DECODE_ROWS, CONTEXT = ((32, 256), 512) if REAL else ((2,), 20)
PROMPTS = (64, 512) if REAL else (8,)
BESIDE = 31  # rows in decode beside a prompt, at most
STREAMS = (1, 16, 64, 256) if REAL else (1, 2)
PROMPT, ANSWER = (128, 128) if REAL else (4, 3)  # tokens
BATCH_TOKENS = 2048 if REAL else 64
ENGINE_ADAPTERS, HTTP_ADAPTERS = (64, 8) if REAL else (2, 2)
FILES = 4  # adapters on disk, which the engine's adapters share
READY_S = 150.0
LOG_CHARACTERS = 3000


def say(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", flush=True)


def device() -> None:
    """Bandwidth, products and launches of the device."""
    if not REAL:
        say("device: none; Triton's interpreter runs")
        return
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    say(f"device: {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, torch {torch.__version__}")
    rates = measured(GPU, TIMER)
    say(
        f"device: copy {rates.copy_bytes_s / 1e12:.2f} TB/s, read {rates.read_bytes_s / 1e12:.2f} TB/s, "
        f"bf16 {rates.flops_s / 1e12:.0f} TFLOP/s, launch {rates.launch_s * 1e6:.2f} us, "
        f"two dependent launches {rates.floor_s * 1e6:.2f} us"
    )


def exact() -> None:
    """Logits of the whole model beside transformers + PEFT on the same weights."""
    names = ("base", "x", "y", "z")
    spec = spec_of(SHAPE, 2 * (EXACT_PROMPT + 7 * len(names) + EXACT_MORE))
    weights = random_weights(spec, Numbers(GPU.device, GPU.dtype))
    ranks = dict.fromkeys(PROJECTIONS, RANK)
    adapters = {name: peft_tensors(spec, ranks, seed, GPU.dtype) for seed, name in enumerate(names[1:], 1)}
    rng = random.Random(0)
    prompts = {name: random_tokens(rng, EXACT_PROMPT + 7 * i, spec.vocab_size) for i, name in enumerate(names)}
    ours = gpu_exact.ours(spec, weights, adapters, prompts, EXACT_MORE)
    GPU.free()
    model = gpu_exact.oracle(spec, weights, adapters)
    rounded = {name: gpu_exact.answered(model, name, ours[name].tokens, prompt) for name, prompt in prompts.items()}
    model = model.float()
    for name, prompt in prompts.items():
        true = gpu_exact.answered(model, name, ours[name].tokens, prompt)
        error, theirs = (gpu_exact.error_of(logits, true) for logits in (ours[name].logits, rounded[name]))
        same = (ours[name].logits.argmax(1) == true.argmax(1)).float().mean()
        verdict = "WRONG" if error > 3 * theirs + 1e-3 else "right"
        say(
            f"exact: {name}: {verdict}; largest error beside fp32: ours {error:.2e}, transformers + PEFT {theirs:.2e}; "
            f"likeliest token as fp32's {same:.3f}"
        )


def steps() -> None:
    """Captured decode steps and eager mixed steps: the host's part beside the step."""
    runs = 20 if REAL else 1
    for rows in DECODE_ROWS:
        began = time.perf_counter()
        loaded = Loaded.of(GPU, SHAPE, [(rows, CONTEXT + 64)])
        say(f"steps: {rows} rows: weights, graphs and adapters made in {time.perf_counter() - began:.1f} s")
        for kind in (BASE, IDENTICAL, DISTINCT):
            batch = Batch(rows, kind)
            step = loaded.decode(batch, CONTEXT)
            host_ms, step_ms = _timed(lambda step=step, loaded=loaded: loaded.executor.run(step), runs)
            n_bytes = batch.work(SHAPE, CONTEXT).n_bytes
            say(
                f"steps: captured, {rows} rows, context {CONTEXT}, {kind}: {step_ms:.2f} ms "
                f"({n_bytes / step_ms / 1e9:.2f} TB/s, {n_bytes / 1e9:.1f} GB), host {host_ms:.2f} ms"
            )
        beside = min(rows - 1, BESIDE)
        for prompt in PROMPTS:
            for adapted in (False, True):
                decoding = [RowOf(1, CONTEXT, i if adapted else None) for i in range(1, beside + 1)]
                step = loaded.step([RowOf(prompt, 0, 0 if adapted else None), *decoding])
                host_ms, step_ms = _timed(lambda step=step, loaded=loaded: loaded.executor.run(step), runs)
                say(
                    f"steps: eager, prompt {prompt} beside {beside} rows, {'an adapter each' if adapted else BASE}: "
                    f"{step_ms:.2f} ms, of which the host launches for {host_ms:.2f} ms"
                )
        del loaded
        GPU.free()


def streams() -> None:
    """Requests through the engine in this process."""
    most, rng = max(STREAMS), random.Random(0)
    sizes = Sizes(
        rows=most, slots=ENGINE_ADAPTERS, context_tokens=PROMPT + ANSWER, batch_tokens=BATCH_TOKENS, prefills=4
    )
    with tempfile.TemporaryDirectory() as folder, DeviceSubject(GPU, SHAPE, sizes, waiting=most) as subject:
        model = Model("gpu", SHAPE, Path(folder), rng)
        adapters = [model.alias(subject, f"adapter {i}", i, FILES) for i in range(ENGINE_ADAPTERS)]

        def asks(names: Sequence[str], count: int, tokens: int) -> list[Ask]:
            return [Ask(names[i % len(names)], random_tokens(rng, PROMPT, SHAPE.vocab), tokens) for i in range(count)]

        subject.play(asks(adapters, len(adapters), 2), streams=min(16, max(STREAMS)))
        say("streams: every adapter is in a slot")
        for kind, names in ((BASE, [""]), ("adapters", adapters)):
            for count in STREAMS:
                played = subject.play(asks(names, 2 * count, ANSWER), streams=count)
                gaps_s = [b - a for life in played.lives for a, b in zip(life.at, life.at[1:], strict=False)]
                ttft_s = [life.ttft_s for life in played.lives]
                _say_rates(f"streams: {count} streams, {kind}", played.tokens / played.wall_s, ttft_s, gaps_s)


def http() -> None:
    """The whole stack: `weft up` with a random model on disk, asked over HTTP. EVIDENCE_EXECUTOR: cuda if not set."""
    name, rng = "1B" if REAL else "tiny", random.Random(0)
    shape, memory = DEVICE_SHAPES[name], Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        folder = Path(scratch)
        base = base_model(folder / "made", name, shape)
        paths = [adapter(folder / "made", name, shape, i, RANK) for i in range(HTTP_ADAPTERS)]
        sizes = Sizes(
            rows=max(STREAMS), slots=HTTP_ADAPTERS, context_tokens=PROMPT + ANSWER, batch_tokens=BATCH_TOKENS,
            prefills=4, adapter_pages=64 * HTTP_ADAPTERS,
        )  # fmt: skip
        manifests = write_manifests(folder / "manifests", base, paths, shape, sizes)
        executor = os.environ.get("EVIDENCE_EXECUTOR", "cuda")
        began = time.perf_counter()
        with Stack(manifests, folder / "data", "--executor", executor) as stack:
            try:
                stack.wait_for_models(HTTP_ADAPTERS + 1, timeout_s=READY_S)
                say(f"http: {name} and {HTTP_ADAPTERS} adapters ready in {time.perf_counter() - began:.1f} s")
                for kind, models in ((BASE, [BASE]), ("adapters", [f"default/{path.name}" for path in paths])):
                    for count in STREAMS:
                        bodies = [_body(rng, models[i % len(models)], shape.vocab) for i in range(2 * count)]
                        began = time.perf_counter()
                        answers = asyncio.run(sse.run("127.0.0.1", stack.port, bodies, count))
                        tokens_s = sum(answer.tokens for answer in answers) / (time.perf_counter() - began)
                        gaps_s = [gap for answer in answers for gap in answer.gaps()]
                        ttft_s = [answer.first - answer.start for answer in answers]
                        _say_rates(f"http: {count} streams, {kind}", tokens_s, ttft_s, gaps_s)
            except BaseException:
                say(f"http: log of the stack:\n{stack.log()[-LOG_CHARACTERS:]}")
                for log in (folder / "data" / "logs").glob("runner*"):
                    say(f"{log.name}\n{log.read_text(errors='replace')[-LOG_CHARACTERS:]}")
                raise


def _timed(run: Callable[[], object], runs: int) -> tuple[float, float]:
    """Return the median milliseconds until a call returns, and until the device is done; caches are warm."""
    run()
    host, step = TIMER.clock(run, runs)
    return host.median * 1e3, step.median * 1e3


def _say_rates(what: str, tokens_s: float, ttft_s: Sequence[float], gaps_s: Sequence[float]) -> None:
    ttft, gaps = ([percentile(values or [0.0], n) * 1e3 for n in (50, 99)] for values in (ttft_s, gaps_s))
    say(
        f"{what}: {tokens_s:,.0f} output tokens/s, TTFT p50 {ttft[0]:.0f} ms, p99 {ttft[1]:.0f} ms, "
        f"between tokens p50 {gaps[0]:.1f} ms, p99 {gaps[1]:.1f} ms"
    )


def _body(rng: random.Random, model: str, vocab: int) -> dict[str, Any]:
    prompt = [rng.randrange(3, vocab) for _ in range(PROMPT)]
    return {"model": model, "temperature": 0, "max_tokens": ANSWER, "ignore_eos": True, "prompt": prompt}


STAGES = {"device": device, "exact": exact, "steps": steps, "streams": streams, "http": http}


def main(names: Sequence[str]) -> int:
    """Return the exit code."""
    failed = False
    for name in names or STAGES:
        try:
            STAGES[name]()
        except Exception:  # noqa: BLE001 - the next stage may work
            failed = True
            say(f"{name}: FAILED\n{traceback.format_exc()}")
            if not GPU.works():
                say("the device is lost")
                break
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
