# pyright: reportUnusedImport=false
"""The pure part: the next line to run, the end of a batch, and the meaning of an input line.

Tests, the simulator and benchmarks import names only from here: the submodules may change.
"""

from weft_batch.core.batches import (
    Added,
    Batches,
    BatchGone,
    CancelAsked,
    Finalize,
    Give,
    LineCounters,
    LineFailed,
    LinesStored,
    NamespaceFigures,
    StoreResult,
    Validate,
    Validated,
)
from weft_batch.core.input_lines import BadLine, GoodLine, InputReader, LineIndex, LineSplitter, compression, read_line
