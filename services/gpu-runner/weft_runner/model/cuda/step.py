"""A step on the device: its host integers in one pinned buffer, one copy, and views of it for the kernels.

Fields have fixed places for a given shape of the step, so that a captured graph finds each new step where it found the
one before. Shorter steps are padded: tokens of no row (-1), chunks of no tokens, rows that do not decode (-1), tiles of
no row (-1).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from weft_kernels.triton import fused
from weft_kernels.triton.attention import prefill_tiles
from weft_kernels.triton.chunks import TURNS, chunk_table, count_chunks
from weft_kernels.triton.lora import ChunkTable
from weft_runner.model.step import StepInput

Ints = npt.NDArray[np.int32]
Marks = npt.NDArray[np.bool_]
ALIGNED = 4  # ints: every field begins at 16 bytes
GRAPH_PROMPT_TOKENS = 64  # of a prompt and more, on average: what graphs of steps with prompts have room for
PADDING = (0, -1, 0, 0, -1, -1, 0, -1, 0, None)  # of each field; of pages only those of a step are copied


@dataclass(frozen=True, slots=True)
class Shape:
    """How much of everything a step has, padding included."""

    tokens: int
    rows: int
    chunks: int
    turns: int  # rows of the chunk table
    base_turns: int  # and of that of a step without adapters
    tiles: int
    sampled: int
    pages: int
    block_m: int  # most tokens of a chunk

    @property
    def fields(self) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of each field, in the buffer's order; `pages` last."""
        return (
            (self.tokens, 1), (self.tokens, 1), (self.rows, 4), (self.turns, 4), (self.rows, 1), (self.tiles, 2),
            (self.sampled, 1), (self.tokens, 1), (self.rows, 1), (self.pages, 1),
        )  # fmt: skip

    def holds(self, other: "Shape") -> bool:
        """Whether a step of that shape can be padded to this one."""
        return other.block_m == self.block_m and all(
            theirs[0] <= own[0] for theirs, own in zip(other.fields, self.fields, strict=True)
        )


@dataclass(frozen=True, eq=False)
class StepTables:
    """What the kernels read of a step beside its arrays, as host integers.

    `single` [R]: rows that decode a token; chunks [E, 4]: `chunks.chunk_table`; tiles [n, 2]: `prefill_tiles`.
    """

    step: StepInput
    block_m: int  # most tokens of a chunk
    tile: int  # tokens of a tile
    single: Marks

    @classmethod
    def of(cls, step: StepInput, block_m: int, tile: int) -> "StepTables":
        """Rows of one token are those that decode."""
        rows = step.arrays.rows
        return cls(step, block_m, tile, rows[:, 1] - rows[:, 0] == 1)

    @cached_property
    def chunks(self) -> Ints:
        return chunk_table(self.step.plan, self.block_m)

    @cached_property
    def tiles(self) -> Ints:
        return prefill_tiles(self.step.arrays.rows, self.tile, self.single)

    @cached_property
    def shape(self) -> Shape:
        """The step's own, without padding."""
        arrays, turns = self.step.arrays, len(self.chunks)
        return Shape(
            len(arrays.tokens), len(arrays.rows), count_chunks(self.chunks), turns, turns, len(self.tiles),
            len(arrays.sampled), len(arrays.pages), self.block_m,
        )  # fmt: skip


class DeviceStep:
    """Views of one device buffer. `write` fills it from a step that fits the shape, `advance` moves it on.

    Two host buffers by turns: the copy of one step may still wait its turn on the device while the next is written. No
    third step is written before the first one is done.
    """

    def __init__(self, shape: Shape, device: torch.device, whole: Shape | None = None) -> None:
        """`whole`: of the step that this is a part of. Sums are split as for that one."""
        self.shape, self.whole = shape, whole or shape
        sizes = [rows * columns for rows, columns in shape.fields]
        starts = np.cumsum([0, *(-(-size // ALIGNED) * ALIGNED for size in sizes)]).tolist()
        at = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self._hosts = [_pinned(starts[-1], device) for _ in range(2)]
        self._into = [[host.numpy()[where] for where in at] for host in self._hosts]
        self._turn, self._small = 0, starts[-2]  # the pages come last: they stay while a batch runs on
        self._device = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        views = [self._device[where] for where in at]
        self.tokens, self.row_of, self.picked, self.sampled = (views[i] for i in (0, 1, 4, 6))
        self._taken, self.long, self.pages = views[7:]
        self.rows, self.tiles = views[2].view(-1, 4), views[5].view(-1, 2)
        self.chunked = ChunkTable(views[3].view(-1, 4), shape.block_m, shape.chunks)
        self.base_chunked = replace(self.chunked, table=self.chunked.table[: shape.base_turns])
        self.decodes = True  # some row may have a single token

    def write(self, tables: StepTables, sampled: torch.Tensor | None = None) -> None:
        """Everything of a step, in stream order. `sampled`: the tokens of the step before, on the device."""
        arrays = tables.step.arrays
        row = np.arange(len(arrays.rows), dtype=np.int32)
        fields = (
            arrays.tokens, np.repeat(row, arrays.rows[:, 1] - arrays.rows[:, 0]), arrays.rows[:, :4], tables.chunks,
            np.where(tables.single, row, -1), tables.tiles, arrays.sampled, arrays.taken, arrays.rows[:, 4:],
            arrays.pages,
        )  # fmt: skip
        self._turn = 1 - self._turn
        for into, values, pad in zip(self._into[self._turn], fields, PADDING, strict=True):
            into[: values.size] = values.reshape(-1)
            if pad is not None:
                into[values.size :] = pad
        self.decodes = bool(self.shape.tiles == 0 or tables.single.any())
        self._copy(self._small + arrays.pages.size)
        if tables.step.taken:
            assert sampled is not None, "no step was launched before"
            fused.take_tokens(self.tokens, self._taken, sampled)

    def advance(self, step: StepInput, tokens: torch.Tensor | None = None) -> None:
        """The step that was written, one token further: tokens and positions alone.

        `tokens`: they are on the device already, where -1 stands for none (that row's result is not used).
        """
        arrays, before = step.arrays, self._hosts[self._turn]
        self._turn = 1 - self._turn
        self._hosts[self._turn][: self._small] = before[: self._small]
        into = self._into[self._turn]
        into[0][: arrays.tokens.size] = arrays.tokens
        into[2][: 4 * len(arrays.rows)] = arrays.rows[:, :4].reshape(-1)
        self._copy(self._small)
        if tokens is not None:
            torch.clamp(tokens, min=0, out=self.tokens[: len(tokens)])

    def _copy(self, n: int) -> None:
        self._device[:n].copy_(self._hosts[self._turn][:n], non_blocking=True)


def _pinned(n: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32, pin_memory=device.type == "cuda")


def decode_shape(rows: int, row_pages: int, block_m: int) -> Shape:
    """The shape of a captured step: up to `rows` rows in decode, each with `row_pages` pages and an adapter at most."""
    base_turns = min(rows, TURNS * -(-rows // block_m))
    return Shape(rows, rows, rows, rows, base_turns, 0, rows, rows * row_pages, block_m)


def prompt_shape(tokens: int, rows: int, row_pages: int, block_m: int, tile: int) -> Shape:
    """The shape of a captured step with prompts: up to `tokens` tokens of up to `rows` rows, each with an adapter.

    There is room for rows in decode and for prompts of GRAPH_PROMPT_TOKENS and more on average; where prompts are
    shorter, some steps need the shape of more tokens. A prompt has a tile more than whole ones, and turns of a chunk.
    """
    rows, prompts = min(tokens, rows), -(-tokens // GRAPH_PROMPT_TOKENS)
    turns = min(tokens, rows + TURNS * (-(-tokens // block_m) + prompts))
    return Shape(
        tokens, rows, turns, turns, min(tokens, TURNS * -(-tokens // block_m)), -(-tokens // tile) + prompts, rows,
        rows * row_pages, block_m,
    )  # fmt: skip


def slots_of(step: StepInput) -> Sequence[int]:
    """The slots that a step's rows use."""
    return step.arrays.segments[:, 2].tolist()
