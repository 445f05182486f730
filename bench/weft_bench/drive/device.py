"""Work on a GPU without the engine: times by CUDA events, steps of a whole model.

A graph is captured and replayed, so that launches from Python are in no figure. Before each run a buffer of more than
twice the L2 is written and another is read: the caches have nothing of the run, and nothing to write back meanwhile.
Triton's interpreter has neither graphs nor events. There the work runs once, by the clock: it shows that a case works.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Self

import torch

from weft.domain.model.spec import ModelSpec
from weft.domain.request import Sampling
from weft_bench.cpu_shapes import RANK
from weft_bench.drive.engine import PAGE_TOKENS, Batch
from weft_runner.model import Partition, SamplingArgs, StepInput
from weft_runner.model.cuda.adapters import PagedAdapter, layout_of
from weft_runner.model.cuda.executor import CudaExecutor, Sizes
from weft_stage.cpu_witness import slots_of
from weft_stage.errors import WrongAdapter
from weft_stage.gpu_device import Gpu
from weft_stage.gpu_models import Numbers, StepOf, random_tokens, random_weights, spec_of, step_of
from weft_stage.gpu_placed import Deck, pages_needed, row_offsets
from weft_stage.lines import percentile
from weft_stage.shapes import Shape

Work = Callable[[], object]
WARM_UPS, RUNS = 3, 100  # runs: enough for a p99
FLUSH_BYTES = 256 << 20  # at least, as in Punica's benchmark
# Launches of `TritonOps`: of a layer; of its adapters; embedding, last sum and norm, head, two of the choice.
LAYER_LAUNCHES, LORA_LAUNCHES, OTHER_LAUNCHES = 9, 6, 6


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each run."""

    seconds: Sequence[float]

    @property
    def median(self) -> float:
        return percentile(self.seconds, 50)

    @property
    def p99(self) -> float:
        return percentile(self.seconds, 99)


class Timer:
    """Times work on one device."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, n_bytes = gpu, 0
        if gpu.is_real:
            n_bytes = max(FLUSH_BYTES, 2 * torch.cuda.get_device_properties(gpu.device).L2_cache_size)
        self._written, self._read = (torch.zeros(n_bytes // 4, device=gpu.device) for _ in range(2))

    def graph(self, work: Work, runs: int = RUNS) -> Times:
        """Time work that only launches: captured, replayed."""
        if not self._gpu.is_real:
            return self.clock(work, 1)[1]
        graph = captured(work)
        times = self.eager(graph.replay, runs)
        graph.reset()
        return times

    def eager(self, work: Work, runs: int = RUNS) -> Times:
        """Time work as it is launched; it may not wait for the device."""
        if not self._gpu.is_real:
            return self.clock(work, 1)[1]
        for _ in range(WARM_UPS):
            self._flush()
            work()
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
        for before, after in pairs:
            self._flush()
            before.record()
            work()
            after.record()
        torch.cuda.synchronize()
        return Times([before.elapsed_time(after) * 1e-3 for before, after in pairs])

    def clock(self, work: Work, runs: int) -> tuple[Times, Times]:
        """Time work by the clock: until the call returns, and until the device is done. Caches are warm."""
        launched, done = list[float](), list[float]()
        for _ in range(runs):
            self._gpu.sync()
            started = time.perf_counter()
            work()
            launched.append(time.perf_counter() - started)
            self._gpu.sync()
            done.append(time.perf_counter() - started)
        return Times(launched), Times(done)

    def _flush(self) -> None:
        self._written.zero_()
        self._read.sum()


def captured(work: Work) -> torch.cuda.CUDAGraph:
    """Capture work as a graph, after warm-ups on another stream: kernels are compiled, workspaces are made."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


class RowOf(NamedTuple):
    """A row of a step: `tokens` tokens from `position` on, with the adapter in `slot`."""

    tokens: int
    position: int
    slot: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """An executor of a random model with an adapter of the usual rank in each slot, as many as rows.

    Keys, values and adapters are random numbers in random pages; `pages` are left for contexts.
    """

    executor: CudaExecutor
    pages: Sequence[int]
    shape: Shape

    @classmethod
    def of(cls, gpu: Gpu, shape: Shape, batches: Sequence[tuple[int, int]], recorded: int = 1) -> Self:
        """`batches`: rows, and tokens of each, of the steps; `recorded`: tokens of the longest captured prompt."""
        rows, tokens = (max(column) for column in zip(*batches, strict=True))
        spec = spec_of(shape, tokens)
        page = spec.layers * 2 * spec.kv_heads * PAGE_TOKENS * spec.head_dim
        adapter_pages = rows * pages_needed(layout_of(Partition(spec), RANK), RANK, page)
        n_pages = max(n * -(-each // PAGE_TOKENS) for n, each in batches) + adapter_pages
        weights = random_weights(spec, Numbers(gpu.device, gpu.dtype))
        gpu.sync()
        sizes = Sizes(n_pages, PAGE_TOKENS, rows, RANK, rows, tokens, graphs=True, tokens=recorded)
        executor, deck = CudaExecutor(spec, weights, sizes), Deck(n_pages)
        tables = executor.adapters.tables
        tables.arena.normal_()
        for slot, entry in enumerate(row_offsets(tables.layout, [RANK] * rows, tables.arena.shape[1], deck)):
            executor.adapters.put(slot, PagedAdapter(entry, (), RANK, 3 * RANK, 0))
        gpu.sync()
        return cls(executor, deck.rest(), shape)

    def step(self, rows: Sequence[RowOf]) -> StepInput:
        """Make a step, always with the same tokens and pages: only adapters differ. Raises WrongAdapter."""
        rng, pages = random.Random(0), iter(self.pages)
        parts = [
            StepOf(
                random_tokens(rng, row.tokens, self.shape.vocab), row.position,
                list(islice(pages, -(-(row.position + row.tokens) // PAGE_TOKENS))), row.slot,
            )
            for row in rows
        ]  # fmt: skip
        step = step_of(parts, PAGE_TOKENS)
        expected = [-1 if row.slot is None else row.slot for row in rows]
        if (used := slots_of(step.plan, [row.tokens for row in rows])) != expected:
            raise WrongAdapter(f"rows of a step: expected the slots {expected}, got {used}")
        return step

    def decode(self, batch: Batch, context: int) -> StepInput:
        """Make a step of one token a row with `context` tokens before it. Rows of an adapter are neighbours."""
        slots = sorted(batch.adapters, key=lambda slot: -1 if slot is None else slot)
        return self.step([RowOf(1, context, slot) for slot in slots])

    def run(self, step: StepInput) -> torch.Tensor:
        """Run a step and return its logits. Raises WrongAdapter if a row has no finite maximum."""
        logits = self.executor.run(step).clone()
        choices = self.executor.sample(logits, [SamplingArgs(Sampling(), 0)] * len(logits))
        if bad := [row for row, choice in enumerate(choices) if choice is None]:
            raise WrongAdapter(f"logits of rows {bad}: expected a finite maximum, got none")
        return logits


def launches(spec: ModelSpec, *, adapters: bool) -> int:
    """Count the kernels of a decode step. A product of the library counts once, and may be two kernels."""
    return spec.layers * (LAYER_LAUNCHES + (LORA_LAUNCHES if adapters else 0)) + OTHER_LAUNCHES
