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
    """Make the table [E, 4]: slot (-1: no adapter), first token, tokens (1, or PER_ROW to `block_m`), turn.

    First all chunks in the order of their tokens, turn 0; then the other turns of those of several tokens.
    """
    # 1. spans of one adapter or of none, in the order of their tokens
    segments = np.array([(one.start, one.end, one.slot) for one in plan.segments], np.int32).reshape(-1, 3)
    spans = np.full((2 * len(segments) + 1, 3), NO_SLOT, np.int32)
    spans[1::2] = segments
    spans[::2, 0], spans[::2, 1] = [0, *segments[:, 1]], [*segments[:, 0], plan.rows]
    start, end, slot = spans.T
    # 2. each a number of chunks of several tokens, then single ones
    left = (end - start) % block_m
    singles = np.where(left < PER_ROW, left, 0)
    tiles = -(-(end - start - singles) // block_m)
    # 3. the chunks, counted in their spans
    counts = tiles + singles
    span = np.repeat(np.arange(len(spans)), counts)
    index = np.arange(len(span)) - np.repeat(np.cumsum(counts) - counts, counts)
    single = index >= tiles[span]
    first = np.where(single, end[span] - counts[span] + index, start[span] + index * block_m)
    tokens = np.where(single, 1, np.minimum(block_m, end[span] - first))
    chunks = np.stack((slot[span], first, tokens, np.zeros_like(first)), axis=1).astype(np.int32)
    # 4. the other turns of those of several tokens
    others = np.repeat(chunks[~single], TURNS - 1, axis=0)
    others[:, 3] = np.arange(len(others)) % (TURNS - 1) + 1
    return np.concatenate((chunks, others))


def count_chunks(table: Chunks) -> int:
    """Count the chunks of a table, each once."""
    return int(np.count_nonzero(table[:, 3] == 0))
