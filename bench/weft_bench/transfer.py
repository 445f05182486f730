"""`weft bench transfer`: the runner's own streams of KV between two processes of this machine, by each carrier, from
one process's pages to the other's. `2 ranks`: half of each page on each of two streams of this process, to a process of
its own each, at the same time until both are acknowledged. A transfer begins with the order to send and ends with the
acknowledgement, a KvComplete and a KvAck included. `memcpy`: one thread copies as many bytes from page to page, in one
process. All pages have been touched before, and every transfer uses others than the one before it. CPU seconds are
those of all processes. gRPC: the same bytes in messages of a MiB, for comparison (ADR 0017).

`as computed`: a prompt in one step of the CPU executor, its KV sent layer by layer meanwhile. What is not hidden is the
time from the end of the step to the acknowledgement; beside it what the step itself takes longer for the transfer.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np

from weft_bench import transfer_grpc
from weft_bench.cpu_context import Bar
from weft_bench.cpu_engine import Sizes, Subject
from weft_bench.cpu_shapes import SHAPES, prompts
from weft_bench.transfer_ends import PAGE_TOKENS, Carrier, Geometry, NoLayers, ReceiverEnd, SenderEnd, cpu_s, receiver
from weft_kernels.plan import SegmentPlan
from weft_runner.model import LocalKvMemory, StepInput, StepRow
from weft_stage.cpu_models import base_model, cache_dir, files
from weft_stage.lines import Line, Origin

SHAPE = "m135"
TOKENS, PROMPT_TOKENS = 512, 1024
REPETITIONS, STEPS = 200, 9
QUICK_REPETITIONS, QUICK_STEPS = 5, 2
ROTATION = 4  # times the pages of a transfer: what is copied is in no core's own cache
GIGA = 1e9
SHARED_MEMORY_TARGET, TCP_TARGET, UNHIDDEN_TARGET = ">= 0.5", ">= 1", "<= 0.1"


def page_bytes(shape: str = SHAPE) -> int:
    """Return the bytes of a page of that model in bf16."""
    of = SHAPES[shape]
    return of.layers * 2 * of.kv_heads * (of.hidden // of.heads) * PAGE_TOKENS * 2


def figures(
    origin: Origin, *, tls: Path | None, threads: list[int], quick: bool, seed: int, bar: Bar
) -> Iterator[Line]:
    """Measure carriers, gRPC, and transfers beside a step. `tls`: a folder of certificates. Raises BenchFailed."""
    count = QUICK_REPETITIONS if quick else REPETITIONS
    carriers = [Carrier("shared memory", shared_memory=True), Carrier("TCP loopback")]
    carriers += [Carrier("TCP loopback, mutual TLS", tls=tls)] if tls else []
    memcpy = _memcpy(count)
    case = f"{SHAPE}, {TOKENS} tokens ({_bytes() / 1e6:.1f} MB)"
    yield origin.line(case, "memcpy, one thread", memcpy / GIGA, "GB/s")
    for carrier in carriers:
        with bar(carrier.name, 1) as advanced:
            rate, cpu = _carried(carrier, count)
            advanced(1)
        target = TCP_TARGET if carrier.name == "TCP loopback" else None
        yield origin.line(case, carrier.name, rate / GIGA, "GB/s", baseline=memcpy / GIGA, target=target)
        if carrier.shared_memory:
            yield origin.line(case, f"{carrier.name}, of memcpy", rate / memcpy, "x", target=SHARED_MEMORY_TARGET)
        yield origin.line(case, f"{carrier.name}, CPU", cpu, "s/GB")
        rate, cpu = _carried(carrier, count, ranks=2)
        yield origin.line(case, f"{carrier.name}, 2 ranks", rate / GIGA, "GB/s", baseline=memcpy / GIGA)
        yield origin.line(case, f"{carrier.name}, 2 ranks, CPU", cpu, "s/GB")
    for folder in (None, tls) if tls else (None,):
        name = "gRPC messages, mutual TLS" if folder else "gRPC messages"
        rate, cpu = _by_grpc(folder, max(2, count // 10))
        yield origin.line(case, name, rate / GIGA, "GB/s", baseline=memcpy / GIGA)
        yield origin.line(case, f"{name}, CPU", cpu, "s/GB")
    for number in threads:
        for carrier in carriers:
            with bar(f"{carrier.name}, {number} threads", 1) as advanced:
                lines = list(_beside_a_step(origin, carrier, number, QUICK_STEPS if quick else STEPS, seed))
                advanced(1)
            yield from lines


def _bytes() -> int:
    return TOKENS // PAGE_TOKENS * page_bytes()


def _memcpy(count: int) -> float:
    """Measure the bytes a second of a copy."""
    source, to = (np.ones((ROTATION, _bytes()), np.uint8) for _ in range(2))
    seconds: list[float] = []
    for number in range(count):
        began = time.perf_counter()
        np.copyto(to[number % ROTATION], source[number % ROTATION])
        seconds.append(time.perf_counter() - began)
    return _bytes() / median(seconds)


def _carried(carrier: Carrier, count: int, ranks: int = 1) -> tuple[float, float]:
    """Measure bytes/s at the median, and CPU seconds a GB. `ranks`: senders, each with a shard of every page."""
    shape, n_pages = SHAPES[SHAPE], TOKENS // PAGE_TOKENS
    geometry = Geometry(ROTATION * n_pages, shape.layers, page_bytes() // ranks)
    seconds: list[float] = []
    with ExitStack() as stack:
        others = [stack.enter_context(receiver(geometry, carrier)) for _ in range(ranks)]
        senders = [_sender(geometry, carrier, other) for other in others]
        used = 0.0
        for number in range(-ROTATION, count):  # the first ones bring everything into memory
            if number == 0:
                used = -cpu_s() - sum(other.cpu_s() for other in others)
            begin, names = number % ROTATION * n_pages, [sender.offer() for sender in senders]
            began = time.perf_counter()
            for sender, name in zip(senders, names, strict=True):
                sender.send(name, tuple(range(begin, begin + n_pages)))
            for sender in senders:
                sender.acknowledged()
            if number >= 0:
                seconds.append(time.perf_counter() - began)
        used += cpu_s() + sum(other.cpu_s() for other in others)
        for sender in senders:
            sender.close()
    return _bytes() / median(seconds), used / (count * _bytes() / GIGA)


def _sender(geometry: Geometry, carrier: Carrier, other: ReceiverEnd) -> SenderEnd:
    memory = LocalKvMemory(np.ones((geometry.pages, geometry.page_bytes), np.uint8), geometry.layers, "")
    return SenderEnd(memory, NoLayers(), carrier, other.runner, other.address)


def _by_grpc(tls: Path | None, count: int) -> tuple[float, float]:
    content = np.ones(_bytes(), np.uint8)
    with transfer_grpc.receiver(_bytes(), tls) as (address, asks):
        asks.send("cpu")
        used = -cpu_s() - asks.recv()
        seconds = asyncio.run(transfer_grpc.transfers_s(address, tls, content, count))
        asks.send("cpu")
        used += cpu_s() + asks.recv()
    return _bytes() / median(seconds), used / ((count + 1) * _bytes() / GIGA)


def _beside_a_step(origin: Origin, carrier: Carrier, threads: int, steps: int, seed: int) -> Iterator[Line]:
    shape, n_pages = SHAPES[SHAPE], PROMPT_TOKENS // PAGE_TOKENS
    base = files(base_model(cache_dir(), SHAPE, shape))
    sizes = Sizes(
        executor="cpu", threads=threads, rows=2, context_tokens=PROMPT_TOKENS, slots=1, batch_tokens=PROMPT_TOKENS
    )
    case = f"{SHAPE}, prompt of {PROMPT_TOKENS} tokens, {threads} threads, {carrier.name}"
    with Subject(base, sizes) as subject, receiver(Geometry(4 * n_pages, shape.layers, page_bytes()), carrier) as other:
        executor, pages = subject.engine.executor, tuple(range(n_pages))
        assert executor.kv_memory is not None, "an executor that exchanges no KV"
        (prompt,) = prompts(random.Random(seed), 1, PROMPT_TOKENS, shape.vocab)
        row = StepRow(0, PROMPT_TOKENS, 0, pages, samples=True)
        step = StepInput(prompt, (row,), SegmentPlan(PROMPT_TOKENS, ()))
        sender = SenderEnd(executor.kv_memory, subject.engine.layers, carrier, other.runner, other.address)
        alone, after, beside, tail = list[float](), list[float](), list[float](), list[float]()
        for number in range(-1, steps):
            began = time.perf_counter()
            executor.run(step)
            ended = time.perf_counter()
            name = sender.offer()
            sent = time.perf_counter()
            sender.send(name, pages)
            sender.acknowledged()
            acknowledged = time.perf_counter()
            name = sender.offer()
            again = time.perf_counter()
            sender.send(name, pages, layer_by_layer=True)
            executor.run(step)
            computed = time.perf_counter()
            sender.acknowledged()
            if number >= 0:
                alone.append(ended - began)
                after.append(acknowledged - sent)
                beside.append(computed - again)
                tail.append(time.perf_counter() - computed)
        sender.close()
    transfer = median(after)
    yield origin.line(case, "step alone", 1e3 * median(alone), "ms")
    yield origin.line(case, "transfer after it", 1e3 * transfer, "ms")
    yield origin.line(case, "as computed: not hidden", median(tail) / transfer, "x", target=UNHIDDEN_TARGET)
    slower = median(b - a for a, b in zip(alone, beside, strict=True))
    yield origin.line(case, "as computed: step takes longer by", 1e3 * slower, "ms")
    yield origin.line(case, "as computed: of the transfer's time", (slower + median(tail)) / transfer, "x")
