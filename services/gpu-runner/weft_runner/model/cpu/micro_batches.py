"""A step in parts of at most so many tokens (FlexGen's GPU batches): what a layer computes at a time.

A row may be cut: its later part is a later chunk of the same text, whose earlier keys are there by then. As a row's
bits are its own whatever is beside it and however it is chunked (`cpu.executor`), parts give the step's own bits.
"""

from dataclasses import dataclass

import numpy as np

from weft_runner.model.step import Ints, StepArrays


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Tokens [start, end) of a step; its rows and segments count from `start`."""

    start: int
    end: int
    rows: Ints  # [R, 4]: start, end, position, where its pages begin
    segments: Ints  # [S, 3]: start, end, slot
    of_row: Ints  # [R]: which rows of the step
    skipped: Ints  # [R]: tokens of that row in earlier parts

    @property
    def n_tokens(self) -> int:
        return self.end - self.start

    def follow(self, arrays: StepArrays) -> None:
        """The step has advanced: so have its positions."""
        self.rows[:, 2] = arrays.rows[self.of_row, 2] + self.skipped


def cut(arrays: StepArrays, most: int) -> list[MicroBatch]:
    """In order, each but the last of `most` tokens."""
    n_tokens = len(arrays.tokens)
    return [_part(arrays, start, min(start + most, n_tokens)) for start in range(0, n_tokens, most)]


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
