"""`weft bench offload --cases cells`: budgets and batches beside the machine's bound."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from weft_bench.cpu_context import WEIGHT_BYTES
from weft_bench.cpu_decode import Batch
from weft_bench.cpu_machine import GIGA
from weft_bench.cpu_shapes import BASE, DISTINCT
from weft_bench.offload_model import MIN_BOUND_SHARE, Context, OffloadModel, executor_of
from weft_bench.roofline import base_bytes
from weft_kernels.cpu.memory import MappedMemory
from weft_runner.model.tiers.direct_io import BLOCK, PAGE, DirectFile
from weft_runner.model.tiers.weight_stream import THREADS
from weft_stage.lines import Line
from weft_stage.playing import Played

READ_S = 1.5  # of a measurement of the disk
RING_BYTES = 128 << 20
EMBEDDING_TOO = 1 << 30  # with all weights there is room for it
ADAPTER_ROWS = 16  # for which adapters' cost has a target
MAX_BYTES_RATIO = 1.1


@dataclass(frozen=True, slots=True)
class Cell:
    """A share of the weights and a batch, as it was measured. `rates`: of the disk alone, before and after."""

    share: float
    batch: Batch
    played: Played
    streamed_bytes: int
    rates: tuple[float, float]
    read_bytes: int
    reading_s: float
    waited_s: float

    @property
    def disk(self) -> float:
        return sum(self.rates) / 2


def figures(model: OffloadModel, context: Context) -> Iterator[Line]:
    """Every cell. Raises EngineRefused, WrongAdapter."""
    options, blocks = model.options, dict[tuple[int, float, str], float]()
    for rows, popularity in product(options.rows, options.popularities):
        batch = Batch(rows, popularity)
        found, beside = model.figures(batch)
        weights = found.resident_bytes + found.streamed_bytes
        for share in options.shares:
            device_bytes = beside + int(share * weights) + (EMBEDDING_TOO if share >= 1.0 else 0)
            with context.bar(f"{model.name}: {share:.0%}, {rows} rows, {popularity}", 1) as advanced:
                cell = _measured(model, share, batch, device_bytes)
                advanced(1)
            blocks[rows, share, popularity] = cell.played.wall_s
            yield from _lines(model, context, cell)
    yield from adapters_in_blocks(model, context, blocks)


def adapters_in_blocks(
    model: OffloadModel, context: Context, blocks: dict[tuple[int, float, str], float]
) -> Iterator[Line]:
    """Distinct against base: how much longer a block takes, over how many more bytes each of its passes reads."""
    weights = base_bytes(model.shape, WEIGHT_BYTES[model.options.dtype])
    for (rows, share, popularity), block_s in blocks.items():
        base_s = blocks.get((rows, share, BASE))
        if popularity == DISTINCT and base_s is not None:
            over = 1 + Batch(rows, DISTINCT).adapters_work(model.shape).n_bytes / weights
            target = f"<= {MAX_BYTES_RATIO}" if rows == ADAPTER_ROWS and model.options.usual else None
            case = f"{model.title}, {share:.0%} of the weights, {rows} rows, Distinct against base{model.lengths}"
            yield context.origin.line(case, "time of a block", block_s / base_s, "x")
            yield context.origin.line(case, "bytes of a pass", over, "x")
            yield context.origin.line(case, "time over bytes", block_s / base_s / over, "x", target=target)


def _measured(model: OffloadModel, share: float, batch: Batch, device_bytes: int) -> Cell:
    first = read_rate(model.path)
    with model.subject(model.sizes(batch, model.offload(device_bytes))) as subject:
        executor = executor_of(subject)
        model.play(subject, batch, warm=True)
        before = replace(executor.figures.stream)
        played = model.play(subject, batch)
        after = executor.figures
    rates = first, read_rate(model.path)
    return Cell(
        share, batch, played, after.streamed_bytes, rates, after.stream.read_bytes - before.read_bytes,
        after.stream.reading_s - before.reading_s, after.stream.waited_s - before.waited_s,
    )  # fmt: skip


def _lines(model: OffloadModel, context: Context, cell: Cell) -> Iterator[Line]:
    origin, batch, played = context.origin, cell.batch, cell.played
    case = f"{model.title}, {cell.share:.0%} of the weights, {batch.rows} rows, {batch.popularity}{model.lengths}"
    disk_s = cell.streamed_bytes / cell.disk
    bound_s = sum(model.bound_s(beat.tokens, beat.rows, disk_s) for beat in played.beats)
    decode = [beat for beat in played.beats if not beat.prefills]
    decode_s = sum(beat.ended - beat.began for beat in decode) / max(1, len(decode))
    decode_bound_s = model.bound_s(batch.rows, batch.rows, disk_s)
    target = f">= {MIN_BOUND_SHARE:g}" if cell.share < 1.0 and model.options.usual else None
    yield origin.line(
        case, "output tokens", played.tokens / played.wall_s, "tokens/s", baseline=played.tokens / bound_s,
        bound_fraction=bound_s / played.wall_s,
    )  # fmt: skip
    yield origin.line(case, "of the bound", bound_s / played.wall_s, "", target=target)
    yield origin.line(
        case, "pass without prompts", decode_s * 1e3, "ms", baseline=decode_bound_s * 1e3,
        bound_fraction=decode_bound_s / decode_s,
    )  # fmt: skip
    yield origin.line(case, "read from disk a pass", cell.streamed_bytes / GIGA, "GB")
    if cell.reading_s > 0.0:
        rate = cell.read_bytes / cell.reading_s
        yield origin.line(case, "disk alone, before", cell.rates[0] / GIGA, "GB/s")
        yield origin.line(case, "disk alone, after", cell.rates[1] / GIGA, "GB/s")
        yield origin.line(
            case, "disk read while computing", rate / GIGA, "GB/s", baseline=cell.disk / GIGA,
            bound_fraction=rate / cell.disk,
        )  # fmt: skip
        yield origin.line(case, "time that waits for weights", cell.waited_s / played.wall_s, "")


def read_rate(path: Path) -> float:
    """Bytes/s of direct reads as weights are read: as many threads, blocks in order, into as much memory as a ring.

    Into a small buffer, which stays in the cache, a virtual disk may be half as fast again.
    """
    file, size = DirectFile(path), path.stat().st_size // PAGE * PAGE
    memory, block = MappedMemory(RING_BYTES), min(BLOCK, size)
    until, began = time.perf_counter() + READ_S, time.perf_counter()

    def read(first: int) -> int:
        done, at = 0, first
        while not done or time.perf_counter() < until:  # a busy machine may start a thread late
            file.read(memory.address + at % (RING_BYTES // block) * block, block, at % (size // block) * block)
            done, at = done + block, at + THREADS
        return done

    with ThreadPoolExecutor(THREADS) as threads:
        n_bytes = sum(threads.map(read, range(THREADS)))
    seconds = time.perf_counter() - began
    file.close()
    return n_bytes / seconds
