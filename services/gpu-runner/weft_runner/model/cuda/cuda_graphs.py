"""CUDA graphs of decode steps: one for each batch size of a short list, with and without adapters.

A graph is captured once and replayed for every step of up to that many rows, whatever their adapters: the kernels find
chunks, slots and ranks in the step's tables, so a replay may have more adapters than the capture had (SGLang #28371
dropped segments here). Nothing is captured for each number of adapters.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from weft_kernels.plan import Segment, SegmentPlan
from weft_kernels.triton.lora import chunk_bucket
from weft_runner.model.cuda.step import NO_TILES, DeviceStep, graph_shape
from weft_runner.model.step import StepInput, StepRow

WARM_UPS = 2  # of the kernels: compiled, and libraries' workspaces allocated, before a capture


def sizes(most: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, ... and `most`: a step computes at most 7 padding rows."""
    return sorted({size for size in (1, 2, 4, *range(8, most, 8), most) if size <= most})


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """Of a step: logits fp32 [rows, V] and each row's likeliest token, -1 where there is none."""

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


class CudaGraphs:
    """Of one executor, all recorded at start: no other thread may allocate while one is."""

    def __init__(self, forward: Forward, device: torch.device, most: int, row_pages: int, block_m: int) -> None:
        self._sizes = sizes(most)
        self._steps = {size: DeviceStep(graph_shape(size, row_pages, block_m), device) for size in self._sizes}
        self._written: tuple[StepInput | None, int] = None, 0
        self._replays: dict[tuple[int, bool], Callable[[], Outputs]] = {}
        pool, stream = None, None
        if device.type == "cuda":  # else each forward runs anew: the same steps and padding under the interpreter
            pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        for size in reversed(self._sizes):  # the largest first: the others fit into its memory
            for lora in (True, False):
                run = partial(forward, self._steps[size], lora)
                self._replays[size, lora] = run if stream is None else capture(run, pool, stream)

    def size_of(self, step: StepInput) -> int | None:
        """The size that serves a step; None: it is no step of decode rows that all get a token, or too large."""
        rows = len(step.rows)
        if len(step.tokens) != rows or rows > self._sizes[-1]:
            return None
        if not all(row.samples and not row.pools for row in step.rows):
            return None
        return next(size for size in self._sizes if size >= rows)

    def replay(self, step: StepInput, size: int, tokens: torch.Tensor | None = None) -> Outputs:
        """Run a step that `size_of` gave this size; outputs hold until the next replay, rows beyond the step's too.

        `tokens`: on the device, int32 [rows], in place of the step's own.
        """
        here = self._steps[size]
        if self._written[0] is step and self._written[1] == size:
            here.advance(step, tokens)
        else:
            assert tokens is None, "a step that follows another is the same one"
            here.write(step, NO_TILES)
            self._written = step, size
        return self._replays[size, bool(step.plan.segments)]()


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
    """`segments`: at least so many chunks, if there are so many tokens."""
    ends = sorted({*range(1, min(segments, n_tokens)), n_tokens})
    plan = SegmentPlan(n_tokens, tuple(Segment(a, b, 0, 1) for a, b in zip([0, *ends], ends, strict=False)))
    pages = (0,) * -(-n_tokens // page_tokens)
    bounds = [(0, n_tokens - 1), (n_tokens - 1, n_tokens)] if n_tokens > 1 else [(0, 1)]
    rows = tuple(StepRow(start, end, 0, pages, samples=end == n_tokens) for start, end in bounds)
    return StepInput([0] * n_tokens, rows, plan)
