"""`weft bench offload`: a model larger than its memory, whose weights come from disk while layers compute (FlexGen).

A cell is a share of the weights' bytes that the engine has memory for, ring included (KV, adapters and what steps work
on come beside it), and a number of requests, all there at the start: prompts of 512 tokens, 32 tokens each. The bound
of a cell is the sum over its passes of the longer of two times: the bytes that do not stay, at the mean of the rates at
which this disk was read alone just before and just after the cell, past the page cache, and the pass's work in memory:
the weights' bytes at the measured bandwidth or the FLOPs of its tokens at the measured peak (of the base; attention and
adapters are left out). 100 % is the same engine with nothing on disk.
"""

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from weft_bench.cpu_context import WEIGHT_BYTES, adapter_pages
from weft_bench.cpu_decode import Batch
from weft_bench.cpu_engine import Ask, Offload, Played, Sizes, Subject
from weft_bench.cpu_machine import GIGA, Machine, meter
from weft_bench.cpu_models import adapter, base_model, files
from weft_bench.cpu_shapes import BASE, RANK, SHAPES, prompts
from weft_bench.lines import Line, Origin
from weft_bench.roofline import Shape, Work, base_bytes
from weft_kernels.cpu.memory import MappedMemory
from weft_kernels.cpu.threads import cpu_quota
from weft_runner.model.cpu.direct_io import BLOCK, PAGE, DirectFile
from weft_runner.model.cpu.offload import OffloadExecutor
from weft_runner.model.cpu.weight_stream import THREADS
from weft_runner.model.memory_estimate import available_memory

PROMPT_TOKENS, TOKENS = 512, 32
LEAST_OF_BOUND = 0.8
BATCH_TOKENS = 4096  # of a pass
READ_S = 1.5  # of a measurement of the disk
RING_BYTES = 128 << 20
EMBEDDING_TOO = 1 << 30  # with all weights there is room for it
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for. `usual`: figures may be held against targets."""

    folder: Path
    shares: Sequence[float]
    rows: Sequence[int]
    popularities: Sequence[str]
    dtype: str = "bf16"
    threads: int = 0
    seed: int = 0
    prompt_tokens: int = PROMPT_TOKENS
    tokens: int = TOKENS
    usual: bool = True


def figures(options: Options, shapes: Sequence[str], origin: Origin, bar: Bar) -> Iterator[Line]:
    """Every cell of every shape. Raises EngineRefused, WrongAdapter."""
    machine = Machine.measured(meter(options.threads or cpu_quota()))
    yield from machine.lines(origin)
    origin = replace(origin, versions=f"{origin.versions}, seed {options.seed}")
    for name in shapes:
        model = _Model(options, name, SHAPES[name], machine)
        yield from model.figures(origin, bar)


class _Model:
    """One shape: its file of packed weights, and its cells."""

    def __init__(self, options: Options, name: str, shape: Shape, machine: Machine) -> None:
        self._options, self._name, self._shape, self._machine = options, name, shape, machine
        self._base = base_model(options.folder, name, shape)
        self._packed = options.folder / "offload"
        self._rng = random.Random(options.seed)

    def figures(self, origin: Origin, bar: Bar) -> Iterator[Line]:
        options = self._options
        for rows, popularity in product(options.rows, options.popularities):
            batch = Batch(rows, popularity)
            with self._subject(self._sizes(batch, self._offload(available_memory().n_bytes // 2, 0.0))) as subject:
                executor = _executor(subject)
                beside, found = executor.beside_bytes, executor.figures
            weights = found.resident_bytes + found.streamed_bytes
            for share in options.shares:
                device_bytes = beside + int(share * weights) + (EMBEDDING_TOO if share >= 1.0 else 0)
                with bar(f"{self._name}: {share:.0%}, {rows} rows, {popularity}", 1) as advanced:
                    yield from self._cell(origin, share, batch, device_bytes)
                    advanced(1)

    def _cell(self, origin: Origin, share: float, batch: Batch, device_bytes: int) -> Iterator[Line]:
        options, rates = self._options, [_read_rate(self._path)]
        with self._subject(self._sizes(batch, self._offload(device_bytes))) as subject:
            executor = _executor(subject)
            self._play(subject, batch, warm=True)
            before = replace(executor.figures.stream)
            played = self._play(subject, batch)
            after = executor.figures
        rates.append(_read_rate(self._path))
        disk = sum(rates) / len(rates)
        case = f"{self._name} {options.dtype}, {share:.0%} of the weights, {batch.rows} rows, {batch.popularity}"
        if not options.usual:
            case += f", {options.prompt_tokens} + {options.tokens} tokens"
        bound_s = sum(self._bound_s(beat.tokens, beat.rows, after.streamed_bytes / disk) for beat in played.beats)
        decode = [beat for beat in played.beats if not beat.prefills]
        decode_s = sum(beat.ended - beat.began for beat in decode) / max(1, len(decode))
        decode_bound_s = self._bound_s(batch.rows, batch.rows, after.streamed_bytes / disk)
        target = f">= {LEAST_OF_BOUND:g}" if share < 1.0 and options.usual else None
        yield origin.line(
            case, "output tokens", played.tokens / played.wall_s, "tokens/s",
            baseline=played.tokens / bound_s, bound_fraction=bound_s / played.wall_s,
        )  # fmt: skip
        yield origin.line(case, "of the bound", bound_s / played.wall_s, "", target=target)
        yield origin.line(
            case, "pass without prompts", decode_s * 1e3, "ms", baseline=decode_bound_s * 1e3,
            bound_fraction=decode_bound_s / decode_s,
        )  # fmt: skip
        yield origin.line(case, "read from disk a pass", after.streamed_bytes / GIGA, "GB")
        if (reading_s := after.stream.reading_s - before.reading_s) > 0.0:
            rate = (after.stream.read_bytes - before.read_bytes) / reading_s
            yield origin.line(case, "disk alone, before", rates[0] / GIGA, "GB/s")
            yield origin.line(case, "disk alone, after", rates[1] / GIGA, "GB/s")
            yield origin.line(
                case, "disk read while computing", rate / GIGA, "GB/s", baseline=disk / GIGA, bound_fraction=rate / disk
            )
            waited_s = after.stream.waited_s - before.waited_s
            yield origin.line(case, "time that waits for weights", waited_s / played.wall_s, "")

    def _bound_s(self, tokens: int, rows: int, disk_s: float) -> float:
        """Of a pass: the disk, the FLOPs, or the weights' bytes in memory."""
        shape = self._shape
        flops = 2 * (shape.layers * shape.layer_weights * tokens + shape.vocab * shape.hidden * rows)
        weights = base_bytes(shape, WEIGHT_BYTES[self._options.dtype])
        return max(disk_s, Work(weights, flops).bound_s(self._machine.rates(weights)))

    def _play(self, subject: Subject, batch: Batch, *, warm: bool = False) -> Played:
        options = self._options
        asks = list[Ask]()
        for number, prompt in zip(
            batch.adapters, prompts(self._rng, batch.rows, options.prompt_tokens, self._shape.vocab), strict=True
        ):
            digest = "" if number is None else f"{self._name}-{number}"
            if number is not None:
                subject.adapters.paths[digest] = adapter(options.folder, self._name, self._shape, number, RANK)
            asks.append(Ask(digest, prompt[: 16 if warm else None], 2 if warm else options.tokens))
        return subject.play(asks)

    def _subject(self, sizes: Sizes) -> Subject:
        return Subject(files(self._base), sizes)

    def _sizes(self, batch: Batch, offload: Offload) -> Sizes:
        options = self._options
        adapters = adapter_pages(self._shape, batch.adapters_work(self._shape).n_bytes, batch.rows)
        return Sizes(
            executor="cpu", dtype=options.dtype, threads=options.threads, rows=batch.rows, slots=max(1, batch.rows),
            context_tokens=options.prompt_tokens + options.tokens + 1, prefills=batch.rows, max_rank=RANK,
            batch_tokens=min(BATCH_TOKENS, batch.rows * options.prompt_tokens),
            adapter_pages=adapters if batch.popularity != BASE else 0, offload=offload,
        )  # fmt: skip

    @property
    def _path(self) -> Path:
        (path,) = self._packed.glob(f"{self._digest.removeprefix('sha256:')}-{self._options.dtype}-*.packed")
        return path

    @property
    def _digest(self) -> str:
        """Of the model's shape: its weights follow from that."""
        return f"sha256:{hashlib.sha256(repr(self._shape).encode()).hexdigest()}"

    def _offload(self, device_bytes: int, share: float = 1.0) -> Offload:
        return Offload(self._packed, self._digest, device_bytes, share)


def _executor(subject: Subject) -> OffloadExecutor:
    executor = subject.built.engine.executor
    assert isinstance(executor, OffloadExecutor)
    return executor


def _read_rate(path: Path) -> float:
    """Bytes/s of direct reads as weights are read: as many threads, blocks in order, into as much memory as a ring.

    Into a small buffer, which stays in the cache, a virtual disk may be half as fast again.
    """
    file, size = DirectFile(path), path.stat().st_size // PAGE * PAGE
    memory, block = MappedMemory(RING_BYTES), min(BLOCK, size)
    until, began = time.perf_counter() + READ_S, time.perf_counter()

    def read(first: int) -> int:
        done, at = 0, first
        while time.perf_counter() < until:
            file.read(memory.address + at % (RING_BYTES // block) * block, block, at % (size // block) * block)
            done, at = done + block, at + THREADS
        return done

    with ThreadPoolExecutor(THREADS) as threads:
        n_bytes = sum(threads.map(read, range(THREADS)))
    seconds = time.perf_counter() - began
    file.close()
    return n_bytes / seconds
