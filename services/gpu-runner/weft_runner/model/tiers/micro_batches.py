"""A step in parts of bounded numbers of tokens (FlexGen's GPU batches): what a layer computes at a time.

A row may be cut: its later part is a later chunk of the same text, whose earlier keys are there by then. As a row's
bits are its own whatever is beside it and however it is chunked (`cpu.executor`), parts give the step's own bits. The
cuda executor takes parts of whole rows, for attention alone (`cuda.host_kv`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from weft_runner.model.step import Ints, StepArrays

Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Tokens [start, end) of a step; its rows and segments count from `start`."""

    start: int
    end: int
    rows: Ints  # as `StepArrays.rows`
    segments: Ints  # [S, 3]: start, end, slot
    of_row: Ints  # [R]: which rows of the step
    skipped: Ints  # [R]: tokens of that row in earlier parts

    @property
    def n_tokens(self) -> int:
        return self.end - self.start

    def advance(self, arrays: StepArrays) -> None:
        """Take the positions of the step, which has advanced."""
        self.rows[:, 2] = arrays.rows[self.of_row, 2] + self.skipped


def cut_step(arrays: StepArrays, most: int, outside: Marks | None = None, most_pages: int = 0) -> list[MicroBatch]:
    """Cut a step, in order, into parts of `most` tokens; of at most as many where some pages are outside.

    `outside`: which of `arrays.pages` are on a slower tier; the rows of a part have `most_pages` of those, at most, and
    no row has more. A row with such pages is cut only where it is larger than a part.
    """
    edges = range(0, len(arrays.tokens), most) if outside is None else _edges(arrays, most, outside, most_pages)
    return [_part(arrays, start, end) for start, end in pairwise([*edges, len(arrays.tokens)])]


def _edges(arrays: StepArrays, most: int, outside: Marks, most_pages: int) -> Iterator[int]:
    """Find the tokens with which parts begin."""
    start, held = 0, set[int]()
    ends = [*arrays.rows[1:, 3], len(arrays.pages)]
    yield 0
    for (row_start, row_end, _, first, _), last in zip(arrays.rows, ends, strict=True):
        own = {*arrays.pages[first:last][outside[first:last]].tolist()}
        assert len(own) <= most_pages, (own, most_pages)
        cut_short = bool(own) and row_end - start > most  # its later part would wait for the earlier one's pages
        if row_start > start and (len(held | own) > most_pages or cut_short):
            start, held = int(row_start), set[int]()
            yield start
        held |= own
        while row_end - start > most:
            start, held = start + most, own
            yield start


def _part(arrays: StepArrays, start: int, end: int) -> MicroBatch:
    of_row = np.flatnonzero((arrays.rows[:, 0] < end) & (arrays.rows[:, 1] > start)).astype(np.int32)
    rows = arrays.rows[of_row]
    skipped = np.maximum(start - rows[:, 0], 0).astype(np.int32)
    rows[:, 2] += skipped
    rows[:, :2] = _inside(rows[:, :2], start, end)
    within = (arrays.segments[:, 0] < end) & (arrays.segments[:, 1] > start)
    segments = arrays.segments[within]
    segments[:, :2] = _inside(segments[:, :2], start, end)
    return MicroBatch(start, end, np.ascontiguousarray(rows), np.ascontiguousarray(segments), of_row, skipped)


def _inside(bounds: Ints, start: int, end: int) -> Ints:
    return np.clip(bounds, start, end) - np.int32(start)
