"""The LoRA operator alone: shrink and expand as the engine launches them in a captured step.

Its bytes: each adapter of the batch once, inputs once, outputs read and written. A time's bound holds them against the
measured bandwidth; `beyond the launch floor` leaves out what two dependent launches take that do nothing.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from weft_bench.gpu_amounts import Batch, Operator, punica_us
from weft_bench.gpu_context import Context
from weft_bench.gpu_page import BANDWIDTH, BEYOND_FLOOR
from weft_bench.gpu_timing import Times
from weft_bench.lora_baselines import Dense, gather, loop
from weft_kernels.plan import plan_rows
from weft_kernels.triton.chunks import chunk_table
from weft_kernels.triton.lora import ChunkTable, PartialSums, planes_of, prepare_expand, prepare_shrink
from weft_kernels.triton.tables import Layout, LoraTables, SiteShape, SiteTables, SlotEntry
from weft_runner.model.cuda.executor import DECODE_CHUNK
from weft_stage.errors import WrongAdapter
from weft_stage.gpu_device import Gpu
from weft_stage.gpu_placed import Deck, pages_needed, row_offsets, rows_at

PAGE = 1 << 20  # numbers: a KV page of 16 tokens of an 8B model
LARGEST_ERROR = 0.03  # of bf16 sums in another order, relative to the largest value


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One batch of one operator, on the device."""

    operator: Operator
    batch: Batch
    x: torch.Tensor
    y: torch.Tensor
    partials: PartialSums
    tables: SiteTables
    chunked: ChunkTable
    dense: Dense

    def run(self) -> None:
        planes, tables = self.partials, self.tables
        prepare_shrink(planes, self.x, tables, self.chunked)(planes.tensor, self.x, tables.shrinks)
        prepare_expand(self.y, planes, tables, self.chunked)(self.y, planes.tensor, tables.expands)


def measure(context: Context) -> None:
    """Measure every operator and batch of the amounts."""
    for operator, batch in context.amounts.operators:
        context.check_time()
        case = made(context.gpu, operator, batch)
        check(case)
        times = context.timer.graph(case.run)
        _report(context, case, times)
        _report_baselines(context, case, times)
        del case
        context.gpu.free()


def made(gpu: Gpu, operator: Operator, batch: Batch) -> Case:
    """Put adapters at random places of a random arena, rows in the adapters' order, chunks padded as in a graph."""
    ranks = [batch.ranks[number % len(batch.ranks)] for number in range(batch.n_adapters)]
    layout = Layout(1, (SiteShape(operator.n_in, operator.widths),), max(ranks))
    deck_pages = sum(pages_needed(layout, rank, PAGE) for rank in ranks)
    arena = torch.randn(deck_pages + 1, PAGE, device=gpu.device, dtype=gpu.dtype)
    tables = LoraTables(arena, layout, len(ranks))
    entries = row_offsets(layout, ranks, PAGE, Deck(deck_pages))
    for slot, entry in enumerate(entries):
        tables.put(slot, entry)
    chunked = _chunked(gpu, batch)
    site = tables.at(0, 0)
    partials = planes_of(site, chunked.chunks, chunked.block_m, batch.rows, gpu.sms)
    x = torch.randn(batch.rows, operator.n_in, device=gpu.device, dtype=gpu.dtype)
    y = torch.randn(batch.rows, sum(operator.widths), device=gpu.device, dtype=gpu.dtype)
    return Case(operator, batch, x, y, partials, site, chunked, _dense(gpu, arena, operator, batch, entries))


def check(case: Case) -> None:
    """Check the result before its time counts: each row's own adapter was used. Raises WrongAdapter."""
    before, expected = case.y.clone(), case.y.to(torch.float32, copy=True)
    case.run()
    for segment in case.dense.segments:
        segment.add_to(expected, case.x.float())
    error = float((case.y.float() - expected).abs().max() / expected.abs().max())
    case.y.copy_(before)
    if not error < LARGEST_ERROR:
        raise WrongAdapter(f"{case.operator.case(case.batch)}: off by {error:.2g} of the largest value")


def _chunked(gpu: Gpu, batch: Batch) -> ChunkTable:
    """Make a table with a chunk a row, as in a captured step. Raises WrongAdapter where one has another adapter."""
    table = chunk_table(plan_rows(batch.adapters, dict.fromkeys(range(batch.rows), 1)), DECODE_CHUNK)
    found = [slot for slot, _, tokens, turn in table.tolist() if not turn for _ in range(tokens)]
    if found != batch.adapters or len({*found}) != batch.n_adapters:
        raise WrongAdapter(f"chunks have the adapters {found}, asked for were {batch.adapters}")
    padded = np.zeros((batch.rows, 4), np.int32)
    padded[: len(table)] = table
    return ChunkTable(torch.from_numpy(padded).to(gpu.device), DECODE_CHUNK, batch.rows)


def _dense(gpu: Gpu, arena: torch.Tensor, operator: Operator, batch: Batch, entries: list[SlotEntry]) -> Dense:
    """Return the same adapters as plain matrices, for the baselines."""
    most = entries[0].row_offsets.shape[-1]
    at = torch.stack([entry.row_offsets[0].view(2, most) for entry in entries])
    ends = [entry.ends[0, 0].tolist() for entry in entries]
    scale = float(entries[0].scales[0, 0, 0])

    def adapter(number: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        last, first, b = ends[number][len(operator.widths) - 1], 0, list[torch.Tensor]()
        for index, width in enumerate(operator.widths):
            b.append(rows_at(arena, at[number, 1, first : ends[number][index]], width))
            first = ends[number][index]
        return rows_at(arena, at[number, 0, :last], operator.n_in), b

    return Dense.of([adapter(number) for number in range(len(entries))], batch.adapters, scale, gpu.device)


def _report(context: Context, case: Case, times: Times) -> None:
    name, machine = case.operator.case(case.batch), context.machine
    n_bytes = case.operator.adapters_work(case.batch).n_bytes + case.operator.rows_bytes(case.batch)
    bound_s = n_bytes / machine.bytes_s
    beyond_s = times.median - machine.floor_s
    context.report_times(name, "time", "us", times, bound_s=bound_s)
    context.report(name, BANDWIDTH, bound_s / times.median, "share")
    context.report(name, BEYOND_FLOOR, bound_s / beyond_s if beyond_s > 0 else None, "share")
    if (published := punica_us(case.operator, case.batch)) is not None:
        context.report(name, "Punica on A100 / ours", published / (times.median * 1e6), "x")


def _report_baselines(context: Context, case: Case, ours: Times) -> None:
    name = case.operator.case(case.batch)
    for metric, work in (("a loop over adapters / ours", loop), ("gather and batched product / ours", gather)):
        theirs = context.timer.graph(partial(work(case.dense), case.y, case.x))
        context.report(name, metric, theirs.median / ours.median, "x")
