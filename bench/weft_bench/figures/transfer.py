"""`weft bench transfer`: the runner's own streams of KV between two processes of this machine, by each carrier.

The sender is this process, the receiver a process whose machine accepts whatever is offered.
docs/benchmarks/phases.md has the method.
"""

import multiprocessing
import queue
import random
import resource
import secrets
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from weft.domain.ids import Epoch, RunnerId
from weft.domain.kv_transfer import KvAccept, KvAck, KvComplete, KvHello, KvOffer, KvReady
from weft.domain.machine import Connected, Kind, Peer, Received
from weft.wire.tls import load_tls
from weft_bench import cases
from weft_bench.cpu_shapes import SHAPES, prompts
from weft_bench.run import Run
from weft_kernels.plan import SegmentPlan
from weft_runner.core import OpenKvStream, ReceiveKv, SendKv
from weft_runner.model import KvMemory, LayerProgress, LocalKvMemory, StepInput, StepRow
from weft_runner.shell.kv_transfer import KvPlace, KvStreamShell
from weft_stage.errors import EngineRefused
from weft_stage.lines import Line, Origin

SHAPE, PAGE_TOKENS, TOKENS, PROMPT_TOKENS = "m135", 16, 512, 1024
REPETITIONS, STEPS, QUICK_REPETITIONS, QUICK_STEPS = 200, 9, 5, 2
ROTATION = 4  # times the pages of a transfer: what is copied is in no core's own cache
POOL, PATIENCE_S, GIGA = "bench/bench", 60.0, 1e9
EPOCH, BASE_DIGEST = Epoch(1, 1), f"sha256:{0:064}"
OVER_MEMCPY, OVER_TCP, UNHIDDEN = ">= 0.5", ">= 1", "<= 0.1"


@dataclass(frozen=True, slots=True)
class Carrier:
    """What bytes travel by. `tls`: a folder as `--tls-dir`, or None."""

    name: str
    shared_memory: bool = False
    tls: Path | None = None


@dataclass(frozen=True, slots=True)
class Geometry:
    """Pages of KV."""

    pages: int
    layers: int
    page_bytes: int


def geometry(pages: int, name: str = SHAPE) -> Geometry:
    """Return `pages` pages of a model's KV in bf16."""
    shape = SHAPES[name]
    return Geometry(pages, shape.layers, shape.layers * 2 * shape.kv * PAGE_TOKENS * 2)


def figures(options: cases.Transfer, run: Run) -> Iterator[Line]:
    """Measure carriers, and transfers beside a step. Raises EngineRefused."""
    origin, count = run.origin(), QUICK_REPETITIONS if options.quick else REPETITIONS
    carriers = [Carrier("shared memory", shared_memory=True), Carrier("TCP loopback")]
    carriers += [Carrier("TCP loopback, mutual TLS", tls=options.tls_dir)] if options.tls_dir else []
    place = geometry(ROTATION * TOKENS // PAGE_TOKENS)
    n_bytes = place.pages // ROTATION * place.page_bytes
    memcpy, case = _memcpy(n_bytes, count), f"{SHAPE}, {TOKENS} tokens ({n_bytes / 1e6:.1f} MB)"
    yield origin.line(case, "memcpy, one thread", memcpy / GIGA, "GB/s")
    for carrier in carriers:
        rate, cpu = carried(place, carrier, count)
        target = OVER_TCP if carrier.name == "TCP loopback" else None
        yield origin.line(case, carrier.name, rate / GIGA, "GB/s", baseline=memcpy / GIGA, target=target)
        if carrier.shared_memory:
            yield origin.line(case, f"{carrier.name}, of memcpy", rate / memcpy, "x", target=OVER_MEMCPY)
        yield origin.line(case, f"{carrier.name}, CPU", cpu, "s/GB")
    for threads in options.threads:
        for carrier in carriers:
            yield from _beside_a_step(origin, carrier, threads, options)


def _memcpy(n_bytes: int, count: int) -> float:
    """Return the bytes a second at which one thread copies as many bytes, at the median."""
    source, to = (np.ones((ROTATION, n_bytes), np.uint8) for _ in range(2))
    seconds = list[float]()
    for number in range(count):
        began = time.perf_counter()
        np.copyto(to[number % ROTATION], source[number % ROTATION])
        seconds.append(time.perf_counter() - began)
    return n_bytes / median(seconds)


def carried(place: Geometry, carrier: Carrier, count: int) -> tuple[float, float]:
    """Measure the bytes a second at the median, and the CPU seconds of both processes a GB."""
    n_pages, seconds, used = place.pages // ROTATION, list[float](), 0.0
    memory = LocalKvMemory(np.ones((place.pages, place.page_bytes), np.uint8), place.layers, "")
    with receiver(place, carrier) as other:
        sender = SenderEnd(memory, NoLayers(), carrier, other)
        for number in range(-ROTATION, count):  # the first transfers bring everything into memory
            if number == 0:
                used = -cpu_s() - other.cpu_s()
            begin, name = number % ROTATION * n_pages, sender.offer()
            began = time.perf_counter()
            sender.send(name, tuple(range(begin, begin + n_pages)))
            sender.acknowledged()
            if number >= 0:
                seconds.append(time.perf_counter() - began)
        used += cpu_s() + other.cpu_s()
        sender.close()
    n_bytes = n_pages * place.page_bytes
    return n_bytes / median(seconds), used / (count * n_bytes / GIGA)


def _beside_a_step(origin: Origin, carrier: Carrier, threads: int, options: cases.Transfer) -> Iterator[Line]:
    """Send the KV of a prompt after its step, and layer by layer while the step runs."""
    from weft_bench.drive.engine import Sizes, Subject  # seconds of imports that the receiver does without
    from weft_stage.cpu_models import base_model, cache_dir, files

    shape, n_pages = SHAPES[SHAPE], PROMPT_TOKENS // PAGE_TOKENS
    sizes = Sizes(
        executor="cpu", threads=threads, rows=2, context_tokens=PROMPT_TOKENS, slots=1, batch_tokens=PROMPT_TOKENS
    )
    case = f"{SHAPE}, prompt of {PROMPT_TOKENS} tokens, {threads} threads, {carrier.name}"
    base = files(base_model(cache_dir(), SHAPE, shape))
    with Subject(base, sizes) as subject, receiver(geometry(ROTATION * n_pages), carrier) as other:
        executor, pages = subject.engine.executor, tuple(range(n_pages))
        assert executor.kv_memory is not None, "an executor that exchanges no KV"
        (prompt,) = prompts(random.Random(options.seed), 1, PROMPT_TOKENS, shape.vocab)
        row = StepRow(0, PROMPT_TOKENS, 0, pages, samples=True)
        step = StepInput(prompt, (row,), SegmentPlan(PROMPT_TOKENS, ()))
        sender = SenderEnd(executor.kv_memory, subject.engine.layers, carrier, other)
        alone, after, beside, tail = list[float](), list[float](), list[float](), list[float]()
        for number in range(-1, QUICK_STEPS if options.quick else STEPS):
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
    transfer, slower = median(after), median(b - a for a, b in zip(alone, beside, strict=True))
    yield origin.line(case, "step alone", 1e3 * median(alone), "ms")
    yield origin.line(case, "transfer after it", 1e3 * transfer, "ms")
    yield origin.line(case, "as computed: not hidden", median(tail) / transfer, "x", target=UNHIDDEN)
    yield origin.line(case, "as computed: step takes longer by", 1e3 * slower, "ms")
    yield origin.line(case, "as computed: of the transfer's time", (slower + median(tail)) / transfer, "x")


# ---- the two ends


class NoLayers:
    """Nothing is sent layer by layer."""

    count = 0

    def wait_for(self, count: int, timeout_s: float) -> bool:
        del count
        time.sleep(timeout_s)
        return False


def cpu_s() -> float:
    """Return the CPU seconds of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True, slots=True)
class ReceiverEnd:
    """The other process, from here."""

    runner: RunnerId
    address: str
    pipe: "Connection[Any, Any]"

    def cpu_s(self) -> float:
        self.pipe.send("cpu")
        return self.pipe.recv()


class SenderEnd:
    """Sends to the other process, one transfer at a time. Raises EngineRefused when the stream ends."""

    def __init__(self, memory: KvMemory, progress: LayerProgress, carrier: Carrier, to: ReceiverEnd) -> None:
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._shell, self._numbers = _shell(_runner("sender"), memory, progress, carrier, self._events), 0
        self._peer = Peer(Kind.RUNNER, f"{to.runner.uuid}/{to.runner.incarnation}")
        hello = KvHello(_runner("sender"), to.runner.incarnation, POOL, BASE_DIGEST, memory.layout)
        self._shell.execute(OpenKvStream(self._peer, to.address, hello))
        self._await(Connected)

    def offer(self) -> str:
        """Offer a sequence, which the receiver expects from here on."""
        self._numbers += 1
        self._shell.send(self._peer, KvOffer(f"r{self._numbers}", EPOCH, ""))
        self._await(Received)
        return f"r{self._numbers}"

    def send(self, name: str, pages: tuple[int, ...], *, layer_by_layer: bool = False) -> None:
        self._shell.execute(SendKv(self._peer, name, EPOCH, 0, pages, layer_by_layer))
        self._shell.send(self._peer, KvComplete(name, EPOCH, len(pages) * PAGE_TOKENS, (1,)))

    def acknowledged(self) -> None:
        self._await(Received)

    def close(self) -> None:
        self._shell.close()

    def _await(self, kind: type[Any]) -> None:
        event = self._events.get(timeout=PATIENCE_S)
        if not isinstance(event, kind):
            raise EngineRefused(f"a stream of KV ended: {event}")


@contextmanager
def receiver(place: Geometry, carrier: Carrier) -> Generator[ReceiverEnd]:
    """Start the other process, and end it with the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_receive, args=(there, place, carrier), daemon=True)
    process.start()
    try:
        runner, address = here.recv()
        yield ReceiverEnd(runner, address, here)
        here.send("end")
        process.join(PATIENCE_S)
    finally:
        process.kill()


def _receive(pipe: "Connection[Any, Any]", place: Geometry, carrier: Carrier) -> None:
    """Run the other process: pages are given out in turn, all of them touched before."""
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    memory = LocalKvMemory(np.ones((place.pages, place.page_bytes), np.uint8), place.layers, "")
    runner = _runner("receiver")
    shell = _shell(runner, memory, NoLayers(), carrier, events)
    pipe.send((runner, f"127.0.0.1:{shell.port}"))
    threading.Thread(target=_accept_all, args=(shell, runner, place.pages, events), daemon=True).start()
    while pipe.recv() != "end":
        pipe.send(cpu_s())
    shell.close()


def _accept_all(shell: KvStreamShell, runner: RunnerId, total: int, events: "queue.SimpleQueue[Any]") -> None:
    """Handle events as the receiver's machine."""
    at = 0
    while True:
        match events.get():
            case Connected(peer):
                shell.send(peer, KvReady(runner))
            case Received(peer, KvOffer(name, epoch)):
                at = (at + total // ROTATION) % total
                pages = tuple((at + page) % total for page in range(total // ROTATION))
                shell.execute(ReceiveKv(peer, name, epoch, 0, pages))
                shell.send(peer, KvAccept(name, epoch, 0))
            case Received(peer, KvComplete(name, epoch)):
                shell.send(peer, KvAck(name, epoch))
            case _:
                return


def _shell(
    runner: RunnerId, memory: KvMemory, progress: LayerProgress, carrier: Carrier, events: "queue.SimpleQueue[Any]"
) -> KvStreamShell:
    tls = load_tls(carrier.tls, "runner")
    place = KvPlace("127.0.0.1:0", runner, POOL, PAGE_TOKENS, tls, carrier.shared_memory)
    return KvStreamShell(place, memory, progress, events.put)


def _runner(name: str) -> RunnerId:
    return RunnerId(f"bench.{name}", secrets.token_hex(8))
