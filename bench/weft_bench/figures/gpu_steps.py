"""Steps of a whole model on a GPU, replayed as the engine replays them, and the LoRA operator alone.

What adapters add is in per cent of the base's step, beside what their bytes add to the base's bytes. The launch floor
is what as many empty kernels take in a graph. A step with a prompt is timed by the clock.
"""

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from weft_bench.cpu_shapes import BASE, POPULARITIES, RANK
from weft_bench.drive.device import Loaded, RowOf, launches
from weft_bench.drive.device_machine import empties
from weft_bench.drive.engine import Batch
from weft_bench.drive.gpu import Bench, Operator
from weft_bench.roofline import prefill_work
from weft_kernels.plan import plan_rows
from weft_kernels.triton.chunks import chunk_table
from weft_kernels.triton.lora import ChunkTable, planes_of, prepare_expand, prepare_shrink
from weft_kernels.triton.tables import Layout, LoraTables, SiteShape
from weft_runner.model.cuda.executor import DECODE_CHUNK
from weft_stage.errors import WrongAdapter
from weft_stage.gpu_placed import Deck, pages_needed, row_offsets
from weft_stage.lines import Line
from weft_stage.shapes import BF16_BYTES

GIB = 1 << 30
ARENA_PAGE = 1 << 20  # numbers: a KV page of 16 tokens of an 8B model


def steps(bench: Bench) -> Iterator[Line]:
    """Measure decode steps of every batch and popularity, the base first, then steps with prompts."""
    amounts, started = bench.amounts, time.perf_counter()
    prompts = [(1 + amounts.beside, prompt) for prompt in amounts.prompts]
    batches = [*((rows, tokens + 1) for rows, tokens in amounts.decode), *prompts]
    loaded = Loaded.of(bench.gpu, amounts.shape, batches, recorded=max(amounts.prompts))
    case = f"{amounts.model} steps"
    yield bench.line(case, "weights and graphs made", time.perf_counter() - started, "s")
    if (captured := loaded.executor.captured) is not None:
        yield bench.line(case, "graphs", captured.graphs, "")
        yield bench.line(case, "graphs captured", captured.seconds, "s")
        yield bench.line(case, "memory of graphs", captured.n_bytes / GIB, "GiB")
    for rows, context in amounts.decode:
        for kind, adapters in (("base", False), ("adapters", True)):
            floor = bench.timer.graph(empties(bench.gpu, launches(loaded.executor.spec, adapters=adapters)))
            case = f"{amounts.model} decode, batch {rows}, {kind}"
            yield bench.line(case, "launch floor: as many empty kernels", floor.median * 1e3, "ms")
        yield from _decode(bench, loaded, rows, context)
    for prompt in amounts.prompts:
        for beside in (0, amounts.beside):
            yield from _prompt(bench, loaded, prompt, beside)


def _decode(bench: Bench, loaded: Loaded, rows: int, context: int) -> Iterator[Line]:
    """Measure a step of each popularity. Raises WrongAdapter if an adapter changes nothing: it was not computed."""
    bench.check_time()
    base_s, base_bytes, base_logits = 0.0, 0.0, torch.empty(0)
    for kind in (BASE, *POPULARITIES):
        batch = Batch(rows, kind)
        case, step = f"{bench.amounts.model} decode, {batch_name(batch, context)}", loaded.decode(batch, context)
        logits = loaded.run(step)
        times = bench.timer.eager(lambda step=step: loaded.executor.run(step))
        host, _ = bench.timer.clock(lambda step=step: loaded.executor.run(step), bench.amounts.clocked)
        work = batch.work(bench.amounts.shape, context)
        yield bench.line(case, "the host's part", host.median * 1e3, "ms")
        yield from bench.times(case, "step", "ms", times, work.bound_s(bench.machine.rates))
        if kind == BASE:
            base_s, base_bytes, base_logits = times.median, work.n_bytes, logits
            share = work.n_bytes / times.median / bench.machine.bytes_s
            target = ">= 0.85" if (rows, context) == (32, 512) else None
            yield bench.line(case, "of the bandwidth", share, "share", target=target)
            continue
        if bool((logits == base_logits).all(dim=1).any()):
            raise WrongAdapter(f"{case}: an adapter left a row as it was")
        added, by_bytes = 100 * (times.median / base_s - 1), 100 * (work.n_bytes / base_bytes - 1)
        yield bench.line(case, "added by adapters", added, "%", baseline=by_bytes)
        target = "<= 10" if (rows, context) == (32, 512) else None
        yield bench.line(case, "added beyond the bytes", added - by_bytes, "points", target=target)


def batch_name(batch: Batch, context: int) -> str:
    """Name a batch and its context in a case."""
    return f"batch {batch.rows}, context {context}, {batch.popularity}"


def _prompt(bench: Bench, loaded: Loaded, prompt: int, beside: int) -> Iterator[Line]:
    """Measure a prompt from its start and rows in decode, each with an adapter of its own, or all of the base."""
    amounts, rows = bench.amounts, f" and {beside} rows" if beside else ""
    case, position = f"{amounts.model} step of {prompt} prompt tokens{rows}", min(n for _, n in amounts.decode)
    bench.check_time()
    whole = dict[bool, float]()
    for adapted in (False, True):
        others = [RowOf(1, position, number if adapted else None) for number in range(1, beside + 1)]
        step = loaded.step([RowOf(prompt, 0, 0 if adapted else None), *others])
        loaded.run(step)
        host, done = bench.timer.clock(lambda step=step: loaded.executor.run(step), amounts.clocked)
        whole[adapted], metric = done.median, "with adapters" if adapted else "base"
        bound_s = None if beside else prefill_work(loaded.shape, prompt).bound_s(bench.machine.rates)
        yield bench.line(
            case, metric, done.median * 1e3, "ms", baseline=bound_s and bound_s * 1e3,
            bound_fraction=bound_s and bound_s / done.median,
        )  # fmt: skip
        yield bench.line(case, f"{metric}: the host launches for", host.median * 1e3, "ms")
    target = "<= 1.05" if (prompt, beside) == (2048, 0) else None
    yield bench.line(case, "with adapters / base", whole[True] / whole[False], "x", target=target)


def operator(bench: Bench) -> Iterator[Line]:
    """Measure shrink and expand as the engine launches them in a captured step, of adapters at random places."""
    targets = {("4096 -> 4096", 64): ">= 0.6", ("q, k, v 4096 -> 6144", 256): ">= 0.75"}
    for operator_ in bench.amounts.operators:
        for batch in operator_.batches:
            bench.check_time()
            times = bench.timer.graph(_launch(bench, operator_, batch))
            used, width = {*batch.adapters}, len(operator_.widths) * operator_.n_in + sum(operator_.widths)
            n_bytes = BF16_BYTES * (
                len(used) * RANK * width + batch.rows * (operator_.n_in + 2 * sum(operator_.widths))
            )
            bound_s, beyond_s = n_bytes / bench.machine.bytes_s, times.median - bench.machine.floor_s
            case = f"LoRA {operator_.name}, rank {RANK}, batch {batch.rows}, {batch.popularity}"
            yield from bench.times(case, "time", "us", times, bound_s)
            target = targets.get((operator_.name, batch.rows)) if len(used) == batch.rows else None
            yield bench.line(case, "of the bandwidth", bound_s / times.median, "share",
                             target=target if batch.rows == 256 else None)  # fmt: skip
            yield bench.line(case, "of the bandwidth, beyond the launch floor",
                             bound_s / beyond_s if beyond_s > 0 else None, "share",
                             target=target if batch.rows == 64 else None)  # fmt: skip


def _launch(bench: Bench, operator_: Operator, batch: Batch) -> Callable[[], None]:
    """Return the work of one operator on the device. Raises WrongAdapter if a chunk has another adapter."""
    gpu, slots = bench.gpu, sorted(slot for slot in batch.adapters if slot is not None)
    layout = Layout(1, (SiteShape(operator_.n_in, operator_.widths),), RANK)
    ranks = [RANK] * len({*slots})
    n_pages = sum(pages_needed(layout, rank, ARENA_PAGE) for rank in ranks)
    arena = torch.randn(n_pages + 1, ARENA_PAGE, device=gpu.device, dtype=gpu.dtype)
    tables = LoraTables(arena, layout, len(ranks))
    for slot, entry in enumerate(row_offsets(layout, ranks, ARENA_PAGE, Deck(n_pages))):
        tables.put(slot, entry)
    chunked, site = _chunked(bench, slots), tables.at(0, 0)
    planes = planes_of(site, chunked.chunks, chunked.block_m, batch.rows, gpu.sms)
    x = torch.randn(batch.rows, operator_.n_in, device=gpu.device, dtype=gpu.dtype)
    y = torch.randn(batch.rows, sum(operator_.widths), device=gpu.device, dtype=gpu.dtype)

    def run() -> None:
        prepare_shrink(planes, x, site, chunked)(planes.tensor, x, site.shrinks)
        prepare_expand(y, planes, site, chunked)(y, planes.tensor, site.expands)

    return run


def _chunked(bench: Bench, slots: Sequence[int]) -> ChunkTable:
    """Make a chunk table, padded to a chunk a row, as in a captured step. Raises WrongAdapter."""
    table = chunk_table(plan_rows(list(slots), dict.fromkeys(slots, 1)), DECODE_CHUNK)
    used = [slot for slot, _, tokens, turn in table.tolist() if not turn for _ in range(tokens)]
    if used != [*slots]:
        raise WrongAdapter(f"chunks of a batch: expected the slots {slots}, got {used}")
    padded = np.zeros((len(slots), 4), np.int32)
    padded[: len(table)] = table
    return ChunkTable(torch.from_numpy(padded).to(bench.gpu.device), DECODE_CHUNK, len(slots))
