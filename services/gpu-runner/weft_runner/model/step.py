"""One iteration as an executor sees it: host integers, built once a batch, read by every layer.

While a batch of decode rows runs on unchanged its step is the same object from one iteration to the next: `advance`
puts in the new tokens and positions, and everything else (rows, pages, plan, arrays) stays as it is and where it is.
An executor may keep what it derives from a step for as long as it is handed that step.
"""

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft_kernels.plan import Segment, SegmentPlan

Ints = npt.NDArray[np.int32]
ROW_FIELDS = 5
PACKED_ROW, _BOOLS = 9, {0: False, 1: True}


@dataclass(slots=True)
class StepRow:
    """Tokens [start, end) of the step belong to one sequence, at positions [position, position + end - start).

    `pages` hold the sequence's keys and values in token order, the new ones included; `samples`: logits of the last
    token are wanted. `scored`: how many of the first tokens' logits are, without the last one's where it samples:
    those before a prompt's token whose probability is asked, or before a guess.
    `pools`: of the last token the hidden state is wanted, not logits (`model.pooling`). `guesses`: the last tokens,
    which may be wrong: nothing of theirs may reach the tokens before them. `long`: its positions are rotated as those
    of a long text (LongRoPE). Only `position` ever changes.
    """

    start: int
    end: int
    position: int
    pages: tuple[int, ...]
    samples: bool
    scored: int = 0
    pools: bool = False
    guesses: int = 0
    long: bool = False

    @property
    def wanted(self) -> tuple[int, ...]:
        """Return the tokens of the step whose logits are wanted."""
        last = (self.end - 1,) if self.samples else ()
        return (*range(self.start, self.start + self.scored), *last) if self.scored else last

    @property
    def context(self) -> int:
        """Tokens in KV after this step."""
        return self.position + self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class StepArrays:
    """A step as flat int32 arrays, each contiguous; their addresses hold as long as the step lives."""

    tokens: Ints  # [T]
    rows: Ints  # [R, ROW_FIELDS]: start, end, position, where its pages begin in `pages`, 1 for a long text
    pages: Ints  # [sum of the rows' pages]
    segments: Ints  # [S, 3]: start, end, slot
    sampled: Ints  # [S]: tokens whose logits are wanted: of each row the scored ones, and its last where it samples
    taken: Ints  # [T] or []: which token of the step before each is, -1: none
    guesses: Ints = field(default_factory=lambda: np.empty(0, np.int32))  # [T] or []: 1 for each that may be wrong


class StepLayout(NamedTuple):
    """A step as one array of int32: the parts of its `StepArrays` one behind the other, in their order.

    `address`: where it lies as long as the step lives; `ends`: where each part ends.
    """

    whole: "array[int]"
    address: int
    ends: tuple[int, ...]


@dataclass(slots=True)
class StepInput:
    """Flattened tokens (ORCA, section 4.3: all but attention runs on [sum L, H]) and the rows they belong to.

    `taken`: in place of those tokens, the ones that the step before samples, by their numbers in it.
    """

    tokens: Sequence[int]
    rows: tuple[StepRow, ...]
    plan: SegmentPlan
    taken: Mapping[int, int] = field(default_factory=dict[int, int])
    _layout: StepLayout | None = field(default=None, init=False, repr=False, compare=False)
    _arrays: StepArrays | None = field(default=None, init=False, repr=False, compare=False)

    def packed(self) -> bytes:
        """Pack it for another rank, which makes the arrays anew: numbers of int32."""
        rows, segments = self.rows, self.plan.segments
        numbers = [len(self.tokens), len(rows), len(segments)]
        for row in rows:
            numbers += row.start, row.end, row.position, len(row.pages), row.samples
            numbers += row.scored, row.pools, row.guesses, row.long
        for segment in segments:
            numbers += segment.start, segment.end, segment.slot, segment.rank
        numbers += self.tokens
        for row in rows:
            numbers += row.pages
        return struct.pack(f"{len(numbers)}i", *numbers)

    @classmethod
    def unpacked(cls, body: bytes) -> "StepInput":
        """Read `packed`'s form. Raises ValueError, TypeError, LookupError, AssertionError: it has another form."""
        numbers = memoryview(body).cast("i")
        n_tokens, n_rows, n_segments = numbers[:3]
        n_heads, n_parts = 3 + PACKED_ROW * n_rows, 4 * n_segments
        if min(n_tokens, n_rows, n_segments, n_spare := len(numbers) - n_heads - n_parts - n_tokens) < 0:
            raise ValueError(f"expected a step of {len(numbers) - n_spare} numbers at least, got {len(numbers)}")
        heads = [numbers[at : at + PACKED_ROW].tolist() for at in range(3, n_heads, PACKED_ROW)]
        segments = [Segment(*numbers[at : at + 4]) for at in range(n_heads, n_heads + n_parts, 4)]
        ends = [*accumulate((head[3] for head in heads), initial=n_heads + n_parts + n_tokens)]
        if ends[-1] != len(numbers) or ends != sorted(ends):
            raise ValueError(f"expected a step of {ends[-1]} numbers, got {len(numbers)}")
        rows = tuple(
            StepRow(start, end, position, (*numbers[first:last],), _BOOLS[samples], scored, _BOOLS[pools], guesses,
                    _BOOLS[long])
            for (start, end, position, _, samples, scored, pools, guesses, long), (first, last)
            in zip(heads, pairwise(ends), strict=True)
        )  # fmt: skip
        return cls(numbers[ends[0] - n_tokens : ends[0]].tolist(), rows, SegmentPlan(n_tokens, tuple(segments)))

    def advance(self, tokens: Sequence[int], positions: list[int]) -> None:
        """Become the next iteration of the same decode rows: one token each, at these positions."""
        self.tokens, self.taken = tokens, {}
        for row, position in zip(self.rows, positions, strict=True):
            row.position = position
        if self._layout is not None:
            whole, _, (n_tokens, rows_end, *_) = self._layout
            whole[:n_tokens] = array("i", tokens)
            whole[n_tokens + 2 : rows_end : ROW_FIELDS] = array("i", positions)

    def advance_speculatively(self) -> None:
        """Become the next iteration while only the device knows the tokens: each row is a position further."""
        self.advance(self.tokens, [row.position + 1 for row in self.rows])

    @property
    def pooled(self) -> list[int]:
        """The rows of its logits that have hidden states."""
        if not any(row.pools for row in self.rows):
            return []
        last = np.cumsum([len(row.wanted) for row in self.rows])
        return [int(end) - 1 for row, end in zip(self.rows, last, strict=True) if row.pools]

    @property
    def layout(self) -> StepLayout:
        """The step as one array, made when first asked for, kept up to date by `advance`."""
        if self._layout is None:
            rows, whole, pages, sampled, guesses = self.rows, array("i", self.tokens), array("i"), array("i"), 0
            n_tokens = len(whole)
            for row in rows:
                whole.extend((row.start, row.end, row.position, len(pages), row.long))
                pages.extend(row.pages)
                sampled.extend(row.wanted)
                guesses += row.guesses
            rows_end = len(whole)
            whole += pages
            pages_end = len(whole)
            for segment in self.plan.segments:
                whole.extend((segment.start, segment.end, segment.slot))
            segments_end = len(whole)
            whole += sampled
            sampled_end = len(whole)
            if self.taken:
                whole.extend(self.taken.get(at, -1) for at in range(n_tokens))
            taken_end = len(whole)
            if guesses:
                for row in rows:
                    whole.extend((0,) * (row.end - row.start - row.guesses) + (1,) * row.guesses)
            ends = n_tokens, rows_end, pages_end, segments_end, sampled_end, taken_end, len(whole)
            self._layout = StepLayout(whole, whole.buffer_info()[0], ends)
        return self._layout

    @property
    def arrays(self) -> StepArrays:
        """The parts of its layout, in the same memory."""
        if self._arrays is None:
            whole, _, ends = self.layout
            view = np.frombuffer(whole, np.int32)
            tokens, rows, pages, segments, sampled, taken, guesses = (
                view[begin:end] for begin, end in pairwise((0, *ends))
            )
            self._arrays = StepArrays(
                tokens, rows.reshape(-1, ROW_FIELDS), pages, segments.reshape(-1, 3), sampled, taken, guesses
            )  # fmt: skip
        return self._arrays


def check_step(step: StepInput, page_tokens: int) -> None:
    """Check that rows cover the tokens without a hole and have the pages that their context needs."""
    start = 0
    for row in step.rows:
        assert row.start == start < row.end, row
        assert len(row.pages) * page_tokens >= row.context, row
        start = row.end
    assert start == len(step.tokens) == step.plan.rows
