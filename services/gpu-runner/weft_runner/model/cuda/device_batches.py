"""A step in device batches (FlexGen's GPU batches, section 4.1): tokens that a layer computes at a time, one by one.

A batch is a step of its own. Kernels are launched as for the whole step: chunks of adapters are those of the step and
are never cut, contexts and shrinks are split as for all of its rows, and a row of several tokens is no decode row where
a batch has only one of them. So a row's bits are those that the whole step gives, but for the library's products, whose
sums may depend on the number of rows.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from weft_kernels.plan import Segment, SegmentPlan
from weft_runner.model.cuda.step import DeviceStep, Marks, StepTables
from weft_runner.model.step import Ints, StepInput


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch:
    """Tokens [start, end) of a step as one of their own, and the same on the device. Nothing in it samples.

    `single` [R]: rows that decode a token; `tiles`: of the others.
    """

    start: int
    end: int
    step: StepInput
    here: DeviceStep
    single: Marks
    tiles: Ints


def device_batches(step: StepInput, most: int, block_m: int, tile: int, at: torch.device) -> Iterator[DeviceBatch]:
    """Cut a step into batches of `most` tokens at most or one chunk (`block_m`). `tile`: tokens of one in prefill."""
    whole = StepTables.of(step, block_m, tile)
    edges = [*_edges(whole.chunks, most), len(step.tokens)]
    for start, end in pairwise(edges):
        part, single = _part(step, start, end)
        tables = StepTables(part, block_m, tile, single)
        here = DeviceStep(tables.shape, at, whole.shape)
        here.write(tables)
        yield DeviceBatch(start, end, part, here, single, tables.tiles)


def _edges(chunks: Ints, most: int) -> Iterator[int]:
    """Find the tokens with which batches begin: the first ones of chunks."""
    start = 0
    yield start
    for _, first, count, turn in chunks.tolist():
        if turn:
            return
        if first + count - start > most and first > start:
            start = first
            yield start


def _part(step: StepInput, start: int, end: int) -> tuple[StepInput, Marks]:
    starts, ends = [row.start for row in step.rows], [row.end for row in step.rows]
    own = step.rows[bisect_right(ends, start) : bisect_left(starts, end)]
    rows = tuple(
        replace(
            row, start=max(row.start, start) - start, end=min(row.end, end) - start,
            position=row.position + max(start - row.start, 0), samples=False, scored=0, pools=False, guesses=0,
        )
        for row in own
    )  # fmt: skip
    segments = tuple(
        Segment(max(one.start, start) - start, min(one.end, end) - start, one.slot, one.rank)
        for one in step.plan.segments
        if one.start < end and one.end > start
    )
    single = np.array([row.end - row.start == 1 for row in own], bool)
    return StepInput(step.tokens[start:end], rows, SegmentPlan(end - start, segments)), single
