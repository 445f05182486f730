"""Steps of a whole model, replayed as the engine replays them; those of many tokens run eagerly.

Keys, values and adapters are random numbers in random pages. A step's bytes are the base's, its contexts' and its
adapters' (`roofline.decode_work`). What adapters add is told in per cent of the base's step beside what their bytes add
to the base's bytes, and as the points between the two. The launch floor is what as many empty kernels take in a graph.
A step with a prompt is told by the clock, beside how long the host launches for and what its kernels take.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import NamedTuple

import torch

from weft.domain.model.spec import ModelSpec
from weft.domain.request import Sampling
from weft_bench.cpu_shapes import BASE, DISTINCT, POPULARITIES, RANK, ranks_of
from weft_bench.gpu_amounts import Batch
from weft_bench.gpu_context import Context
from weft_bench.gpu_kernels import kernel_times
from weft_bench.gpu_machine import empties
from weft_bench.gpu_page import ADDED, BANDWIDTH, BEYOND_BYTES, RATIO
from weft_bench.gpu_timing import MANY, Times
from weft_bench.roofline import Work, adapter_work, decode_work, prefill_work
from weft_runner.model import Partition, SamplingArgs, StepInput
from weft_runner.model.cuda.adapters import PagedAdapter, PagedAdapterStore, layout_of
from weft_runner.model.cuda.executor import CudaExecutor, Sizes
from weft_stage.cpu_witness import slots_of
from weft_stage.errors import WrongAdapter
from weft_stage.gpu_device import Gpu
from weft_stage.gpu_models import Numbers, StepOf, random_tokens, random_weights, spec_of, step_of
from weft_stage.gpu_placed import Deck, pages_needed, row_offsets
from weft_stage.shapes import Shape

PAGE_TOKENS = 16
GIB = 1 << 30
COSTLIEST = 12  # kernels of a step that are told by name
# Of `TritonOps`: a layer's, adapters' in a layer; embedding, last sum and norm, head, and two of the choice.
LAYER_LAUNCHES, LORA_LAUNCHES, OTHER_LAUNCHES = 9, 6, 6


class RowOf(NamedTuple):
    """A row to be: `tokens` tokens from `position` on, with the adapter in `slot`."""

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
    def of(cls, gpu: Gpu, shape: Shape, batches: Sequence[tuple[int, int]], recorded: int = 1) -> "Loaded":
        """`batches`: rows, and tokens of each, of the steps that are to be made; `recorded`: tokens of the longest one.

        What is not recorded is run once before it is timed.
        """
        rows, tokens = (max(column) for column in zip(*batches, strict=True))
        spec = spec_of(shape, tokens)
        n_pages = max(n * -(-each // PAGE_TOKENS) for n, each in batches) + rows * _adapter_pages(spec)
        weights = random_weights(spec, Numbers(gpu.device, gpu.dtype))
        gpu.sync()
        executor = CudaExecutor(
            spec, weights, Sizes(n_pages, PAGE_TOKENS, rows, RANK, rows, tokens, graphs=True, tokens=recorded)
        )
        executor.adapters.tables.arena.normal_()  # keys, values and adapters
        deck = Deck(n_pages)
        _seat(executor.adapters, rows, deck)
        gpu.sync()
        return cls(executor, deck.rest(), shape)

    def step(self, rows: Sequence[RowOf]) -> StepInput:
        """Make a step, always with the same tokens and pages: what differs are adapters. Raises WrongAdapter."""
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
        """Make a step of one token a row with `context` before it."""
        return self.step([RowOf(1, context, slot) for slot in batch.adapters])


def _adapter_pages(spec: ModelSpec) -> int:
    page = spec.layers * 2 * spec.kv_heads * PAGE_TOKENS * spec.head_dim
    return pages_needed(layout_of(Partition(spec), RANK), RANK, page)


def _seat(store: PagedAdapterStore, slots: int, deck: Deck) -> None:
    """Put an adapter of the usual rank into each slot."""
    for slot, entry in enumerate(row_offsets(store.tables.layout, [RANK] * slots, store.tables.arena.shape[1], deck)):
        store.put(slot, PagedAdapter(entry, (), RANK, 3 * RANK, 0))


def measure(context: Context) -> None:
    """Measure decode steps of every batch and popularity of the amounts, the base first, then steps with prompts."""
    amounts, started = context.amounts, time.perf_counter()
    prompts = [(1 + amounts.beside, prompt) for prompt in amounts.prompts]
    batches = [*((n, tokens + 1) for n, tokens in amounts.decode), *prompts]
    loaded = Loaded.of(context.gpu, amounts.shape, batches, recorded=max(amounts.prompts))
    context.report(f"{amounts.model} steps", "weights and graphs made", time.perf_counter() - started, "s")
    if (captured := loaded.executor.captured) is not None:
        context.report(f"{amounts.model} steps", "graphs", captured.graphs, "")
        context.report(f"{amounts.model} steps", "graphs captured", captured.seconds, "s")
        context.report(f"{amounts.model} steps", "memory of graphs", captured.n_bytes / GIB, "GiB")
    for rows, length in amounts.decode:
        _report_floors(context, loaded, rows)
        _measure_batches(context, loaded, [Batch(rows, kind) for kind in (BASE, *POPULARITIES)], length)
    for prompt in amounts.prompts:
        for beside in (0, amounts.beside):
            _measure_prompt(context, loaded, prompt, beside)


def _measure_prompt(context: Context, loaded: Loaded, prompt: int, beside: int) -> None:
    """Measure a prompt from its start and rows in decode, each with an adapter of its own, or all of the base."""
    name, position = context.amounts.prompt_name(prompt, beside), min(length for _, length in context.amounts.decode)
    whole = dict[bool, float]()
    context.check_time()
    for adapted in (False, True):
        rows = [RowOf(1, position, number if adapted else None) for number in range(1, beside + 1)]
        step = loaded.step([RowOf(prompt, 0, 0 if adapted else None), *rows])
        assert_finite(loaded, loaded.executor.run(step))
        times = _by_clock(context, lambda step=step: loaded.executor.run(step))
        whole[adapted], said = median(times.whole_s), "with adapters" if adapted else "base"
        bound_s = prefill_work(loaded.shape, prompt).bound_s(context.machine.rates) if not beside else None
        context.report(
            name, said, whole[adapted] * 1e3, "ms", baseline=bound_s and bound_s * 1e3,
            bound_fraction=bound_s and bound_s / whole[adapted],
        )  # fmt: skip
        context.report(name, f"{said}: the host launches for", median(times.host_s) * 1e3, "ms")
        _report_kernels(context, f"{name}, {said}", lambda step=step: loaded.executor.run(step))
    context.report(name, RATIO, whole[True] / whole[False], "x")


class ByClock(NamedTuple):
    """Seconds of each run: until the call returned, until the device was done."""

    host_s: list[float]
    whole_s: list[float]


def _by_clock(context: Context, run: Callable[[], object]) -> ByClock:
    times = ByClock([], [])
    for _ in range(context.amounts.clocked):
        context.gpu.sync()
        started = time.perf_counter()
        run()
        times.host_s.append(time.perf_counter() - started)
        context.gpu.sync()
        times.whole_s.append(time.perf_counter() - started)
    return times


def _report_kernels(context: Context, name: str, run: Callable[[], object]) -> None:
    """Report what its kernels take, all together and the costliest each, and how many there are: by CUPTI."""
    if not context.gpu.is_real:
        return
    kernels = kernel_times(run)
    context.report(name, "kernels", sum(kernel.seconds for kernel in kernels) * 1e3, "ms")
    context.report(name, "launches", float(sum(kernel.launches for kernel in kernels)), "")
    for kernel in kernels[:COSTLIEST]:
        context.report(f"{name}, by kernel", f"{kernel.name} ({kernel.launches})", kernel.seconds * 1e3, "ms")


def launches(spec: ModelSpec, *, adapters: bool) -> int:
    """Count the kernels of a decode step, as far as they are ours to count: a product of the library may be two."""
    return spec.layers * (LAYER_LAUNCHES + (LORA_LAUNCHES if adapters else 0)) + OTHER_LAUNCHES


def work_of(shape: Shape, batch: Batch, context: float) -> Work:
    """Return what a step must read and compute."""
    return decode_work(shape, batch.rows, context) + adapter_work(shape, *ranks_of(batch.adapters, batch.ranks))


def assert_adapters(step: StepInput, rows: Sequence[RowOf]) -> None:
    """Check that each row's tokens use the slot that was asked for. Raises WrongAdapter."""
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
    """Measure each batch; the first one is the base, which the others are held against."""
    context.check_time()
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
    context.report(
        name, "the host's part", median(_by_clock(context, lambda: loaded.executor.run(step)).host_s) * 1e3, "ms"
    )
    work = work_of(loaded.shape, batch, length)
    context.report_times(name, "step", "ms", times, bound_s=work.bound_s(context.machine.rates))
    if batch.popularity in (BASE, DISTINCT):
        _report_kernels(context, name, lambda: loaded.executor.run(step))
    return Ran(name, times, work.n_bytes, logits)


def _report_added(context: Context, ran: Ran, base: Ran) -> None:
    """Report what adapters add to the base. Raises WrongAdapter where one changes nothing: it was not computed."""
    if bool((ran.logits == base.logits).all(dim=1).any()):
        raise WrongAdapter(f"{ran.name}: an adapter left a row as it was")
    added = 100 * (ran.times.median / base.times.median - 1)
    by_bytes = 100 * (ran.n_bytes / base.n_bytes - 1)
    context.report(ran.name, ADDED, added, "%", baseline=by_bytes)
    context.report(ran.name, BEYOND_BYTES, added - by_bytes, "points")


def assert_finite(loaded: Loaded, logits: torch.Tensor) -> None:
    """Check that every row has a token: a step of NaNs would be no step. Raises WrongAdapter."""
    choices = loaded.executor.sample(logits, [SamplingArgs(Sampling(), 0)] * len(logits))
    if any(choice is None for choice in choices):
        raise WrongAdapter(f"rows without a finite maximum: {[i for i, c in enumerate(choices) if c is None]}")


def _report_floors(context: Context, loaded: Loaded, rows: int) -> None:
    for kind, adapters in (("base", False), ("adapters", True)):
        count = launches(loaded.executor.spec, adapters=adapters)
        times = context.timer.graph(empties(context.gpu, count))
        name = f"{context.amounts.model} decode, batch {rows}, {kind}"
        context.report(name, "launch floor: as many empty kernels", times.median * 1e3, "ms")
