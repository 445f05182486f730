"""Decode steps of a whole model: captured graphs, replayed as the engine replays them, the tables' copy included.

Keys, values and adapters are random numbers in random pages. A step's bytes are the base's, its contexts' and its
adapters' (`roofline.decode_work`). What adapters add is told in per cent of the base's step beside what their bytes add
to the base's bytes, and as the points between the two. The launch floor is what as many empty kernels take in a graph.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch

from weft.domain.model.config import ModelSpec
from weft.domain.request import Sampling
from weft_bench.cpu_shapes import BASE, POPULARITIES, RANK, ranks_of
from weft_bench.cpu_witness import slots_of
from weft_bench.errors import WrongAdapter
from weft_bench.gpu_amounts import Batch
from weft_bench.gpu_attention import splits_of
from weft_bench.gpu_context import Context
from weft_bench.gpu_device import Gpu
from weft_bench.gpu_machine import empties
from weft_bench.gpu_models import Numbers, StepOf, random_tokens, random_weights, spec_of, step_of
from weft_bench.gpu_page import ADDED, BANDWIDTH, BEYOND_BYTES
from weft_bench.gpu_placed import Deck, pages_needed, row_offsets
from weft_bench.gpu_timing import MANY, Times
from weft_bench.roofline import Shape, Work, adapter_work, decode_work
from weft_runner.model.cuda.adapters import PagedAdapter, PagedAdapterStore, layout_of
from weft_runner.model.cuda.executor import CudaExecutor, Sizes
from weft_runner.model.partition import Partition
from weft_runner.model.sampling import SamplingArgs
from weft_runner.model.step import StepInput

PAGE_TOKENS = 16
# Of `TritonOps`: a layer's, an attention's join, adapters' in a layer; embedding, last norm, head, choice, outputs.
LAYER_LAUNCHES, JOIN, LORA_LAUNCHES, OTHER_LAUNCHES = 9, 1, 6, 8


class RowOf(NamedTuple):
    """A row to be: so many tokens from this position on, with the adapter in this slot."""

    tokens: int
    position: int
    slot: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """An executor with as many adapters as rows, of the usual rank, in slots; `pages` are left for contexts."""

    executor: CudaExecutor
    pages: Sequence[int]
    shape: Shape

    @classmethod
    def of(cls, gpu: Gpu, shape: Shape, rows: int, tokens: int, *, graphs: bool) -> "Loaded":
        """`tokens`: of the longest row.

        Nothing but decode steps is warmed up: what else a case runs, it runs once before it is timed.
        """
        spec = spec_of(shape, tokens)
        n_pages = rows * (-(-tokens // PAGE_TOKENS) + _adapter_pages(spec))
        weights = random_weights(spec, Numbers(gpu.device, gpu.dtype))
        gpu.sync()
        executor = CudaExecutor(spec, weights, Sizes(n_pages, PAGE_TOKENS, rows, RANK, rows, tokens, graphs, tokens=1))
        executor.adapters.tables.arena.normal_()  # keys, values and adapters
        deck = Deck(n_pages)
        _seat(executor.adapters, rows, deck)
        gpu.sync()
        return cls(executor, deck.rest(), shape)

    def step(self, rows: Sequence[RowOf]) -> StepInput:
        """Each with the same tokens and pages whenever it is made: what differs are adapters. Raises WrongAdapter."""
        rng, pages = random.Random(0), iter(self.pages)
        parts = [
            StepOf(
                random_tokens(rng, row.tokens, self.shape.vocab), row.position,
                list(islice(pages, -(-(row.position + row.tokens) // PAGE_TOKENS))), row.slot,
            )
            for row in rows
        ]  # fmt: skip
        step = step_of(parts, PAGE_TOKENS)
        assert_adapters(step, rows)
        return step

    def decode(self, batch: Batch, context: int) -> StepInput:
        """Rows of one token with `context` before it."""
        return self.step([RowOf(1, context, slot) for slot in batch.adapters])


def _adapter_pages(spec: ModelSpec) -> int:
    page = spec.layers * 2 * spec.kv_heads * PAGE_TOKENS * spec.head_dim
    return pages_needed(layout_of(Partition(spec), RANK), RANK, page)


def _seat(store: PagedAdapterStore, slots: int, deck: Deck) -> None:
    """An adapter of the usual rank in each slot."""
    for slot, entry in enumerate(row_offsets(store.tables.layout, [RANK] * slots, store.tables.arena.shape[1], deck)):
        store.put(slot, PagedAdapter(entry, (), RANK, 3 * RANK, 0))


def measure(context: Context) -> None:
    """Every popularity and context of the amounts, the base first."""
    amounts, rows = context.amounts, context.amounts.rows
    started = time.perf_counter()
    loaded = Loaded.of(context.gpu, amounts.shape, rows, max(amounts.contexts) + 1, graphs=True)
    context.report(f"{amounts.model} decode", "weights and graphs made", time.perf_counter() - started, "s")
    _report_floors(context, loaded)
    for length in amounts.contexts:
        _measure_batches(context, loaded, [Batch(rows, kind) for kind in (BASE, *POPULARITIES)], length)


def launches(spec: ModelSpec, rows: int, sms: int, *, adapters: bool) -> int:
    """Kernels of a decode step, as far as they are ours to count: a product of the library may be two."""
    join = JOIN if splits_of(rows, spec.kv_heads, sms)[1] > 1 else 0
    return spec.layers * (LAYER_LAUNCHES + join + (LORA_LAUNCHES if adapters else 0)) + OTHER_LAUNCHES


def work_of(shape: Shape, batch: Batch, context: float) -> Work:
    """What a step must read and compute."""
    return decode_work(shape, batch.rows, context) + adapter_work(shape, *ranks_of(batch.adapters, batch.ranks))


def assert_adapters(step: StepInput, rows: Sequence[RowOf]) -> None:
    """Each row's tokens use the slot that was asked for. Raises WrongAdapter."""
    asked = [-1 if row.slot is None else row.slot for row in rows]
    if (found := slots_of(step.plan, [row.tokens for row in rows])) != asked:
        raise WrongAdapter(f"rows asked for the slots {asked} and use {found}")


@dataclass(frozen=True, slots=True, eq=False)
class Ran:
    """What a batch's step took, must move, and computed."""

    name: str
    times: Times
    n_bytes: float
    logits: torch.Tensor


def _measure_batches(context: Context, loaded: Loaded, batches: Sequence[Batch], length: int) -> None:
    """The first one is the base, which the others are held against."""
    base, *adapted = batches
    without = _ran(context, loaded, base, length)
    bandwidth = without.n_bytes / without.times.median
    context.report(without.name, BANDWIDTH, bandwidth / context.machine.bytes_s, "share")
    for batch in adapted:
        _report_added(context, _ran(context, loaded, batch, length), without)


def _ran(context: Context, loaded: Loaded, batch: Batch, length: int) -> Ran:
    step, name = loaded.decode(batch, length), context.amounts.decode_name(batch, length)
    logits = loaded.executor.run(step).clone()
    assert_finite(loaded, logits)
    times = context.timer.eager(lambda: loaded.executor.run(step), runs=MANY)
    work = work_of(loaded.shape, batch, length)
    context.report_times(name, "step", "ms", times, bound_s=work.bound_s(context.machine.rates))
    return Ran(name, times, work.n_bytes, logits)


def _report_added(context: Context, ran: Ran, base: Ran) -> None:
    """Raises WrongAdapter where an adapter changes nothing: it was not computed."""
    if bool((ran.logits == base.logits).all(dim=1).any()):
        raise WrongAdapter(f"{ran.name}: an adapter left a row as it was")
    added = 100 * (ran.times.median / base.times.median - 1)
    by_bytes = 100 * (ran.n_bytes / base.n_bytes - 1)
    context.report(ran.name, ADDED, added, "%", baseline=by_bytes)
    context.report(ran.name, BEYOND_BYTES, added - by_bytes, "points")


def assert_finite(loaded: Loaded, logits: torch.Tensor) -> None:
    """Every row has a token: a step of NaNs would be no step. Raises WrongAdapter."""
    choices = loaded.executor.sample(logits, [SamplingArgs(Sampling(), 0)] * len(logits))
    if any(choice is None for choice in choices):
        raise WrongAdapter(f"rows without a finite maximum: {[i for i, c in enumerate(choices) if c is None]}")


def _report_floors(context: Context, loaded: Loaded) -> None:
    for kind, adapters in (("base", False), ("adapters", True)):
        count = launches(loaded.executor.spec, context.amounts.rows, context.gpu.sms, adapters=adapters)
        times = context.timer.graph(empties(context.gpu, count))
        name = f"{context.amounts.model} decode, {kind}"
        context.report(name, "launch floor: as many empty kernels", times.median * 1e3, "ms")
