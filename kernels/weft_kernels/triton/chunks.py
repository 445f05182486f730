"""A step's tokens cut into chunks of one adapter: the grid of every kernel that adapters take part in.

A grid by requests or slots launches programs that mostly find nothing; a grid by chunks follows the tokens (Punica,
arXiv 2310.18547, section 4: thread blocks by segment, and long segments split). All tokens are covered, those without
an adapter by chunks of slot -1, so that one table serves the kernels that every token passes through. Host integers.
"""

import numpy as np
import numpy.typing as npt

from weft_kernels.plan import SegmentPlan

PER_ROW = 4  # chunks of fewer tokens are computed token by token, without tensor cores, which want 16 rows
NO_SLOT = -1

Chunks = npt.NDArray[np.int32]


def chunk_table(plan: SegmentPlan, block_m: int) -> Chunks:
    """[C, 3]: slot (-1: no adapter), first token, tokens (1 to `block_m`), in the order of the tokens."""
    chunks: list[tuple[int, int, int]] = []
    at = 0
    for segment in plan.segments:
        _cut(chunks, NO_SLOT, at, segment.start, block_m)
        _cut(chunks, segment.slot, segment.start, segment.end, block_m)
        at = segment.end
    _cut(chunks, NO_SLOT, at, plan.rows, block_m)
    return np.array(chunks, np.int32).reshape(-1, 3)


def _cut(chunks: list[tuple[int, int, int]], slot: int, start: int, end: int, block_m: int) -> None:
    chunks.extend((slot, first, min(block_m, end - first)) for first in range(start, end, block_m))
