"""`weft bench transfer`: the runner's own streams of KV between two processes of this machine, by each carrier.

The sender is this process, the receiver a process whose machine accepts whatever is offered.
docs/benchmarks/phases.md has the method.
"""

import multiprocessing
import queue
import random
import secrets
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
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
from weft_runner.model import CalledLayerCounter, KvMemory, LayerProgress, LocalKvMemory, StepInput, StepRow
from weft_runner.shell.kv_transfer import KvPlace, KvStreamShell
from weft_stage.errors import EngineRefused
from weft_stage.lines import Line

SHAPE, PAGE_TOKENS, TOKENS, PROMPT_TOKENS = "m135", 16, 512, 1024
REPETITIONS, STEPS, QUICK_REPETITIONS, QUICK_STEPS = 200, 9, 5, 2
ROTATION = 4  # times the pages of a transfer: what is copied is in no core's own cache
POOL, PATIENCE_S, GIGA = "bench/bench", 60.0, 1e9
EPOCH, BASE_DIGEST = Epoch(1, 1), f"sha256:{0:064}"
OVER_MEMCPY, OVER_TCP, UNHIDDEN = ">= 0.5", ">= 1", "<= 0.1"
LAYERS, PAGE_BYTES = SHAPES[SHAPE].layers, SHAPES[SHAPE].layers * 2 * SHAPES[SHAPE].kv * PAGE_TOKENS * 2  # bf16


@dataclass(frozen=True, slots=True)
class Carrier:
    """What bytes travel by. `tls`: a folder as `--tls-dir`, or None."""

    name: str
    shared_memory: bool = False
    tls: Path | None = None


def figures(options: cases.Transfer, run: Run) -> Iterator[Line]:
    """Measure carriers, and transfers beside a step. Raises EngineRefused."""
    line, count = run.origin().line, QUICK_REPETITIONS if options.quick else REPETITIONS
    carriers = [Carrier("shared memory", shared_memory=True), Carrier("TCP loopback")]
    carriers += [Carrier("TCP loopback, mutual TLS", tls=options.tls_dir)] if options.tls_dir else []
    n_bytes, n_pages = TOKENS // PAGE_TOKENS * PAGE_BYTES, TOKENS // PAGE_TOKENS
    memcpy, case = n_bytes / memcpy_s(n_bytes, count) / GIGA, f"{SHAPE}, {TOKENS} tokens ({n_bytes / 1e6:.1f} MB)"
    yield line(case, "memcpy, one thread", memcpy, "GB/s")
    for carrier in carriers:
        rate = n_bytes / transfer_s(n_pages, carrier, count) / GIGA
        target = OVER_TCP if carrier.name == "TCP loopback" else None
        yield line(case, carrier.name, rate, "GB/s", baseline=memcpy, target=target)
        if carrier.shared_memory:
            yield line(case, f"{carrier.name}, of memcpy", rate / memcpy, "x", target=OVER_MEMCPY)
    for threads, carrier in product(options.threads, carriers):
        case = f"{SHAPE}, prompt of {PROMPT_TOKENS} tokens, {threads} threads, {carrier.name}"
        steps = steps_s(carrier, threads, QUICK_STEPS if options.quick else STEPS, options.seed)
        alone, after, beside, tail = zip(*steps, strict=True)
        slower = median(b - a for a, b in zip(alone, beside, strict=True))
        yield line(case, "step alone", 1e3 * median(alone), "ms")
        yield line(case, "transfer after it", 1e3 * median(after), "ms")
        yield line(case, "as computed: not hidden", median(tail) / median(after), "x", target=UNHIDDEN)
        yield line(case, "as computed: step takes longer by", 1e3 * slower, "ms")


def memcpy_s(n_bytes: int, count: int) -> float:
    """Return the median seconds in which one thread copies as many bytes."""
    (source, to), seconds = (np.ones((ROTATION, n_bytes), np.uint8) for _ in range(2)), list[float]()
    for number in range(count):
        began = time.perf_counter()
        np.copyto(to[number % ROTATION], source[number % ROTATION])
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def transfer_s(n_pages: int, carrier: Carrier, count: int) -> float:
    """Return the median seconds of a transfer of that many pages."""
    memory = LocalKvMemory(np.ones((ROTATION * n_pages, PAGE_BYTES), np.uint8), LAYERS, "")
    with sender(memory, CalledLayerCounter(), n_pages, carrier) as to:
        begins = [number % ROTATION * n_pages for number in range(ROTATION + count)]
        seconds = [to.transfer(range(begin, begin + n_pages)) for begin in begins]
    return median(seconds[ROTATION:])  # the first ones bring everything into memory


def steps_s(carrier: Carrier, threads: int, count: int, seed: int) -> Iterator[tuple[float, float, float, float]]:
    """Send the KV of a prompt after its step, and layer by layer while the step runs.

    Yields the seconds of the step alone, of the transfer after it, of the step beside a transfer, and of what is left
    of the transfer then.
    """
    from weft_bench.drive.engine import Sizes, Subject  # seconds of imports that the receiver does without
    from weft_stage.cpu_models import base_model, cache_dir, files

    shape, pages = SHAPES[SHAPE], tuple(range(PROMPT_TOKENS // PAGE_TOKENS))
    sizes = Sizes("cpu", threads=threads, rows=2, context_tokens=PROMPT_TOKENS, slots=1, batch_tokens=PROMPT_TOKENS)
    (prompt,) = prompts(random.Random(seed), 1, PROMPT_TOKENS, shape.vocab)
    row = StepRow(0, PROMPT_TOKENS, 0, pages, samples=True)
    step = StepInput(prompt, (row,), SegmentPlan(PROMPT_TOKENS, ()))
    with Subject(files(base_model(cache_dir(), SHAPE, shape)), sizes) as subject:
        executor = subject.engine.executor
        assert executor.kv_memory is not None, "an executor that exchanges no KV"
        with sender(executor.kv_memory, subject.engine.layers, len(pages), carrier) as to:
            for number in range(-1, count):
                began = time.perf_counter()
                executor.run(step)
                alone_s, after_s, name = time.perf_counter() - began, to.transfer(pages), to.offer()
                began = time.perf_counter()
                to.send(name, pages, layer_by_layer=True)
                executor.run(step)
                computed = time.perf_counter()
                to.wait()
                if number >= 0:
                    yield alone_s, after_s, computed - began, time.perf_counter() - computed


# ---- the two ends


@dataclass(slots=True)
class Sender:
    """Sends to the other process, one transfer at a time. Raises EngineRefused when the stream ends."""

    shell: KvStreamShell
    peer: Peer
    events: "queue.SimpleQueue[Any]"
    offers: int = 0

    def offer(self) -> str:
        """Offer a sequence, which the receiver expects from here on."""
        self.offers += 1
        self.shell.send(self.peer, KvOffer(f"r{self.offers}", EPOCH, ""))
        self.wait()
        return f"r{self.offers}"

    def send(self, name: str, pages: Sequence[int], *, layer_by_layer: bool = False) -> None:
        self.shell.execute(SendKv(self.peer, name, EPOCH, 0, tuple(pages), layer_by_layer))
        self.shell.send(self.peer, KvComplete(name, EPOCH, len(pages) * PAGE_TOKENS, (1,)))

    def wait(self, kind: type[Any] = Received) -> None:
        event = self.events.get(timeout=PATIENCE_S)
        if not isinstance(event, kind):
            raise EngineRefused(f"a stream of KV ended: {event}")

    def transfer(self, pages: Sequence[int]) -> float:
        """Return the seconds from the order to send an offered sequence to its acknowledgement."""
        name, began = self.offer(), time.perf_counter()
        self.send(name, pages)
        self.wait()
        return time.perf_counter() - began


@contextmanager
def sender(memory: KvMemory, progress: LayerProgress, n_pages: int, carrier: Carrier) -> Generator[Sender]:
    """Start the other process, which takes `n_pages` pages a transfer, and open a stream to it."""
    context, events = multiprocessing.get_context("spawn"), queue.SimpleQueue[Any]()
    here, there = context.Pipe()
    process = context.Process(target=_receive, args=(there, n_pages, carrier), daemon=True)
    process.start()
    runner, shell = _shell("sender", memory, progress, carrier, events)
    try:
        to, address = here.recv()
        opened = Sender(shell, Peer(Kind.RUNNER, f"{to.uuid}/{to.incarnation}"), events)
        hello = KvHello(runner, to.incarnation, POOL, BASE_DIGEST, memory.layout)
        shell.execute(OpenKvStream(opened.peer, address, hello))
        opened.wait(Connected)
        yield opened
    finally:
        shell.close()
        process.kill()


def _receive(pipe: "Connection[Any, Any]", n_pages: int, carrier: Carrier) -> None:
    """Run the other process: pages are given out in turn, all of them touched before."""
    events, total, at = queue.SimpleQueue[Any](), ROTATION * n_pages, 0
    memory = LocalKvMemory(np.ones((total, PAGE_BYTES), np.uint8), LAYERS, "")
    runner, shell = _shell("receiver", memory, CalledLayerCounter(), carrier, events)
    pipe.send((runner, f"127.0.0.1:{shell.port}"))
    while True:
        match events.get():
            case Connected(peer):
                shell.send(peer, KvReady(runner))
            case Received(peer, KvOffer(name, epoch)):
                at = (at + n_pages) % total
                shell.execute(ReceiveKv(peer, name, epoch, 0, tuple(range(at, at + n_pages))))
                shell.send(peer, KvAccept(name, epoch, 0))
            case Received(peer, KvComplete(name, epoch)):
                shell.send(peer, KvAck(name, epoch))
            case _:
                return


def _shell(
    name: str, memory: KvMemory, progress: LayerProgress, carrier: Carrier, events: "queue.SimpleQueue[Any]"
) -> tuple[RunnerId, KvStreamShell]:
    runner = RunnerId(f"bench.{name}", secrets.token_hex(8))
    place = KvPlace("127.0.0.1:0", runner, POOL, PAGE_TOKENS, load_tls(carrier.tls, "runner"), carrier.shared_memory)
    return runner, KvStreamShell(place, memory, progress, events.put)
