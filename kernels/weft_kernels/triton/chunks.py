"""A step's tokens cut into chunks of one adapter: the grid of every kernel that adapters take part in.

A grid by requests or slots launches programs that mostly find nothing; a grid by chunks follows the tokens (Punica,
arXiv 2310.18547, section 4: thread blocks by segment, and long segments split). All tokens are covered, those without
an adapter by chunks of slot -1, so that one table serves the kernels that every token passes through. Host integers.

A chunk of several tokens is one tile of tensor cores, whose programs take few columns each; one token is vector
arithmetic, whose programs take many. So a chunk stands in the table once for each program that shares what one program
of a single token would have, and a table has no more rows than the step has tokens, whatever the adapters.
"""

import numpy as np
import numpy.typing as npt

from weft_kernels.plan import SegmentPlan

PER_ROW = 8  # fewer tokens are single ones, computed without tensor cores, which want 16 rows
TURNS = 8  # rows of one chunk in the table, as many as the fewest tokens that it has
NO_SLOT = -1

Chunks = npt.NDArray[np.int32]


def chunk_table(plan: SegmentPlan, block_m: int) -> Chunks:
    """[E, 4]: slot (-1: no adapter), first token, tokens (1, or PER_ROW to `block_m`), turn.

    First all chunks in the order of their tokens, turn 0; then the other turns of those of several tokens.
    """
    chunks: list[tuple[int, int, int, int]] = []
    at = 0
    for segment in plan.segments:
        _cut(chunks, NO_SLOT, at, segment.start, block_m)
        _cut(chunks, segment.slot, segment.start, segment.end, block_m)
        at = segment.end
    _cut(chunks, NO_SLOT, at, plan.rows, block_m)
    chunks += [(*chunk[:3], turn) for chunk in chunks if chunk[2] > 1 for turn in range(1, TURNS)]
    return np.array(chunks, np.int32).reshape(-1, 4)


def count_chunks(table: Chunks) -> int:
    """How many chunks a table has, each counted once."""
    return int(np.count_nonzero(table[:, 3] == 0))


def _cut(chunks: list[tuple[int, int, int, int]], slot: int, start: int, end: int, block_m: int) -> None:
    whole = end - (end - start) % block_m
    if end - whole >= PER_ROW:
        whole = end
    chunks.extend((slot, first, min(block_m, end - first), 0) for first in range(start, whole, block_m))
    chunks.extend((slot, token, 1, 0) for token in range(whole, end))
