"""CUDA graphs of steps, with and without adapters: of decode steps by their rows, of steps with prompts by tokens.

A graph is captured once and replayed for every step that its shape holds, whatever its rows and adapters: the kernels
find chunks, slots, ranks, tiles and contexts in the step's tables, so a replay may have more adapters than the capture
had (SGLang #28371 dropped segments here). Nothing is captured for each number of adapters or of prompts.

An 8B's step launches some 500 kernels: as Triton launches them, 13 to 38 ms of a host's time, more than a GPU works on
a few hundred tokens (prepared, a third of it, `weft_kernels.triton.prepared`).
Larger steps hide their launches behind their arithmetic and run eagerly.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from weft_kernels.plan import Segment, SegmentPlan
from weft_kernels.triton.lora import chunk_bucket
from weft_runner.model.cuda.step import DeviceStep, Shape, StepTables
from weft_runner.model.step import StepInput, StepRow

WARM_UPS = 2  # of the kernels: compiled, and libraries' workspaces allocated, before a capture
MAX_GRAPH_TOKENS = 1024  # of a captured step with prompts
# Chunks that shrinks of a step with prompts are cut into parts for: mostly there are fewer, and rows in decode beside.
# With one for each two tokens, and so fewer parts, adapters cost an H100 4 points more in a prompt.
PARTS_TOKENS, MAX_PARTS_CHUNKS = 8, 64


def decode_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, 16, ... 256, 288, ... 512, 576, ... 1,024 and `most`.

    A step computes at most 7 padding rows, beyond 256 at most an eighth: 51 graphs would else be 131.
    """
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, 512, 32), *range(512, 1024, 64), most}
    return sorted(size for size in sizes if size <= most)


def prompt_sizes(most: int) -> list[int]:
    """Tokens: 16, 32, ... 128, 160, ... 256, 320, ... 512, 640, ... 1,024, `most` where that is less: at most 20."""
    most = min(most, MAX_GRAPH_TOKENS)
    sizes = {*range(16, 128, 16), *range(128, 256, 32), *range(256, 512, 64), *range(512, 1024, 128), most}
    return sorted(size for size in sizes if size <= most)


def graph_rows(rows: int, tokens: int) -> list[int]:
    """Most rows of each captured step where steps have up to `rows` rows and `tokens` tokens."""
    return [*decode_sizes(rows), *(min(size, rows) for size in prompt_sizes(tokens))]


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """Results of a step: logits fp32 [rows, V] and each row's likeliest token, -1 if absent."""

    logits: torch.Tensor
    tokens: torch.Tensor


Forward = Callable[[DeviceStep, bool], Outputs]


def capture(forward: Callable[[], Outputs], pool: Any, stream: torch.cuda.Stream) -> Callable[[], Outputs]:
    """A forward as a CUDA graph: its replay. Warm-ups first: kernels are compiled and libraries' workspaces made.

    Graphs of one `pool` share the memory of their intermediates, since one runs at a time; of one `stream`, the
    library's workspace.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        outputs = forward()

    def replay() -> Outputs:
        graph.replay()
        return outputs

    return replay


@dataclass(frozen=True, slots=True, eq=False)
class CapturedStep:
    """A step's place on the device, and what runs it there: without adapters, with them."""

    here: DeviceStep
    replays: tuple[Callable[[], Outputs], Callable[[], Outputs]]

    def replay(self, step: StepInput) -> Outputs:
        """Run the step that was placed there. Outputs hold until the next replay, rows beyond the step's too."""
        return self.replays[bool(step.plan.segments)]()


class CudaGraphs:
    """Graphs of one executor, all recorded at start: no other thread may allocate meanwhile."""

    def __init__(
        self, forward: Forward, device: torch.device, decodes: Sequence[Shape], prompts: Sequence[Shape], tile: int
    ) -> None:
        """Shapes by their size; of steps with prompts tiles have `tile` tokens."""
        self._tile = tile
        self._written: tuple[StepInput | None, CapturedStep | None] = None, None
        pool, stream = None, None
        if device.type == "cuda":  # else each forward runs anew: the same steps and padding under the interpreter
            pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

        def captured(shape: Shape, chunks: int) -> CapturedStep:
            here = DeviceStep(shape, device, replace(shape, chunks=chunks))
            runs = [partial(forward, here, lora) for lora in (False, True)]
            base, adapted = runs if stream is None else (capture(run, pool, stream) for run in runs)
            return CapturedStep(here, (base, adapted))

        # the largest first: the others fit into its memory
        self._prompts = [
            captured(shape, min(MAX_PARTS_CHUNKS, -(-shape.tokens // PARTS_TOKENS))) for shape in reversed(prompts)
        ][::-1]
        self._decodes = [captured(shape, shape.chunks) for shape in reversed(decodes)][::-1]
        self._sizes = [shape.rows for shape in decodes]

    @property
    def captured(self) -> Sequence[CapturedStep]:
        """Every captured step, by kind and size."""
        return (*self._decodes, *self._prompts)

    def find_decode(self, step: StepInput) -> CapturedStep | None:
        """The one for a step of decode rows that all get a token; None: it is no such step, or too large."""
        rows = len(step.rows)
        if len(step.tokens) != rows or rows > self._sizes[-1]:
            return None
        if not all(row.samples and not row.pools for row in step.rows):
            return None
        return self._decodes[bisect_left(self._sizes, rows)]

    def place(
        self, step: StepInput, tokens: torch.Tensor | None = None, sampled: torch.Tensor | None = None
    ) -> CapturedStep | None:
        """Write a step's tables where the smallest graph that holds it finds them. None: there is no such graph.

        `tokens`: on the device, int32 [rows], in place of the step's own; `sampled`: those of the step before, of which
        it takes some.
        """
        if (found := self.find_decode(step)) is None:
            assert tokens is None, "a step that follows another is one of decode rows"
            return self._place_prompts(step, sampled)
        if self._written[0] is step and self._written[1] is found:
            found.here.advance(step, tokens)
        else:
            assert tokens is None, "a step that follows another is the same one"
            found.here.write(StepTables.of(step, found.here.shape.block_m, self._tile), sampled)
            self._written = step, found
        return found

    def _place_prompts(self, step: StepInput, sampled: torch.Tensor | None) -> CapturedStep | None:
        if any(row.pools for row in step.rows):
            return None
        tables: StepTables | None = None
        for one in self._prompts:
            shape = one.here.shape
            if shape.tokens < len(step.tokens) or shape.sampled < len(step.arrays.sampled):
                continue
            if tables is None or tables.block_m != shape.block_m:
                tables = StepTables.of(step, shape.block_m, self._tile)
            if shape.holds(tables.shape):
                one.here.write(tables, sampled)
                return one
        return None


def warm_up_steps(tokens: int, block_m: Callable[[int], int], page_tokens: int) -> Iterator[StepInput]:
    """For each size of chunks and each bucket of their number that steps of up to `tokens` tokens can have, one.

    All tokens but one are a prompt's. They name slot 0, and lie on page 0.
    """
    seen: set[tuple[int, int]] = set()
    powers = [1 << i for i in range(tokens.bit_length())]
    for n_tokens in sorted({*powers, *(power - 1 for power in powers[1:]), tokens}):
        block = block_m(n_tokens)
        for bucket in {chunk_bucket(n) for n in range(-(-n_tokens // block), n_tokens + 1)}:
            if (block, bucket) not in seen:
                seen.add((block, bucket))
                yield _warm_up_step(n_tokens, bucket // 4 + 1, page_tokens)


def _warm_up_step(n_tokens: int, segments: int, page_tokens: int) -> StepInput:
    """Return a step of at least `segments` chunks, if `n_tokens` allows."""
    ends = sorted({*range(1, min(segments, n_tokens)), n_tokens})
    plan = SegmentPlan(n_tokens, tuple(Segment(a, b, 0, 1) for a, b in zip([0, *ends], ends, strict=False)))
    pages = (0,) * -(-n_tokens // page_tokens)
    bounds = [(0, n_tokens - 1), (n_tokens - 1, n_tokens)] if n_tokens > 1 else [(0, 1)]
    rows = tuple(StepRow(start, end, 0, pages, samples=end == n_tokens) for start, end in bounds)
    return StepInput([0] * n_tokens, rows, plan)
